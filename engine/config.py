"""The recipe: one typed object that says everything about a run.

The docstring under each field is the help text shown everywhere. Validation here looks at values only: it opens no file
and needs no device.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from penstock.storage.errors import UserError
from penstock.storage.untrusted import one_line

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_LARGEST = 10**18
"""Bytes; what is larger is a slip of the unit."""


def parse_bytes(text: str | int, where: str) -> int:
    """Bytes named by `text`: an int, or a number with a unit (`512MiB`, `1.5 GiB`, `24GB`).

    Raises UserError naming `where` when the text is not a size, is below one byte or is more than any machine has.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*", str(text))
    unit = _UNITS.get(match.group(2).lower()) if match else None
    size = float(match.group(1)) * unit if match and unit else 0.0
    if size < 1:
        raise UserError(f"{where}: '{text}' is not a size; write for example 512MiB, 24GiB or 1.5TB")
    if size > _LARGEST:
        raise UserError(f"{where}: '{text}' is more than any machine has; write for example 512MiB, 24GiB or 1.5TB")
    return int(size)


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise UserError(message)


MOST_LAYERS = 4096
"""Times what the deepest published models have; a model is built layer by layer, if only on the meta device."""
MOST_SIZE = 2**28
"""Of any width or number of a model: times what the widest vocabulary has."""
MOST_TOKENS = 2**27
"""Of a sequence: a hundred times the longest contexts."""
MOST_STEPS = 10**12
MOST_SEQUENCES = 2**20
MOST_SAMPLE_TOKENS = 2**20
_NAME_CHARS = 100
"""Of a run's name: with a time behind it, it is the name of a folder."""


def _require_most(section: str, config: object, names: Sequence[str], most: int) -> None:
    """Raise UserError for a number of the section beyond `most`: a slip, whose plan would take for ever."""
    for name in names:
        value = getattr(config, name)
        _require(
            value is None or value <= most, f"{section}.{name}: {value} is a slip of the pen; the most is {most:,}"
        )


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """Which model: a Hugging Face folder, a shape to train from scratch, or both: then they are the same model."""

    path: str | None = None
    """Hugging Face folder (config.json, *.safetensors) to fine-tune; none trains the shape below from scratch. With a
    shape beside it a run can be planned without the folder, or started with --from-scratch."""
    model_type: str = "qwen3"
    """transformers model type of the shape below, for example qwen3, llama, mixtral."""
    num_layers: int | None = None
    """Decoder layers."""
    hidden_size: int | None = None
    """Width of the residual stream."""
    intermediate_size: int | None = None
    """Width of the MLP."""
    num_heads: int | None = None
    """Query heads."""
    num_kv_heads: int | None = None
    """Key and value heads; fewer than num_heads is grouped-query attention."""
    head_dim: int | None = None
    """Width of one attention head."""
    vocab_size: int | None = None
    """Vocabulary entries; none takes the tokenizer's."""
    max_position: int | None = None
    """Longest position the rotary embedding is configured for; none takes data.sequence_length."""
    tie_embeddings: bool = False
    """Share the embedding matrix with the output head."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Further fields of the transformers config, by their own names, for example {"rope_theta": 1e6}."""

    def __post_init__(self) -> None:
        sizes = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
        for name in (*sizes, "vocab_size", "max_position"):
            value = getattr(self, name)
            _require(value is None or value > 0, f"model.{name}: {value} must be at least 1")
        _require_most("model", self, ("num_layers",), MOST_LAYERS)
        _require_most("model", self, (*sizes, "vocab_size", "max_position"), MOST_SIZE)
        if self.num_heads and self.num_kv_heads:
            _require(
                self.num_heads % self.num_kv_heads == 0,
                f"model.num_heads: {self.num_heads} is not a multiple of model.num_kv_heads {self.num_kv_heads}",
            )

    @property
    def has_shape(self) -> bool:
        """Whether the fields describe a model by themselves; width and depth are what no default stands for."""
        return self.num_layers is not None and self.hidden_size is not None


