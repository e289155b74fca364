"""The help screen: every key of the screen below it, from the action table."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from penstock.tui.actions import Action


class HelpScreen(ModalScreen[None]):
    """Keys and what they do."""

    BINDINGS = [Binding("escape,q,question_mark,f1", "dismiss", "Close")]

    def __init__(self, scope: str, found: list[Action]) -> None:
        super().__init__(classes="dialog")
        self._scope, self._found = scope, found

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="box help") as box:
            box.border_title = f"keys: {self._scope}"
            box.border_subtitle = "esc closes"
            yield Static(help_text(self._found), markup=False)


def help_text(found: list[Action]) -> str:
    """A line per action: its keys, its name, its sentence."""
    keys = [" ".join(action.shown_keys) for action in found]
    wide = max(map(len, keys), default=0)
    name = max((len(action.label) for action in found), default=0)
    return "\n".join(
        f"{key:<{wide}}  {action.label:<{name}}  {action.help}" for key, action in zip(keys, found, strict=True)
    )
