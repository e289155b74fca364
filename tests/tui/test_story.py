"""The whole story by keys alone, every process a real one: open, pick a recipe, change fields, see its plan change,
launch, watch, checkpoint, pause, go on, stop, resume, export."""

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
import real_runs
from textual.pilot import Pilot
from textual.screen import ModalScreen
from textual.widgets import DataTable

from penstock.app.console.rows import plain
from penstock.app.launch.launcher import start
from penstock.app.recipes.recipe import apply_overrides, load_recipe
from penstock.app.runs import control
from penstock.app.runs.checkpoints import checkpoint_steps
from penstock.app.runs.directory import read_info, read_status
from penstock.app.runs.files import JsonLines
from penstock.tui.app import PenstockApp
from penstock.tui.data import plan_client
from penstock.tui.screens.configure import ConfigureScreen
from penstock.tui.screens.home import HomeScreen
from penstock.tui.screens.run import RunScreen
from penstock.tui.widgets.kpi_bar import KpiBar
from penstock.tui.widgets.pages import PlanPanel

REAL_PLANNER = plan_client.SERVER
STEPS = 60
"""So many that it is still training when it is paused and stopped."""


async def until(pilot: Pilot[Any], condition: Callable[[], bool], what: str) -> None:
    try:
        await real_runs.until(condition, lambda _: pilot.pause(0.3))  # each time the screen is drawn
    except AssertionError:
        shown = "\n".join(str(strip.text) for strip in pilot.app.screen._compositor.render_strips())
        pytest.fail(f"waited in vain for {what}:\n{shown}")


async def ask(pilot: Pilot[Any], key: str, *answer: str) -> None:
    """Press a key that asks a question first, wait for the question, and answer it."""
    await pilot.press(key)
    await until(pilot, lambda: isinstance(pilot.app.screen, ModalScreen), "a question")
    await pilot.press(*(answer or ("y",)))


async def set_field(pilot: Pilot[Any], key: str, text: str) -> None:
    """As a person does it: filter by name, enter to edit, the value, enter."""
    await pilot.press("slash", *key, "enter", "enter", "end", "ctrl+u", *text, "enter", "escape")


def recipes_of(app: PenstockApp) -> DataTable[Any]:
    return app.screen.query_one("#recipes", DataTable)


def recipe_at_cursor(app: PenstockApp) -> str:
    rows = recipes_of(app).ordered_rows
    return Path(str(rows[recipes_of(app).cursor_row].key.value)).name if rows else ""


def plan_text(screen: ConfigureScreen) -> str:
    return plain(screen.query_one(PlanPanel).rows(70, 60))


async def test_from_opening_to_the_exported_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(plan_client, "SERVER", REAL_PLANNER)
    app = PenstockApp(tmp_path)
    async with app.run_test(size=(140, 44)) as pilot:
        # ---- open, pick a recipe
        await until(pilot, lambda: bool(recipe_at_cursor(app)), "recipes")
        assert recipes_of(app).has_focus  # there are no runs yet
        assert recipe_at_cursor(app) == "quickstart.py"
        real_runs.make_root(tmp_path)
        await pilot.press("slash", *"tiny")
        await until(pilot, lambda: recipe_at_cursor(app) == "tiny.py", "a recipe of one's own")
        await pilot.press("enter", "enter")
        await until(pilot, lambda: isinstance(app.screen, ConfigureScreen), "the form")
        screen = cast("ConfigureScreen", app.screen)
        await until(pilot, lambda: "tokens/s" in plan_text(screen), "a plan")
        before = plan_text(screen)
        # ---- change fields, see the plan change
        await set_field(pilot, "global_batch_size", "2")
        await set_field(pilot, "train.steps", str(STEPS))
        await pilot.press("slash", *"train.calibrate", "enter", "right", "escape")
        await until(pilot, lambda: f"{STEPS} steps" in plan_text(screen), "a new plan")
        assert plan_text(screen) != before
        # ---- launch
        await ask(pilot, "l")
        await until(pilot, lambda: isinstance(app.screen, RunScreen), "the run's screen")
        watched = cast("RunScreen", app.screen)
        (run,) = (tmp_path / "runs").iterdir()

        def step() -> int:
            return read_info(run).step

        def shown() -> str:
            return plain(app.screen.query_one(KpiBar).rows(138, 1))

        async def comes_to(state: str) -> None:
            await until(pilot, lambda: read_info(run).state == state and state in shown(), state)

        # ---- watch steps arrive
        await until(pilot, lambda: step() >= 3 and "running" in shown() and "ETA" in shown(), "three steps")
        await until(pilot, lambda: watched.data.spans.view.num_spans > 100, "their ops")
        # ---- a checkpoint
        await ask(pilot, "k", "enter")
        await until(pilot, lambda: bool(checkpoint_steps(run)), "the checkpoint")
        await until(pilot, lambda: bool(watched.data.checkpoints), "its name")
        # ---- pause, and go on
        await ask(pilot, "P")
        await comes_to("paused")
        held = step()
        await pilot.pause(0.5)
        assert step() == held
        await ask(pilot, "R")
        await until(pilot, lambda: step() > held, "a step after the pause")
        # ---- stop
        await ask(pilot, "S")
        await comes_to("stopped")
        assert held < step() < STEPS
        # ---- resume to the end
        await ask(pilot, "R")
        await comes_to("finished")
        assert [line["step"] for line in JsonLines(run / "metrics.jsonl")] == list(range(1, STEPS + 1))
        await until(pilot, lambda: watched.data.metrics.rows == watched.data.metrics.last_step == STEPS, "all of them")
        # ---- export
        folder = tmp_path / "exported"
        await ask(pilot, "e", "end", "ctrl+u", *str(folder), "enter")
        await until(pilot, lambda: (folder / "model.safetensors").exists(), "the exported folder")
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(app.screen, RunScreen), "the screen before")
        await pilot.press("escape")
        await until(pilot, lambda: isinstance(app.screen, HomeScreen), "home")


@pytest.mark.long
async def test_quitting_leaves_the_run_alone(tmp_path: Path) -> None:
    """Nothing in this process holds the run: it goes on when the application has closed."""
    root = real_runs.make_root(tmp_path)
    run = start(apply_overrides(load_recipe(root / "recipes" / "tiny.py"), ["train.steps=100000"]), root)
    try:
        app = PenstockApp(root, run)
        async with app.run_test(size=(100, 30)) as pilot:
            await until(pilot, lambda: read_info(run).step >= 2, "two steps")
            step = read_info(run).step
            await pilot.press("q")
        await real_runs.until(lambda: read_info(run).step > step + 1, asyncio.sleep)
        assert read_info(run).state == "running"
        control.ask(run, "stop")
        await real_runs.until(lambda: read_info(run).state == "stopped", asyncio.sleep)
    finally:
        with suppress(ProcessLookupError):  # nothing is left behind where the test fails
            os.kill(read_status(run)["pid"], signal.SIGKILL)
