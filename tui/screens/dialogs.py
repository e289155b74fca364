"""Dialogs: questions, keys, a machine, a file or folder, and what has been changed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.style import Style
from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, ItemGrid, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Button, DirectoryTree, Input, Label, OptionList, Static
from textual.widgets._directory_tree import DirEntry
from textual.widgets.option_list import Option
from textual.widgets.tree import TreeNode

from penstock.app.console.rows import Glyphs, Row
from penstock.storage.files.errors import UserError
from penstock.storage.files.units import bytes_text
from penstock.storage.files.untrusted import parse_printable, read_regular
from penstock.tui.actions import Action, grouped
from penstock.tui.data.recipes import matches
from penstock.tui.host import host_of
from penstock.tui.theme import style, styled

if TYPE_CHECKING:
    from penstock.app.planning.machines import MachineInfo
    from penstock.tui.data.draft import Difference


class Dialog(ModalScreen[Any]):
    """A box with a title and the widgets of `content`; its answer is what it is dismissed with."""

    BINDINGS = [Binding("escape", "dismiss(None)", "Cancel")]

    def __init__(self, title: str) -> None:
        super().__init__(classes="dialog")
        self._title = title

    def content(self) -> ComposeResult:
        raise NotImplementedError

    def compose(self) -> ComposeResult:
        with Vertical(classes="box") as box:
            box.border_title = Text(self._title)
            yield from self.content()


class ConfirmDialog(Dialog):
    """Asks before something is done. Escape and `n` say no."""

    BINDINGS = [
        Binding("y", "dismiss(True)", "Yes"),
        Binding("n,escape", "dismiss(False)", "No"),
        Binding("left,right", "app.focus_next", show=False),
    ]

    def __init__(self, title: str, text: str, yes: str, no: str) -> None:
        super().__init__(title)
        self._text, self._yes, self._no = text, yes, no

    def content(self) -> ComposeResult:
        yield Label(self._text, markup=False)
        with Horizontal(classes="buttons"):
            yield Button(f"{self._yes} (y)", id="yes", variant="primary")
            yield Button(f"{self._no} (n)", id="no")

    def on_button_pressed(self, event: Button.Pressed) -> None:
        event.stop()
        self.dismiss(event.button.id == "yes")


class TextDialog(Dialog):
    """Asks for a line of text. Enter takes it, escape does not."""

    def __init__(self, title: str, text: str, value: str) -> None:
        super().__init__(title)
        self._text, self._value = text, value

    def content(self) -> ComposeResult:
        yield Label(self._text, markup=False)
        yield Input(self._value, id="answer")
        yield Label("enter accepts, esc cancels", classes="hint")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.dismiss(event.value.strip() or None)


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

    def __init__(self, scope: str, result: list[Action]) -> None:
        super().__init__(classes="dialog")
        self._scope, self._found = scope, result

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="help") as box:
            box.border_title = f"keys: {self._scope}"
            box.border_subtitle = "esc closes"
            with ItemGrid(min_column_width=_COLUMN_CELLS):
                for title, result in grouped(self._found).items():
                    yield Static(self._group(title, result), markup=False)

    def _group(self, title: str, result: Sequence[Action]) -> Group:
        dark = self.app.current_theme.dark
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(max_width=9)
        for action in result:
            keys = action.shown_keys
            shown = " ".join(keys) if len(keys) <= 3 else f"{keys[0]} to {keys[-1]}"
            help = styled([(action.label, "good bold"), (f"  {action.help}", "text")], dark)
            table.add_row(styled([(shown, "title")], dark), help)
        return Group(styled([(title, "accent bold")], dark), table)


_CONFIG_BYTES = 1 << 20


THIS_MACHINE = "this machine"


class MachinePicker(Dialog):
    """Which machine to plan for; the answer is its name, empty for this one, None for no answer."""

    DEFAULT_CSS = """
    MachinePicker .box { width: 96; }
    MachinePicker OptionList { height: auto; max-height: 60%; background: $surface; border: none; padding: 0; }
    MachinePicker .box Input { width: 100%; margin-bottom: 1; }
    MachinePicker #source { height: 4; margin-top: 1; color: $text-muted; }
    MachinePicker.-tiny #source, MachinePicker.-short #source { height: 3; }
    """
    BINDINGS = [Binding("down", "cursor(1)", show=False), Binding("up", "cursor(-1)", show=False)]

    def __init__(self, current: str) -> None:
        from penstock.app.planning.machines import machine_infos

        super().__init__("choose a machine to plan for")
        self._current, self._infos = current, machine_infos()

    def content(self) -> ComposeResult:
        yield Input(placeholder="filter, or a profile file written by `penstock probe --save`", compact=True)
        yield OptionList(id="machines")
        yield Static(id="source", markup=False)
        yield Label("enter selects, esc cancels; runs always start on this machine", classes="hint")

    def on_mount(self) -> None:
        self._fill("")
        names = [info.name for info in self._infos]
        if self._current in names:
            self.query_one(OptionList).highlighted = names.index(self._current)
        self.query_one(Input).focus()

    def _fill(self, words: str) -> None:
        machines = self.query_one(OptionList)
        result = [info for info in self._infos if matches(words, info.title, info.text, info.source)]
        machines.set_options(Option(self._text(info), id=info.name or "this") for info in result)
        machines.highlighted = 0 if result else None

    def _text(self, info: MachineInfo) -> Text:
        dark = self.app.current_theme.dark
        title = (f"{info.title:<15} ", "accent" if info.name == self._current else "title")
        return styled([title, (info.text, "text")], dark, no_wrap=True, overflow="ellipsis")

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        """Textual's hook: where that machine's figures come from."""
        event.stop()
        source = next((info.source for info in self._infos if (info.name or "this") == event.option.id), "")
        self.query_one("#source", Static).update(source)

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        self._fill(event.value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Textual's hook: the machine under the cursor, or the profile that was typed."""
        event.stop()
        machines = self.query_one(OptionList)
        option = machines.highlighted_option
        if option is not None:
            self._choose(option)
            return
        from penstock.app.planning.machines import profile_info

        try:
            self.dismiss(profile_info(Path(event.value.strip())).name)
        except UserError as error:
            self.notify(str(error), severity="error")

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self._choose(event.option)

    def _choose(self, option: Option) -> None:
        self.dismiss("" if option.id == "this" else option.id)

    def action_cursor(self, by: int) -> None:
        machines = self.query_one(OptionList)
        (machines.action_cursor_down if by > 0 else machines.action_cursor_up)()


