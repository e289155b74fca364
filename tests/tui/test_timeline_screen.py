from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import real_runs
from textual.pilot import Pilot
from textual.widgets import Input

from penstock.tui.app import PenstockApp
from penstock.tui.screens.timeline import TimelineScreen
from penstock.tui.widgets.lines import LineWidget


@asynccontextmanager
async def timeline(
    run: Path, step: int | None = None, size: tuple[int, int] = (120, 36)
) -> AsyncIterator[tuple[TimelineScreen, Pilot[None]]]:
    app = PenstockApp(run.parent.parent)
    async with app.run_test(size=size, notifications=True) as pilot:
        screen = TimelineScreen(run, step)
        await app.push_screen(screen)
        await until(pilot, lambda: screen.step is not None or screen.said != "looking for steps")
        if step is not None:
            await at_step(pilot, screen, step)
        yield screen, pilot


async def until(pilot: Pilot[None], condition: Callable[[], bool]) -> None:
    await real_runs.until(condition, pilot.pause)


async def at_step(pilot: Pilot[None], screen: TimelineScreen, step: int) -> None:
    await until(pilot, lambda: screen.step is not None and screen.step.spans.window.step == step)
    await pilot.pause()


def text_of(screen: TimelineScreen, name: str) -> str:
    pane = screen.query_one(f"#{name}", LineWidget)
    return "\n".join(pane.render_line(y).text.rstrip() for y in range(pane.size.height))


def notices(pilot: Pilot[None]) -> str:
    return "\n".join(notice.message for notice in pilot.app._notifications)


async def answer(pilot: Pilot[None], key: str, text: str) -> None:
    await pilot.press(key)
    await until(pilot, lambda: bool(pilot.app.screen.query(Input)))
    pilot.app.screen.query_one(Input).value = text
    await pilot.press("enter")
    await pilot.pause()


async def test_the_last_step_of_a_real_run(first: Path) -> None:
    async with timeline(first) as (screen, pilot):
        await at_step(pilot, screen, 12)
        assert screen.lane_view.border_title == "first  step 12 of 12"
        lanes = text_of(screen, "lanes")
        for lane in ("nvme_read", "h2d", "compute", "d2h", "optimizer", "nvme_write"):
            assert lane in lanes
        assert "bound by" in lanes
        idle = text_of(screen, "idle")
        assert idle.startswith("critical path")
        assert idle.splitlines()[1].startswith("compute     idle ")
        assert "critical path, in order" in idle
        assert "d2h         idle" not in idle
        await pilot.press("down", "down", "down", "down")
        assert "d2h         idle" in text_of(screen, "idle")
        assert text_of(screen, "idle").splitlines()[1].startswith("compute     idle ")
        assert screen.step.analysis.recorded
        path = screen.step.analysis.path
        window = screen.step.spans.window
        assert sum(part.end_s - part.start_s for part in path) == pytest.approx(window.end_s - window.start_s)


async def test_every_step_can_be_picked(first: Path) -> None:
    async with timeline(first, 3) as (screen, pilot):
        await pilot.press("left_square_bracket")
        await at_step(pilot, screen, 2)
        await pilot.press("left_square_bracket")
        await at_step(pilot, screen, 1)
        await pilot.press("left_square_bracket")
        await pilot.pause()
        assert "steps 1 to 12" in notices(pilot)
        await pilot.press("right_square_bracket", "right_square_bracket", "right_square_bracket")
        await at_step(pilot, screen, 4)
        await answer(pilot, "g", "9")
        await at_step(pilot, screen, 9)
        await answer(pilot, "g", "90")
        assert "90: the run has steps 1 to 12" in notices(pilot)
        await answer(pilot, "g", "last")
        await at_step(pilot, screen, 12)
        await pilot.press("g")
        await pilot.press("escape")
        await pilot.pause()
        assert screen.step.spans.window.step == 12


async def test_ops_are_selected_and_told(first: Path) -> None:
    async with timeline(first, 5, (160, 50)) as (screen, pilot):
        assert "no op selected" in text_of(screen, "inspector")
        await pilot.press("b")
        assert "select an op first" in notices(pilot)
        await pilot.press("down", "down", "down", "full_stop")
        selected = screen.lane_view.selected
        assert selected.lane == "compute"
        inspector = text_of(screen, "inspector")
        assert selected.op in inspector
        assert "lane     compute" in inspector
        assert str(screen.query_one("#ops").border_title).startswith("ops of compute (")
        assert selected.op in text_of(screen, "ops")
        await pilot.press("n", "comma")
        assert screen.lane_view.selected == selected
        for key in ("w", "a", "d", "s", "plus", "minus", "left", "right", "f"):
            await pilot.press(key)
        assert screen.lane_view.mode == "step"


