"""From a recipe to a plan: device, model, data, budgets. Nothing of the model's size is allocated here."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PretrainedConfig

from engine.attention import chunk as attention
from engine.config import (
    MOST_LAYERS,
    MOST_SIZE,
    DataConfig,
    ModelConfig,
    Recipe,
    TrainConfig,
    parse_bytes,
)
from engine.data.corpus import prepare_text, random_corpus
from engine.data.corpus_files import TokenCorpus
from engine.data.loader import DataLoader, ValidationSet, split_documents
from engine.data.tokenizer import TextTokenizer
from engine.forecast.costs import representatives
from engine.forecast.flops import block_matmul, projection_matmul, unread_matmul
from engine.machine.device import overhead_bytes
from engine.model.graph_size import graph_bytes_per_token
from engine.model.spec import ModelSpec, validate_context
from engine.plan.plan import FP32, BlockShape, BufferShape, Problem
from storage.errors import UserError
from storage.layout import FlatLayout, part_numel_even
from storage.model_folder import has_model_file, read_model_file
from storage.untrusted import one_line, parse_object, printable, real_path

LOGITS_BYTES = {"cpu": 64 * 2**20, "cuda": 2**30}
"""What the logits that exist at once take with their gradient and their float32 rows, per device type."""

ALLOCATOR_SHARE = 32
"""One part in so many of the GPU's budget is left to the allocator, whose pieces are larger than what is asked for."""

HOLES_BYTES = 5 * 20 * 2**20
"""Most that an op's temporaries lose to holes between them, beside that share: the allocator's large segments grow and
shrink by pages of 20 MiB, and blocks of about that size leave some of them half empty."""

_SHAPE_FIELDS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
}
"""Recipe field -> transformers config field."""


_CONFIG_BYTES = 1 << 24
_SIZES = (
    r"(?P<depth>(num_|n_)(hidden_|decoder_)?layers?|n_layer)|vocab_size|hidden_size|n_embd|d_model|head_dim|n_inner|"
    r"(\w+_)?intermediate_size|((num|n)_\w*|\w+_)?(heads|head|experts|groups)|(\w+_)?max_position_embeddings|"
    r"(\w+_)?lora_rank|ffn_dim|num_experts_per_tok"
)
"""Fields of configs that are sizes or counts, of whatever model; a depth has fewer."""


@dataclass(frozen=True, slots=True)
class Data:
    """The tokenised corpus and what it was tokenised with (None for random tokens)."""

    corpus: TokenCorpus
    tokenizer: TextTokenizer | None


def read_config(path: Path, overrides: dict[str, Any] | None = None) -> PretrainedConfig:
    """The transformers config of a model folder or of a JSON file, with `overrides` replacing fields of it.

    Code that a folder brings along is never run. Raises UserError naming the file when it is missing, is not JSON, or
    names an unknown architecture.
    """
    file = path / "config.json" if path.is_dir() else path
    if not has_model_file(file.parent, file.name):
        raise UserError(f"{file}: no such file; give a Hugging Face folder or a config.json")
    # A file that the user names may be a link of the user's; what is in a folder may not.
    place = file if path.is_dir() else real_path(file)
    values = parse_config(read_model_file(place.parent, place.name, _CONFIG_BYTES), str(file))
    overrides = overrides or {}
    if "rope_parameters" in overrides:
        values.pop("rope_scaling", None)  # its former name, which transformers would prefer
    return make_config(values | overrides, str(file))


def parse_config(content: bytes, where: str) -> dict[str, Any]:
    """The values of a config.json. Raises UserError naming `where` when it is not JSON or names no model type."""
    try:
        values = parse_object(content)
    except ValueError as error:
        raise UserError(f"{where}: not JSON ({error}); give the config.json of a transformers model") from None
    if "model_type" not in values:
        raise UserError(f"{where}: has no 'model_type'; is it the config.json of a transformers model?")
    return values


