"""Hugging Face checkpoints into flat buffers and back; exports in another dtype, in small files, with the files that
transformers writes."""

import json
import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from model_folders import as_users_have_it
from safetensors.torch import load_file, save_file
from samples import cases
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, Transpose, WeightConverter

from penstock.engine.data.text.made_tokenizer import train_tokenizer
from penstock.engine.data.text.tokenizer import tokenizer_contents
from penstock.engine.hf.config import read_config
from penstock.engine.hf.weights import CheckpointLayout, export_folder, import_blocks, remarks_on_tensors
from penstock.engine.model import anatomy
from penstock.engine.model.spec import ModelSpec
from penstock.storage.files.errors import UserError
from penstock.storage.files.safetensors import CheckpointReader

SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "max_position_embeddings": 64}
SHAPE |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
TYPES = {
    "llama": {},
    "phi3": {},
    "gemma3_text": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, **EXPERTS},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
TYPES["deepseek_v3"] = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, **EXPERTS}
TYPES["deepseek_v3"] |= dict.fromkeys(("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8)
TYPES["glm4_moe"] = {"n_routed_experts": 4, "first_k_dense_replace": 1, **EXPERTS}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
LINEAR |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}
TYPES["qwen3_5_text"] = LINEAR
TYPES["qwen3_next"] = {"num_experts": 4, "shared_expert_intermediate_size": 16, **EXPERTS, **LINEAR}
TYPES["deepseek_v3"] |= {"q_lora_rank": 12, "num_key_value_heads": 4}
SCRATCH = [("llama", torch.bfloat16), ("mixtral", torch.float32), ("deepseek_v3", torch.bfloat16)]
NATIVE = [(name, True) for name in ("llama", "mixtral", "gpt_oss")]
EXPERT = "model.layers.1.block_sparse_moe.experts.2.w3.weight"


def random_model(model_type: str, tied: bool = False, dtype: torch.dtype = torch.bfloat16, **fields):
    config = AutoConfig.for_model(model_type, **{**SHAPE, **TYPES[model_type], **fields})
    config.tie_word_embeddings = tied
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for tensor in model.state_dict().values():
        tensor.normal_(std=0.1)
    return model.eval()


def saved(folder: Path, model_type: str, **fields: Any) -> Path:
    random_model(model_type, **fields).save_pretrained(folder)
    return folder


@contextmanager
def stored(folder: Path) -> Iterator[dict[str, torch.Tensor]]:
    tensors = load_file(folder / "model.safetensors")
    yield tensors
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def spec_of(folder: Path) -> ModelSpec:
    return anatomy.take_apart(AutoConfig.from_pretrained(folder))  # once for each config (conftest.py)


def round_trip(folder: Path, scratch: Path, spec: ModelSpec | None = None) -> Path:
    spec = spec or spec_of(folder)
    reader = CheckpointReader(folder)
    buffers = dict(import_blocks(CheckpointLayout(spec, reader)))
    for buffer, params in ((name, each.params) for name, each in spec.buffers.items()):
        assert set(buffers[buffer]) == {param.name for param in params}
        assert all(buffers[buffer][param.name].dtype == torch.float32 for param in params)
    assert set(CheckpointLayout(spec, reader).read_constants()) == set(spec.constants)
    options = {"constants": {}, "origin": folder, "tokenizer": {}, "dtype": "bfloat16"}
    export_folder(scratch / "export", spec, buffers.__getitem__, **options)
    return scratch / "export"


def assert_equal_tensors(one: Path, two: Path) -> None:
    first, second = CheckpointReader(one), CheckpointReader(two)
    assert first.tensors == second.tensors
    for name in first.tensors:
        a, b = first.read(name), second.read(name)
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)), name


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.arange(24)[None]).logits


@pytest.mark.parametrize(("model_type", "native"), [*((name, False) for name in TYPES), *NATIVE])
def test_import_then_export_is_byte_equal(tmp_path, model_type, native):
    original = tmp_path / "original"
    model = random_model(model_type)
    model.save_pretrained(original, save_original_format=not native, max_shard_size="20KB")
    assert (original / "model.safetensors.index.json").exists()
    exported = round_trip(original, tmp_path)
    assert_equal_tensors(original, exported)
    for name in ("config.json", "generation_config.json"):
        assert (original / name).read_bytes() == (exported / name).read_bytes()
    assert torch.equal(logits(exported), logits(original))


