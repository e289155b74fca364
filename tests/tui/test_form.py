"""The form, edited in place, and the draft behind it, which checks every edit and makes a recipe of what is right."""

import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from seen import Themed, press
from textual.app import ComposeResult
from textual.pilot import Pilot
from textual.widgets import Input, Static

from penstock.app.recipes.fields import fields
from penstock.app.recipes.recipe import apply_overrides, load_recipe
from penstock.engine.config import Recipe
from penstock.storage.files.errors import UserError
from penstock.tui.data.draft import Draft, choices_of, error_field, field_table, get, kind_of, value_text
from penstock.tui.widgets.form import FieldList, FieldRow, Form

DRAWN_AT_ONCE = True
RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.py"))
TEXT_SMALL = RECIPES[0].with_name("text_small.py")


class FormApp(Themed):
    """The form of text_small."""

    def __init__(self) -> None:
        super().__init__()
        self.draft = Draft(load_recipe(TEXT_SMALL))
        self.num_changes = 0

    def compose(self) -> ComposeResult:
        yield Form(self.draft, self.count, id="form")

    def count(self) -> None:
        self.num_changes += 1

    form = property(lambda self: self.query_one(Form))

    def row(self, key: str) -> FieldRow:
        return self.form.rows[key]

    def edit(self, key: str) -> FieldRow:
        self.form.go(key)
        self.row(key).begin_edit()
        return self.row(key)


@pytest.fixture
async def pilot() -> AsyncIterator[Pilot[None]]:
    async with FormApp().run_test(size=(80, 30)) as pilot:
        yield pilot


@pytest.fixture
def app(pilot: Pilot[None]) -> FormApp:
    assert isinstance(pilot.app, FormApp)
    return pilot.app


def on_screen(row: FieldRow) -> bool:
    return bool(row.region.intersection(row.parent.region)) if row.parent is not None else False  # type: ignore[union-attr]


async def test_every_field_has_a_row_a_hint_and_a_section_and_the_row_stays_in_sight(
    app: FormApp, pilot: Pilot[None]
) -> None:
    assert [row.key for row in app.query(FieldRow)] == [item.key for item in fields()]
    shown = {"train.steps": "84", "model.path": "none", "after.export": "on"}
    shown["after.sample_prompt"] = "def read(self, path):\\n    "
    for key, text in shown.items():
        assert text in app.row(key).render().plain
    assert "steps" in app.row("train.steps").render().plain
    titles = [str(title.render()).partition("  ") for title in app.query(".section").results(Static)]
    sections = dict.fromkeys(item.key.partition(".")[0] if "." in item.key else "recipe" for item in fields())
    assert [title for title, _, _ in titles] == list(sections)
    assert all(len(about.split()) > 1 for _, _, about in titles), "each says what it is about"
    for item in fields():
        hint = str(app.query_one("#hint", Static).render())
        assert item.key in hint
        assert item.help in hint
        await pilot.press("down")
    for key in ("end", "pageup", "up", "k", "j", "pagedown", "home", "down"):
        await press(pilot, key)
        assert on_screen(app.form.current), key
    assert app.form.current.key == "machine"
    app.form.move_section(1)
    assert app.form.current.key == "model.path"
    app.form.move_section(-1)
    app.form.move_section(-1)
    assert app.form.current.key == "after.export"
    await pilot.pause()
    assert on_screen(app.form.current)


async def test_typing_checks_at_once_loses_nothing_escape_takes_back_and_arrows_take_over(
    app: FormApp, pilot: Pilot[None]
) -> None:
    row = app.edit("train.steps")
    await pilot.pause()
    assert isinstance(app.focused, Input)
    await press(pilot, "0")  # the old text is selected
    assert (row.error, row.size.height) == ("0 must be at least 1", 2)
    assert "must be at least 1" in row.render().plain
    await press(pilot, "backspace", "2", "0")
    assert (row.error, row.size.height, app.draft.recipe.train.steps) == ("", 1, 20)
    assert "was 84" in row.render().plain
    await press(pilot, "enter")
    assert (row.is_editing, app.form.current, app.num_changes > 0) == (False, row, True)
    assert isinstance(app.focused, FieldList)
    for key, text, at in (("escape", "20", "train.steps"), ("down", "9", "train.global_batch_size")):
        app.edit("train.steps")
        await press(pilot, "9", key)
        assert (app.draft.text("train.steps"), row.is_editing, app.form.current.key) == (text, False, at)
    assert isinstance(app.focused, FieldList)
    app.draft.reset_all()
    app.form.update_rows()
    row = app.edit("train.steps")
    await pilot.pause()
    entry = row.query_one(Input)

    async def typed(*texts: str) -> str:
        for text in texts:
            entry.value = text  # all before the first message is handled
        await pilot.pause()
        await pilot.pause()
        return app.draft.text("train.steps")

    assert (await typed("", "6", "60", "600"), entry.value) == ("600", "600")
    assert await typed("6001", "600") == "600"  # back to what is still shown
    entry.value = "7"
    row.end_edit(undo=True)  # before the change is told
    assert await typed() == "84"