def make_config(values: dict[str, Any], where: str) -> PretrainedConfig:
    """The transformers config with these values. Raises UserError naming `where` for unknown types and bad values."""
    model_type = values["model_type"]
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise UserError(
            f"{where}: unknown architecture '{one_line(model_type)}'; transformers {transformers.__version__} has no "
            "such type"
        )
    _require_sane(values, where)
    try:
        config = CONFIG_MAPPING[model_type].from_dict(copy.deepcopy(values))  # it completes nested values in place
    except Exception as error:  # transformers validates with errors of many types
        raise UserError(f"{where}: transformers refuses this config: {one_line(error)}") from error
    return config


def _require_sane(values: Any, where: str, name: str = "") -> None:
    """UserError for a number in a config that no model has, or a text that no terminal should see."""
    if isinstance(values, dict):
        for key, value in values.items():
            _require_sane(str(key), where, "a name")
            _require_sane(value, where, str(key))
    elif isinstance(values, str) and printable(values) != values:  # transformers' warnings would show them as they are
        raise UserError(f"{where}: {printable(name)} holds control characters; take them out")
    elif isinstance(values, list):
        for value in values:
            if not (isinstance(value, float) and value == math.inf):  # ranges of some models are open
                _require_sane(value, where, name)
    elif isinstance(values, float) and not math.isfinite(values):
        raise UserError(f"{where}: {name} is {values}, which is no number; correct it")
    elif is_size := re.fullmatch(_SIZES, name):
        if isinstance(values, str) or (isinstance(values, float) and not values.is_integer()):
            raise UserError(f"{where}: {name} is {one_line(repr(values), 80)}, where a whole number is due; correct it")
        most = MOST_LAYERS if is_size.group("depth") else MOST_SIZE
        if isinstance(values, int | float) and not isinstance(values, bool) and not 0 <= values <= most:
            raise UserError(f"{where}: {name} is {values}, and no model has that: 0 to {most:,}; correct it")


def model_config(recipe: Recipe, vocab_size: int | None) -> PretrainedConfig:
    """The transformers config that a recipe describes, `model.overrides` on top.

    Where `model.path` exists, that is its config.json, and shape fields beside it must agree with it; else it is made
    from the shape. `vocab_size` is the tokenizer's. Raises UserError naming the field and both values.
    """
    model = recipe.model
    if model.path is not None:
        folder = Path(model.path).expanduser()
        if folder.exists():
            _require_agreement(model, read_config(folder), folder)
            return read_config(folder, model.overrides)
        if not model.has_shape:
            raise UserError(
                f"model.path: {folder} does not exist, and the recipe gives no shape; name a Hugging Face model folder "
                "or its config.json with --set model.path=..."
            )
    vocabulary = model.vocab_size or vocab_size
    if vocabulary is None:
        raise UserError("model.vocab_size: there is no tokenizer to take it from; set it")
    values: dict[str, Any] = {"model_type": model.model_type, "vocab_size": vocabulary}
    values["tie_word_embeddings"] = model.tie_embeddings
    values["max_position_embeddings"] = model.max_position or recipe.data.sequence_length
    for ours, theirs in _SHAPE_FIELDS.items():
        if getattr(model, ours) is not None:
            values[theirs] = getattr(model, ours)
    return make_config(values | model.overrides, "model")