def test_import_holds_one_buffer_at_a_time(tmp_path, monkeypatch):
    dtype = torch.bfloat16
    random_model("mixtral", dtype=dtype, num_hidden_layers=8).save_pretrained(tmp_path)
    spec = spec_of(tmp_path)
    reader = CheckpointReader(tmp_path)
    names: list[str] = []
    alive: dict[str, int] = {}
    peak = 0
    read = CheckpointReader.read

    def tracked_read(self, name):
        nonlocal peak
        tensor = read(self, name)
        names.append(name)
        alive[name] = tensor.nbytes
        weakref.finalize(tensor.untyped_storage(), alive.pop, name)
        peak = max(peak, sum(alive.values()))
        return tensor

    monkeypatch.setattr(CheckpointReader, "read", tracked_read)
    for _, tensors in import_blocks(CheckpointLayout(spec, reader)):
        del tensors
    assert len(names) == len(reader.tensors)
    largest = max(sum(param.numel for param in buffer.params) for buffer in spec.buffers.values()) * dtype.itemsize
    assert peak <= 2 * largest < spec.num_params * dtype.itemsize / 3


@pytest.mark.parametrize("head", ["absent", "present", "alone"])
def test_tied_embeddings_keep_their_names(tmp_path, head):
    original = saved(tmp_path / "original", "llama", tied=True)
    with stored(original) as tensors:
        assert "lm_head.weight" not in tensors
        if head != "absent":
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        if head == "alone":
            del tensors["model.embed_tokens.weight"]
    exported = round_trip(original, tmp_path)
    assert_equal_tensors(original, exported)
    assert torch.equal(logits(exported), logits(original))
    if head == "present":
        with stored(original) as tensors:
            tensors["lm_head.weight"] += 1
        with pytest.raises(UserError, match="tie_word_embeddings"):
            round_trip(original, tmp_path / "differing")


def test_mixed_dtypes_unused_tensors_and_special_values_survive(tmp_path):
    original = saved(tmp_path / "original", "mixtral")
    with stored(original) as tensors:
        tensors["model.norm.weight"] = tensors["model.norm.weight"].double().float() * 1.000001
        tensors["model.layers.0.self_attn.q_proj.weight"] = tensors["model.layers.0.self_attn.q_proj.weight"].half()
        expert = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
        tensors[expert] = tensors[expert].float() * 1.000001
        tensors["model.embed_tokens.weight"][0, :3] = torch.tensor([-0.0, float("inf"), 1e-40])
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.rand(4)
        tensors["model.layers.7.extra.weight"] = torch.arange(5, dtype=torch.int64)
    assert_equal_tensors(original, round_trip(original, tmp_path))
    base = saved(tmp_path / "base", "mixtral", tied=True)
    with stored(base) as tensors:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)
    assert_equal_tensors(base, round_trip(base, tmp_path / "names of the base model"))


class Halve(ConversionOps):
    """Halves a tensor; claims that doing so again undoes it."""

    def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
        return {target_patterns[0]: next(iter(input_dict.values()))[0] / 2}

    @property
    def reverse_op(self):
        return Halve()


@pytest.fixture
def declare():
    """Declares how llamas are converted whose o_proj are stored as something else."""

    def declared(pattern: str, operation: ConversionOps) -> None:
        conversion = WeightConverter(pattern, "self_attn.o_proj.weight", [operation])
        register_checkpoint_conversion_mapping("llama", [conversion], overwrite=True)

    yield declared
    register_checkpoint_conversion_mapping("llama", [], overwrite=True)


