"""The look of the screens as SVG, of a run kept beside this file. UPDATE_SNAPSHOTS=1 takes what is drawn now."""

import os
import re
import shutil
import time
from pathlib import Path

import pytest
from sample_forecast import fitting
from sample_proposal import proposal
from seen import running, until
from textual.pilot import Pilot
from textual.widgets import Input

from penstock.app.console.rows import UNICODE
from penstock.tui.app import PenstockApp
from penstock.tui.data.processes import FinetuneRequest, FinetuneState
from penstock.tui.screens.finetune import FinetuneScreen

HERE = Path(__file__).parent
SNAPSHOTS = HERE / "snapshots"
NOW = 1_790_000_000.0
"""When the pictures are taken, Unix seconds."""

UPDATE = bool(os.environ.get("UPDATE_SNAPSHOTS"))
WAIT_S = 3.0 if UPDATE else 30.0

SIZES = [(80, 24), (120, 36), (200, 60)]
CASES = [("home", size) for size in SIZES] + [("run", size) for size in SIZES]
CASES += [("timeline", (120, 36)), ("compare", (120, 36)), ("help", (80, 24)), ("finetune", (120, 36))]


@pytest.fixture
def kept_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root with two copies of the kept run, at a path and of an age that are the same everywhere."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    root = tmp_path / "work"
    for name, age_s in (("baseline", 7200.0), ("wider", 60.0)):
        run = root / "runs" / name
        shutil.copytree(HERE / "snapshot_run", run)
        for file in run.rglob("*"):
            os.utime(file, (NOW - age_s, NOW - age_s))
    return root


async def picture(app: PenstockApp, pilot: Pilot[None], expected: str) -> str:
    """That is expected, once it is there; where it does not come, the last one."""
    found, deadline = "", time.monotonic() + (3 if UPDATE else WAIT_S)
    while not found or (found != expected and time.monotonic() < deadline):
        await pilot.pause(0.05)
        # Without the number that is new in each.
        found = re.sub(r"terminal-\d+", "terminal", app.export_screenshot(title="penstock", simplify=True))
    return found


def fill_form(app: PenstockApp) -> None:
    """As if what the form names had been looked at."""
    screen = app.screen
    assert isinstance(screen, FinetuneScreen)
    asked = FinetuneRequest("models/llama", "talks.jsonl", "3")
    for name in ("model", "data", "epochs"):
        screen.query_one(f"#{name}", Input).value = getattr(asked, name)
    screen.client.state = FinetuneState(asked, "", proposal(plan=fitting()))
    screen._show()


@pytest.mark.parametrize(
    ("screen", "size"), CASES, ids=lambda value: value if isinstance(value, str) else str(value[0])
)
async def test_a_screen_looks_as_it_did(kept_root: Path, screen: str, size: tuple[int, int]) -> None:
    run = kept_root / "runs" / "baseline"
    file = SNAPSHOTS / f"{screen}-{size[0]}x{size[1]}.svg"
    expected = "" if UPDATE else file.read_text()
    async with running(kept_root, size, glyphs=UNICODE, clock=lambda: NOW) as (app, pilot):
        if screen in ("run", "help"):
            app.open("run", run)
        elif screen == "timeline":
            app.open("timeline", run)
        elif screen == "compare":
            app.open("compare", [run, kept_root / "runs" / "wider"])
        elif screen == "finetune":
            app.open("finetune")
            await pilot.pause()
            fill_form(app)
        await pilot.pause()
        if screen == "help":
            await until(pilot, lambda: bool(app.screen.check_action("export", ())))  # once the run is read
            await pilot.press("question_mark")
        found = await picture(app, pilot, expected)
    if UPDATE:
        file.write_text(found)
    elif found != expected:
        beside = file.with_suffix(".new.svg")
        beside.write_text(found)
        pytest.fail(f"{file.name} is not what is drawn now, {beside}; UPDATE_SNAPSHOTS=1 takes it")
