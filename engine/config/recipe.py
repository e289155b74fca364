"""The recipe, its samples, what becomes of it in the end, and what distinguishes two recipes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from penstock.engine.config.data import DataConfig
from penstock.engine.config.grpo import SAMPLED, GrpoConfig
from penstock.engine.config.model import AdapterConfig, ModelConfig
from penstock.engine.config.preference import LOSS_TYPES, PreferenceConfig
from penstock.engine.config.storage import BudgetConfig, StorageConfig
from penstock.engine.config.train import TrainConfig
from penstock.engine.config.values import MOST_STEPS, parse_bytes, require, require_counts, require_kinds
from penstock.storage.files.untrusted import one_line

_NAME_CHARS = 100
"""Of a run's name: with a time behind it, it is the name of a folder."""
TRACKERS = (
    "trackio",
    "wandb",
    "tensorboard",
    "mlflow",
)
"""Trackers by the name of the package that they need."""
MOST_SAMPLE_TOKENS = 2**20


@dataclass(kw_only=True, slots=True)
class SamplesConfig:
    """Sample texts generated during training, from the same prompts each time."""

    every: int | None = None
    """Generate samples every so many steps and after the last one. none generates none."""
    prompts: list[str] = field(default_factory=list)
    """Prompts to continue."""
    chat: bool = False
    """Treat the prompts as user messages and put them into the tokenizer's chat template."""
    tokens: int = 64
    """Most tokens to generate per prompt."""
    temperature: float = 0.0
    """Sampling temperature. 0 always takes the most likely token; higher values give more random text."""
    top_p: float = 1.0
    """Sample only from the most likely tokens whose probabilities add up to this."""
    seed: int = 0
    """Seed of the sampling, the same each time."""

    def __post_init__(self) -> None:
        require_kinds("samples", self)
        require_counts("samples", self, ("every",), MOST_STEPS)
        require(
            self.every is None or bool(self.prompts),
            f"samples.every: {self.every}, but there are no prompts; set samples.prompts, or leave samples.every out",
        )
        require("" not in self.prompts, "samples.prompts: a prompt is empty; write a text")
        require(
            1 <= self.tokens <= MOST_SAMPLE_TOKENS,
            f"samples.tokens: {self.tokens} must be from 1 to {MOST_SAMPLE_TOKENS:,}",
        )
        require(self.temperature >= 0, f"samples.temperature: {self.temperature} must not be negative")
        require(0 < self.top_p <= 1, f"samples.top_p: {self.top_p} must be above 0, at most 1")
        require(-(2**63) <= self.seed < 2**63, f"samples.seed: {self.seed} has more than 64 bits")