Source = Literal[
    "python_stdlib",
    "text",
    "jsonl",
    "random",
]
"""Formats of engine/data/formats/base.py, and `random`, which reads nothing."""


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """Which text, which tokenizer, how it is packed."""

    source: Source = "python_stdlib"
    """python_stdlib: the running interpreter's library; text: files below path; jsonl: a `text` field per line of
    path; random: seeded random token ids (benchmarks)."""
    path: str | None = None
    """File or folder that text and jsonl read; none is enough to plan with, and refused by a run."""
    tokenizer: str | None = None
    """Hugging Face folder or tokenizer.json; none takes the model folder's, or trains a byte-level BPE on the data."""
    tokenizer_vocab_size: int = 4096
    """Entries of a tokenizer trained on the data."""
    sequence_length: int = 4096
    """Tokens of one packed sequence (the context)."""
    seed: int = 0
    """Seed of the document order."""
    max_documents: int | None = None
    """Use only the first documents of the source."""
    validation_documents: int | None = None
    """Documents held out of training for the validation loss, chosen by seed; none holds out none. train.validate_every
    says when they are looked at."""

    def __post_init__(self) -> None:
        _require(self.sequence_length >= 2, f"data.sequence_length: {self.sequence_length} must be at least 2")
        _require(
            self.tokenizer_vocab_size > 256,
            f"data.tokenizer_vocab_size: {self.tokenizer_vocab_size} must be over 256, the byte alphabet",
        )
        _require_most("data", self, ("sequence_length",), MOST_TOKENS)
        _require_most("data", self, ("tokenizer_vocab_size",), MOST_SIZE)
        _require_most("data", self, ("max_documents", "validation_documents"), MOST_STEPS)
        _require(0 <= self.seed < 2**63, f"data.seed: {self.seed} must be from 0 to 2^63 - 1")
        most = self.max_documents
        _require(most is None or most >= 1, f"data.max_documents: {most} must be at least 1; none reads all")
        held = self.validation_documents
        _require(
            held is None or held >= 1, f"data.validation_documents: {held} must be at least 1; none holds out none"
        )
        _require(
            held is None or most is None or held < most,
            f"data.validation_documents: {held} leaves nothing of data.max_documents {most} to train on",
        )

    @property
    def lacks_path(self) -> bool:
        """Whether the source reads a path and none is named."""
        return self.path is None and self.source not in ("python_stdlib", "random")


