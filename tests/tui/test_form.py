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
from textual.geometry import Region
from textual.pilot import Pilot
from textual.widgets import Input

from penstock.app.console.rows import UNICODE, Row, plain
from penstock.app.recipes.fields import fields
from penstock.app.recipes.recipe import apply_overrides, load_recipe
from penstock.engine.config import Recipe
from penstock.storage.files.errors import UserError
from penstock.tui.data.draft import Draft, choices_of, error_field, field_table, get, kind_of, value_text
from penstock.tui.theme import style
from penstock.tui.widgets.form import FieldList, Form
from penstock.tui.widgets.lines import LineWidget

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
        yield Form(self.draft, self.count)

    def count(self) -> None:
        self.num_changes += 1

    form = property(lambda self: self.query_one(Form))

    def rows(self, of: str) -> list[Row]:
        return [row for owner, row in self.form.fields.lines(self.form.fields.size.width) if owner == of]

    def line(self, of: str) -> str:
        return plain(self.rows(of))

    def hint(self) -> str:
        return " ".join(plain(self.form._hint(78, 9, UNICODE)).split())

    def edit(self, key: str) -> None:
        self.form.go(key)
        self.form.fields.begin_edit()

    def region(self) -> Region:
        """What is seen of the current field's rows."""
        fields = self.form.fields
        rows = fields.region_of(self.form.current).translate(fields.region.offset)
        return rows.intersection(self.query_one(FieldList).region)


@pytest.fixture
async def pilot() -> AsyncIterator[Pilot[None]]:
    async with FormApp().run_test(size=(80, 30)) as pilot:
        yield pilot


@pytest.fixture
def app(pilot: Pilot[None]) -> FormApp:
    assert isinstance(pilot.app, FormApp)
    return pilot.app


async def test_every_field_has_a_row_a_hint_and_a_section_and_the_row_stays_in_sight(
    app: FormApp, pilot: Pilot[None]
) -> None:
    assert app.form.shown == [item.key for item in fields()]
    shown = {"train.steps": "84", "model.path": "none", "after.export": "on"}
    shown["after.sample_prompt"] = "def read(self, path):\\n    "
    for key, text in shown.items():
        assert text in app.line(key)
    assert "steps" in app.line("train.steps")
    titles = [plain([row]).partition("  ") for of, row in app.form.fields.lines(78) if row and of[0] == "#"]
    sections = dict.fromkeys(item.key.partition(".")[0] if "." in item.key else "recipe" for item in fields())
    assert [title for title, _, _ in titles] == list(sections)
    assert all(len(about.split()) > 1 for _, _, about in titles), "each says what it is about"
    for item in fields():
        assert item.key in app.hint()
        assert item.help in app.hint()
        await pilot.press("down")
    for key in ("end", "pageup", "up", "k", "j", "pagedown", "home", "down"):
        await press(pilot, key)
        assert app.region(), key
    assert app.form.current == "machine"
    app.form.move_section(1)
    assert app.form.current == "model.path"
    app.form.move_section(-1)
    app.form.move_section(-1)
    assert app.form.current == "after.export"
    await pilot.pause()
    assert app.region()