@dataclass(kw_only=True, slots=True)
class AfterConfig:
    """What happens once the last step is committed."""

    export: bool = False
    """Export the finished model as a Hugging Face folder to export/ in the run directory, or to export-step-N/ if
    export/ exists."""
    export_merged: bool = False
    """For an adapter: export the base model with the adapter merged in, instead of the adapter alone."""
    export_dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Dtype of the exported weights. auto keeps the dtype of the original model; an adapter exported alone is
    float32."""
    export_shard: str | int = "5GB"
    """Largest size of an exported weight file."""
    push: str | None = None
    """Hub repository, OWNER/NAME, to upload the export to. none uploads nothing."""
    sample_prompt: str | None = None
    """Prompt that plain transformers continues with the exported model, as a test. none skips the test."""
    sample_tokens: int = 60
    """Most tokens to generate after that prompt."""

    def __post_init__(self) -> None:
        parse_bytes(self.export_shard, "after.export_shard")
        require(
            1 <= self.sample_tokens <= MOST_SAMPLE_TOKENS,
            f"after.sample_tokens: {self.sample_tokens} must be from 1 to {MOST_SAMPLE_TOKENS:,}",
        )


@dataclass(kw_only=True, slots=True)
class Recipe:
    """One run: the model, the data, how to train, what each tier may use and what happens at the end."""

    name: str
    """Short name; run directories start with it."""
    machine: str = ""
    """Machine that the recipe is written for: name of a preset or a profile file. Empty for none."""
    trackers: list[str] = field(default_factory=list)
    """Trackers that also get metrics and samples: trackio, wandb, tensorboard, mlflow. Each is configured by its own
    environment variables."""
    model: ModelConfig = field(default_factory=ModelConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    budgets: BudgetConfig = field(default_factory=BudgetConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)
    samples: SamplesConfig = field(default_factory=SamplesConfig)
    after: AfterConfig = field(default_factory=AfterConfig)

    def __post_init__(self) -> None:
        require(
            re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", str(self.name)) is not None,
            f"name: '{one_line(self.name)}' must consist of letters, digits, '.', '_' and '-', as it names a folder",
        )
        require(
            len(self.name) <= _NAME_CHARS,
            f"name: {len(self.name)} characters are too long for a folder name; use at most {_NAME_CHARS}",
        )
        for tracker in self.trackers:
            require(
                tracker in TRACKERS,
                f"trackers: '{one_line(tracker, 40)}' is not a tracker; choose from {', '.join(TRACKERS)}",
            )
        kinds, kind = LOSS_TYPES.get(self.train.objective, ()), self.preference.loss_type
        require(
            kind is None or not kinds or kind in kinds,
            f"preference.loss_type: '{one_line(kind, 40)}' does not belong to train.objective="
            f"{self.train.objective}; choose "
            f"from {', '.join(kinds)}",
        )
        if self.train.objective in SAMPLED:
            self._check_rollouts()
        require(len({*self.trackers}) == len(self.trackers), "trackers: one is listed twice; list each once")

    def _check_rollouts(self) -> None:
        objective, batch, group = self.train.objective, self.train.global_batch_size, self.grpo.num_generations
        require(
            bool(self.grpo.reward),
            f"grpo.reward: empty, but train.objective={objective} needs one; name a function, FILE.py:FUNCTION, or "
            "command: PROGRAM",
        )
        require(
            batch % group == 0,
            f"train.global_batch_size: {batch} is not a multiple of grpo.num_generations {group}; a step has all "
            "completions of its prompts, so set one of them to fit the other",
        )
        require(
            self.prompt_room >= 2,
            f"data.sequence_length: {self.data.sequence_length:,} leaves no room for a prompt before "
            f"grpo.max_completion_length={self.grpo.max_completion_length:,}; raise it, or lower that",
        )

    @property
    def prompt_room(self) -> int:
        """Most tokens of a prompt whose completions are sampled."""
        return self.data.sequence_length - self.grpo.max_completion_length

    @property
    def keeps_reference(self) -> bool:
        """Whether a run keeps the weights that it began with, to compare with as it goes on."""
        return self.train.objective in SAMPLED and self.grpo.beta > 0

    @property
    def wants_old_logps(self) -> bool:
        """Whether log-probabilities of completions are found before they are trained on: the first of several steps
        changes the weights, and the rewards of rloo need them beside the reference's."""
        return self.grpo.num_steps > 1 or (self.keeps_reference and self.train.objective == "rloo")

    @property
    def prompts_per_generation(self) -> int:
        """Whose completions are sampled with the same weights."""
        return self.train.global_batch_size * self.grpo.steps_per_generation // self.grpo.num_generations

    @property
    def prompts_per_validation(self) -> int:
        """Of those held out, how many the model answers in each validation; 0: none."""
        held_out, train = self.data.validation_documents, self.train
        if train.validate_every is None or held_out is None:
            return 0
        completions = train.validation_sequences or train.global_batch_size
        return min(held_out, max(1, completions // self.grpo.num_validated))


_SHORT = 60
"""Characters of a value that fit into a sentence."""


def _trained(recipe: Recipe) -> dict[str, Any]:
    """Dotted field -> value of what decides what is trained on what."""
    return {
        f"{section}.{name}": value
        for section in ("model", "adapter", "data", "train", "preference", "grpo")
        for name, value in dataclasses.asdict(getattr(recipe, section)).items()
    }


def given_fields(recipe: Recipe) -> dict[str, Any]:
    """Dotted field -> value of what decides what is trained on what, where it is not the default."""
    usual = _trained(Recipe(name="x"))
    return {key: value for key, value in _trained(recipe).items() if value != usual[key] and key != "train.gpus"}


def changed_fields(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What differs between two recipes' `given_fields`, in words; empty where nothing does."""
    usual, changed = _trained(Recipe(name="x")), []
    for key in sorted({*before, *now}):
        was, now_is = (json.dumps(values.get(key, usual.get(key))) for values in (before, now))
        if was != now_is:
            short = all(len(text) <= _SHORT for text in (was, now_is))
            changed.append(f"{key} was {was} and is {now_is}" if short else f"{key} has changed")
    return ", ".join(changed)


def config_digest(recipe: Recipe) -> str:
    """SHA-256, in hex, of what decides what is trained on what: equal exactly for equal values."""
    text = json.dumps(given_fields(recipe), sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def state_folder(run_dir: Path) -> Path:
    """Where a run's manifest is, and its chunk files unless the recipe names drives."""
    return run_dir / "state"


_DCP = re.compile(r"step-(\d{6,})")
_DCP_INDEX = ".metadata"
"""What torch.distributed.checkpoint writes last."""


def dcp_folder(run_dir: Path, step: int) -> Path:
    """Where a run on several machines keeps its checkpoint of `step`."""
    return run_dir / "dcp" / f"step-{step:06}"


def dcp_folders(run_dir: Path) -> dict[int, Path]:
    """Step -> folder of such a run's whole checkpoints, in their order."""
    result = {}
    for path in (run_dir / "dcp").glob(f"step-*/{_DCP_INDEX}"):
        if (match := _DCP.fullmatch(path.parent.name)) is not None and not path.parent.is_symlink():
            result[int(match[1])] = path.parent
    return dict(sorted(result.items()))


def drive_folders(run_dir: Path, storage: StorageConfig) -> list[Path]:
    """The folders that hold a run's chunk files: one of the run's name on each drive of the recipe."""
    given = [Path(drive).expanduser().absolute() / run_dir.resolve().name for drive in storage.drives]
    return given or [state_folder(run_dir)]