@dataclass(kw_only=True, slots=True)
class TrainConfig:
    """Steps, batch, optimizer and precision."""

    steps: int = 100
    """Optimizer steps of the whole run."""
    global_batch_size: int = 1
    """Sequences whose gradients make one optimizer step."""
    micro_batch_size: int = 1
    """Sequences laid end to end into one token stream; their number times the sequence length sets the K/V window."""
    chunk_tokens: int | None = None
    """Tokens of one chunk, the unit of activation memory; need not divide anything; none lets the plan choose."""
    activation_checkpointing: Literal["auto", "full", "selective", "none"] = "auto"
    """What backward recomputes of a layer. full: all of it, attention too, as forward saves the layer's input only;
    selective: all but attention, whose keys, values and output are saved too; none: nothing, as everything is saved in
    GPU memory; auto lets the plan choose layer by layer."""
    kv_window: Literal["auto", "whole", "streamed"] = "auto"
    """Hold one layer's keys and values of a micro-batch on the GPU whole, or stream them from RAM chunk by chunk; auto
    streams only where the budget is too small."""
    optimizer: str = "adamw"
    """Optimizer by name; adamw is the one there is."""
    lr: float = 3e-4
    """Peak learning rate."""
    min_lr_ratio: float = 0.1
    """Final learning rate over the peak one."""
    warmup_steps: int = 0
    """Steps of linear warm-up from zero."""
    lr_schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the decay after warm-up."""
    beta1: float = 0.9
    """Adam's decay of the first moment."""
    beta2: float = 0.95
    """Adam's decay of the second moment."""
    eps: float = 1e-8
    """Adam's epsilon."""
    weight_decay: float = 0.1
    """Decoupled weight decay; never applied to norms and biases."""
    clip_norm: float | None = 1.0
    """Global gradient norm to clip to; none does not clip."""
    compute_dtype: Literal["auto", "bfloat16", "float32"] = "bfloat16"
    """Dtype of the weights and activations in forward and backward; master weights and moments are float32. auto is
    bfloat16, but float32 on a CPU that has no instructions for bfloat16 and takes several times as long with it."""
    gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which a block's gradient waits for the optimizer; it is always summed in float32 first."""
    validate_every: int | None = None
    """Steps between two measurements of the validation loss, which is also measured after the last step; none measures
    none. Needs data.validation_documents."""
    validation_sequences: int | None = None
    """Sequences that a validation looks at, the same every time, fewer where the documents held out fill fewer; none
    takes as many as a step has."""
    seed: int = 0
    """Seed of the weights of a model trained from scratch."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile layers and optimizer with torch.compile; auto does where the compilers for it are there and, as measured
    before the first step, it pays within the run's steps."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes CUDA where there is a GPU."""
    calibrate: bool = True
    """Measure one block's ops before the first step and plan again with what they take."""
    deterministic: bool = False
    """Use only kernels that give the same bits on every run on one machine, which takes time on a GPU; on CPU every run
    gives them anyway."""

    def __post_init__(self) -> None:
        counts = ("steps", "global_batch_size", "micro_batch_size", "chunk_tokens")
        for name in (*counts, "validate_every", "validation_sequences"):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"train.{name}: {value} must be at least 1")
        _require_most("train", self, ("steps", "validate_every"), MOST_STEPS)
        _require_most("train", self, ("global_batch_size", "micro_batch_size", "validation_sequences"), MOST_SEQUENCES)
        _require_most("train", self, ("chunk_tokens",), MOST_TOKENS)
        for name in ("global_batch_size", "validation_sequences"):
            value = getattr(self, name)
            _require(
                value is None or value % self.micro_batch_size == 0,
                f"train.{name}: {value} is not a multiple of train.micro_batch_size {self.micro_batch_size}",
            )
        _require(
            self.validation_sequences is None or self.validate_every is not None,
            f"train.validation_sequences: {self.validation_sequences} is never used; say with train.validate_every "
            "when to measure the validation loss, or leave it out",
        )
        _require(-(2**63) <= self.seed < 2**63, f"train.seed: {self.seed} has more than 64 bits")
        _require(self.lr > 0, f"train.lr: {self.lr} must be above 0")
        _require(self.eps > 0, f"train.eps: {self.eps} must be above 0")
        _require(0 <= self.min_lr_ratio <= 1, f"train.min_lr_ratio: {self.min_lr_ratio} must lie in 0..1")
        _require(self.warmup_steps >= 0, f"train.warmup_steps: {self.warmup_steps} must not be negative")
        _require(self.warmup_steps <= self.steps, f"train.warmup_steps: {self.warmup_steps} exceeds train.steps")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            _require(0 <= value < 1, f"train.{name}: {value} must lie in 0..1")
        _require(self.clip_norm is None or self.clip_norm > 0, f"train.clip_norm: {self.clip_norm} must be above 0")
        _require(self.weight_decay >= 0, f"train.weight_decay: {self.weight_decay} must not be negative")


@dataclass(kw_only=True, slots=True)
class BudgetConfig:
    """How much of each tier the run may use. Sizes are ints or texts such as 24GiB."""

    gpu: str | int | None = None
    """GPU memory (on a machine without a GPU: ordinary memory standing for it); none takes what is free, less a
    reserve."""
    ram: str | int | None = None
    """Pinned RAM; none takes what is free, less a reserve."""
    nvme: str | int | None = None
    """Disk for the state; none takes what is free."""

    def __post_init__(self) -> None:
        for name in ("gpu", "ram", "nvme"):
            value = getattr(self, name)
            if value is not None:
                parse_bytes(value, f"budgets.{name}")


