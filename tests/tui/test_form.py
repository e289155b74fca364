"""The form alone: rows, editing in place, messages below them, the filter; and that a key redraws little."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from textual.app import App, ComposeResult
from textual.pilot import Pilot
from textual.widgets import Input, Static

from penstock.app.recipe import load_recipe
from penstock.app.recipe_fields import fields
from penstock.app.rows import UNICODE
from penstock.tui.data.draft import Draft
from penstock.tui.theme import THEMES
from penstock.tui.widgets.form import FieldList, FieldRow, Form

DRAWN_AT_ONCE = True

TEXT_SMALL = Path(__file__).parents[2] / "recipes" / "text_small.py"


class FormApp(App[None]):
    """The form of text_small."""

    glyphs = UNICODE

    def __init__(self) -> None:
        super().__init__()
        self.draft = Draft(load_recipe(TEXT_SMALL))
        self.edited: list[str] = []

    def compose(self) -> ComposeResult:
        yield Form(self.draft, id="form")

    def on_mount(self) -> None:
        for theme in THEMES:
            self.register_theme(theme)
        self.theme = "penstock-dark"

    def on_form_edited(self, event: Form.Edited) -> None:
        self.edited.append(event.key)

    @property
    def form(self) -> Form:
        return self.query_one(Form)

    def row(self, key: str) -> FieldRow:
        return self.form.rows[key]


@pytest.fixture
async def pilot() -> AsyncIterator[Pilot[None]]:
    async with FormApp().run_test(size=(80, 30)) as pilot:
        yield pilot


@pytest.fixture
def app(pilot: Pilot[None]) -> FormApp:
    assert isinstance(pilot.app, FormApp)
    return pilot.app


def line(row: FieldRow) -> str:
    return row.render().plain


def on_screen(row: FieldRow) -> bool:
    return bool(row.region.intersection(row.parent.region)) if row.parent is not None else False  # type: ignore[union-attr]


async def test_every_field_has_a_row_a_hint_and_a_section(app: FormApp, pilot: Pilot[None]) -> None:
    assert [row.key for row in app.query(FieldRow)] == [item.key for item in fields()]
    assert "steps" in line(app.row("train.steps"))
    assert "84" in line(app.row("train.steps"))
    assert "none" in line(app.row("model.path"))
    assert "def read(self, path):\\n    " in line(app.row("after.sample_prompt"))
    assert "on" in line(app.row("after.export"))
    titles = [str(title.render()) for title in app.query(".section").results(Static)]
    sections = dict.fromkeys(item.key.partition(".")[0] if "." in item.key else "recipe" for item in fields())
    assert [title.partition("  ")[0] for title in titles] == list(sections)
    assert all(len(title.partition("  ")[2].split()) > 1 for title in titles), "each says what it is about"
    for item in fields():
        hint = str(app.query_one("#hint", Static).render())
        assert item.key in hint
        assert item.help in hint
        await pilot.press("down")


async def test_moving_keeps_the_row_in_sight(app: FormApp, pilot: Pilot[None]) -> None:
    for key in ("end", "pageup", "up", "k", "j", "pagedown", "home", "down"):
        await pilot.press(key)
        await pilot.pause()
        assert on_screen(app.form.current), key
    assert app.form.current.key == "machine"
    app.form.move_section(1)
    assert app.form.current.key == "model.path"
    app.form.move_section(-1)
    app.form.move_section(-1)
    assert app.form.current.key == "after.export"
    await pilot.pause()
    assert on_screen(app.form.current)


async def test_typing_checks_at_once_and_the_message_stands_below(app: FormApp, pilot: Pilot[None]) -> None:
    app.form.go("train.steps")
    row = app.form.current
    row.begin_edit()
    await pilot.pause()
    assert isinstance(app.focused, Input)
    await pilot.press("0")  # the old text is selected
    await pilot.pause()
    assert row.error == "0 must be at least 1"
    assert row.size.height == 2
    assert "must be at least 1" in line(row)
    await pilot.press("backspace", "2", "0")
    await pilot.pause()
    assert (row.error, row.size.height) == ("", 1)
    assert app.draft.recipe.train.steps == 20
    assert "was 84" in line(row)
    await pilot.press("enter")
    await pilot.pause()
    assert not row.is_editing
    assert isinstance(app.focused, FieldList)
    assert app.form.current is row
    assert set(app.edited) == {"train.steps"}


async def test_escape_takes_back_and_arrows_take_over(app: FormApp, pilot: Pilot[None]) -> None:
    app.form.go("train.steps")
    app.form.current.begin_edit()
    await pilot.press("9", "escape")
    await pilot.pause()
    assert app.draft.text("train.steps") == "84"
    assert not app.row("train.steps").is_editing
    app.form.current.begin_edit()
    await pilot.press("9", "down")
    await pilot.pause()
    assert app.draft.text("train.steps") == "9"
    assert app.form.current.key == "train.global_batch_size"
    assert not app.row("train.steps").is_editing
    assert isinstance(app.focused, FieldList)


async def test_choices_and_switches(app: FormApp) -> None:
    app.form.go("train.lr_schedule")
    assert "● cosine  ○ linear  ○ constant" in line(app.form.current)
    app.form.cycle(1)
    assert "● linear" in line(app.form.current)
    app.form.go("after.export")
    assert "● on" in line(app.form.current)
    app.form.cycle(1)
    assert "○ off" in line(app.form.current)
    assert "linear  was cosine" in line(app.row("train.lr_schedule"))
    app.form.go("train.steps")
    app.form.cycle(1)
    assert app.draft.text("train.steps") == "84"


async def test_changes_are_marked_and_counted_and_a_long_value_is_cut(app: FormApp, pilot: Pilot[None]) -> None:
    app.form.set_text("train.lr", "2e-3")
    app.form.set_text("train.steps", "20")
    assert line(app.row("train.lr")).startswith("◆ lr")
    assert "2 changed" in str(app.query_one("#section-train", Static).render())
    app.form.go("train.lr")
    app.form.reset()
    assert line(app.row("train.lr")).startswith("  lr")
    app.form.set_text("data.path", "/a/very/long/path" * 9)
    assert line(app.row("data.path")).count("…") == 1
    app.form.go("data.path")
    app.form.current.begin_edit()
    await pilot.pause()
    entry = app.focused
    assert isinstance(entry, Input)
    assert entry.value == "/a/very/long/path" * 9


async def test_the_filter(app: FormApp, pilot: Pilot[None]) -> None:
    app.form.begin_filter()
    await pilot.press(*"decay")
    await pilot.pause()
    shown = {row.key for row in app.query(FieldRow) if row.display}
    assert {"train.weight_decay", "train.beta1"} <= shown
    assert "train.steps" not in shown
    assert not app.query_one("#section-model").display
    await pilot.press("enter")
    await pilot.pause()
    assert app.form.current.key in shown
    await pilot.press("down", "up", "end")
    assert app.form.current.key in shown
    app.form.end_filter()
    assert all(row.display for row in app.query(FieldRow))
    app.form.begin_filter()
    await pilot.press(*"data.sequence_length", "enter")  # the help of others names it too
    assert app.form.current.key == "data.sequence_length"
    app.form.end_filter()
    app.form.begin_filter()
    await pilot.press(*"zzzz", "enter")
    app.form.move(1)
    app.form.move_section(1)
    app.form.end_filter()


async def test_a_key_redraws_two_rows(app: FormApp, pilot: Pilot[None], monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    render = FieldRow.render
    monkeypatch.setattr(FieldRow, "render", lambda row: drawn.append(row.key) or render(row))  # type: ignore[func-returns-value]
    await pilot.press("down")
    await pilot.pause()
    assert set(drawn) == {"name", "machine"}
    drawn.clear()
    app.form.set_text("train.lr", "2e-3")
    await pilot.pause()
    assert set(drawn) <= {"train.lr"}


async def test_clicks_and_another_theme_for_titles_and_hint(app: FormApp, pilot: Pilot[None]) -> None:
    await pilot.pause()
    await pilot.click(app.row("model.num_layers"))
    assert app.form.current.key == "model.num_layers"
    await pilot.click(app.row("model.num_layers"), times=2)
    await pilot.pause()
    assert app.row("model.num_layers").is_editing
    app.theme = "penstock-light"
    await pilot.pause()
    light = {"#1f2933", "#101820", "#66717e", "#0b6fa4"}
    for place in ("#hint", "#section-recipe"):
        found = [span.style for span in app.query_one(place, Static).content.spans]  # type: ignore[union-attr]
        assert {style.color.triplet.hex for style in found} <= light


async def test_typing_faster_than_it_is_drawn_loses_nothing(app: FormApp, pilot: Pilot[None]) -> None:
    app.form.go("train.steps")
    row = app.row("train.steps")
    row.begin_edit()
    await pilot.pause()
    entry = row.query_one(Input)
    for text in ("", "6", "60", "600"):
        entry.value = text  # all before the first message is handled
    await pilot.pause()
    await pilot.pause()
    assert entry.value == "600"
    assert app.draft.text("train.steps") == "600"
    for text in ("6001", "600"):  # back to what is still shown
        entry.value = text
    await pilot.pause()
    await pilot.pause()
    assert app.draft.text("train.steps") == "600"
    entry.value = "7"
    row.end_edit(undo=True)  # before the change is told
    await pilot.pause()
    await pilot.pause()
    assert app.draft.text("train.steps") == "84"