async def test_choices_and_changes_are_marked_and_counted_and_a_long_value_is_cut(
    app: FormApp, pilot: Pilot[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[str] = []
    render = FieldRow.render
    with monkeypatch.context() as patch:
        patch.setattr(FieldRow, "render", lambda row: drawn.append(row.key) or render(row))  # type: ignore[func-returns-value]
        await press(pilot, "down")
        assert set(drawn) == {"name", "machine"}, "a key redraws two rows"
        drawn.clear()
        app.form.set_text("train.lr", "2e-3")
        await pilot.pause()
        assert set(drawn) <= {"train.lr"}
    app.form.set_text("train.lr", app.draft.base_text("train.lr"))
    for key, before, after in (
        ("train.lr_schedule", "● cosine  ○ linear  ○ constant", "● linear"),
        ("after.export", "● on", "○ off"),
        ("train.steps", "84", "84"),
    ):
        app.form.go(key)
        assert before in app.form.current.render().plain
        app.form.cycle(1)
        assert after in app.form.current.render().plain
    assert "linear  was cosine" in app.row("train.lr_schedule").render().plain
    app.form.set_text("train.lr", "2e-3")
    assert app.row("train.lr").render().plain.startswith("◆ lr")
    assert "2 changed" in str(app.query_one("#section-train", Static).render())
    app.form.go("train.lr")
    app.form.reset()
    assert app.row("train.lr").render().plain.startswith("  lr")
    long = "/a/very/long/path" * 9
    app.form.set_text("data.path", long)
    assert app.row("data.path").render().plain.count("…") == 1
    app.edit("data.path")
    await pilot.pause()
    assert isinstance(app.focused, Input)
    assert app.focused.value == long


async def test_the_filter_clicks_and_another_theme_for_titles_and_hint(app: FormApp, pilot: Pilot[None]) -> None:
    async def filtered(*keys: str) -> None:
        app.form.begin_filter()
        await press(pilot, *keys)

    await filtered(*"decay")
    shown = {row.key for row in app.query(FieldRow) if row.display}
    assert {"train.weight_decay", "train.beta1"} <= shown
    assert "train.steps" not in shown
    assert not app.query_one("#section-model").display
    for keys in (["enter"], ["down", "up", "end"]):
        await press(pilot, *keys)
        assert app.form.current.key in shown
    app.form.end_filter()
    assert all(row.display for row in app.query(FieldRow))
    await filtered(*"data.sequence_length", "enter")  # the help of others names it too
    assert app.form.current.key == "data.sequence_length"
    app.form.end_filter()
    await filtered(*"zzzz", "enter")
    app.form.move(1)
    app.form.move_section(1)
    app.form.end_filter()
    app.form.go("name")
    await pilot.pause()
    row = app.row("model.num_layers")
    await pilot.click(row)
    assert app.form.current is row
    await pilot.click(row, times=2)
    await pilot.pause()
    assert row.is_editing
    app.theme = "penstock-light"
    await pilot.pause()
    for place in ("#hint", "#section-recipe"):
        found = [span.style for span in app.query_one(place, Static).content.spans]  # type: ignore[union-attr]
        assert {style.color.triplet.hex for style in found} <= {"#1f2933", "#101820", "#66717e", "#0b6fa4"}


@pytest.fixture
def draft() -> Draft:
    return Draft(load_recipe(TEXT_SMALL))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_field_shows_what_the_recipe_says(path: Path) -> None:
    recipe = load_recipe(path)
    draft = Draft(recipe)
    for key in field_table():
        assert "\n" not in draft.text(key)
        draft.set(key, draft.text(key) + " ")  # differs as a text, not as a value
        if kind_of(key) == "text" and not isinstance(get(recipe, key), str):
            assert not draft.is_changed(key), key
            assert key not in draft.errors
        draft.reset(key)
    assert draft.recipe == recipe
    assert draft.differences == []


def test_a_change_or_a_fix_makes_another_recipe(draft: Draft) -> None:
    texts = {"model.overrides": '{"rope_theta": 1e6}', "train.steps": "20", "train.clip_norm": ""}
    texts |= {"storage.nvme": '["/a", "/b"]', "after.sample_prompt": "two\\nlines, a \\\\ and a \\t"}
    for key, text in texts.items():
        draft.set(key, text)
    assert (draft.recipe.train.steps, draft.recipe.train.clip_norm) == (20, None)
    assert draft.recipe.after.sample_prompt == "two\nlines, a \\ and a \t"
    assert draft.recipe.model.overrides == {"rope_theta": 1e6}
    assert draft.recipe.storage.drives == ["/a", "/b"]
    assert [item.key for item in draft.differences] == list(texts)
    assert (draft.differences[1].before, draft.differences[2].after) == ("84", "")
    draft.set("train.lr", "fast")
    draft.reset("train.steps")
    assert draft.text("train.steps") == "84"
    draft.set("train.lr", "0.001")
    assert draft.is_changed("train.lr") is False
    draft.apply(["train.global_batch_size=16", "train.gradient_dtype=bfloat16", 'storage.nvme=["/mnt/a b"]'])
    assert (draft.recipe.train.global_batch_size, draft.recipe.storage.nvme) == (16, ["/mnt/a b"])
    draft.apply(["model.overrides.rope_theta=5", "train.chunk_tokens=none", r'after.sample_prompt="quoted\n"'])
    assert (draft.recipe.model.overrides, draft.recipe.train.chunk_tokens) == ({"rope_theta": 5}, None)
    assert draft.recipe.after.sample_prompt == "quoted\n"
    draft.set("after.sample_prompt", r'"quoted"\n')  # as it is typed
    assert draft.recipe.after.sample_prompt == '"quoted"\n'
    with pytest.raises(UserError, match="not a size"):
        draft.apply(["budgets.gpu=much"])
    assert draft.recipe.budgets.gpu == "least"
    draft.set("train.lr", "fast")  # what is wrong elsewhere stays
    draft.apply(["train.steps=9"])
    assert (draft.text("train.steps"), set(draft.errors)) == ("9", {"train.lr"})


def test_what_is_wrong_stands_at_its_fields_and_choices_go_round(draft: Draft) -> None:
    for key, text, part in (
        ("train.steps", "many", "'many' must be a whole number"),
        ("train.steps", "", "must be a whole number"),
        ("name", "a/b", "folder"),
        ("storage.nvme", "[", "a list of texts"),
        ("data.sequence_length", "1", "at least 2"),
    ):
        draft.set(key, text)
        assert (draft.recipe, list(draft.errors)) == (None, [key])
        assert part in draft.errors[key]
        assert not draft.errors[key].startswith(key)
        draft.reset(key)
        assert draft.recipe == draft.base
    wrong = {"train.steps": "x", "train.lr": "-1", "budgets.gpu": "much", "data.seed": "1.5"}
    for key, text in wrong.items():
        draft.set(key, text)
    assert set(draft.errors) == set(wrong)
    assert "above 0" in draft.errors["train.lr"]
    draft.reset_all()
    assert (draft.errors, draft.recipe) == ({}, draft.base)
    draft.set("model.num_kv_heads", "3")
    assert set(draft.errors) == {"model.num_heads", "model.num_kv_heads"}
    draft.set("model.num_heads", "6")
    assert draft.errors == {}
    draft.set("after.export", "false")
    assert "set after.export=true" in draft.errors["after.sample_prompt"]
    draft.reset_all()
    assert choices_of("train.lr_schedule") == ("cosine", "linear", "constant", "wsd")
    for by, expected in ((1, "linear"), (1, "constant"), (1, "wsd"), (1, "cosine"), (-1, "wsd")):
        draft.cycle("train.lr_schedule", by)
        assert draft.text("train.lr_schedule") == expected
    draft.cycle("train.calibrate", 1)
    assert draft.recipe.train.calibrate is False
    assert (kind_of("train.calibrate"), kind_of("data.source"), kind_of("budgets.gpu")) == ("switch", "choice", "text")
    assert error_field("model.path: /x does not exist") == "model.path"
    assert error_field("data.sequence_length 8 is more than model.max_position 4") == "data.sequence_length"
    assert error_field("name: 'a b' must be letters") == "name"
    assert error_field("the disk is full") is None
    for value, text in {3e-5: "3e-5", 1e6: "1e6", 0.1: "0.1", 1234567.0: "1234567.0", 2.5e-8: "2.5e-8"}.items():
        assert value_text("train.lr", value) == text


typed = st.text(max_size=8) | st.integers(-2, 10**4).map(str) | st.sampled_from(["true", "1e-3", "2GiB", "[]", "{}"])


@settings(max_examples=40)
@given(edits=st.lists(st.tuples(st.sampled_from(list(field_table())), typed), max_size=6))
def test_any_edits_make_a_recipe_or_say_what_is_wrong(edits: list[tuple[str, str]]) -> None:
    draft = Draft(Recipe(name="x"))
    for key, text in edits:
        draft.set(key, text)
    assert (draft.recipe is None) == bool(draft.errors)
    assert all(key in field_table() and message for key, message in draft.errors.items())
    if draft.recipe is not None:
        changed = {key for key in field_table() if get(draft.recipe, key) != get(draft.base, key)}
        assert {item.key for item in draft.differences} == changed
    for key, _ in edits:
        draft.reset(key)
    assert (draft.recipe, draft.differences) == (draft.base, [])


@given(st.text(max_size=30))
@example("{\n  ")
@example("[1] ")
def test_a_text_field_keeps_every_character(text: str) -> None:
    base = apply_overrides(Recipe(name="x"), ["after.export=true"])
    base = dataclasses.replace(base, after=dataclasses.replace(base.after, sample_prompt=text))
    draft = Draft(Recipe(name="x"))
    draft.set("after.export", "true")
    draft.set("after.sample_prompt", value_text("after.sample_prompt", text))
    if text.strip() and text.strip().lower() not in ("none", "null"):
        assert draft.recipe == base, json.dumps(text)