async def test_typing_checks_at_once_loses_nothing_escape_takes_back_and_arrows_take_over(
    app: FormApp, pilot: Pilot[None]
) -> None:
    app.edit("train.steps")
    await pilot.pause()
    entry = app.focused
    assert isinstance(entry, Input)
    assert entry.region.y == app.region().y
    app.form.planner_errors = {"name": "wrong"}
    app.form.fields.redraw()
    await pilot.pause()
    assert entry.region.y == app.region().y, "it follows its row"
    app.form.planner_errors = {}
    await press(pilot, "0")  # the old text is selected
    assert app.form.errors == {"train.steps": "0 must be at least 1"}
    assert (len(app.rows("train.steps")), app.region().height) == (2, 2)
    assert "must be at least 1" in app.line("train.steps")
    await press(pilot, "backspace", "2", "0")
    assert (app.form.errors, app.region().height, app.draft.recipe.train.steps) == ({}, 1, 20)
    assert "was 84" in app.line("train.steps")
    await press(pilot, "enter")
    assert (app.form.fields.entry, app.form.current, app.num_changes > 0) == (None, "train.steps", True)
    assert isinstance(app.focused, FieldList)
    for key, text, at in (("escape", "20", "train.steps"), ("down", "9", "train.global_batch_size")):
        app.edit("train.steps")
        await press(pilot, "9", key)
        assert (app.draft.text("train.steps"), app.form.fields.entry, app.form.current) == (text, None, at)
    assert isinstance(app.focused, FieldList)
    app.draft.reset_all()
    app.form.fields.redraw()
    app.edit("train.steps")
    await pilot.pause()
    entry = app.focused
    assert isinstance(entry, Input)

    async def typed(*texts: str) -> str:
        for text in texts:
            entry.value = text  # all before the first message is handled
        await pilot.pause()
        await pilot.pause()
        return app.draft.text("train.steps")

    assert (await typed("", "6", "60", "600"), entry.value) == ("600", "600")
    assert await typed("6001", "600") == "600"  # back to what is still shown
    entry.value = "7"
    app.form.fields.end_edit(undo=True)  # before the change is told
    assert await typed() == "84"
    app.edit("train.steps")
    await press(pilot, "9")
    app.form.set_text("train.steps", "50")  # by a fix or a file browser, from the palette
    app.form.fields.end_edit()
    assert await typed() == "50", "what was typed before it is not put back"


async def test_choices_and_changes_are_marked_and_counted_and_a_long_value_is_cut(
    app: FormApp, pilot: Pilot[None]
) -> None:
    app.form.set_text("train.lr", app.draft.base_text("train.lr"))
    for key, before, after in (
        ("train.lr_schedule", "● cosine  ○ linear  ○ constant", "● linear"),
        ("after.export", "● on", "○ off"),
        ("train.steps", "84", "84"),
    ):
        app.form.go(key)
        assert before in app.line(app.form.current)
        app.form.cycle(1)
        assert after in app.line(app.form.current)
    assert "linear  was cosine" in app.line("train.lr_schedule")
    app.form.set_text("train.lr", "2e-3")
    assert app.line("train.lr").startswith("◆ lr")
    assert "2 changed" in app.line("#train")
    app.form.go("train.lr")
    app.form.reset()
    assert app.line("train.lr").startswith("  lr")
    long = "/a/very/long/path" * 9
    app.form.set_text("data.path", long)
    assert app.line("data.path").count("…") == 1
    app.edit("data.path")
    await pilot.pause()
    assert isinstance(app.focused, Input)
    assert app.focused.value == long


async def test_the_filter_clicks_and_another_theme_for_titles_and_hint(app: FormApp, pilot: Pilot[None]) -> None:
    async def filtered(*keys: str) -> None:
        app.form.begin_filter()
        await press(pilot, *keys)

    await filtered(*"decay")
    shown = set(app.form.shown)
    assert {"train.weight_decay", "train.beta1"} <= shown
    assert "train.steps" not in shown
    assert not app.line("#model")
    for keys in (["enter"], ["down", "up", "end"]):
        await press(pilot, *keys)
        assert app.form.current in shown
    app.form.end_filter()
    assert app.form.shown == list(field_table())
    await filtered(*"data.sequence_length", "enter")  # the help of others names it too
    assert app.form.current == "data.sequence_length"
    app.form.end_filter()
    await filtered(*"zzzz", "enter")
    app.form.move(1)
    app.form.move_section(1)
    app.form.end_filter()
    app.form.go("name")
    await pilot.pause()
    at = (5, app.form.fields.region_of("model.num_layers").y)
    await pilot.click(app.form.fields, offset=at)
    assert app.form.current == "model.num_layers"
    await pilot.click(app.form.fields, offset=at, times=2)
    await pilot.pause()
    assert isinstance(app.focused, Input)
    app.theme = "penstock-light"
    await pilot.pause()
    title = app.form.fields.region_of("#recipe").y
    for widget, y in ((app.query_one("#hint", LineWidget), 0), (app.form.fields, title)):
        colours = {segment.style.color.name for segment in widget.render_line(y) if segment.text.strip()}
        assert colours <= {style(token, False).color.name for token in ("title", "dim", "accent")}


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
        assert value_text(value) == text


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
    draft.set("after.sample_prompt", value_text(text))
    if text.strip() and text.strip().lower() not in ("none", "null"):
        assert draft.recipe == base, json.dumps(text)