@dataclass(kw_only=True, slots=True)
class StorageConfig:
    """Where the state lives and how often a generation is committed."""

    nvme: str | list[str] | None = None
    """Folder of the NVMe tier, or a list of folders on several drives to stripe over; none takes state/ in the run
    directory."""
    reader: Literal["auto", "kvikio", "direct", "tensorstore"] = "auto"
    """What reads chunk files: kvikio straight into GPU memory, direct by our own direct I/O into RAM, or tensorstore;
    auto takes kvikio for the GPU where it works and direct for RAM."""
    part_bytes: str | int = "32MiB"
    """Size of one chunk file of fp32 state (bf16 weights take half of it)."""
    checkpoint_every: int = 50
    """Steps between committed generations; a crash resumes from the last one."""
    keep_last: int = 1
    """Committed generations to keep: the newest, and as checkpoints named step-N those before it."""
    keep_every: int | None = None
    """Keep the generation of every so many steps for good, as checkpoint step-N; none keeps no such."""
    keep_good: float | None = 2.0
    """Keep, as checkpoint last-good, the newest generation whose following step had a loss of at most so many times the
    running mean: the way back from a run that diverges. Takes the disk of one more generation, and is left out where
    there is no room; none keeps none."""

    def __post_init__(self) -> None:
        size = parse_bytes(self.part_bytes, "storage.part_bytes")
        _require(size % 8192 == 0, f"storage.part_bytes: {size} is not a multiple of 8 KiB")
        _require(self.checkpoint_every >= 1, f"storage.checkpoint_every: {self.checkpoint_every} must be at least 1")
        _require_most("storage", self, ("checkpoint_every", "keep_last", "keep_every"), MOST_STEPS)
        _require(self.keep_last >= 1, f"storage.keep_last: {self.keep_last} must be at least 1, the newest generation")
        every = self.keep_every
        _require(
            every is None or (every >= 1 and every % self.checkpoint_every == 0),
            f"storage.keep_every: {every} is not a multiple of storage.checkpoint_every {self.checkpoint_every}: "
            "only committed generations can be kept",
        )
        good = self.keep_good
        _require(good is None or good > 1, f"storage.keep_good: {good} must be above 1; none keeps no last-good")
        _require(self.nvme != [], "storage.nvme: the list is empty; name a folder, or leave it out")
        _require("" not in self.drives, "storage.nvme: the name of a folder is empty; name one, or leave it out")

    @property
    def drives(self) -> list[str]:
        """The folders of `nvme`, as given; empty for the default place."""
        return [self.nvme] if isinstance(self.nvme, str) else list(self.nvme or ())


@dataclass(kw_only=True, slots=True)
class AfterConfig:
    """What happens once the last step is committed."""

    export: bool = False
    """Write a Hugging Face folder to export/ in the run directory; where one is there, to export-step-N/."""
    sample_prompt: str | None = None
    """Text that plain transformers continues from the exported folder; none prints no sample."""
    sample_tokens: int = 60
    """Tokens to generate after the prompt."""

    def __post_init__(self) -> None:
        _require(
            1 <= self.sample_tokens <= MOST_SAMPLE_TOKENS,
            f"after.sample_tokens: {self.sample_tokens} must be from 1 to {MOST_SAMPLE_TOKENS:,}",
        )
        _require(
            self.sample_prompt is None or self.export,
            "after.sample_prompt: the sample is generated from the export; set after.export=true, or no prompt",
        )


