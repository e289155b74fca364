"""What screens and widgets ask of the application that shows them, without knowing it: tui/app.py provides it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, cast

from textual.dom import DOMNode
from textual.screen import Screen

from app.rows import Glyphs


class Host(Protocol):
    """The application, as `PenstockApp` documents it."""

    root: Path
    glyphs: Glyphs
    clock: Callable[[], float]
    read_only: bool

    def open_run(self, run_path: Path) -> None:
        """Show a run."""

    def open_timeline(self, run_path: Path, step: int | None = None) -> None:
        """Show a step of a run; None: its last."""

    def open_configure(self, recipe_path: Path) -> None:
        """Configure a recipe: a .py file, or the recipe.json of a run."""

    def open_compare(self, run_paths: list[Path]) -> None:
        """Compare runs."""

    async def action_back(self) -> None:
        """Leave the screen; the first one stays."""

    def on_show(self, screen: Screen[Any]) -> bool:
        """Whether `screen` is the one that is seen, if only behind a dialog; may be asked from any thread."""

    def from_thread(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Call `function` in the UI's thread and wait for it; nothing where the application is closing."""

    def refuses(self) -> bool:
        """Whether no action is taken here, which it says then."""

    def target(self, typed: str) -> Path:
        """Where a file or folder is to be written that was typed as `typed`. Raises UserError."""

    async def ask(self, title: str, text: str, yes: str = "Yes", no: str = "Cancel") -> bool:
        """A question with two answers; call it from a worker."""

    async def ask_text(self, title: str, text: str, value: str = "") -> str | None:
        """A question for a line of text; None where there is no answer. Call it from a worker."""


def host_of(node: DOMNode) -> Host:
    """The application that shows `node`."""
    return cast(Host, node.app)
