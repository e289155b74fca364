"""The Configure screen: every key, the plan that follows the form, save and launch; most of it with a quick planner."""

import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from cli_process import PATIENCE_S, json_lines
from rich.style import Style
from seen import notices, press, running, until
from textual.pilot import Pilot
from textual.widgets import Input, OptionList

from penstock.app.console.rows import plain
from penstock.app.recipes.recipe import load_recipe, save_recipe
from penstock.engine.config import Recipe
from penstock.storage.files.errors import UserError
from penstock.tui.actions import ACTIONS
from penstock.tui.app import PenstockApp
from penstock.tui.data import plan_client
from penstock.tui.screens.configure import ConfigureScreen
from penstock.tui.screens.dialogs import (
    ChangesDialog,
    ConfirmDialog,
    MachinePicker,
    PathPicker,
    TextDialog,
    first_folder,
    model_mark,
)
from penstock.tui.screens.run import RunScreen
from penstock.tui.widgets.form import FieldList
from penstock.tui.widgets.lines import LineWidget
from penstock.tui.widgets.pages import PlanPanel

pytestmark = pytest.mark.usefixtures("few_fields")


class Opened:
    """The application with Configure open, on a root with recipes and no run."""

    def __init__(self, pilot: Pilot[None]) -> None:
        self.pilot, self.app = pilot, pilot.app

    async def open(self, path: Path) -> None:
        self.configure = ConfigureScreen(path)
        await self.app.push_screen(self.configure)
        await self.pilot.pause()

    async def until(self, condition: Callable[[], bool]) -> None:
        await until(self.pilot, condition)

    async def planned(self) -> dict[str, Any]:
        """The plan of what the form says now."""
        await self.until(lambda: self.state.phase == "done" and not self.state.stale)
        assert self.state.forecast is not None
        return self.state.forecast

    async def press(self, *keys: str) -> None:
        await press(self.pilot, *keys)

    async def dialog(self, kind: type, key: str) -> Any:
        """The dialog that a key opens."""
        await self.press(key)
        await self.until(lambda: isinstance(self.app.screen, kind))
        await self.pilot.pause()
        return self.app.screen

    async def answer(self, *keys: str) -> None:
        """Keys that close the dialog on show."""
        await self.press(*keys)
        await self.until(lambda: self.app.screen is self.configure)
        await self.pilot.pause()

    state = property(lambda self: self.configure.client.state)
    form = property(lambda self: self.configure.form)
    notes = property(lambda self: notices(self.pilot))
    recipe = property(lambda self: self.form.draft.recipe)
    """What the form says now, where it is right."""

    def page(self) -> str:
        panel = self.configure.query_one(PlanPanel)
        return plain(panel.rows(panel.size.width or 60, 200))

    async def type(self, key: str, text: str) -> None:
        """Edit a field by keys."""
        self.form.go(key)
        await self.press("enter", *text, "enter")


