"""Arguments and options that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.app import shipped

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a field; may be repeated.")
]


def complete_recipes(incomplete: str) -> list[str]:
    """A shell's completion of a recipe: shipped ones' names; files are the shell's own."""
    return [name for name in shipped.names() if name.startswith(incomplete)]


RecipeArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RECIPE",
        help="Python file that builds a Recipe, a recipe.json, or the name of a shipped recipe.",
        autocompletion=complete_recipes,
    ),
]
