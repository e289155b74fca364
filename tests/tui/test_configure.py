"""The Configure screen: every key, the plan that follows the form, save and launch; most of it with a quick planner."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.style import Style
from textual.pilot import Pilot
from textual.widgets import Input, OptionList

from app.recipe import load_recipe, to_json
from app.rows import ASCII, UNICODE, Glyphs, plain
from engine.config import Recipe
from storage.errors import UserError
from tui.actions import ACTIONS
from tui.app import PenstockApp
from tui.data import plan_client
from tui.data.plan_client import PlanState
from tui.screens.configure import ConfigureScreen
from tui.screens.confirm import ConfirmDialog, TextDialog
from tui.screens.pickers import ChangesDialog, MachinePicker, PathPicker, first_folder, model_mark
from tui.widgets.plan_panel import PlanPanel, PlanSummary

RECIPES = Path(__file__).parents[2] / "recipes"
FAKE = Path(__file__).parents[1] / "support" / "fake_planner.py"
WAIT_S = 120


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A root with recipes and no run."""
    shutil.copytree(RECIPES, tmp_path / "root" / "recipes", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "root"


@pytest.fixture
def quick_planner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Answers of a fake planner; the file that its requests are written to."""
    monkeypatch.setattr(plan_client, "SERVER", (sys.executable, str(FAKE), "sample", str(tmp_path / "log")))
    monkeypatch.setattr(plan_client, "DEBOUNCE_S", 0.01)
    return tmp_path / "log.requests"


class Opened:
    """The application with Configure open."""

    def __init__(self, pilot: Pilot[None], screen: ConfigureScreen) -> None:
        self.pilot, self.configure = pilot, screen
        self.app = pilot.app

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await self.pilot.pause(0.02)

    async def planned(self) -> dict[str, Any]:
        """The plan of what the form says now."""
        await self.until(lambda: self.state.phase == "done" and not self.state.stale)
        assert self.state.forecast is not None
        return self.state.forecast

    async def dialog(self, kind: type) -> Any:
        await self.until(lambda: isinstance(self.app.screen, kind))
        await self.pilot.pause()
        return self.app.screen

    async def closed(self) -> None:
        await self.until(lambda: self.app.screen is self.configure)
        await self.pilot.pause()

    @property
    def state(self) -> PlanState:
        assert self.configure.client is not None
        return self.configure.client.state

    @property
    def notes(self) -> str:
        return " | ".join(f"{note.title} {note.message}" for note in self.app._notifications)

    def page(self) -> str:
        panel = self.configure.query_one(PlanPanel)
        return plain(panel.rows(panel.size.width or 60, 200))

    async def type(self, key: str, text: str) -> None:
        """Edit a field by keys."""
        self.configure.form.go(key)
        await self.pilot.press("enter", *text, "enter")
        await self.pilot.pause()


async def opened(pilot: Pilot[None], path: Path) -> Opened:
    screen = ConfigureScreen(path)
    await pilot.app.push_screen(screen)
    await pilot.pause()
    return Opened(pilot, screen)


def application(place: Path, glyphs: Glyphs = UNICODE) -> PenstockApp:
    return PenstockApp(place, glyphs=glyphs)


async def test_the_plan_follows_what_is_typed(place: Path, quick_planner: Path) -> None:
    async with application(place).run_test(size=(120, 36)) as pilot:
        ui = await opened(pilot, place / "recipes" / "quickstart.py")
        assert (await ui.planned())["steps"] == 84
        assert "84 steps" in ui.page()
        await ui.type("train.steps", "20")
        assert (await ui.planned())["steps"] == 20
        assert "20 steps" in ui.page()
        assert ui.configure.form.border_title == "quickstart: 1 changed"
        await pilot.press("backspace")
        assert (await ui.planned())["steps"] == 84
        assert not ui.configure.is_unsaved


async def test_a_wrong_value_shows_its_message_and_blocks_save_and_launch(place: Path, quick_planner: Path) -> None:
    async with application(place).run_test(size=(120, 36)) as pilot:
        ui = await opened(pilot, place / "recipes" / "quickstart.py")
        await ui.planned()
        await ui.type("train.lr", "fast")
        assert "must be a number" in ui.configure.form.rows["train.lr"].error
        assert (ui.state.phase, ui.state.stale) == ("idle", True)
        assert "no plan" in ui.page()
        assert "train.lr: 'fast' must be a number" in ui.page()
        ui.configure.form.go("name")
        for key in ("l", "ctrl+s"):
            await pilot.press(key)
            await pilot.pause()
            assert ui.app.screen is ui.configure
            assert ui.configure.form.current.key == "train.lr"
        assert "train.lr: 'fast' must be a number" in ui.notes
        await pilot.press("1", "b")
        assert ui.configure.draft is not None
        assert [item.key for item in ui.configure.draft.differences] == ["train.lr"]


async def test_what_the_planner_finds_wrong_stands_at_its_field(place: Path, quick_planner: Path) -> None:
    async with application(place).run_test(size=(120, 36)) as pilot:
        ui = await opened(pilot, place / "recipes" / "quickstart.py")
        await ui.type("train.steps", "13")
        await ui.until(lambda: ui.state.error is not None)
        assert ui.configure.form.rows["train.steps"].error == "13 is unlucky"
        assert "no plan" in ui.page()
        await ui.type("train.steps", "14")
        await ui.planned()
        assert ui.configure.form.rows["train.steps"].error == ""


async def test_number_keys_apply_fixes_and_b_what_helps_most(place: Path, quick_planner: Path) -> None:
    async with application(place).run_test(size=(120, 36)) as pilot:
        ui = await opened(pilot, place / "recipes" / "quickstart.py")
        await ui.type("train.chunk_tokens", "8192")
        assert not (await ui.planned())["fits"]
        assert "1 shorter chunks" in ui.page()
        await pilot.press("9")
        assert "no such change" in ui.notes
        await pilot.press("1")
        draft = ui.configure.draft
        assert draft is not None
        assert draft.recipe is not None
        assert (draft.recipe.train.chunk_tokens, draft.recipe.train.kv_window) == (1024, "streamed")
        assert ui.configure.form.current.key == "train.chunk_tokens"
        assert (await ui.planned())["fits"]
        await pilot.press("tab", "b")
        assert draft.recipe.train.gradient_dtype == "bfloat16"
        await ui.planned()


async def test_another_machine_replans(place: Path, quick_planner: Path) -> None:
    async with application(place).run_test(size=(120, 36)) as pilot:
        ui = await opened(pilot, place / "recipes" / "8b_8k.py")
        assert (await ui.planned())["machine"]["name"] == "h100-pcie-512"
        await pilot.press("m")
        await ui.dialog(MachinePicker)
        await pilot.press(*"gh200", "enter")
        await ui.closed()
        assert (await ui.planned())["machine"]["name"] == "gh200-480"
        assert ui.configure.query_one(PlanPanel).border_title == "plan for gh200-480"
        await pilot.press("m")
        picker = await ui.dialog(MachinePicker)
        await pilot.press("down", "up", "up")
        assert picker.query_one(OptionList).highlighted == 0
        await pilot.press("enter")
        await ui.closed()
        assert (await ui.planned())["machine"]["name"] == "generic"
        assert ui.configure.draft is not None
        assert ui.configure.draft.differences == []
        await pilot.press("m")
        await ui.dialog(MachinePicker)
        await pilot.press(*"nowhere.json", "enter", "escape")
        await ui.closed()
        assert "nowhere.json" in ui.notes
        assert json.loads(quick_planner.read_text().splitlines()[-1])[1] is None


async def test_every_key_of_the_table(place: Path, quick_planner: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each does something and none of them fails, with the cursor on each kind of field."""
    monkeypatch.setattr("app.launcher.start", lambda recipe, root: pytest.fail("launched unasked"))
    keys = [key for action in ACTIONS if action.scope == "configure" for key in action.keys.split(",")]
    keys = [key for key in keys if key not in ("q", "ctrl+q", "escape")]
    assert len(keys) > 25
    async with application(place).run_test(size=(120, 36)) as pilot:
        ui = await opened(pilot, place / "recipes" / "quickstart.py")
        await ui.planned()
        for field in ("train.lr_schedule", "model.path"):
            for key in keys:
                ui.configure.form.focus_fields()
                ui.configure.form.go(field)
                await pilot.press(key)
                await pilot.pause()
                for _ in range(3):
                    if ui.app.screen is not ui.configure or isinstance(ui.app.focused, Input):
                        await pilot.press("escape")
                        await pilot.pause()
                if ui.app.screen is not ui.configure:
                    await pilot.press("escape")
                await ui.until(lambda: ui.app.screen is ui.configure)
        assert ui.app.screen is ui.configure


async def test_sections_filter_and_reset(place: Path, quick_planner: Path) -> None:
    async with application(place).run_test(size=(120, 36)) as pilot:
        ui = await opened(pilot, place / "recipes" / "quickstart.py")
        form = ui.configure.form
        await pilot.press("right_square_bracket", "right_square_bracket")
        assert form.current.key == "data.source"
        await pilot.press("left_square_bracket")
        assert form.current.key == "model.path"
        await pilot.press("slash", *"lr_sch", "enter")
        await pilot.pause()
        assert form.current.key == "train.lr_schedule"
        await pilot.press("right", "space", "left")
        assert form.draft.text("train.lr_schedule") == "linear"
        await pilot.press("escape")
        await pilot.pause()
        assert not form.is_filtered
        assert ui.app.screen is ui.configure
        await ui.type("train.steps", "9")
        await pilot.press("d")
        await ui.dialog(ChangesDialog)
        await pilot.press("escape")
        await ui.closed()
        await pilot.press("U")
        await ui.dialog(ConfirmDialog)
        await pilot.press("y")
        await ui.closed()
        assert form.draft.differences == []
        assert "84" in form.rows["train.steps"].value


async def test_save_as_and_no_unasked_overwriting(place: Path, quick_planner: Path) -> None:
    async with application(place).run_test(size=(120, 36)) as pilot:
        ui = await opened(pilot, place / "recipes" / "quickstart.py")
        await ui.type("train.steps", "20")
        await ui.type("name", "mine-20")
        assert ui.configure.is_unsaved
        await pilot.press("ctrl+s")
        dialog = await ui.dialog(TextDialog)
        assert dialog.query_one(Input).value == "recipes/mine_20.json"
        await pilot.press("enter")
        await ui.closed()
        saved = load_recipe(place / "recipes" / "mine_20.json")
        assert ui.configure.draft is not None
        assert saved == ui.configure.draft.recipe
        assert saved.train.steps == 20
        assert not ui.configure.is_unsaved
        await ui.type("train.steps", "21")
        assert ui.configure.is_unsaved
        for answer, steps in (("n", 20), ("y", 21)):
            await pilot.press("ctrl+s")
            await ui.dialog(TextDialog)
            await pilot.press("enter")
            await ui.dialog(ConfirmDialog)
            await pilot.press(answer)
            await ui.closed()
            assert load_recipe(place / "recipes" / "mine_20.json").train.steps == steps
        await pilot.press("ctrl+s")
        dialog = await ui.dialog(TextDialog)
        dialog.query_one(Input).value = "recipes/mine.py"
        await pilot.press("enter")
        await ui.closed()
        assert "let its name end in .json" in ui.notes


async def test_leaving_with_unsaved_edits_asks(place: Path, quick_planner: Path) -> None:
    async with application(place).run_test(size=(120, 36)) as pilot:
        ui = await opened(pilot, place / "recipes" / "quickstart.py")
        await ui.planned()
        assert ui.configure.client is not None
        process = ui.configure.client._process
        await ui.type("train.steps", "20")
        await pilot.press("escape")
        await ui.dialog(ConfirmDialog)
        await pilot.press("n")
        await ui.closed()
        await pilot.press("q")
        await ui.dialog(ConfirmDialog)
        await pilot.press("escape")
        await ui.closed()
        await pilot.press("escape")
        await ui.dialog(ConfirmDialog)
        await pilot.press("y")
        await ui.until(lambda: ui.configure not in ui.app.screen_stack)
        assert process is not None
        await ui.until(lambda: process.returncode is not None)


async def test_launch_asks_and_starts_here(place: Path, quick_planner: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[Recipe, Path]] = []
    shown: list[Path] = []

    def start(recipe: Recipe, root: Path) -> Path:
        started.append((recipe, root))
        return root / "runs" / "new"

    monkeypatch.setattr("app.launcher.start", start)
    monkeypatch.setattr(PenstockApp, "open_run", lambda app, path: shown.append(path))
    async with application(place).run_test(size=(120, 36)) as pilot:
        ui = await opened(pilot, place / "recipes" / "quickstart.py")
        await ui.planned()
        ui.configure._set_machine("gh200-480")
        await ui.planned()
        await pilot.press("l")
        dialog = await ui.dialog(ConfirmDialog)
        assert "this machine" in dialog._text
        assert "It fits" in dialog._text
        await pilot.press("n")
        await ui.closed()
        assert ui.configure.machine == "gh200-480"
        assert started == []
        await ui.planned()
        await pilot.press("l")
        await ui.dialog(ConfirmDialog)
        await pilot.press("y")
        await ui.until(lambda: bool(shown))
        assert started[0][0].name == "quickstart"
        assert started[0][1] == place
        assert shown == [place / "runs" / "new"]


async def test_launch_warns_of_what_does_not_fit_and_says_why_not(
    place: Path, quick_planner: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(recipe: Recipe, root: Path) -> Path:
        raise UserError("no room in runs/")

    monkeypatch.setattr("app.launcher.start", refuse)
    async with application(place).run_test(size=(120, 36)) as pilot:
        ui = await opened(pilot, place / "recipes" / "quickstart.py")
        await ui.type("train.chunk_tokens", "8192")
        await pilot.press("l")
        dialog = await ui.dialog(ConfirmDialog)
        assert "DOES NOT FIT" in dialog._text
        await pilot.press("y")
        await ui.until(lambda: "no room in runs/" in ui.notes)
        assert ui.app.screen is ui.configure


async def test_launch_without_the_model_s_folder_offers_random_weights(
    place: Path, quick_planner: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Recipe] = []
    monkeypatch.setattr("app.launcher.start", lambda recipe, root: started.append(recipe) or root)
    monkeypatch.setattr(PenstockApp, "open_run", lambda app, path: None)
    async with application(place).run_test(size=(120, 36)) as pilot:
        ui = await opened(pilot, place / "recipes" / "8b_8k.py")
        await ui.planned()
        await pilot.press("l")
        dialog = await ui.dialog(ConfirmDialog)
        assert "Llama-3.1-8B does not exist" in dialog._text
        await pilot.press("n")
        await ui.closed()
        await pilot.press("l")
        await ui.dialog(ConfirmDialog)
        await pilot.press("y")
        await ui.until(lambda: "Launch" in getattr(ui.app.screen, "_title", "") if ui.app.screen else False)
        await pilot.pause()
        await pilot.press("y")
        await ui.until(lambda: bool(started))
        assert started[0].model.path is None
        assert json.loads(quick_planner.read_text().splitlines()[-1])[2] is True


async def test_picking_a_model_folder_and_a_data_file(place: Path, quick_planner: Path) -> None:
    model = place / "models" / "tiny"
    model.mkdir(parents=True)
    (model / "config.json").write_text('{"model_type": "qwen3"}')
    (model / "model.safetensors").write_bytes(b"\0" * 2048)
    (place / "texts.txt").write_text("hello")
    async with application(place).run_test(size=(120, 36)) as pilot:
        ui = await opened(pilot, place / "recipes" / "quickstart.py")
        ui.configure.form.go("model.path")
        await pilot.press("o")
        picker = await ui.dialog(PathPicker)
        tree = picker.query_one("_Tree")
        await ui.until(lambda: len(tree.root.children) == 2)
        await pilot.press("down", "enter")
        await ui.until(lambda: any(node.children for node in tree.root.children))
        assert [str(node.label) for node in tree.root.children] == ["models", "recipes"]
        await pilot.press("down")
        assert "qwen3, 2.0 KiB" in tree.render_label(tree.cursor_node, Style(), Style()).plain
        await pilot.press("space")
        await ui.closed()
        assert ui.configure.form.draft.text("model.path") == "models/tiny"
        ui.configure.form.go("data.path")
        await pilot.press("o")
        picker = await ui.dialog(PathPicker)
        tree = picker.query_one("_Tree")
        await ui.until(lambda: len(tree.root.children) == 3)
        await pilot.press("end", "enter")
        await ui.closed()
        assert ui.configure.form.draft.text("data.path") == "texts.txt"
        await pilot.press("o")
        picker = await ui.dialog(PathPicker)
        await pilot.press("u", "tab")
        picker.query_one(Input).value = "/elsewhere/file"
        await pilot.press("enter")
        await ui.closed()
        assert ui.configure.form.draft.text("data.path") == "/elsewhere/file"
        ui.configure.form.go("train.steps")
        await pilot.press("o")
        await pilot.pause()
        assert "names no file" in ui.notes


def test_what_a_folder_is(tmp_path: Path) -> None:
    assert model_mark(tmp_path) == ""
    for text, mark in (
        ("[" * 100_000, ""),
        ("[]", ""),
        ('{"model_type": 3}', ""),
        ('{"model_type": "llama"}', "llama, no weights"),
    ):
        (tmp_path / "config.json").write_text(text)
        assert model_mark(tmp_path) == mark
    assert first_folder("", tmp_path) == first_folder("nowhere/at/all", tmp_path) == tmp_path
    assert first_folder('["/a"]', tmp_path) == tmp_path


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
async def test_any_size(place: Path, quick_planner: Path, glyphs: Glyphs) -> None:
    async with application(place, glyphs).run_test(size=(120, 36)) as pilot:
        ui = await opened(pilot, place / "recipes" / "quickstart.py")
        await ui.planned()
        for size in ((20, 5), (80, 24), (200, 60), (1, 1), (80, 24)):
            await pilot.resize_terminal(*size)
            for keys in (("tab", "end", "tab"), ("m", "escape"), ("d", "escape"), ("slash", "x", "escape")):
                await pilot.press(*keys)
                await pilot.pause()
            await ui.closed()


async def test_narrow_terminals_show_one_pane_and_the_plan_in_one_row(place: Path, quick_planner: Path) -> None:
    async with application(place).run_test(size=(80, 24)) as pilot:
        ui = await opened(pilot, place / "recipes" / "quickstart.py")
        await ui.planned()
        panel, summary = ui.configure.query_one(PlanPanel), ui.configure.query_one(PlanSummary)
        assert (panel.display, summary.display, ui.configure.form.display) == (False, True, True)
        assert "fits" in summary.render_line(0).text
        await pilot.press("tab")
        await pilot.pause()
        assert (panel.display, summary.display, ui.configure.form.display) == (True, False, False)
        assert panel.has_focus
        await pilot.press("escape")
        await pilot.pause()
        assert ui.configure.form.display
        await pilot.resize_terminal(120, 36)
        await pilot.pause()
        assert (panel.display, summary.display) == (True, False)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("broken.py", "recipe = ("),
        ("exits.py", "import sys\nsys.exit(3)"),
        ("torn.json", '{"name": "x", '),
        ("deep.json", "[" * 100_000),
        ("missing.py", None),
    ],
)
async def test_a_recipe_that_cannot_be_read_says_so(
    place: Path, quick_planner: Path, name: str, text: str | None
) -> None:
    if text is not None:
        (place / name).write_text(text)
    async with application(place).run_test(size=(100, 30)) as pilot:
        ui = await opened(pilot, place / name)
        assert name in ui.configure._broken
        await pilot.press("l", "ctrl+s", "m", "enter", "1", "tab", "slash", "d")
        await pilot.press("escape")
        await ui.until(lambda: ui.configure not in ui.app.screen_stack)