@pytest.fixture
async def ui(
    place: Path, planner_log: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> AsyncIterator[Opened]:
    """On a recipe, text_small if none is named; with a quick planner, or another `how` (fake_planner.py)."""
    recipe, how = getattr(request, "param", ("text_small", "sample"))
    monkeypatch.setattr(plan_client, "SERVER", (*plan_client.SERVER[:2], how, str(planner_log)))
    async with running(place) as (_, pilot):
        ui = Opened(pilot)
        await ui.open(place / "recipes" / f"{recipe}.py")
        yield ui


async def test_the_plan_follows_the_form_and_what_is_wrong_blocks_save_launch_and_fixes(ui: Opened) -> None:
    assert (await ui.planned())["steps"] == 84
    assert "84 steps" in ui.page()
    await ui.type("train.steps", "20")
    assert (await ui.planned())["steps"] == 20
    assert "20 steps" in ui.page()
    assert ui.form.border_title == "text_small: 1 changed"
    await ui.press("backspace")
    assert (await ui.planned())["steps"] == 84
    assert not ui.configure.is_unsaved
    await ui.type("train.steps", "13")
    await ui.until(lambda: ui.state.error is not None)
    assert (ui.state.phase, ui.state.stale) == ("done", True)
    assert ui.form.errors["train.steps"] == "13 is unlucky"
    assert "no plan" in ui.page()
    await ui.press("backspace")
    await ui.planned()
    assert (ui.state.error, ui.form.errors) == (None, {})
    # Number keys apply fixes, b what helps most.
    await ui.type("train.chunk_tokens", "8192")
    assert not (await ui.planned())["fits"]
    assert "1 shorter chunks" in ui.page()
    await ui.press("9")
    assert "there is no fix" in ui.notes
    await ui.press("1")
    assert (ui.recipe.train.chunk_tokens, ui.recipe.train.kv_window) == (1024, "streamed")
    assert ui.form.current == "train.chunk_tokens"
    assert (await ui.planned())["fits"]
    await ui.press("tab", "b")
    assert ui.recipe.train.gradient_dtype == "bfloat16"
    await ui.planned()
    await ui.press("tab")
    ui.form.draft.reset_all()
    await ui.type("train.lr", "fast")
    assert "must be a number" in ui.form.errors["train.lr"]
    assert (ui.state.phase, ui.state.stale) == ("idle", True)
    assert "no plan" in ui.page()
    assert "train.lr: 'fast' must be a number" in ui.page()
    ui.form.go("name")
    for key in ("l", "ctrl+s"):
        await ui.press(key)
        assert (ui.app.screen, ui.form.current) == (ui.configure, "train.lr")
    assert "train.lr: 'fast' must be a number" in ui.notes
    await ui.press("1", "b")
    assert [item.key for item in ui.form.draft.differences] == ["train.lr"]


@pytest.mark.parametrize("ui", [("8b_8k", "sample")], indirect=True)
async def test_another_machine_and_random_weights_replan(
    ui: Opened, planner_log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def machine() -> str:
        return (await ui.planned())["machine"]["name"]

    assert await machine() == "h100-pcie-512"
    await ui.dialog(MachinePicker, "m")
    await ui.answer(*"gh200", "enter")
    assert await machine() == "gh200-480"
    assert ui.configure.query_one(PlanPanel).border_title == "plan for gh200-480"
    picker = await ui.dialog(MachinePicker, "m")
    await ui.press("down", "up", "up")
    assert picker.query_one(OptionList).highlighted == 0
    await ui.answer("enter")
    assert await machine() == "generic"
    assert ui.form.draft.differences == []
    await ui.dialog(MachinePicker, "m")
    await ui.answer(*"nowhere.json", "enter", "escape")
    assert "nowhere.json" in ui.notes
    requests = planner_log.with_suffix(".requests")  # of steps, on a machine, from scratch or not
    assert json_lines(requests)[-1][1] is None
    started: list[Recipe] = []
    monkeypatch.setattr("penstock.app.launch.launcher.start", lambda recipe, root: started.append(recipe) or root)
    monkeypatch.setattr(PenstockApp, "open", lambda app, name, path: None)
    dialog = await ui.dialog(ConfirmDialog, "l")
    assert "Llama-3.1-8B does not exist" in dialog._text
    await ui.press("y")
    await ui.until(lambda: "Launch" in getattr(ui.app.screen, "_title", ""))
    await ui.press("y")
    await ui.until(lambda: bool(started))
    assert (started[0].model.path, json_lines(requests)[-1][2]) == (None, True)


@pytest.mark.long
@pytest.mark.parametrize(
    ("field", "size"),
    [("model.path", (120, 36)), ("train.lr_schedule", (20, 5)), ("train.steps", (1, 1)), ("train.steps", (200, 60))],
)
async def test_every_key_of_the_table_at_any_size(
    ui: Opened, monkeypatch: pytest.MonkeyPatch, field: str, size: tuple[int, int]
) -> None:
    """Each does something and none of them fails, with the cursor on each kind of field."""
    monkeypatch.setattr("penstock.app.launch.launcher.start", lambda recipe, root: pytest.fail("launched unasked"))
    keys = [key for action in ACTIONS if action.scope == "configure" for key in action.keys.split(",")]
    keys = [key for key in keys if key not in ("q", "ctrl+q", "escape")]
    assert len(keys) > 25
    await ui.planned()
    await ui.pilot.resize_terminal(*size)
    for key in [*keys, "end", "home", "pagedown"]:
        ui.form.focus_fields()
        ui.form.go(field)
        await ui.press(key)
        while ui.app.screen is not ui.configure or isinstance(ui.app.focused, Input):
            assert ui.configure in ui.app.screen_stack, key
            await ui.press("escape")
    await ui.pilot.resize_terminal(80, 24)
    await ui.answer()


async def test_sections_filter_reset_and_picking_a_model_folder_and_a_data_file(ui: Opened, place: Path) -> None:
    form = ui.form
    await ui.press(*["right_square_bracket"] * 3)
    assert form.current == "data.source"
    await ui.press("left_square_bracket")
    assert form.current == "adapter.method"
    await ui.press("slash", *"lr_sch", "enter")
    assert form.current == "train.lr_schedule"
    await ui.press("right", "space", "left")
    assert form.draft.text("train.lr_schedule") == "linear"
    await ui.press("escape")
    assert (form.is_filtered, ui.app.screen) == (False, ui.configure)
    await ui.type("train.steps", "9")
    await ui.dialog(ChangesDialog, "d")
    await ui.answer("escape")
    await ui.dialog(ConfirmDialog, "U")
    await ui.answer("y")
    assert form.draft.differences == []
    assert form.draft.text("train.steps") == "84"
    save_recipe(place / "recipe.json", ui.recipe)
    await ui.open(place / "recipe.json")
    assert (await ui.planned())["recipe"] == "text_small", "a run's recipe opens, too"

    async def picker(field: str, num_shown: int) -> Any:
        """The picker's tree, once it shows so much."""
        ui.form.go(field)
        tree = (await ui.dialog(PathPicker, "o")).query_one("_Tree")
        await ui.until(lambda: len(tree.root.children) == num_shown)
        return tree

    model = place / "models" / "tiny"
    model.mkdir(parents=True)
    (model / "config.json").write_text('{"model_type": "qwen3"}')
    (model / "model.safetensors").write_bytes(b"\0" * 2048)
    (place / "texts.txt").write_text("hello")
    tree = await picker("model.path", 2)
    await ui.press("down", "enter")
    await ui.until(lambda: any(node.children for node in tree.root.children))
    assert [str(node.label) for node in tree.root.children] == ["models", "recipes"]
    await ui.press("down")
    assert "qwen3, 2.0 KiB" in tree.render_label(tree.cursor_node, Style(), Style()).plain
    await ui.answer("space")
    assert ui.form.draft.text("model.path") == "models/tiny"
    await picker("data.path", 4)
    await ui.answer("end", "enter")
    assert ui.form.draft.text("data.path") == "texts.txt"
    dialog = await ui.dialog(PathPicker, "o")
    await ui.press("u", "tab")
    dialog.query_one(Input).value = "/elsewhere/file"
    await ui.answer("enter")
    assert ui.form.draft.text("data.path") == "/elsewhere/file"
    ui.form.go("train.steps")
    await ui.press("o")
    assert "is not a path" in ui.notes


async def test_nothing_is_overwritten_or_left_unsaved_unasked(ui: Opened, place: Path) -> None:
    saved = place / "recipes" / "mine_20.json"
    await ui.type("train.steps", "20")
    await ui.type("name", "mine-20")
    assert ui.configure.is_unsaved
    dialog = await ui.dialog(TextDialog, "ctrl+s")
    assert dialog.query_one(Input).value == "recipes/mine_20.json"
    await ui.answer("enter")
    assert load_recipe(saved) == ui.recipe
    assert (ui.recipe.train.steps, ui.configure.is_unsaved) == (20, False)
    await ui.type("train.steps", "21")
    assert ui.configure.is_unsaved
    for answer, steps in (("n", 20), ("y", 21)):
        await ui.dialog(TextDialog, "ctrl+s")
        await ui.dialog(ConfirmDialog, "enter")
        await ui.answer(answer)
        assert load_recipe(saved).train.steps == steps
    dialog = await ui.dialog(TextDialog, "ctrl+s")
    dialog.query_one(Input).value = "recipes/mine.py"
    await ui.answer("enter")
    assert "let its name end in .json" in ui.notes
    process = ui.configure.client._process
    await ui.type("train.steps", "22")
    for leave, stay in (("escape", "n"), ("q", "escape")):
        await ui.dialog(ConfirmDialog, leave)
        await ui.answer(stay)
    await ui.dialog(ConfirmDialog, "escape")
    await ui.press("y")
    await ui.until(lambda: ui.configure not in ui.app.screen_stack)
    assert process is not None
    await ui.until(lambda: process.returncode is not None)


async def test_launch_asks_is_told_at_once_and_begins_one_run_here(
    ui: Opened, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[Recipe, Path]] = []
    ready = threading.Event()

    def start(recipe: Recipe, root: Path) -> Path:
        started.append((recipe, root))
        if len(started) == 1:
            raise UserError("no room in runs/")
        assert ready.wait(PATIENCE_S)
        return root / "runs" / "none"

    monkeypatch.setattr("penstock.app.launch.launcher.start", start)
    await ui.type("train.chunk_tokens", "8192")
    dialog = await ui.dialog(ConfirmDialog, "l")
    assert "DOES NOT FIT" in dialog._text
    await ui.press("y")
    await ui.until(lambda: "no room in runs/" in ui.notes)
    assert ui.app.screen is ui.configure
    await ui.press("backspace")
    ui.configure._set_machine("gh200-480")
    await ui.planned()
    dialog = await ui.dialog(ConfirmDialog, "l")
    assert "this machine" in dialog._text
    assert "It fits" in dialog._text
    await ui.answer("n")
    assert (ui.configure.machine, len(started)) == ("gh200-480", 1)
    await ui.planned()
    line = ui.configure.query_one("#launching")
    await ui.dialog(ConfirmDialog, "l")
    assert not line.display
    await ui.answer("y")
    assert line.display
    assert "starting text_small" in str(line.render())
    before = ui.form.current
    await ui.press("down", "l")  # the window goes on, and nothing is started twice
    assert ui.form.current != before
    assert ui.app.screen is ui.configure
    assert "starting text_small" in ui.notes
    ready.set()
    await ui.until(lambda: isinstance(ui.app.screen, RunScreen))
    assert ui.app.screen.data.path == place / "runs" / "none"  # type: ignore[attr-defined]
    assert [(recipe.name, root) for recipe, root in started[1:]] == [("text_small", place)]
    assert not line.display


async def test_the_selected_field_stays_in_view_and_narrow_terminals_show_one_pane(ui: Opened) -> None:
    def is_seen() -> bool:
        rows, fields = ui.form.query_one(FieldList), ui.form.fields
        field = fields.region_of(ui.form.current).translate(fields.region.offset)
        return bool(rows.size.height) and rows.region.contains_region(field)

    await ui.planned()
    keys = ui.form.shown
    for key in ("train.lr", keys[-1]):
        ui.form.go(key)
        for size in ((120, 60), (120, 14), (80, 24)):
            await ui.pilot.resize_terminal(*size)
            # The terminal application lays itself out a moment after a resize.
            await ui.until(lambda size=size: ui.configure.has_class("-narrow") == (size[0] < 100) and is_seen())  # type: ignore[misc]
        for wrong in (keys[:6], []):
            ui.form.planner_errors = dict.fromkeys(wrong, "a reason of so many words that it takes a row of its own")
            ui.form.fields.redraw()
            await ui.until(lambda wrong=wrong: all(ui.form.fields.region_of(name).height > 1 for name in wrong))  # type: ignore[misc]
            await ui.until(is_seen)
    panel, summary = ui.configure.query_one(PlanPanel), ui.configure.query_one("#summary", LineWidget)
    await ui.until(lambda: (panel.display, summary.display, ui.form.display) == (False, True, True))
    assert "fits" in summary.render_line(0).text
    await ui.press("tab")
    assert (panel.display, summary.display, ui.form.display, panel.has_focus) == (True, False, False, True)
    await ui.press("escape")
    assert ui.form.display
    await ui.pilot.resize_terminal(120, 36)
    await ui.until(lambda: (panel.display, summary.display) == (True, False))


def test_what_a_folder_is(tmp_path: Path) -> None:
    assert model_mark(tmp_path) == ""
    for text in ("[" * 100_000, "[]", '{"model_type": 3}', '{"model_type": "llama"}'):
        (tmp_path / "config.json").write_text(text)
        assert model_mark(tmp_path) == ("llama, no weights" if "llama" in text else "")
    assert first_folder("", tmp_path) == first_folder("nowhere/at/all", tmp_path) == tmp_path
    assert first_folder('["/a"]', tmp_path) == tmp_path


async def test_what_cannot_be_read_says_so(place: Path) -> None:
    broken = {"broken.py": "recipe = (", "exits.py": "import sys\nsys.exit(3)", "deep.json": "[" * 100_000}
    for name, text in broken.items():
        (place / name).write_text(text)
    async with running(place) as (_, pilot):
        ui = Opened(pilot)
        for name in (*broken, "missing.py"):
            await ui.open(place / name)
            assert name in ui.configure._broken
            await ui.press("l", "ctrl+s", "m", "enter", "1", "tab", "slash", "d")
            await ui.press("escape")
            await ui.until(lambda: ui.configure not in ui.app.screen_stack)


@pytest.mark.parametrize("ui", [("text_small", "dies")], indirect=True)
async def test_planner_trouble_leaves_the_form_working(ui: Opened) -> None:
    await ui.until(lambda: "stopped again" in (ui.state.trouble or ""))
    assert "MemoryError: no room" in ui.page()
    await ui.type("train.steps", "20")
    assert ui.recipe.train.steps == 20
    await ui.press("f5")
    await ui.until(lambda: "stopped again" in (ui.state.trouble or ""))