def model_mark(folder: Path) -> str:
    """`qwen3, 15.2 GiB` for a Hugging Face folder; empty for any other."""
    try:
        # A folder of a downloaded model may hold links into a cache of its own.
        config = parse_printable(read_regular((folder / "config.json").resolve(), most_bytes=_CONFIG_BYTES))
        size = sum(entry.stat().st_size for entry in os.scandir(folder) if entry.name.endswith(".safetensors"))
    except (OSError, ValueError, RuntimeError):
        return ""
    kind = config.get("model_type")
    if not isinstance(kind, str):
        return ""
    return f"{kind}, {bytes_text(size) if size else 'no weights'}"


class _Tree(DirectoryTree):
    """Folders and files, those hidden left out, with what is known of each."""

    BINDINGS = [Binding("space", "screen.take", "Choose")]

    def __init__(self, path: Path, glyphs: Glyphs, *, folders_only: bool) -> None:
        super().__init__(path)
        self.ICON_NODE, self.ICON_NODE_EXPANDED = ("▸ ", "▾ ") if glyphs.braille else ("+ ", "- ")
        self.ICON_FILE = "  "
        self._folders_only = folders_only
        self._notes: dict[Path, str] = {}

    def filter_paths(self, paths: Iterable[Path]) -> Iterable[Path]:
        """Textual's hook, called in the thread that reads a folder: look at what is shown."""
        kept = []
        for path in paths:
            try:
                is_folder = path.is_dir()
                if path.name.startswith(".") or (self._folders_only and not is_folder):
                    continue
                self._notes[path] = model_mark(path) if is_folder else bytes_text(path.stat().st_size)
            except OSError:
                continue
            kept.append(path)
        return kept

    def render_label(self, node: TreeNode[DirEntry], base_style: Style, style: Style) -> Text:
        label = super().render_label(node, base_style, style)
        note = self._notes.get(node.data.path, "") if node.data is not None else ""
        return label.append_text(styled([(f"  {note}", "good")], self.app.current_theme.dark)) if note else label