def _require_agreement(model: ModelConfig, config: PretrainedConfig, folder: Path) -> None:
    """UserError unless the shape that a recipe gives beside a folder is that of the folder's `config`."""
    text = config.get_text_config(decoder=True)
    names = _SHAPE_FIELDS | {"vocab_size": "vocab_size", "max_position": "max_position_embeddings"}
    given = {ours: value for ours in names if (value := getattr(model, ours)) is not None}
    found = {ours: getattr(text, names[ours], None) for ours in given}
    if found.get("head_dim", 0) is None:
        found["head_dim"] = text.hidden_size // text.num_attention_heads
    if found.get("num_kv_heads", 0) is None:
        found["num_kv_heads"] = text.num_attention_heads
    if model.has_shape:
        given |= {"model_type": model.model_type, "tie_embeddings": model.tie_embeddings}
        found |= {"model_type": config.model_type, "tie_embeddings": getattr(config, "tie_word_embeddings", None)}
    for name, value in given.items():
        if found[name] != value:
            raise UserError(
                f"model.{name}: {value} in the recipe, {found[name]} in {folder}; name the folder of the recipe's "
                f"model with --set model.path=..., or correct model.{name}"
            )


def prepare_data(recipe: Recipe, folder: Path) -> Data:
    """Tokenizer and tokenised corpus in `folder`, made unless they are there already."""
    model, data = recipe.model, recipe.data
    if data.source == "random":
        vocabulary = model.vocab_size
        if vocabulary is None and model.path is not None:
            vocabulary = read_config(Path(model.path).expanduser()).get_text_config(decoder=True).vocab_size
        if vocabulary is None:
            raise UserError("model.vocab_size: data.source=random needs it; set it")
        return Data(random_corpus(data, vocabulary, folder / "corpus"), None)
    tokenizer, corpus = prepare_text(data, Path(model.path).expanduser() if model.path is not None else None, folder)
    return Data(corpus, tokenizer)


def make_loader(corpus: TokenCorpus, spec: ModelSpec, recipe: Recipe, *, validation: bool = False) -> DataLoader:
    """The batches of a run, or of its `validation`, which end.

    Raises UserError when the corpus holds an id beyond the vocabulary, or fewer documents than are held out.
    """
    data, train, documents = recipe.data, recipe.train, None
    if data.validation_documents is not None:
        split = split_documents(corpus.info.num_documents, data.validation_documents, data.seed)
        documents = split[int(validation)]
    return DataLoader(
        corpus,
        vocab_size=spec.vocab_size,
        sequence_length=data.sequence_length,
        sequences_per_step=train.sequences_per_step,
        sequences_per_micro_batch=train.sequences_per_micro_batch,
        seed=data.seed,
        one_document_per_row=spec.recurrent,
        documents=documents,
        endless=not validation,
    )


def make_validation(corpus: TokenCorpus, spec: ModelSpec, recipe: Recipe) -> ValidationSet | None:
    """What the validation loss is measured on; None where the recipe asks for none.

    Raises UserError when there is nothing to measure it on.
    """
    data, train = recipe.data, recipe.train
    if train.validate_every is None or data.validation_documents is None:
        return None
    rows = train.sequences_per_micro_batch
    return ValidationSet(
        make_loader(corpus, spec, recipe, validation=True),
        num_documents=data.validation_documents,
        most=(train.validation_sequences or train.sequences_per_step) // rows,
        per_pass=train.sequences_per_step // rows,
    )


def model_spec(config: PretrainedConfig, data: DataConfig) -> ModelSpec:
    """The model taken apart. Raises UserError when it cannot be trained or does not reach the context."""
    spec = ModelSpec.from_config(config)
    for shape in spec.attention:
        # transformers accepts such a config, and kernels divide by the zero that comes of it.
        if shape is not None and shape.heads % shape.kv_heads:
            raise UserError(
                f"model.num_kv_heads: {shape.heads} query heads cannot share {shape.kv_heads} key and value heads; "
                "give a divisor of model.num_heads"
            )
    validate_context(spec, data.sequence_length)
    return spec


def with_compute_dtype(train: TrainConfig, device_type: str) -> TrainConfig:
    """The same with train.compute_dtype=auto decided for a device: of this machine, where it is a CPU."""
    if train.compute_dtype != "auto":
        return train
    return replace(train, compute_dtype="bfloat16" if device_type == "cuda" or cpu_has_bfloat16() else "float32")


