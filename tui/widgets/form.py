"""The form of a recipe: a row per field, edited in place, with what is wrong below the row it stands in."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable
from typing import cast

from rich.cells import cell_len, set_cell_size
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.geometry import Region, Size
from textual.widgets import Input

from penstock.app.console.rows import Glyphs, Page, Row, exactly
from penstock.tui.data.draft import PATHS, Draft, choices_of, field_table, kind_of, may_be_none
from penstock.tui.data.recipes import matches
from penstock.tui.widgets.lines import Drawn, LineWidget, row_bindings

MARK_CELLS = 2
NAME_CELLS = 26
SECTIONS = {
    "recipe": "name, machine and trackers",
    "model": "the model to train",
    "adapter": "train a small adapter and leave the model as it is",
    "data": "what to train on, and how it is packed",
    "train": "steps, batch, optimizer, precision",
    "preference": "preference training: dpo, cpo, simpo, orpo, kto",
    "grpo": "reinforcement learning with rewards: grpo, rloo",
    "budgets": "memory and disk that the run may use",
    "storage": "where state is stored, and how often it is committed",
    "samples": "texts that the model writes while it trains",
    "after": "what happens after the last step",
}


def section_of(key: str) -> str:
    return key.partition(".")[0] if "." in key else "recipe"


class ValueInput(Input):
    BINDINGS = [Binding("escape", "undo", "Undo", show=False)]

    def action_undo(self) -> None:
        cast(Fields, self.parent).end_edit(undo=True)


class Fields(LineWidget):
    """The rows. A text is edited in an input that stands over its row for as long as one types."""

    entry: ValueInput | None = None
    _before = _typed = ""
    """What the field said when editing began, and what was last typed."""
    _lines: tuple[int, list[tuple[str, Row]]] | None = None
    """For a width."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self._form = form

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self.lines(width))

    def rows(self, width: int, height: int) -> list[Row]:
        return [row for _, row in self.lines(width)]

    def lines(self, width: int) -> list[tuple[str, Row]]:
        """Each row, and what it is of: a field, by its key, or the title of a section, by `#` and its name."""
        if self._lines is not None and self._lines[0] == width:
            return self._lines[1]
        form, result = self._form, list[tuple[str, Row]]()
        changes = Counter(section_of(item.key) for item in form.draft.differences)
        section = ""
        for key in form.shown:
            if section_of(key) != section:
                section = section_of(key)
                changed = f"  {changes[section]} changed" if changes[section] else ""
                title = [(section, "title"), (f"  {SECTIONS[section]}", "dim"), (changed, "warn")]
                above: list[Row] = [[]] if section != next(iter(SECTIONS)) else []
                result += [(f"#{section}", row) for row in (*above, exactly(title, width))]
            rows = _field_rows(form, key, width, self.glyphs)
            if key == form.current:
                rows = [[(text, f"{token} chosen") for text, token in row] for row in rows]
            result += [(key, row) for row in rows]
        self._lines = width, result
        return result

    def region_of(self, owner: str) -> Region:
        """Where the rows of a field or a title are; empty where the filter hides them."""
        width = self.size.width
        places = [y for y, (of, _) in enumerate(self.lines(width)) if of == owner]
        return Region(0, places[0], width, len(places)) if places else Region()

    def redraw(self) -> None:
        super().redraw()
        self._lines = None
        if self.entry is not None:
            self.entry.styles.offset = (0, self.region_of(self._form.current).y)
        if len(self.lines(self.size.width)) != self.size.height:
            self.refresh(layout=True)
            self._form.keep_in_view()

    def begin_edit(self) -> None:
        """Mount the input with the current field's text."""
        key = self._form.current
        if kind_of(key) != "text" or self.entry is not None:
            return
        self._before = self._typed = self._form.draft.text(key)
        placeholder = "none" if may_be_none(key) else ""
        self.entry = ValueInput(self._before, placeholder=placeholder, compact=True, select_on_focus=True)
        self.mount(self.entry)
        self.redraw()
        self.entry.focus(scroll_visible=False)

    def end_edit(self, *, undo: bool = False) -> None:
        """Take the input away; what was typed stands unless it is undone."""
        if (entry := self.entry) is None:
            return
        self.entry = None
        self._take(self._before if undo else entry.value)
        had_focus = entry.has_focus
        entry.remove()
        if had_focus:
            self._form.focus_fields()

    def _take(self, text: str) -> None:
        if text != self._typed:
            self._typed = text
            self._form.set_text(self._form.current, text)

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        if event.input is self.entry:
            self._take(self.entry.value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.end_edit()

    def on_descendant_blur(self) -> None:
        """Textual's hook: leaving the input takes what was typed."""
        if self.is_attached and self.app.screen is self.screen:  # a dialog above, or another window, leaves it as it is
            self.end_edit()

    def on_click(self, event: events.Click) -> None:
        """Textual's hook: the first click moves the cursor, a double click edits."""
        lines, y = self.lines(self.size.width), event.screen_y - self.region.y
        key = lines[y][0] if 0 <= y < len(lines) else ""
        if key in field_table():
            if key != self._form.current:
                self._form.go(key)
            if event.chain == 2:
                self.begin_edit()


def _field_rows(form: Form, key: str, width: int, glyphs: Glyphs) -> list[Row]:
    """A field's row: name, value and what the value was; and the lines of what is wrong with it."""
    draft, error = form.draft, form.errors.get(key, "")
    changed, is_current = draft.is_changed(key), key == form.current
    available = max(4, width - MARK_CELLS - NAME_CELLS)
    mark = (glyphs.cross, "bad") if error else (glyphs.diamond, "warn") if changed else (" ", "text")
    name = set_cell_size(key.rpartition(".")[2], NAME_CELLS)
    row: Row = [(f"{mark[0]} ", mark[1]), (name, "bad" if error else "bold" if changed or is_current else "text")]
    value = _value(key, draft.text(key), available, glyphs, is_current=is_current, token="bad" if error else "text")
    was = f"  was {draft.base_text(key) or 'none'}"
    if changed and cell_len(was) <= available - sum(cell_len(text) for text, _ in value):
        value.append((was, "dim"))
    messages = textwrap.wrap(error, max(20, width - MARK_CELLS - 2))
    return [
        exactly([*row, *value], width, glyphs.ellipsis),
        *(exactly([(" " * MARK_CELLS + message, "bad")], width) for message in messages),
    ]


def _value(key: str, text: str, available: int, glyphs: Glyphs, *, is_current: bool, token: str) -> Row:
    """The value in at most `available` cells; of a choice that has the cursor, what else it may be."""
    kind = kind_of(key)
    on, off = (glyphs.dot, "○") if glyphs.braille else ("*", "-")
    if kind == "switch":
        is_on = text == "true"
        return [(f"{on if is_on else off} ", "good" if is_on else "dim"), ("on" if is_on else "off", token)]
    choices = choices_of(key) if kind == "choice" and is_current else ()
    if choices and sum(len(choice) + 4 for choice in choices) - 2 <= available:
        parts: Row = []
        for choice in choices:
            mine = choice == text
            parts += [(f"{on if mine else off} ", "accent" if mine else "dim")]
            parts += [(choice, "bold" if mine else "dim"), ("  ", "text")]
        return parts[:-1]
    if not text and kind == "text":
        return [("none", "dim")]
    return [(set_cell_size(text, available - 1) + glyphs.ellipsis if cell_len(text) > available else text, token)]


class FieldList(VerticalScroll, can_focus=True):
    """What scrolls the rows, and has the focus for the cursor among them."""

    BINDINGS = [*row_bindings("move")]

    def action_move(self, by: int) -> None:
        cast(Form, self.parent).move(by)

    def on_resize(self) -> None:
        """Textual's hook: the terminal, or what stands below the list, has another size."""
        cast(Form, self.parent).keep_in_view()


class Form(Vertical):
    """All fields of a draft, in parts, with a filter above and the current field's help below."""

    DEFAULT_CSS = f"""
    Form #fields {{ height: 1fr; scrollbar-size-vertical: 1; }}
    Form #filter {{ display: none; height: 1; margin-bottom: 1; }}
    Form #filter.-shown {{ display: block; }}
    Form #hint {{ height: 5; border-top: solid $border; padding: 0 1; }}
    Form Fields {{ height: auto; }}
    Form ValueInput {{
        margin-left: {MARK_CELLS + NAME_CELLS}; width: 1fr; height: 1; border: none; padding: 0;
        background: $primary 25%;
    }}
    .-short Form #hint {{ height: 4; }}
    .-tiny Form #hint {{ display: none; }}
    App.-ascii Form #hint {{ border-top: ascii $border; }}
    """
    SCOPED_CSS = False
    """The rules ask for classes of the screen and of the application."""

    def __init__(self, draft: Draft, changed: Callable[[], None]) -> None:
        """`changed` is called when the draft is another."""
        super().__init__(id="form", classes="pane")
        self.draft, self._changed = draft, changed
        self.planner_errors: dict[str, str] = {}
        """What the planner found wrong with single fields."""
        self.shown = list(field_table())
        """Keys of the fields that the filter leaves."""
        self.current = self.shown[0]
        self.fields = Fields(self)
        self._words = ""

    def compose(self) -> ComposeResult:
        yield Input(placeholder="filter by name or help", id="filter", compact=True)
        with FieldList(id="fields"):
            yield self.fields
        yield Drawn(self._hint, id="hint")

    def on_mount(self) -> None:
        self.focus_fields()

    @property
    def errors(self) -> dict[str, str]:
        return self.planner_errors | self.draft.errors

    def _hint(self, width: int, height: int, glyphs: Glyphs) -> list[Row]:
        page, key = Page(width, glyphs), self.current
        keys = {"text": "enter edits", "choice": "left, right choose", "switch": "space switches"}[kind_of(key)]
        keys += ", o browses" if key in PATHS else ""
        page.line([(key, "title"), (f"  {keys}", "accent")])
        page.wrapped(field_table()[key].help, "text")
        return page.rows

    def move(self, by: int) -> None:
        if self.shown:
            index = self.shown.index(self.current) if self.current in self.shown else 0
            self.go(self.shown[max(0, min(len(self.shown) - 1, index + by))])

    def move_section(self, by: int) -> None:
        """To the first shown field of the next or previous part."""
        first = {section_of(key): key for key in reversed(self.shown)}
        sections = [section for section in SECTIONS if section in first]
        if sections:
            here = section_of(self.current)
            index = sections.index(here) if here in sections else 0
            self.go(first[sections[(index + by) % len(sections)]], top=True)

    def go(self, key: str, *, top: bool = False) -> None:
        """The cursor to a field; `top` brings its part's title to the top."""
        self.fields.end_edit()
        self.current = key
        self.fields.redraw()
        self.query_one("#hint", Drawn).redraw()
        row, title = (self.fields.region_of(owner) for owner in (key, f"#{section_of(key)}"))
        places = [title] if top else [title, row] if row.y == title.bottom else [row]
        for place in places:
            self.query_one(FieldList).scroll_to_region(place, top=top, animate=False)

    def keep_in_view(self) -> None:
        """The list has another size, or rows above have: the cursor's row is still seen, once all is laid out."""
        self.call_after_refresh(self._scroll_to_current)

    def _scroll_to_current(self) -> None:
        if self.is_mounted and (row := self.fields.region_of(self.current)):
            self.query_one(FieldList).scroll_to_region(row, animate=False)

    def focus_fields(self) -> None:
        self.query_one(FieldList).focus(scroll_visible=False)

    def set_text(self, key: str, text: str) -> None:
        self.draft.set(key, text)
        self._edited(key)

    def cycle(self, by: int) -> None:
        if kind_of(self.current) != "text":
            self.draft.cycle(self.current, by)
            self._edited(self.current)

    def reset(self) -> None:
        self.draft.reset(self.current)
        self._edited(self.current)

    def _edited(self, key: str) -> None:
        self.planner_errors.pop(key, None)
        self.fields.redraw()
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
        fields = field_table().items()
        self.shown = [key for key, field in fields if matches(words, key, field.help, self.draft.text(key))]
        self.fields.redraw()

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        self.filter(event.value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Textual's hook: to the field of that very name, then of a name with the words; of others' help at last."""
        event.stop()
        if self.shown:
            exact = " ".join(self._words.split())
            self.focus_fields()
            self.go(min(self.shown, key=lambda key: (key != exact, not matches(self._words, key))))
