"""The checklist of what a run prepares: rows as text, and on the run screen until the first step."""

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from seen import drawn, opened, running, until, widths

from penstock.app.rows import ASCII, UNICODE, plain
from penstock.app.rundir import RunLock
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
    dead = lines(84, 10, live=False)  # broken off, where nobody works on it
    assert dead[2].startswith("x pinning 350 GB")
    assert dead[3].split() == ["in", "all", "77.3", "s"]
    assert [line.split()[1] for line in lines(60, 3)] == ["tokenizing", "self-check", "pinning"]
    assert [line.split()[1] for line in lines(60, 2)] == ["self-check", "pinning"]
    assert lines(60, 0) == lines(60, 5, items=[]) == []


def test_narrow_rows_leave_out_what_matters_least() -> None:
    full = "> pinning 350 GB                     41.0 s  ####............   25%  88 of 350 GB"
    short = "> pinning 350 GB                     41.0 s   25%  88 of 350 GB"
    shown = {90: full, 78: full[:77] + "~", 66: short, 64: short, 50: short[:49], 48: short[:43]}
    assert {width: lines(width, 3)[2].rstrip() for width in shown} == shown
    assert (lines(24, 3)[0], lines(14, 3)[0]) == ("v tokenizing t~   33.2 s", "v tokenizing ~")


def test_rows_are_as_wide_as_asked_whatever_the_items_are() -> None:
    odd = [*ITEMS, Prepared("x" * 500, False, 1e300, "y" * 500, 1.0), Prepared("", False, None)]
    for width in (1, 2, 7, 12, 21, 40, 120):
        for glyphs in (ASCII, UNICODE):
            assert widths(checklist_rows(odd, width, 20, glyphs, live=True)) == {width}


def test_a_status_that_holds_anything_else_has_no_items(tmp_path: Path) -> None:
    data = RunData(tmp_path)
    for items in (None, 7, {}, "done", [None, 3, "x"], [[{}]]):
        data.status = {"preparing": items}
        assert data.preparing == []
    data.status = {"preparing": [{"name": "two\nlines", "seconds": "x", "detail": 3, "fraction": 12.0}, {"name": 5}]}
    assert data.preparing == [Prepared("two lines", False, None, "", 1.0), Prepared("?", False, None)]


@asynccontextmanager
async def preparing(root: Path, **more: Any) -> AsyncIterator[tuple[Any, RunScreen, Path]]:
    """The screen on a run without a step, whose lock this process holds."""
    run = root / "runs" / "begun"
    run.mkdir()
    shutil.copy(root / "runs" / "first" / "recipe.json", run)
    lock = RunLock(run)
    tell(run, ITEMS[:1])
    try:
        async with running(root, (80, 24), run=run, clock=lambda: 1_900_000_001.0, **more) as (_, pilot):
            screen = await opened(pilot, RunScreen)
            await until(pilot, lambda: screen.data.state == "preparing")
            yield pilot, screen, run
    finally:
        lock.release()


def tell(run: Path, items: list[Prepared], **more: Any) -> None:
    """Write the status that a process at these items would."""
    listed = [item._asdict() | {"state": "done" if item.done else "running"} for item in items]
    status = {"state": "preparing", "step": 0, "total_steps": 12, "heartbeat": 1_900_000_000.0, "preparing": listed}
    (run / "status.json.tmp").write_text(json.dumps(status | more))
    (run / "status.json.tmp").replace(run / "status.json")


async def test_the_screen_shows_it_until_the_first_step(root: Path) -> None:
    async with preparing(root, glyphs=ASCII) as (pilot, screen, run):
        await until(pilot, lambda: "tokenizing" in drawn(screen.loss))
        tell(run, ITEMS)
        await until(pilot, lambda: "pinning 350" in drawn(screen.loss))
        assert "41.0 s" in drawn(screen.loss)
        assert drawn(screen.loss).isascii()
        assert screen.loss.headline() == "before the first step"
        kpi = screen.query_one(KpiBar)
        assert "preparing  pinning 350 GB 41 s 25%  step 0/12" in plain(kpi.rows(120, 1))
        assert "n/a" not in plain(kpi.rows(120, 1))
        first = (root / "runs" / "first" / "metrics.jsonl").read_text().splitlines(keepends=True)[0]
        (run / "metrics.jsonl").write_text(first)
        tell(run, [item._replace(done=True) for item in ITEMS], step=1)
        await until(pilot, lambda: "tokenizing" not in drawn(screen.loss))
        await until(pilot, lambda: "pinning" not in plain(kpi.rows(120, 1)))


async def test_of_a_run_that_died_before_its_first_step_the_item_is_marked(root: Path) -> None:
    async with preparing(root) as (pilot, screen, run):
        tell(run, ITEMS, state="failed", error="no room")
        await until(pilot, lambda: screen.data.state == "failed" and "pinning" in drawn(screen.loss))
        assert f"{UNICODE.cross} pinning 350 GB" in drawn(screen.loss)