def cpu_has_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this machine's CPU multiplies bfloat16 in hardware; else a product takes several times float32's time."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return False
    return not {"amx_bf16", "avx512_bf16", "bf16"}.isdisjoint(text.split())


def compute_dtype(train: TrainConfig) -> torch.dtype:
    """Dtype of weights and activations in forward and backward, once it is decided."""
    assert train.compute_dtype != "auto"
    return torch.bfloat16 if train.compute_dtype == "bfloat16" else torch.float32


def layouts(spec: ModelSpec) -> dict[str, FlatLayout]:
    """Flat layout of every buffer."""
    return {name: FlatLayout.build(params) for name, params in spec.buffers.items()}


def make_problem(
    spec: ModelSpec,
    recipe: Recipe,
    device_type: str,
    tiers: tuple[int, int, int | None],
    chunk_tokens: int,
    *,
    device_reads: bool = True,
    reader_bytes: int = 0,
    graph_bytes: Mapping[str, int] | None = None,
) -> Problem:
    """What a plan has to solve when chunks have `chunk_tokens` tokens.

    `tiers`: bytes of gpu, ram and nvme, of which the last may be None. `device_reads`: NVMe reads reach the compute
    device's memory without a stage in RAM. `reader_bytes`: pinned RAM that the reader takes for itself. `graph_bytes`:
    first layer of a kind -> bytes that a kept graph of it takes per token, where that has been measured.
    """
    data, train, storage = recipe.data, recipe.train, recipe.storage
    flat = layouts(spec)
    part_bytes = parse_bytes(storage.chunk_bytes, "storage.chunk_bytes")
    gpu_budget, ram_budget, nvme_budget = tiers
    dtype = compute_dtype(train)
    compute_bytes = dtype.itemsize
    tokens = data.sequence_length if spec.recurrent else chunk_tokens
    workspace = workspace_bytes(spec, tokens, compute_bytes, LOGITS_BYTES[device_type])
    if device_type == "cuda":
        stream_tokens = train.sequences_per_micro_batch * data.sequence_length
        workspace += attention_workspace(spec, tokens, stream_tokens, deterministic=train.deterministic)
        workspace += min(workspace // 8, HOLES_BYTES)
        workspace += overhead_bytes(train.sequences_per_step * data.sequence_length) + gpu_budget // ALLOCATOR_SHARE
    return Problem(
        blocks=_learned(block_shapes(spec, dtype), graph_bytes or {}),
        buffers=tuple(
            BufferShape(name=n, numel=f.numel, part_numel=part_numel_even(f.numel, part_bytes // 4))
            for n, f in flat.items()
        ),
        hidden_size=spec.hidden_size,
        compute_bytes=compute_bytes,
        gradient_bytes=2 if train.gradient_dtype == "bfloat16" else 4,
        micro_batches=train.sequences_per_step // train.sequences_per_micro_batch,
        rows=train.sequences_per_micro_batch,
        row_tokens=data.sequence_length,
        chunk_tokens=chunk_tokens,
        chunk_per_row=spec.recurrent,
        workspace_bytes=workspace,
        gpu_budget=gpu_budget,
        ram_budget=ram_budget,
        device_reads=device_reads,
        reader_bytes=reader_bytes,
        save=train.save,
        kv_window=train.kv_window,
        nvme_budget=nvme_budget,
        kept_generations=kept_generations(recipe),
        last_good=storage.keep_good is not None,
    )


def _learned(blocks: tuple[BlockShape, ...], graph_bytes: Mapping[str, int]) -> tuple[BlockShape, ...]:
    """The blocks with what was measured of their graphs."""
    found = [graph_bytes.get(name) for name in representatives(blocks)]
    return tuple(
        block if size is None else replace(block, graph_bytes_per_token=max(1, size - block.lse_bytes_per_token))
        for block, size in zip(blocks, found, strict=True)
    )


def kept_generations(recipe: Recipe) -> int:
    """Generations that a whole run keeps on disk at its end beside the newest and the one being written."""
    train, storage = recipe.train, recipe.storage
    commits = range(storage.checkpoint_every, train.steps + 1, storage.checkpoint_every)
    for_good = 0 if storage.keep_every is None else sum(step % storage.keep_every == 0 for step in commits)
    return min(len(commits), storage.keep_last - 1 + for_good)


def block_shapes(spec: ModelSpec, dtype: torch.dtype) -> tuple[BlockShape, ...]:
    """The blocks as the planner sees them, computing in `dtype`."""
    shapes = []
    kept = graph_bytes_per_token(spec, dtype)
    for i, block in enumerate(spec.blocks):
        matmul = 0 if block.role == "embed" else block_matmul(spec, block)
        if block.role != "layer":
            shapes.append(
                BlockShape(name=block.name, role=block.role, buffers=block.buffers, matmul_flops_per_token=matmul)
            )
            continue
        shape, graph = spec.attention[i - 1], kept[i - 1]
        unread = unread_matmul(spec, block, spec.unread[i - 1])
        plain = BlockShape(
            name=block.name,
            role=block.role,
            buffers=block.buffers,
            graph_bytes_per_token=graph,
            matmul_flops_per_token=matmul,
            unread_flops_per_token=unread,
        )
        if shape is None:
            shapes.append(plain)
            continue
        kv = shape.kv_heads * (shape.qk_dim + shape.v_dim)
        shapes.append(
            replace(
                plain,
                out_bytes_per_token=shape.heads * shape.v_dim * dtype.itemsize,
                lse_bytes_per_token=shape.heads * FP32,
                kv_bytes_per_token=kv * dtype.itemsize,
                kv_numel_per_token=kv,
                q_numel_per_token=shape.heads * shape.qk_dim,
                out_numel_per_token=shape.heads * shape.v_dim,
                window_tokens=shape.window,
                span_tokens=shape.chunk,
                projection_flops_per_token=projection_matmul(spec, shape),
            )
        )
    return tuple(shapes)


def attention_workspace(spec: ModelSpec, tokens: int, stream_tokens: int, *, deterministic: bool) -> int:
    """Most that the kernels for a layer's attention take on a GPU, for chunks of a stream of `stream_tokens`."""
    return max(
        (
            attention.workspace_bytes(
                heads=shape.heads,
                kv_heads=shape.kv_heads,
                qk_dim=shape.qk_dim,
                v_dim=shape.v_dim,
                chunk=tokens,
                total=stream_tokens,
                deterministic=deterministic,
            )
            for shape in spec.attention
            if shape is not None
        ),
        default=0,
    )


def workspace_bytes(spec: ModelSpec, tokens: int, compute_bytes: int, logits_bytes: int) -> int:
    """Estimate of the temporaries of the largest compute op.

    A layer's backward holds the output of every projection, twice for the elementwise work between them, eight
    hidden states, and the gradients of its parameters before they are summed. Experts count for the tokens routed to
    them. The head holds its logits in the compute dtype, replaced by their gradient, and some rows in float32.
    """
    text = spec.config.get_text_config(decoder=True)
    routed = getattr(text, "num_experts_per_tok", None) or 1
    worst = 0
    for block in spec.blocks:
        params = [param for name in block.buffers for param in spec.buffers[name]]
        gradients = sum(param.numel for param in params) * compute_bytes
        if block.role == "layer":
            widths = sum(p.shape[0] for p in params if len(p.shape) == 2)
            widths += sum(routed * p.shape[1] for p in params if len(p.shape) == 3)
            temporaries = tokens * compute_bytes * (2 * widths + 8 * spec.hidden_size)
        else:
            logits = min(logits_bytes, tokens * spec.vocab_size * 12) if block.role == "head" else 0
            temporaries = logits + 4 * tokens * spec.hidden_size * 4
        worst = max(worst, temporaries + gradients)
    return worst