def test_declared_conversions(tmp_path, declare):
    """A llama whose o_proj are stored transposed, as `turned`: what can be undone is; names without a way back become
    the model's own; values without one are refused."""
    original = saved(tmp_path / "original", "llama")
    with stored(original) as tensors:
        for name in [name for name in tensors if "o_proj" in name]:
            tensors[name.replace("o_proj.weight", "turned")] = tensors.pop(name).t().contiguous()
    declare("self_attn.turned", Transpose(0, 1))
    exported = round_trip(original, tmp_path / "undone")
    assert_equal_tensors(original, exported)
    expected = logits(original)
    assert torch.equal(logits(exported), expected)
    declare("self_attn.tur[n]ed", Transpose(0, 1))
    exported = round_trip(original, tmp_path / "renamed")
    names = {name.replace("turned", "o_proj.weight") for name in CheckpointReader(original).tensors}
    assert set(CheckpointReader(exported).tensors) == names
    assert torch.equal(logits(exported), expected)
    declare("self_attn.turned", Halve())
    with pytest.raises(UserError, match=r"0\.self_attn\.turned' cannot be undone exactly"):
        round_trip(original, tmp_path / "halved")


@pytest.mark.parametrize(("model_type", "dtype"), SCRATCH)
def test_model_from_scratch_exports_as_transformers_saves_it(tmp_path, model_type, dtype):
    model = random_model(model_type, dtype=torch.float32)
    for name, tensor in model.named_buffers():
        if name in model.state_dict():
            tensor.zero_()
    spec = anatomy.take_apart(model.config)
    tokenizer = train_tokenizer(["some text to train on"], 260, tmp_path / "tokenizer")
    state = model.state_dict()
    of_tokenizer = {"tokenizer": tokenizer_contents(tokenizer.folder), "eos_id": tokenizer.eos_id}
    out = tmp_path / "export"

    def read_buffer(buffer: str) -> dict[str, torch.Tensor]:
        return {param.name: state[param.name] for param in spec.buffers[buffer].params}

    export_folder(out, spec, read_buffer, constants={}, origin=None, **of_tokenizer, dtype=str(dtype)[6:])
    model.to(dtype).save_pretrained(tmp_path / "reference")
    written, reference = CheckpointReader(out), CheckpointReader(tmp_path / "reference")
    shapes = [{name: shape for name, (_, shape) in of.tensors.items()} for of in (written, reference)]
    assert shapes[0] == shapes[1]
    assert torch.equal(logits(out), logits(tmp_path / "reference"))
    config: PretrainedConfig = AutoConfig.from_pretrained(out)
    assert config.dtype == dtype
    assert config.architectures == [type(model).__name__]
    assert config.eos_token_id == tokenizer.eos_id
    assert (out / "generation_config.json").exists()
    assert (out / "tokenizer.json").read_bytes() == (tokenizer.folder / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(("name", "value", "message"), [
    ("model.layers.0.self_attn.q_proj.weight", None, r"'model\.layers\.0\.self_attn\.q_proj\.weight'"),
    (EXPERT, None, f"'{EXPERT}' is missing"),
    (EXPERT, torch.zeros(47, 32), r"w3\.weight' has shape \[47, 32\], but config\.json implies \[48, 32\]"),
    ("model.norm.weight", torch.zeros(31), r"model\.safetensors: tensor 'model\.norm\.weight' has shape \[31\],"),
    ("model.embed_tokens.weight", torch.zeros(64, 32, dtype=torch.float64), r"embed_tokens\.weight' is float64"),
], ids=["missing", "missing expert", "expert shape", "shape", "dtype"])  # fmt: skip
def test_checkpoints_that_do_not_fit_are_refused_before_reading(tmp_path, name, value, message, monkeypatch):
    mixtral = saved(tmp_path / "mixtral", "mixtral")
    with stored(mixtral) as tensors:
        tensors[name] = value
        if value is None:
            del tensors[name]
    reader = CheckpointReader(mixtral)
    monkeypatch.setattr(reader, "read", lambda name: pytest.fail("read a tensor"))
    with pytest.raises(UserError, match=message):
        import_blocks(CheckpointLayout(spec_of(mixtral), reader))


def test_more_experts_than_the_config_says_are_refused(tmp_path):
    mixtral = saved(tmp_path / "mixtral", "mixtral")
    values = json.loads((mixtral / "config.json").read_text())
    (mixtral / "config.json").write_text(json.dumps(values | {"num_local_experts": 3}))
    with pytest.raises(UserError, match=r"cannot be made of|config\.json"):
        import_blocks(CheckpointLayout(spec_of(mixtral), CheckpointReader(mixtral)))


def exported(folder: Path, out: Path, change: Any = None, **options: Any) -> tuple[Path, list[str], dict[str, Tensor]]:
    """Import a folder and export it; the remarks and what was exported of, fp32."""
    spec = spec_of(folder)
    buffers = dict(import_blocks(CheckpointLayout(spec, CheckpointReader(folder))))
    values = {name: tensor for buffer in buffers.values() for name, tensor in buffer.items()}
    if change is not None:
        change(values)
    options = {
        "constants": {},
        "origin": folder,
        "tokenizer": tokenizer_contents(folder),
        "dtype": "bfloat16",
    } | options
    return out, export_folder(out, spec, buffers.__getitem__, **options), values


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize(("model_type", "tied"), [("llama", False), ("gemma3_text", True)])
def test_the_files_are_those_that_transformers_saves(tmp_path: Path, model_type: str, tied: bool) -> None:
    origin = as_users_have_it(tmp_path / "origin", model_type, tied)
    out, remarks, _ = exported(origin, tmp_path / "out")
    AutoModelForCausalLM.from_pretrained(origin).save_pretrained(tmp_path / "saved")
    AutoTokenizer.from_pretrained(origin).save_pretrained(tmp_path / "saved")
    assert files(out).keys() == files(tmp_path / "saved").keys()
    before = files(origin)
    assert all(content == before[name] for name, content in files(out).items() if not name.endswith(".safetensors"))
    assert load_file(out / "model.safetensors").keys() == load_file(tmp_path / "saved" / "model.safetensors").keys()
    assert remarks == []
    with pytest.raises(UserError, match="not empty"):
        exported(origin, tmp_path / "out")


@pytest.mark.parametrize("name", cases(["float32", "float16"], "float16"))
def test_another_dtype_is_in_tensors_and_config(tmp_path: Path, name: str) -> None:
    origin = as_users_have_it(tmp_path / "origin", "qwen3", True)
    out, _, values = exported(origin, tmp_path / "out", dtype=name, convert=True)
    dtype = getattr(torch, name)
    found = load_file(out / "model.safetensors")
    assert {tensor.dtype for tensor in found.values()} == {dtype}
    assert all(torch.equal(tensor, values[key].to(dtype)) for key, tensor in found.items())
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (origin, out))
    assert after == before | {"dtype": name}
    assert AutoModelForCausalLM.from_pretrained(out).dtype == dtype