@dataclass(kw_only=True, slots=True)
class Recipe:
    """One run: which model, which data, how to train, what the tiers may use and what happens at the end."""

    name: str
    """Short name; run directories start with it."""
    machine: str = ""
    """Machine that the recipe is written for: a preset's name, or a profile's file; empty for none."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    budgets: BudgetConfig = field(default_factory=BudgetConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)
    after: AfterConfig = field(default_factory=AfterConfig)

    def __post_init__(self) -> None:
        _require(
            re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", str(self.name)) is not None,
            f"name: '{one_line(self.name)}' must be letters, digits, '.', '_' and '-', as it names a folder",
        )
        _require(
            len(self.name) <= _NAME_CHARS,
            f"name: {len(self.name)} characters are too many for a folder; use at most {_NAME_CHARS}",
        )
        if isinstance(self.data, DataConfig) and isinstance(self.train, TrainConfig):  # else said by who loads it
            _require(
                self.train.validate_every is None or self.data.validation_documents is not None,
                f"train.validate_every: {self.train.validate_every}, but no documents are held out to validate on; set "
                "data.validation_documents, or leave train.validate_every out",
            )


class Renamed(NamedTuple):
    """A field of a recipe that had another name, by which it is still read."""

    old: str
    new: str
    values: Mapping[str, str] = {}
    """Its old values -> today's, where they changed."""


RENAMED = (
    Renamed(
        "train.save",
        "train.activation_checkpointing",
        {"input": "full", "attention": "selective", "everything": "none"},
    ),
    Renamed("train.sequences_per_step", "train.global_batch_size"),
    Renamed("train.sequences_per_micro_batch", "train.micro_batch_size"),
    Renamed("storage.chunk_bytes", "storage.part_bytes"),
)

_TRAINED = ("model", "data", "train")
"""Sections that decide what is trained on what."""
_SHORT = 60
"""Characters of a value that a sentence has room for."""
_LATER = {"validation_documents": None, "validate_every": None, "validation_sequences": None, "optimizer": "adamw"}
"""Fields that did not always exist, and what leaves them out of the digest, so that runs from before keep theirs."""


def given_fields(recipe: Recipe) -> dict[str, Any]:
    """Dotted field -> value of what decides what is trained on what, where it is not the default."""
    default = Recipe(name=recipe.name)
    found: dict[str, Any] = {}
    for section in _TRAINED:
        values, usual = (dataclasses.asdict(getattr(one, section)) for one in (recipe, default))
        found |= {f"{section}.{name}": value for name, value in values.items() if value != usual[name]}
    return found


def changed_fields(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What differs between two recipes' `given_fields`, in words; empty where nothing does."""
    usual = {
        f"{section}.{name}": value
        for section in _TRAINED
        for name, value in dataclasses.asdict(getattr(Recipe(name="x"), section)).items()
    }
    changed = []
    for key in sorted({*before, *now}):
        was, now_is = (json.dumps(values.get(key, usual.get(key))) for values in (before, now))
        if was != now_is:
            short = all(len(text) <= _SHORT for text in (was, now_is))
            changed.append(f"{key} was {was} and is {now_is}" if short else f"{key} is another")
    return ", ".join(changed)


def config_digest(recipe: Recipe) -> str:
    """SHA-256, in hex, of what decides what is trained on what: equal exactly for equal values.

    Fields and values go by the names that they had first, so that runs from before keep theirs.
    """
    trees = {section: dataclasses.asdict(getattr(recipe, section)) for section in _TRAINED}
    for tree, (name, default) in itertools.product(trees.values(), _LATER.items()):
        if tree.get(name, ...) == default:
            del tree[name]
    for item in RENAMED:
        section, _, new = item.new.partition(".")
        if section in trees:
            value = trees[section].pop(new)
            first = {now: before for before, now in item.values.items()}
            trees[section][item.old.partition(".")[2]] = first.get(value, value)
    text = json.dumps(list(trees.values()), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def state_folder(run_dir: Path) -> Path:
    """Where a run's manifest is, and its chunk files unless the recipe names drives."""
    return run_dir / "state"


def drive_folders(run_dir: Path, storage: StorageConfig) -> list[Path]:
    """The folders that hold a run's chunk files: one of the run's name on each drive of the recipe."""
    given = [Path(drive).expanduser().absolute() / run_dir.resolve().name for drive in storage.drives]
    return given or [state_folder(run_dir)]
