"""Two questions: yes or no, and a line of text."""

from __future__ import annotations

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Label


class ConfirmDialog(ModalScreen[bool]):
    """Asks before something is done. Escape and `n` say no."""

    BINDINGS = [
        Binding("y", "answer(True)", "Yes"),
        Binding("n,escape", "answer(False)", "No"),
        Binding("left,right", "app.focus_next", show=False),
    ]

    def __init__(self, title: str, text: str, yes: str, no: str) -> None:
        super().__init__(classes="dialog")
        self._title, self._text, self._yes, self._no = title, text, yes, no

    def compose(self) -> ComposeResult:
        with Vertical(classes="box") as box:
            box.border_title = Text(self._title)
            yield Label(self._text, markup=False)
            with Horizontal(classes="buttons"):
                yield Button(f"{self._yes} (y)", id="yes", variant="primary")
                yield Button(f"{self._no} (n)", id="no")

    def on_button_pressed(self, event: Button.Pressed) -> None:
        event.stop()
        self.dismiss(event.button.id == "yes")

    def action_answer(self, yes: bool) -> None:
        self.dismiss(yes)


class TextDialog(ModalScreen[str | None]):
    """Asks for a line of text. Enter takes it, escape does not."""

    BINDINGS = [Binding("escape", "cancel", "Cancel")]

    def __init__(self, title: str, text: str, value: str) -> None:
        super().__init__(classes="dialog")
        self._title, self._text, self._value = title, text, value

    def compose(self) -> ComposeResult:
        with Vertical(classes="box") as box:
            box.border_title = Text(self._title)
            yield Label(self._text, markup=False)
            yield Input(self._value, id="answer")
            yield Label("enter accepts, esc cancels", classes="hint")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.dismiss(event.value.strip() or None)

    def action_cancel(self) -> None:
        self.dismiss(None)