class PathPicker(Dialog):
    """A file or folder from a tree, or typed."""

    DEFAULT_CSS = """
    PathPicker .box { width: 90; height: 80%; }
    PathPicker _Tree { height: 1fr; background: $surface; margin-top: 1; padding: 0; }
    PathPicker .box Input { width: 100%; }
    """
    BINDINGS = [
        Binding("u", "up", "Folder above"),
        Binding("space", "take", "Choose"),
        Binding("tab,shift+tab", "switch", show=False),
    ]

    def __init__(self, title: str, value: str, start: Path, *, folders_only: bool) -> None:
        super().__init__(title)
        self._value, self._start, self._folders_only = value, start, folders_only

    def content(self) -> ComposeResult:
        yield Input(self._value, placeholder="a path; empty for none", compact=True)
        start = first_folder(self._value, self._start)
        yield _Tree(start, host_of(self).glyphs, folders_only=self._folders_only)
        yield Label("space selects, enter opens, u goes up, tab edits the path, esc cancels", classes="hint")

    def on_mount(self) -> None:
        self.query_one(_Tree).focus()

    def on_directory_tree_file_selected(self, event: DirectoryTree.FileSelected) -> None:
        event.stop()
        self.dismiss(self._written(event.path))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.dismiss(event.value.strip())

    def action_take(self) -> None:
        node = self.query_one(_Tree).cursor_node
        if node is not None and node.data is not None:
            self.dismiss(self._written(node.data.path))

    def action_up(self) -> None:
        tree = self.query_one(_Tree)
        tree.path = Path(tree.path).resolve().parent

    def action_switch(self) -> None:
        entry, tree = self.query_one(Input), self.query_one(_Tree)
        (tree if entry.has_focus else entry).focus()

    def _written(self, path: Path) -> str:
        """Relative where it lies below the start, as recipes write it."""
        try:
            return str(path.resolve().relative_to(self._start.resolve()))
        except ValueError:
            return str(path)


def first_folder(value: str, start: Path) -> Path:
    """Where to begin: the nearest folder that exists above `value`, else `start`."""
    if not value or value.startswith("["):
        return start
    path = (start / Path(value).expanduser()).resolve()
    return next((folder for folder in path.parents if folder.is_dir()), start)


class ChangesDialog(Dialog):
    """List the fields that differ from the recipe."""

    DEFAULT_CSS = """
    ChangesDialog .box { width: 100; }
    ChangesDialog VerticalScroll { height: auto; max-height: 30; }
    """
    BINDINGS = [Binding("escape,q,d,enter", "dismiss", "Close")]

    def __init__(self, base: str, differences: Sequence[Difference]) -> None:
        super().__init__(f"changes to {base}")
        self._differences = differences

    def content(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(self._text(), markup=False)

    def on_mount(self) -> None:
        self.query_one(".box").border_subtitle = "esc closes"

    def _text(self) -> Text:
        dark = self.app.current_theme.dark
        if not self._differences:
            return Text("no changes", style("dim", dark))
        name = max(len(item.key) for item in self._differences)
        arrow = (f" {host_of(self).glyphs.arrow} ", "axis")
        lines: list[Row] = [
            [(f"{item.key:<{name}}  ", "title"), (item.before or "none", "dim"), arrow, (item.after or "none", "good")]
            for item in self._differences
        ]
        return Text("\n").join(styled(line, dark) for line in lines)
