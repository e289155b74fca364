"""Fine-tune: name a model and data, see what they are and what is chosen for them, and configure the recipe."""

from __future__ import annotations

import os
from pathlib import Path

from textual import work
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.suggester import Suggester
from textual.widgets import Input, Label

from penstock.app.console.rows import Row
from penstock.app.recipes.recipe import from_dict
from penstock.tui.data.processes import FinetuneClient, FinetuneRequest
from penstock.tui.render.plan import finetune_rows
from penstock.tui.screens.base import PenstockScreen
from penstock.tui.screens.dialogs import PathPicker
from penstock.tui.widgets.lines import Footer, ScrolledLines

_FIELDS = (
    ("model", "model", "folder, or OWNER/NAME on the hub"),
    ("data", "data", "file or folder, or OWNER/NAME of a data set"),
    ("epochs", "epochs", "chosen"),
    ("context", "context", "chosen"),
)
_NUMBERS = {"epochs": r"[0-9]*\.?[0-9]*", "context": r"[0-9]*"}


class Paths(Suggester):
    """Completes the name of what lies where the application works."""

    def __init__(self, root: Path, *, folders_only: bool) -> None:
        super().__init__(use_cache=False, case_sensitive=True)
        self._root, self._folders_only = root, folders_only

    async def get_suggestion(self, value: str) -> str | None:
        """Textual's hook: the first name that begins so."""
        folder, _, begun = value.rpartition("/")
        folder_path = self._root / Path(folder + "/" if value.startswith("/") else folder).expanduser()
        try:
            with os.scandir(folder_path) as entries:
                names = sorted(
                    entry.name + ("/" if entry.is_dir() else "")
                    for entry in entries
                    if entry.name.startswith(begun) and entry.name.startswith(".") == begun.startswith(".")
                    if entry.is_dir() or not self._folders_only
                )
        except (OSError, RuntimeError, ValueError):
            return None
        return value[: len(value) - len(begun)] + names[0] if begun and names else None


class _Found(ScrolledLines):
    def page(self, width: int) -> list[Row]:
        screen = self.screen
        assert isinstance(screen, FinetuneScreen)
        return finetune_rows(screen.client.state, width, self.glyphs)


class FinetuneScreen(PenstockScreen):
    """The form above, what was found below. A process of its own looks at model and data."""

    SCOPE = "finetune"
    DEFAULT_CSS = """
    FinetuneScreen #form { height: 6; }
    FinetuneScreen #form Horizontal { height: 1; }
    FinetuneScreen #form Label { width: 9; color: $text-muted; }
    FinetuneScreen #form Input { width: 1fr; }
    FinetuneScreen.-tiny #form, FinetuneScreen.-tiny #found { border: none; }
    FinetuneScreen.-tiny #form { height: 4; }
    """

    def compose(self) -> ComposeResult:
        root = self.penstock.root
        with Vertical(id="form", classes="pane"):
            for name, label, hint in _FIELDS:
                with Horizontal():
                    yield Label(label)
                    suggester = None if name in _NUMBERS else Paths(root, folders_only=name == "model")
                    limit = _NUMBERS.get(name)
                    entry = Input(placeholder=hint, id=name, compact=True, suggester=suggester, restrict=limit)
                    entry.cursor_blink = False
                    yield entry
        yield _Found(id="found", classes="pane")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#form").border_title = "fine-tune every parameter"
        self.client = FinetuneClient(self.penstock.root, self._show)
        self.query_one("#model", Input).focus()

    @property
    def request(self) -> FinetuneRequest:
        return FinetuneRequest(**{name: self.query_one(f"#{name}", Input).value.strip() for name, _, _ in _FIELDS})

    def _show(self) -> None:
        if not self.is_attached:
            return
        result = self.query_one(_Found)
        if not self.client.state.done:
            result.top = 0
        result.redraw()
        if self.client.state.report is not None and self.request == self.client.state.request:
            result.focus()
        self.refresh_bindings()

    @property
    def _is_answered(self) -> bool:
        return self.client.state.report is not None and self.client.state.request == self.request

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "configure" and self.is_attached:
            return self._is_answered
        return True

    def why_not(self, action: str) -> str:
        return "inspect a model and data first: press enter in the form" if action == "configure" else ""

    def on_input_changed(self) -> None:
        self.refresh_bindings()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Textual's hook: on to the next field that needs a word, then look."""
        event.stop()
        if self._is_answered:
            self.action_configure()
        else:
            self.action_look()

    def action_look(self) -> None:
        request = self.request
        for name in ("model", "data"):
            if not getattr(request, name):
                self.query_one(f"#{name}", Input).focus()
                return
        self._ask(request)

    @work(exclusive=True, group="ask", exit_on_error=False)
    async def _ask(self, request: FinetuneRequest) -> None:
        await self.client.ask(request)

    @work
    async def action_browse(self) -> None:
        chosen = self.focused if isinstance(self.focused, Input) and self.focused.id not in _NUMBERS else None
        entry = chosen or self.query_one("#model", Input)
        picker = PathPicker(str(entry.id), entry.value, self.penstock.root, folders_only=entry.id == "model")
        result = await self.app.push_screen_wait(picker)
        if result is not None:
            entry.value = result
            entry.focus()

    def action_configure(self) -> None:
        if (report := self.client.state.report) is not None:
            recipe = from_dict(report["recipe"])
            self.save_and_configure(recipe, recipe.name)
