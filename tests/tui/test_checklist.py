"""The checklist of what a run prepares: rows as text, and on the run screen until the first step."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import real_runs

from penstock.app.rows import ASCII, UNICODE, Glyphs, plain
from penstock.app.rundir import RunLock
from penstock.tui.app import PenstockApp
from penstock.tui.data.run_data import Prepared, RunData
from penstock.tui.render.checklist import checklist_rows
from penstock.tui.screens.run import RunScreen
from penstock.tui.widgets.kpi_bar import KpiBar

ITEMS = [
    Prepared("tokenizing the data", True, 33.2),
    Prepared("self-check", True, 3.1),
    Prepared("pinning 350 GB", False, 41.0, "88 of 350 GB", 0.25),
]


def lines(width: int, height: int, **more: Any) -> list[str]:
    options = {"live": True} | more
    return plain(checklist_rows(options.pop("items", ITEMS), width, height, ASCII, **options)).splitlines()


def test_what_is_done_and_what_is_being_done() -> None:
    assert [line.rstrip() for line in lines(84, 10)] == [
        "v tokenizing the data                33.2 s",
        "v self-check                          3.1 s",
        "> pinning 350 GB                     41.0 s  ####............   25%  88 of 350 GB",
        "  so far                             77.3 s",
    ]


def test_an_item_that_is_not_done_was_broken_off_where_nobody_works_on_it() -> None:
    dead = lines(84, 10, live=False)
    assert dead[2].startswith("x pinning 350 GB")
    assert dead[3].split() == ["in", "all", "77.3", "s"]


def test_few_rows_show_the_last_items() -> None:
    assert [line.split()[1] for line in lines(60, 3)] == ["tokenizing", "self-check", "pinning"]
    assert [line.split()[1] for line in lines(60, 2)] == ["self-check", "pinning"]
    assert lines(60, 0) == []
    assert lines(60, 5, items=[]) == []


def test_narrow_rows_leave_out_what_matters_least() -> None:
    full = "> pinning 350 GB                     41.0 s  ####............   25%  88 of 350 GB"
    pinning = {width: lines(width, 3)[2].rstrip() for width in (90, 78, 66, 64, 50, 48)}
    assert pinning[90] == full
    assert pinning[78] == full[:77] + "~"
    assert pinning[66] == "> pinning 350 GB                     41.0 s   25%  88 of 350 GB"
    assert pinning[64] == "> pinning 350 GB                     41.0 s   25%  88 of 350 GB"
    assert pinning[50] == "> pinning 350 GB                     41.0 s   25%"
    assert pinning[48] == "> pinning 350 GB                     41.0 s"
    assert lines(24, 3)[0] == "v tokenizing t~   33.2 s"
    assert lines(14, 3)[0] == "v tokenizing ~"


@pytest.mark.parametrize("width", [1, 2, 7, 12, 21, 40, 120])
def test_rows_are_as_wide_as_asked_whatever_the_items_are(width: int) -> None:
    odd = [*ITEMS, Prepared("x" * 500, False, 1e300, "y" * 500, 1.0), Prepared("", False, None)]
    for glyphs in (ASCII, UNICODE):
        rows = checklist_rows(odd, width, 20, glyphs, live=True)
        assert {len(plain([row])) for row in rows} == {width}


@pytest.mark.parametrize("items", [None, 7, {}, "done", [None, 3, "x"], [[{}]]])
def test_a_status_that_holds_anything_else_has_no_items(tmp_path: Path, items: Any) -> None:
    data = RunData(tmp_path)
    data.status = {"preparing": items}
    assert data.preparing == []


def test_fields_that_are_wrong_are_left_out(tmp_path: Path) -> None:
    data = RunData(tmp_path)
    data.status = {"preparing": [{"name": "two\nlines", "seconds": "x", "detail": 3, "fraction": 12.0}, {"name": 5}]}
    assert data.preparing == [Prepared("two lines", False, None, "", 1.0), Prepared("?", False, None)]


@asynccontextmanager
async def preparing(root: Path, size: tuple[int, int], **more: Any) -> AsyncIterator[tuple[Any, RunScreen, Path]]:
    """The screen on a run without a step, whose lock this process holds."""
    run = root / "runs" / "begun"
    run.mkdir()
    shutil.copy(root / "runs" / "first" / "recipe.json", run)
    lock = RunLock(run)
    tell(run, ITEMS[:1])
    app = PenstockApp(root, run=run, clock=lambda: 1_900_000_001.0, **more)
    try:
        async with app.run_test(size=size) as pilot:
            await real_runs.until(lambda: isinstance(app.screen, RunScreen), pilot.pause)
            screen = cast("RunScreen", app.screen)
            await real_runs.until(lambda: screen.data.state == "preparing", pilot.pause)
            yield pilot, screen, run
    finally:
        lock.release()


def tell(run: Path, items: list[Prepared], step: int = 0) -> None:
    """Write the status that a process at these items would."""
    now = 1_900_000_000.0
    listed = [item._asdict() | {"state": "done" if item.done else "running"} for item in items]
    status = {"state": "preparing", "step": step, "total_steps": 12, "heartbeat": now, "preparing": listed}
    (run / "status.json.tmp").write_text(json.dumps(status))
    (run / "status.json.tmp").replace(run / "status.json")


def pane(screen: RunScreen) -> str:
    widget = screen.loss
    return plain(widget.rows(max(1, widget.size.width), max(1, widget.size.height)))


@pytest.mark.parametrize(("size", "glyphs"), [((120, 36), UNICODE), ((80, 24), ASCII)])
async def test_the_screen_shows_it_until_the_first_step(
    root: Path, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int], glyphs: Glyphs
) -> None:
    if glyphs is ASCII:
        monkeypatch.setenv("NO_COLOR", "1")
    async with preparing(root, size, glyphs=glyphs) as (pilot, screen, run):
        await real_runs.until(lambda: "tokenizing" in pane(screen), pilot.pause)
        tell(run, ITEMS)
        await real_runs.until(lambda: "pinning 350" in pane(screen), pilot.pause)
        assert "41.0 s" in pane(screen)
        assert glyphs is UNICODE or pane(screen).isascii()
        assert screen.loss.headline() == "before the first step"
        kpi = screen.query_one(KpiBar)
        bar = plain(kpi.rows(120, 1))
        assert "preparing  pinning 350 GB 41 s 25%  step 0/12" in bar
        assert "n/a" not in bar
        first = (root / "runs" / "first" / "metrics.jsonl").read_text().splitlines(keepends=True)[0]
        (run / "metrics.jsonl").write_text(first)
        tell(run, [item._replace(done=True) for item in ITEMS], step=1)
        await real_runs.until(lambda: "tokenizing" not in pane(screen), pilot.pause)
        await real_runs.until(lambda: "pinning" not in plain(kpi.rows(120, 1)), pilot.pause)


async def test_of_a_run_that_died_before_its_first_step_the_item_is_marked(root: Path) -> None:
    async with preparing(root, (100, 30)) as (pilot, screen, run):
        tell(run, ITEMS)
        status = json.loads((run / "status.json").read_text()) | {"state": "failed", "error": "no room"}
        (run / "status.json").write_text(json.dumps(status))
        await real_runs.until(lambda: screen.data.state == "failed" and "pinning" in pane(screen), pilot.pause)
        assert f"{UNICODE.cross} pinning 350 GB" in pane(screen)
