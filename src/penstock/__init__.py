"""Train and fine-tune large language models, every parameter, in full precision, on one machine.

    from penstock import DataConfig, ModelConfig, Recipe, TrainConfig, export, plan, train

    recipe = Recipe(
        name="mine",
        model=ModelConfig(path="models/Qwen3-8B"),
        data=DataConfig(source="jsonl", path="mine.jsonl"),
        train=TrainConfig(steps=200, lr=1e-5),
    )
    if plan(recipe)["fits"]:
        export(train(recipe), "models/mine")

The names of `__all__` are the public API; what lies in `penstock.app`, `penstock.engine`, `penstock.storage` and
`penstock.tui` may change with any version. Importing this loads none of them: a name loads what it needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.app.cli.script import run_recipe
    from penstock.app.evaluation.run import evaluate
    from penstock.app.launch.api import export, finetune, plan, resume, train
    from penstock.app.launch.callbacks import StopTraining
    from penstock.app.launch.steps import steps
    from penstock.app.recipes.recipe import load_recipe
    from penstock.app.recipes.shapes import gpt_oss_120b, llama3, qwen25
    from penstock.app.runs.reader import Run
    from penstock.app.sampling.sample import sample
    from penstock.engine.config import (
        AdapterConfig,
        AfterConfig,
        BudgetConfig,
        DataConfig,
        GrpoConfig,
        ModelConfig,
        PreferenceConfig,
        Recipe,
        SamplesConfig,
        StorageConfig,
        TrainConfig,
    )
    from penstock.engine.events import Sample, SampleMetrics, Spike, StepMetrics, ValidationMetrics
    from penstock.storage.files.errors import UserError

__version__ = "0.1.0"

__all__ = [
    "AdapterConfig",
    "AfterConfig",
    "BudgetConfig",
    "DataConfig",
    "GrpoConfig",
    "ModelConfig",
    "PreferenceConfig",
    "Recipe",
    "Run",
    "Sample",
    "SampleMetrics",
    "SamplesConfig",
    "Spike",
    "StepMetrics",
    "StopTraining",
    "StorageConfig",
    "TrainConfig",
    "UserError",
    "ValidationMetrics",
    "__version__",
    "evaluate",
    "export",
    "finetune",
    "gpt_oss_120b",
    "llama3",
    "load_recipe",
    "plan",
    "qwen25",
    "resume",
    "run_recipe",
    "sample",
    "steps",
    "train",
]

_HOMES = {
    "app.launch.api": ("export", "finetune", "plan", "resume", "train"),
    "app.launch.callbacks": ("StopTraining",),
    "app.evaluation.run": ("evaluate",),
    "app.runs.reader": ("Run",),
    "app.launch.steps": ("steps",),
    "app.cli.script": ("run_recipe",),
    "app.recipes.recipe": ("load_recipe",),
    "app.sampling.sample": ("sample",),
    "app.recipes.shapes": ("gpt_oss_120b", "llama3", "qwen25"),
    "engine.config": (
        "AdapterConfig",
        "AfterConfig",
        "BudgetConfig",
        "DataConfig",
        "GrpoConfig",
        "ModelConfig",
        "PreferenceConfig",
        "Recipe",
        "SamplesConfig",
        "StorageConfig",
        "TrainConfig",
    ),
    "engine.events": ("Sample", "SampleMetrics", "Spike", "StepMetrics", "ValidationMetrics"),
    "storage.files.errors": ("UserError",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"penstock.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
