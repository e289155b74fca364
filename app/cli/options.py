"""Arguments and options that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.app.recipes import shipped
from penstock.app.runs.directory import list_runs

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a field of the recipe; may be repeated.")
]


def complete_recipes(incomplete: str) -> list[str]:
    """A shell's completion of a recipe: shipped ones' names; files are the shell's own."""
    return [name for name in shipped.names() if name.startswith(incomplete)]


def _complete_runs(incomplete: str) -> list[str]:
    return [info.name for info in list_runs() if info.name.startswith(incomplete)]


RecipeArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RECIPE",
        help="Python file that builds a Recipe, a recipe.json file, or the name of a shipped recipe.",
        autocompletion=complete_recipes,
    ),
]
CheckpointOption = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        metavar="NAME",
        help="Use this checkpoint instead of the last generation, for example last-good or best.",
    ),
]
RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Run directory, or the name of one in runs/.",
        autocompletion=_complete_runs,
    ),
]
