"""What screens and widgets ask of the application that shows them, without knowing it: tui/app.py provides it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from textual.dom import DOMNode
from textual.screen import Screen

from penstock.app.console.rows import Glyphs

if TYPE_CHECKING:
    from penstock.tui.data.home_plans import HomePlans


class Host(Protocol):
    """The application, as `PenstockApp` documents it."""

    root: Path
    glyphs: Glyphs
    clock: Callable[[], float]
    read_only: bool

    @property
    def home_plans(self) -> HomePlans: ...
    def open(self, name: str, *arguments: Any) -> None: ...
    async def action_back(self) -> None: ...
    def on_show(self, screen: Screen[Any]) -> bool: ...
    def refuses(self) -> bool: ...
    def target(self, typed: str) -> Path | None: ...
    async def ask(self, title: str, text: str, yes: str = "Yes", no: str = "Cancel") -> bool: ...
    async def ask_text(self, title: str, text: str, value: str = "") -> str | None: ...


def host_of(node: DOMNode) -> Host:
    return cast(Host, node.app)
