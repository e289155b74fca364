"""The help screen: every key of the screen below it, from the action table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import ItemGrid, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from penstock.tui.actions import Action, grouped
from penstock.tui.theme import styled

_COLUMN_CELLS = 34
"""A narrower column would break every sentence."""


class HelpScreen(ModalScreen[None]):
    """Keys and what they do, in as many columns as fit."""

    BINDINGS = [Binding("escape,q,question_mark,f1", "dismiss", "Close")]
    DEFAULT_CSS = """
    HelpScreen .help {
        width: 100%; height: auto; max-height: 100%; padding: 0 2; background: $surface;
        border: round $primary; border-title-color: $primary;
    }
    HelpScreen ItemGrid { grid-gutter: 1 3; }
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
            with ItemGrid(min_column_width=_COLUMN_CELLS):
                for title, found in grouped(self._found).items():
                    yield Static(self._group(title, found), markup=False)

    def _group(self, title: str, found: Sequence[Action]) -> Group:
        dark = self.app.current_theme.dark
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(max_width=9)
        for action in found:
            keys = action.shown_keys
            shown = " ".join(keys) if len(keys) <= 3 else f"{keys[0]} to {keys[-1]}"
            help = styled([(action.label, "good bold"), (f"  {action.help}", "text")], dark)
            table.add_row(styled([(shown, "title")], dark), help)
        return Group(styled([(title, "accent bold")], dark), table)