@pytest.mark.parametrize("bare", [False, True])
def test_a_config_may_hold_infinity_as_transformers_writes_it_or_bare(tmp_path: Path, bare: bool) -> None:
    """And the export holds what any reader of JSON takes."""
    shape = {"hidden_size": 64, "num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 16}
    config = AutoConfig.for_model("mamba2", num_hidden_layers=2, vocab_size=64, **shape)
    origin, out = tmp_path / "origin", tmp_path / "out"
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(origin)
    values = json.loads((origin / "config.json").read_text())
    assert values["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    if bare:
        (origin / "config.json").write_text(json.dumps(values | {"time_step_limit": [0.0, math.inf]}))
    assert read_config(origin).time_step_limit == [0.0, math.inf]
    assert read_config(origin, {"time_step_limit": [{"__float__": "-Infinity"}, 1.0]}).time_step_limit[0] == -math.inf
    spec = spec_of(origin)
    buffers = dict(import_blocks(CheckpointLayout(spec, CheckpointReader(origin))))
    options = {"constants": {}, "origin": origin, "tokenizer": {}, "dtype": "bfloat16", "convert": True}
    export_folder(out, spec, buffers.__getitem__, **options)
    written = json.loads((out / "config.json").read_text(), parse_constant=pytest.fail)
    assert written == values | {"dtype": "bfloat16"}
    assert AutoConfig.from_pretrained(out).time_step_limit == [0.0, math.inf]
    (origin / "config.json").write_text(json.dumps(values | {"time_step_limit": [0.0, {"__float__": "NaN"}]}))
    with pytest.raises(UserError, match="time_step_limit is nan, which is not a number"):
        read_config(origin)


def test_float16_refuses_what_it_does_not_hold_and_counts_what_became_zero(tmp_path: Path) -> None:
    origin = as_users_have_it(tmp_path / "origin", "llama", False)

    def change(values: dict[str, Tensor]) -> None:
        values["model.layers.1.mlp.up_proj.weight"][3, 4] = -65536.0

    largest = r"1\.mlp\.up_proj\.weight' holds -65536, but the largest float16 value is 65504"
    with pytest.raises(UserError, match=largest):
        exported(origin, tmp_path / "out", change, dtype="float16", convert=True)
    assert not (tmp_path / "out").exists()
    exported(origin, tmp_path / "out", change, dtype="bfloat16", convert=True)

    def small(values: dict[str, Tensor]) -> None:
        values["lm_head.weight"][:2, 0] = 1e-9
        values["lm_head.weight"][2, 0] = float("inf")

    (remark,) = exported(origin, tmp_path / "small", small, dtype="float16", convert=True)[1]
    assert remark.startswith("float16: 2 of "), "what became zero is counted"


def test_files_of_weights_are_at_most_so_large(tmp_path: Path) -> None:
    origin = as_users_have_it(tmp_path / "origin", "llama", False)
    out, _, values = exported(origin, tmp_path / "out", max_shard_bytes=20_000)
    shards = sorted(file for file in out.iterdir() if file.suffix == ".safetensors")
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    assert [file.name for file in shards] == names
    assert len(shards) > 2
    AutoModelForCausalLM.from_pretrained(origin).save_pretrained(tmp_path / "saved", max_shard_size=20_000)
    index, reference = (json.loads((f / "model.safetensors.index.json").read_text()) for f in (out, tmp_path / "saved"))
    assert index["weight_map"].keys() == reference["weight_map"].keys()
    assert index["metadata"]["total_size"] == reference["metadata"]["total_size"]
    assert all(sum(t.nbytes for t in load_file(file).values()) <= 20_000 for file in shards)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert all(torch.equal(model.state_dict()[key], tensor) for key, tensor in values.items())


PREDICTORS = {
    "qwen3_next": (
        "mtp",
        ["fc.weight", "norm.weight", "layers.0.mlp.gate.weight", "layers.0.mlp.experts.0.up_proj.weight"],
    ),
    "qwen3_5_text": (
        "mtp",
        ["fc.weight", "norm.weight", "layers.0.self_attn.q_proj.weight", "layers.0.mlp.up_proj.weight"],
    ),
    "deepseek_v3": (
        "model.layers.61",
        ["eh_proj.weight", "enorm.weight", "mlp.experts.0.up_proj.weight", "mlp.gate.weight"],
    ),
    "glm4_moe": ("model.layers.92", ["eh_proj.weight", "shared_head.norm.weight", "mlp.experts.1.down_proj.weight"]),
}
"""Heads that predict several tokens: where they are, and some of their tensors."""


@pytest.mark.parametrize("model_type", PREDICTORS)
def test_heads_that_predict_several_tokens_are_told_of_and_returned(tmp_path, model_type):
    folder = saved(tmp_path / "model", model_type)
    where, names = PREDICTORS[model_type]
    with stored(folder) as tensors:
        tensors |= {f"{where}.{name}": torch.randn(8, 8).to(torch.float8_e4m3fn) for name in names}
        tensors[f"{where}.layers.0.self_attn.rotary_emb.inv_freq"] = torch.rand(4)
    said = remarks_on_tensors(folder, spec_of(folder).config)
    what = f"{len(names)} of its tensors are ones that transformers' {model_type} model leaves out ({where}.*): "
    assert said == [f"{folder}: {what}they are not trained, and go to the export as they are"]
    assert_equal_tensors(folder, round_trip(folder, tmp_path))
