"""The help screen: every key of the screen below it, from the action table."""

from __future__ import annotations

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from penstock.tui.actions import Action, grouped
from penstock.tui.render.help import help_rows
from penstock.tui.theme import styled

_FRAME_CELLS = 7
"""Border, padding and scroll bar."""


class HelpScreen(ModalScreen[None]):
    """Keys and what they do."""

    BINDINGS = [Binding("escape,q,question_mark,f1", "dismiss", "Close")]
    DEFAULT_CSS = """
    HelpScreen .help {
        width: 100%; height: auto; max-height: 100%; padding: 0 2; background: $surface;
        border: round $primary; border-title-color: $primary;
    }
    App.-ascii HelpScreen .help { border: ascii $primary; }
    """
    SCOPED_CSS = False
    """The rules ask for a class of the application."""

    def __init__(self, scope: str, found: list[Action]) -> None:
        super().__init__(classes="dialog")
        self._scope, self._found = scope, found

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="help") as box:
            box.border_title = f"keys: {self._scope}"
            box.border_subtitle = "esc closes"
            yield Static(id="keys", markup=False)

    def on_resize(self) -> None:
        """Textual's hook: as many columns as fit now."""
        dark = self.app.current_theme.dark
        rows = help_rows(grouped(self._found), max(20, self.size.width - _FRAME_CELLS))
        lines = [styled(row, dark, no_wrap=True) for row in rows]
        self.query_one("#keys", Static).update(Text("\n").join(lines))