async def test_walking_the_critical_path_and_search(first: Path) -> None:
    async with timeline(first, 7) as (screen, pilot):
        view, rows = screen.step.spans.view, screen.step.analysis.path_rows
        assert len(rows) > 3
        for row in rows[:3]:
            await pilot.press("c")
            assert screen.lane_view.selected == view.span(row)
        assert "critical" in text_of(screen, "inspector")
        await pilot.press("b")
        assert screen.lane_view.selected == view.span(rows[1])
        await answer(pilot, "slash", "layer_backward layers.1")
        assert len(screen.found) > 1
        found = [screen.step.spans.view.span(int(row)) for row in screen.found]
        assert {(span.op, span.block) for span in found} == {("layer_backward", "layers.1")}
        assert screen.lane_view.selected == found[0]
        await pilot.press("n")
        assert screen.lane_view.selected == found[1]
        await pilot.press("N")
        assert screen.lane_view.selected == found[0]
        await answer(pilot, "slash", "no such op")
        assert "no op of this step matches no such op" in notices(pilot)
        await pilot.press("slash")
        await pilot.press("escape")
        await pilot.pause()
        assert screen.found is None


async def test_the_forecast_beside_the_step(first: Path) -> None:
    async with timeline(first, 5) as (screen, pilot):
        await pilot.press("p")
        await pilot.pause()
        assert " predicted" in text_of(screen, "lanes")
        await pilot.press("p")
        await pilot.pause()
        assert " predicted" not in text_of(screen, "lanes")
    plan = json.loads((first / "plan.json").read_text())
    (first / "plan.json").write_text(json.dumps(plan | {"step_s": 1000.0}))
    async with timeline(first, 5) as (screen, pilot):
        assert "some layers" not in text_of(screen, "lanes")
        await pilot.press("p")
        await pilot.pause()
        assert "forecast of some layers only" in text_of(screen, "lanes")
    (first / "predicted.jsonl").unlink()
    async with timeline(first, 5) as (screen, pilot):
        await pilot.press("p")
        assert "no predicted.jsonl" in notices(pilot)


async def test_export_of_a_step_and_of_the_run(first: Path, tmp_path: Path) -> None:
    async with timeline(first, 5) as (screen, pilot):
        await answer(pilot, "x", str(tmp_path / "step.json"))
        await until(pilot, (tmp_path / "step.json").exists)
        await answer(pilot, "X", "run.json")  # relative to the root
        await until(pilot, (screen.penstock.root / "run.json").exists)
        await answer(pilot, "x", str(tmp_path / "step.json"))
        await until(pilot, lambda: not isinstance(pilot.app.screen, TimelineScreen))
        await pilot.press("n")  # do not replace
        await answer(pilot, "x", str(tmp_path / "none" / "step.json"))
        await until(pilot, lambda: "cannot be written" in notices(pilot))
        window, view = screen.step.spans.window, screen.step.spans.view
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    ops = [event for event in events if event["ph"] == "X"]
    assert len(ops) == len(view.rows_between(window.start_s, window.end_s))
    assert any(event["name"].startswith("clip") for event in ops)
    whole = json.loads((first.parent.parent / "run.json").read_text())["traceEvents"]
    spans = (first / "spans.jsonl").read_text().splitlines()
    assert sum(event["ph"] == "X" for event in whole) == len(spans)


async def test_a_live_run_gets_further_steps(first: Path) -> None:
    lines = (first / "spans.jsonl").read_text().splitlines(keepends=True)
    ends = [i for i, line in enumerate(lines) if '"op":"clip"' in line]
    (first / "spans.jsonl").write_text("".join(lines[: ends[3] + 1]) + lines[ends[3] + 1][:30])
    async with timeline(first) as (screen, pilot):
        await at_step(pilot, screen, 4)
        (first / "spans.jsonl").write_text("".join(lines[: ends[7] + 1]))
        await until(pilot, lambda: "of 8" in str(screen.lane_view.border_title))
        await pilot.press("right_square_bracket")
        await at_step(pilot, screen, 5)


async def test_a_run_of_before_claims_nothing(first: Path) -> None:
    lines = [json.loads(line) for line in (first / "spans.jsonl").read_text().splitlines()]
    old = [{key: value for key, value in line.items() if key not in ("id", "waited")} for line in lines]
    (first / "spans.jsonl").write_text("".join(json.dumps(line) + "\n" for line in old))
    async with timeline(first, 5) as (screen, pilot):
        idle = text_of(screen, "idle")
        assert "did not record what its ops waited for" in idle
        assert "waited for" not in idle.replace("what its ops waited for", "")
        assert "in order" not in idle
        await pilot.press("c")
        await pilot.press("full_stop", "b")
        assert notices(pilot).count("did not record") >= 2


async def test_missing_torn_and_vanishing_runs(first: Path) -> None:
    async with timeline(first.parent / "none") as (screen, pilot):
        await until(pilot, lambda: "gone" in screen.said)
        for key in ("left_square_bracket", "g", "slash", "x", "full_stop", "c", "p", "f", "w"):
            await pilot.press(key)
        await pilot.pause()
        assert isinstance(pilot.app.screen, TimelineScreen)
    (first / "spans.jsonl").write_text("junk\n[1]\n\x00")
    async with timeline(first) as (screen, pilot):
        await until(pilot, lambda: "no step has finished" in text_of(screen, "idle"))
    (first / "spans.jsonl").unlink()
    async with timeline(first) as (screen, pilot):
        await until(pilot, lambda: "no ops yet" in text_of(screen, "idle"))


async def test_a_step_on_show_outlives_its_directory(first: Path) -> None:
    async with timeline(first, 5) as (screen, pilot):
        shutil.rmtree(first)
        await until(pilot, lambda: "gone" in screen.said)
        await pilot.press("full_stop", "c", "right_square_bracket", "x")
        assert screen.step is not None