async def test_a_run_s_recipe_can_be_configured_again(place: Path, quick_planner: Path) -> None:
    path = place / "recipe.json"
    path.write_text(to_json(load_recipe(RECIPES / "quickstart.py")))
    async with application(place).run_test(size=(100, 30)) as pilot:
        ui = await opened(pilot, path)
        assert (await ui.planned())["recipe"] == "quickstart"


async def test_planner_trouble_leaves_the_form_working(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_client, "SERVER", (sys.executable, str(FAKE), "dies", str(tmp_path / "log")))
    async with application(place).run_test(size=(120, 36)) as pilot:
        ui = await opened(pilot, place / "recipes" / "quickstart.py")
        await ui.until(lambda: "ended again" in (ui.state.trouble or ""))
        assert "MemoryError: no room" in ui.page()
        await ui.type("train.steps", "20")
        assert ui.configure.draft is not None
        assert ui.configure.draft.recipe is not None
        await pilot.press("f5")
        await ui.until(lambda: "ended again" in (ui.state.trouble or ""))


async def test_the_real_planner(place: Path) -> None:
    """Another field, another plan; what does not fit comes with fixes, and a key takes one that fits."""
    async with application(place).run_test(size=(120, 36)) as pilot:
        ui = await opened(pilot, place / "recipes" / "quickstart.py")
        first = await ui.planned()
        assert first["fits"]
        await ui.type("train.steps", "42")
        second = await ui.planned()
        assert second["steps"] == 42
        assert second["run"]["seconds"] < first["run"]["seconds"]
        await ui.type("budgets.gpu", "16MiB")
        refused = await ui.planned()
        assert not refused["fits"]
        assert "does not fit" in ui.page()
        assert refused["refusal"]["changes"]
        await pilot.press("1")
        assert (await ui.planned())["fits"]
        await ui.type("budgets.ram", "900TB")
        await ui.until(lambda: ui.state.error is not None)
        assert "lower it" in ui.configure.form.rows["budgets.ram"].error
        await pilot.press("backspace")
        ui.configure._set_machine("gh200-480")
        there = await ui.planned()
        assert there["machine"]["name"] == "gh200-480"
