"""Arguments and options that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.app.recipes import shipped
from penstock.app.runs.directory import list_runs


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
