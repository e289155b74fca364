"""The form of a recipe: a row per field, edited in place, with what is wrong below the row it stands in."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable
from typing import cast

from rich.cells import cell_len, set_cell_size
from rich.style import Style
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.geometry import Size
from textual.reactive import reactive
from textual.widget import Widget
from textual.widgets import Input, Static

from penstock.app.console.rows import Glyphs, Row
from penstock.tui.data.draft import PATHS, Draft, Kind, choices_of, field_table, kind_of, may_be_none
from penstock.tui.data.recipes import matches
from penstock.tui.host import host_of
from penstock.tui.theme import style, styled
from penstock.tui.widgets.lines import row_bindings

MARK_CELLS = 2
NAME_CELLS = 26
SECTIONS = {
    "recipe": "name, machine and trackers",
    "model": "the model to train",
    "adapter": "train a small adapter and leave the model as it is",
    "data": "what to train on, and how it is packed",
    "train": "steps, batch, optimizer, precision",
    "budgets": "memory and disk that the run may use",
    "storage": "where state is stored, and how often it is committed",
    "samples": "texts that the model writes while it trains",
    "after": "what happens after the last step",
}


def section_of(key: str) -> str:
    return key.partition(".")[0] if "." in key else "recipe"


class ValueInput(Input):
    """The text of the row that is being edited."""

    BINDINGS = [Binding("escape", "undo", "Undo", show=False)]

    def action_undo(self) -> None:
        cast(FieldRow, self.parent).end_edit(undo=True)


class FieldRow(Widget):
    """One field. A text is edited in an input that is mounted for as long as one types.

    The focus stays with the list of rows: moving it from row to row would style the whole form again for each key.
    """

    is_current = reactive(False)

    def __init__(self, form: Form, key: str) -> None:
        super().__init__(classes="field")
        self._form, self.key = form, key
        self.kind: Kind = kind_of(key)
        self._shown: tuple[str, str, bool, str] = ("", "", False, "")
        self._before = self._typed = ""
        self._undone = False

    @property
    def value(self) -> str:
        return self._shown[0]

    @property
    def error(self) -> str:
        return self._shown[3]

    @property
    def is_editing(self) -> bool:
        return bool(self.children)

    def show(self, text: str, base: str, changed: bool, error: str) -> bool:
        """What the draft says of the field; whether its height may be another."""
        if (shown := (text, base, changed, error)) == self._shown:
            return False
        error_was, self._shown = self.error, shown
        self.set_class(bool(error), "-wrong")
        self.refresh(layout=error != error_was)
        return error != error_was

    def get_content_width(self, container: Size, viewport: Size) -> int:
        return container.width

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """Textual's hook: a line, and those of the message."""
        return 1 + len(self._message(width))

    def _message(self, width: int) -> list[str]:
        return textwrap.wrap(self.error, max(20, width - MARK_CELLS - 2)) if self.error else []

    def render(self) -> Text:
        glyphs = host_of(self).glyphs
        dark = self.app.current_theme.dark
        text, base, changed, error = self._shown
        width = self.size.width
        mark = (glyphs.cross, "bad") if error else (glyphs.diamond, "warn") if changed else (" ", "text")
        name = (self.key.rpartition(".")[2], "bad" if error else "bold" if changed or self.is_current else "text")
        parts = [(f"{mark[0]} ", mark[1]), (set_cell_size(name[0], NAME_CELLS), name[1])]
        available = max(4, width - MARK_CELLS - NAME_CELLS)
        parts += self._value(text, available, glyphs)
        was = f"  was {base or 'none'}"
        if changed and cell_len(was) <= available - sum(cell_len(part) for part, _ in parts[2:]):
            parts.append((was, "dim"))
        line = styled(parts, dark, no_wrap=True, overflow="ellipsis")
        for message in self._message(width):
            line.append("\n" + set_cell_size(" " * MARK_CELLS + message, width), style("bad", dark))
        if self.is_current:
            if not error:
                line.pad_right(max(0, width - line.cell_len))
            line.stylize(Style(bgcolor=style("selected", dark).bgcolor))
        return line

    def _value(self, text: str, available: int, glyphs: Glyphs) -> Row:
        """The value in at most `available` cells; of a choice that has the focus, what else it may be."""
        token = "bad" if self.error else "text"
        on, off = (glyphs.dot, "○") if glyphs.braille else ("*", "-")
        if self.kind == "switch":
            is_on = text == "true"
            return [(f"{on if is_on else off} ", "good" if is_on else "dim"), ("on" if is_on else "off", token)]
        choices = choices_of(self.key) if self.kind == "choice" and self.is_current else ()
        if choices and sum(len(choice) + 4 for choice in choices) - 2 <= available:
            parts: Row = []
            for choice in choices:
                mine = choice == text
                parts += [(f"{on if mine else off} ", "accent" if mine else "dim")]
                parts += [(choice, "bold" if mine else "dim"), ("  ", "text")]
            return parts[:-1]
        if not text and self.kind == "text":
            return [("none", "dim")]
        return [(set_cell_size(text, available - 1) + glyphs.ellipsis if cell_len(text) > available else text, token)]

    def begin_edit(self) -> None:
        """Mount the input with the field's text."""
        if self.kind != "text" or self.is_editing:
            return
        self._before = self._typed = self.value
        self._undone = False
        placeholder = "none" if may_be_none(self.key) else ""
        entry = ValueInput(self.value, placeholder=placeholder, compact=True, select_on_focus=True)
        self.mount(entry)
        entry.focus()

    def end_edit(self, *, undo: bool = False) -> None:
        """Take the input away; what was typed stands unless it is undone."""
        if not self.is_editing:
            return
        if undo:
            self._undone = True
            self._form.set_text(self.key, self._before)
        entry = self.children[0]
        had_focus = entry.has_focus
        entry.remove()
        if had_focus and isinstance(self.parent, FieldList):
            self.parent.focus(scroll_visible=False)

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        if event.value != self._typed and not self._undone:  # what is shown may lag behind fast typing
            self._typed = event.value
            self._form.set_text(self.key, event.value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.end_edit()

    def on_descendant_blur(self) -> None:
        """Textual's hook: leaving the input takes what was typed."""
        if self.is_attached and self.app.screen is self.screen:  # a dialog above, or another window, leaves it as it is
            self.end_edit()

    def on_click(self, event: events.Click) -> None:
        """Textual's hook: the first click takes the focus, a double click edits."""
        if self is not self._form.current:
            self._form.go(self.key)
        if event.chain == 2:
            self.begin_edit()


class FieldList(VerticalScroll, can_focus=True):
    """The rows, and the cursor among them."""

    BINDINGS = [*row_bindings("move")]

    def action_move(self, by: int) -> None:
        cast(Form, self.parent).move(by)

    def on_resize(self) -> None:
        """Textual's hook: the terminal, or what stands below the list, has another size."""
        cast(Form, self.parent).keep_in_view()


class Form(Vertical):
    """All fields of a draft, in parts, with a filter above and the focused field's help below."""

    DEFAULT_CSS = f"""
    Form #fields {{ height: 1fr; scrollbar-size-vertical: 1; }}
    Form #filter {{ display: none; height: 1; margin-bottom: 1; }}
    Form #filter.-shown {{ display: block; }}
    Form #hint {{ height: 5; border-top: solid $border; color: $text-muted; padding: 0 1; }}
    Form .section {{ height: 1; margin-top: 1; }}
    Form .section.-first {{ margin-top: 0; }}
    Form FieldRow {{ height: auto; }}
    Form FieldRow ValueInput {{
        margin-left: {MARK_CELLS + NAME_CELLS}; width: 1fr; height: 1; border: none; padding: 0;
        background: $primary 25%;
    }}
    .-short Form #hint {{ height: 4; }}
    .-tiny Form #hint {{ display: none; }}
    App.-ascii Form #hint {{ border-top: ascii $border; }}
    """
    SCOPED_CSS = False
    """The rules ask for classes of the screen and of the application."""

    def __init__(
        self, draft: Draft, changed: Callable[[], None], *, id: str | None = None, classes: str | None = None
    ) -> None:
        """`changed` is called when the draft is another."""
        super().__init__(id=id, classes=classes)
        self.draft, self._changed = draft, changed
        self.planner_errors: dict[str, str] = {}
        """What the planner found wrong with single fields."""
        self.rows = {key: FieldRow(self, key) for key in field_table()}
        self.sections = list(dict.fromkeys(map(section_of, self.rows)))
        self._words = ""
        self._current = next(iter(self.rows))

    def compose(self) -> ComposeResult:
        yield Input(placeholder="filter by name or help", id="filter", compact=True)
        with FieldList(id="fields"):
            for section in self.sections:
                first = " -first" * (section == self.sections[0])
                yield Static(" ", id=f"section-{section}", classes=f"section{first}")
                yield from self._rows_of(section)
        yield Static(id="hint", markup=False)

    def on_mount(self) -> None:
        self.update_rows()
        self.current.is_current = True
        self.query_one(FieldList).focus()
        self.app.theme_changed_signal.subscribe(self, self._on_theme)

    def _on_theme(self, theme: object) -> None:
        for row in self.rows.values():
            row.refresh()
        self.update_rows()

    def _rows_of(self, section: str) -> list[FieldRow]:
        return [row for key, row in self.rows.items() if section_of(key) == section]

    @property
    def current(self) -> FieldRow:
        return self.rows[self._current]

    def update_rows(self) -> None:
        """Show the draft; only rows that say something else are drawn again."""
        errors, moved = self.planner_errors | self.draft.errors, False
        for key, row in self.rows.items():
            text, base, changed = self.draft.text(key), self.draft.base_text(key), self.draft.is_changed(key)
            moved |= row.show(text, base, changed, errors.get(key, ""))
        if moved:
            self.keep_in_view()
        changes = Counter(section_of(item.key) for item in self.draft.differences)
        dark = self.app.current_theme.dark
        for section in self.sections:
            changed_text = f"  {changes[section]} changed" if changes[section] else ""
            parts = [(section, "title"), (f"  {SECTIONS[section]}", "dim"), (changed_text, "warn")]
            self.query_one(f"#section-{section}", Static).update(styled(parts, dark), layout=False)
        self._hint()

    def _hint(self) -> None:
        key = self._current
        item, dark = field_table()[key], self.app.current_theme.dark
        keys = {"text": "enter edits", "choice": "left, right choose", "switch": "space switches"}[kind_of(key)]
        keys += ", o browses" if key in PATHS else ""
        line = styled([(key, "title"), (f"  {keys}", "accent"), (f"\n{item.help}", "text")], dark)
        self.query_one("#hint", Static).update(line, layout=False)

    def _visible(self) -> list[FieldRow]:
        return [row for row in self.rows.values() if row.display]

    def move(self, by: int) -> None:
        shown = self._visible()
        if shown:
            index = shown.index(self.current) if self.current in shown else 0
            self.go(shown[max(0, min(len(shown) - 1, index + by))].key)

    def move_section(self, by: int) -> None:
        """To the first shown field of the next or previous part."""
        shown = {section_of(row.key): row.key for row in reversed(self._visible())}
        sections = [section for section in self.sections if section in shown]
        if sections:
            here = section_of(self._current)
            index = sections.index(here) if here in sections else 0
            self.go(shown[sections[(index + by) % len(sections)]], top=True)

    def go(self, key: str, *, top: bool = False) -> None:
        """The cursor to a field; `top` brings its part's title to the top."""
        self.current.end_edit()
        self.current.is_current = False
        self._current = key
        row, fields = self.current, self.query_one(FieldList)
        row.is_current = True
        section = section_of(key)
        title = self.query_one(f"#section-{section}")
        if top:
            fields.scroll_to_widget(title, top=True, animate=False)
        else:
            fields.scroll_to_widget(title if row is self._rows_of(section)[0] else row, animate=False)
            fields.scroll_to_widget(row, animate=False)
        self._hint()

    def keep_in_view(self) -> None:
        """The list has another size, or rows above have: the cursor's row is still seen, once all is laid out."""
        self.call_after_refresh(self._scroll_to_current)

    def _scroll_to_current(self) -> None:
        if self.is_mounted and self.current.display:
            self.query_one(FieldList).scroll_to_widget(self.current, animate=False)

    def focus_fields(self) -> None:
        self.query_one(FieldList).focus()

    def set_text(self, key: str, text: str) -> None:
        self.draft.set(key, text)
        self._edited(key)

    def cycle(self, by: int) -> None:
        if kind_of(self._current) != "text":
            self.draft.cycle(self._current, by)
            self._edited(self._current)

    def reset(self) -> None:
        self.draft.reset(self._current)
        self._edited(self._current)

    def _edited(self, key: str) -> None:
        self.planner_errors.pop(key, None)
        self.update_rows()
        self._changed()

    def begin_filter(self) -> None:
        entry = self.query_one("#filter", Input)
        entry.add_class("-shown")
        entry.focus()

    @property
    def is_filtered(self) -> bool:
        return self.query_one("#filter").has_class("-shown")

    def end_filter(self) -> None:
        entry = self.query_one("#filter", Input)
        entry.value = ""
        entry.remove_class("-shown")
        self.filter("")
        self.focus_fields()

    def filter(self, words: str) -> None:
        """Show the fields that have every word in their name, help or value."""
        self._words = words.lower()
        for key, row in self.rows.items():
            row.display = matches(words, key, field_table()[key].help, self.draft.text(key))
        for section in self.sections:
            self.query_one(f"#section-{section}").display = any(row.display for row in self._rows_of(section))
        self.keep_in_view()

    def on_input_changed(self, event: Input.Changed) -> None:
        if event.input.id == "filter":
            event.stop()
            self.filter(event.value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Textual's hook: to the field that the words name best."""
        if event.input.id == "filter":
            event.stop()
            shown = self._visible()
            if shown:
                self.focus_fields()
                self.go(min(shown, key=self._unlikeness).key)

    def _unlikeness(self, row: FieldRow) -> tuple[bool, bool]:
        """Least for the field of that very name, then for those whose name has the words; others' help only."""
        return row.key != " ".join(self._words.split()), not matches(self._words, row.key)
