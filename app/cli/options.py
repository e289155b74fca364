"""Arguments and options that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.app.recipes import shipped
from penstock.app.runs.directory import list_runs
from penstock.engine.config.values import MOST_GPUS


def argument(word: str, help: str, **more: Any) -> Any:
    """An argument of a command: the word that stands for it in --help, and what it is."""
    return typer.Argument(metavar=word, help=help, **more)


def option(word: str, help: str, *names: str, **more: Any) -> Any:
    """An option: the word for its value in --help, what it does, and its names, by default that of its parameter."""
    return typer.Option(*names, metavar=word, help=help, **more)


JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
ScratchOption = Annotated[
    bool,
    typer.Option("--from-scratch", help="Start from random weights of the recipe's shape, without a model folder."),
]
SetOption = Annotated[list[str] | None, option("KEY=VALUE", "Change a field of the recipe; may be repeated.", "--set")]


GpusOption = Annotated[
    int | None,
    option("N", "GPUs to use; without a GPU, processes on the CPU. Sets train.gpus.", "--gpus", min=1, max=MOST_GPUS),
]
GpuOption = Annotated[
    int, option("NUMBER", "Of a run on several GPUs the one to look at, from 0.", "--gpu", min=0, max=MOST_GPUS)
]


def with_gpus(overrides: list[str] | None, gpus: int | None) -> list[str]:
    """The overrides of a command, and what its --gpus says."""
    return [*(overrides or []), *([] if gpus is None else [f"train.gpus={gpus}"])]


def complete_recipes(incomplete: str) -> list[str]:
    """A shell's completion of a recipe: shipped ones' names; files are the shell's own."""
    return [name for name in shipped.names() if name.startswith(incomplete)]


def _complete_runs(incomplete: str) -> list[str]:
    return [info.name for info in list_runs() if info.name.startswith(incomplete)]


RecipeArgument = Annotated[
    Path,
    argument(
        "RECIPE",
        "Python file that builds a Recipe, a recipe.json file, or the name of a shipped recipe.",
        autocompletion=complete_recipes,
    ),
]
CheckpointOption = Annotated[
    str | None,
    option(
        "NAME", "Use this checkpoint instead of the last generation, for example last-good or best.", "--checkpoint"
    ),
]
RunArgument = Annotated[
    str, argument("RUN", "Run directory, or the name of one in runs/.", autocompletion=_complete_runs)
]
