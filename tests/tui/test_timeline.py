"""The timeline screen on real runs, and its view of lanes alone on spans that are made up."""

import itertools
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from cli_process import json_lines
from seen import notices, press, running, span, until
from textual.app import ComposeResult
from textual.events import MouseScrollUp
from textual.pilot import Pilot
from textual.widgets import Input

from penstock.app.console.rows import UNICODE
from penstock.app.runs.lanes import LANES
from penstock.tui.app import PenstockApp
from penstock.tui.data.run_data import UnderWay, ops_under_way
from penstock.tui.data.spans import SpanStore
from penstock.tui.screens.base import PenstockScreen
from penstock.tui.screens.lane_keys import LaneKeys
from penstock.tui.screens.timeline import TimelineScreen
from penstock.tui.widgets.lane_view import LAG_S, LaneView
from penstock.tui.widgets.lines import LineWidget


@asynccontextmanager
async def timeline(
    run: Path, step: int | None = None, size: tuple[int, int] = (120, 36)
) -> AsyncIterator[tuple[TimelineScreen, Pilot[None]]]:
    async with running(run.parent.parent, size) as (app, pilot):
        screen = TimelineScreen(run, step)
        await app.push_screen(screen)
        await until(pilot, lambda: screen.step is not None or screen.said != "looking for steps")
        if step is not None:
            await at_step(pilot, screen, step)
        yield screen, pilot


async def at_step(pilot: Pilot[None], screen: TimelineScreen, step: int) -> None:
    await until(pilot, lambda: screen.step is not None and screen.step.window.step == step)
    await pilot.pause()


def text_of(screen: TimelineScreen, name: str) -> str:
    pane = screen.query_one(f"#{name}", LineWidget)
    return "\n".join(pane.render_line(y).text.rstrip() for y in range(pane.size.height))


async def answer(pilot: Pilot[None], key: str, text: str) -> None:
    await pilot.press(key)
    await until(pilot, lambda: bool(pilot.app.screen.query(Input)))
    pilot.app.screen.query_one(Input).value = text
    await press(pilot, "enter")


async def test_the_last_step_is_shown_and_every_step_can_be_picked(first: Path) -> None:
    async with timeline(first) as (screen, pilot):
        await at_step(pilot, screen, 12)
        assert screen.lane_view.border_title == "first  step 12 of 12"
        assert [part for part in (*LANES, "bound by") if part not in text_of(screen, "lanes")] == []
        assert screen.step.analysis.path
        for keys in ([], ["down"] * 4):
            await pilot.press(*keys)
            idle = text_of(screen, "idle")
            assert idle.startswith("critical path")
            assert idle.splitlines()[1].startswith("compute     idle ")
            assert "critical path, in order" in idle
            assert ("d2h         idle" in idle) == bool(keys)
        await answer(pilot, "g", "3")
        for step in (3, 2, 1):
            await at_step(pilot, screen, step)
            await press(pilot, "left_square_bracket")
        assert "steps 1 to 12" in notices(pilot)
        await pilot.press(*["right_square_bracket"] * 3)
        await at_step(pilot, screen, 4)
        await answer(pilot, "g", "90")
        assert "90: the run has steps 1 to 12" in notices(pilot)
        await answer(pilot, "g", "last")
        await at_step(pilot, screen, 12)
        await pilot.press("g")
        await press(pilot, "escape")
        assert screen.step.window.step == 12


async def test_a_step_as_each_gpu_ran_it(first: Path, tmp_path: Path) -> None:
    """The same step of the next GPU, which has other ops, and after the last one of the first again."""
    run = tmp_path / "two"
    shutil.copytree(first, run)
    lines = [line for line in (run / "spans.jsonl").read_text().splitlines(keepends=True) if '"d2h"' not in line]
    (run / "spans.1.jsonl").write_text("".join(lines))
    async with timeline(run, 5) as (screen, pilot):
        await at_step(pilot, screen, 5)
        assert screen.lane_view.border_title == "two  GPU 0  step 5 of 12"
        ops = len(screen.step.rows)
        for gpu in (1, 0):
            await pilot.press("v")
            await at_step(pilot, screen, 5)
            assert screen.lane_view.border_title == f"two  GPU {gpu}  step 5 of 12"
            assert (len(screen.step.rows) < ops) == bool(gpu)
    async with timeline(first, 5) as (screen, pilot):
        await pilot.press("v")
        assert screen.lane_view.border_title == "first  step 5 of 12"


async def test_ops_are_selected_and_told(first: Path) -> None:
    async with timeline(first, 5, (160, 50)) as (screen, pilot):
        assert "no op selected" in text_of(screen, "inspector")
        await pilot.press("b")
        assert "select an op first" in notices(pilot)
        await pilot.press("down", "down", "down", "full_stop")
        selected = screen.lane_view.selected
        assert selected.lane == "compute"
        assert selected.op in text_of(screen, "inspector")
        assert "lane     compute" in text_of(screen, "inspector")
        assert str(screen.query_one("#ops").border_title).startswith("ops of compute (")
        assert selected.op in text_of(screen, "ops")
        await pilot.press("n", "comma")
        assert screen.lane_view.selected == selected
        await pilot.press("w", "a", "d", "s", "plus", "minus", "left", "right", "f")
        assert screen.lane_view.mode == "step"
        for shows in (True, False):
            await press(pilot, "p")
            assert (" predicted" in text_of(screen, "lanes")) == shows


async def test_walking_the_critical_path_and_search(first: Path) -> None:
    async with timeline(first, 7) as (screen, pilot):
        view, rows = screen.step.view, screen.step.analysis.path_rows

        async def selects(key: str, row: int) -> None:
            await pilot.press(key)
            assert screen.lane_view.selected == view.span(row)

        assert len(rows) > 3
        for row in rows[:3]:
            await selects("c", row)
        assert "critical" in text_of(screen, "inspector")
        await selects("b", rows[1])
        await answer(pilot, "slash", "layer_backward layers.1")
        found = [int(row) for row in screen.found]
        assert len(found) > 1
        assert {view.span(row)[1:3] for row in found} == {("layer_backward", "layers.1")}
        assert screen.lane_view.selected == view.span(found[0])
        await selects("n", found[1])
        await selects("N", found[0])
        await answer(pilot, "slash", "no such op")
        assert "no op of this step matches no such op" in notices(pilot)
        await pilot.press("slash")
        await press(pilot, "escape")
        assert screen.found is None


async def test_exports_and_a_forecast_of_some_layers(first: Path, tmp_path: Path) -> None:
    step, run = tmp_path / "step.json", first.parent.parent / "run.json"
    plan = json.loads((first / "plan.json").read_text())
    (first / "plan.json").write_text(json.dumps(plan | {"step_s": 1000.0}))
    async with timeline(first, 5) as (screen, pilot):
        assert "some layers" not in text_of(screen, "lanes")
        await press(pilot, "p")
        assert "forecast of some layers only" in text_of(screen, "lanes")
        await answer(pilot, "x", str(step))
        await until(pilot, step.exists)
        await answer(pilot, "X", "run.json")  # relative to the root
        await until(pilot, run.exists)
        await answer(pilot, "x", str(step))
        await until(pilot, lambda: not isinstance(pilot.app.screen, TimelineScreen))
        await pilot.press("n")  # do not replace
        await answer(pilot, "x", str(tmp_path / "none" / "step.json"))
        await until(pilot, lambda: "cannot be written" in notices(pilot))
        window, view = screen.step.window, screen.step.view
    ops, whole = ([e for e in json.loads(p.read_text())["traceEvents"] if e["ph"] == "X"] for p in (step, run))
    assert len(ops) == len(view.rows_between(window.start_s, window.end_s))
    assert any(event["name"].startswith("clip") for event in ops)
    assert len(whole) == len(json_lines(first / "spans.jsonl"))


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


async def test_missing_torn_and_vanishing_runs(first: Path) -> None:
    async with timeline(first.parent / "none") as (screen, pilot):
        await until(pilot, lambda: "gone" in screen.said)
        await press(pilot, "left_square_bracket", "g", "slash", "x", "full_stop", "c", "p", "f", "w")
        assert isinstance(pilot.app.screen, TimelineScreen)
    async with timeline(first, 5) as (screen, pilot):
        first.rename(first.with_name("aside"))  # a step on show outlives its directory
        await until(pilot, lambda: "gone" in screen.said)
        await pilot.press("full_stop", "c", "right_square_bracket", "x")
        assert screen.step is not None
    first = first.with_name("aside")
    (first / "spans.jsonl").write_text("junk\n[1]\n\x00")
    async with timeline(first) as (screen, pilot):
        await until(pilot, lambda: "no step has finished" in text_of(screen, "idle"))
        (first / "spans.jsonl").unlink()
        await until(pilot, lambda: "no ops yet" in text_of(screen, "idle"))


DRAWN_AT_ONCE = True
NAN = float("nan")


def step_spans(step: int, start: float) -> list[dict[str, Any]]:
    """A step of 2 s: a copy, four chunks, a gradient, clip."""
    ops = [("h2d", "load_weights", 0.0, 0.2, []), ("compute", "layer_forward", 0.2, 0.6, [0])]
    ops += [("compute", "layer_forward", 0.2 + 0.4 * i, 0.6 + 0.4 * i, []) for i in (1, 2, 3)]
    ops += [("d2h", "store_gradient", 1.8, 1.9, [4]), ("optimizer", "clip", 1.9, 2.0, [5])]
    found = []
    for number, (lane, op, begin, end, waited) in enumerate(ops):
        ids = {"id": 10 * step + number, "waited": [10 * step + other for other in waited]}
        more = {"chunk": number - 1 if lane == "compute" else -1, "bytes": 10**8 if lane == "h2d" else 0}
        found.append(span(lane, start + begin, start + end, op=op, block="layers.0", step=step, **ids, **more))
    return found


class OneLaneView(LaneKeys, PenstockScreen):
    SCOPE = "timeline"

    def __init__(self, lane_view: LaneView) -> None:
        super().__init__()
        self.lane_view = lane_view
        self.chosen: list[Any] = []

    def compose(self) -> ComposeResult:
        yield self.lane_view

    def on_lane_view_selected(self) -> None:
        self.chosen.append(self.lane_view.selected)


@asynccontextmanager
async def shown(lane_view: LaneView, size: tuple[int, int] = (80, 12)) -> AsyncIterator[tuple[LaneView, Pilot[None]]]:
    app = PenstockApp(Path("/nowhere"), glyphs=UNICODE)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        await app.push_screen(OneLaneView(lane_view))
        lane_view.focus()
        await pilot.pause()
        yield lane_view, pilot


def rows_of(lane_view: LaneView) -> list[str]:
    return [lane_view.render_line(y).text for y in range(lane_view.size.height)]


def drawn_width(lane_view: LaneView) -> float:
    """Of its window once it is drawn, in seconds."""
    rows_of(lane_view)
    return lane_view.window[1] - lane_view.window[0]


def lane_line(lane_view: LaneView, lane: str) -> str:
    """A lane's row up to its busy share; its history follows."""
    line = next(line for line in rows_of(lane_view) if line.startswith(lane))
    return line[: line.rindex("%") + 1]


def store_of(num_steps: int) -> SpanStore:
    store = SpanStore()
    for step in range(1, num_steps + 1):
        store.add(step_spans(step, 2.0 * (step - 1)))
    return store


async def test_live_follows_the_clock_by_whole_cells_freezes_and_ends() -> None:
    store = store_of(3)
    async with shown(LaneView(store)) as (lane_view, _):
        now = [UnderWay("compute", "layer_forward", "layers.0", 0, 6.2)]
        store.add(step_spans(4, 6.0)[:1])
        ends = []
        for clock in (7.0, 7.5, 7.51, 7.6, 8.0):
            lane_view.update_live(clock, now, True)
            title = rows_of(lane_view)[0]
            assert "last step 3, 2.00 s" in title
            assert "live, 2.00 s in view" in title
            assert drawn_width(lane_view) == pytest.approx(2.0)
            ends.append(lane_view.window[1])
            assert 0 <= ends[-1] - (clock - LAG_S) <= 2.0 / 40
        cell = 2.0 / (80 - 11 - 5 - 9)
        moved = [(b - a) / cell for a, b in itertools.pairwise(ends)]
        assert moved == pytest.approx([round(m) for m in moved], abs=1e-6)
        assert lane_line(lane_view, "compute").endswith(" 80%")  # of 5 to 7 s: 5 to 5.8 before clip, 6.2 to 7 under way
        assert rows_of(lane_view)[-1].startswith("now  layer_forward layers.0[0]")
        lane_view.update_live(5.0, now, True)  # a clock that falls back a little does not move the display back
        rows_of(lane_view)
        assert lane_view.window[1] == ends[-1]
    # An op is not drawn twice once its span is there; freezing holds the spans too; the last step stays.
    store = store_of(1)
    async with shown(LaneView(store)) as (lane_view, _):
        ended = [UnderWay("d2h", "store_gradient", "layers.0", -1, 1.8)]
        lane_view.update_live(4.0, ended, True)
        assert lane_line(lane_view, "d2h").endswith("  5%")
        store.add(step_spans(2, 2.0))
        lane_view.update_live(4.0, [], True)
        lane_view.freeze(True)
        before = rows_of(lane_view)
        store.add(step_spans(3, 4.0))
        lane_view.update_live(6.0, [], True)
        assert rows_of(lane_view)[1:-1] == before[1:-1]
        assert "frozen" in rows_of(lane_view)[0]
        lane_view.freeze(False)
        lane_view.update_live(6.0, [], True)
        assert rows_of(lane_view)[1:-1] != before[1:-1]
        lane_view.update_live(6.0, [], False)
        assert lane_line(lane_view, "compute").endswith("80%")
        assert lane_view.window == (4.0, 6.0)
        garbage: list[Any] = [None, 3, {"d2h": 3}, {"d2h": [1, {}, {"op": [], "start_s": "x", "chunk": {}}]}, {1: [{}]}]
        for clock, said, live in (*((6.1, now, True) for now in garbage), (NAN, None, True), (None, None, False)):
            lane_view.update_live(clock, ops_under_way(said), live)
            assert rows_of(lane_view)


async def test_selecting_zoom_pan_and_fit_by_keys() -> None:
    async with shown(LaneView(store_of(3), live=False), (100, 12)) as (lane_view, pilot):

        def selected() -> tuple[Any, ...]:
            return lane_view.lane, lane_view.selected.op, lane_view.selected.chunk, lane_view.selected.step

        assert "f fit" in rows_of(lane_view)[-1]
        await pilot.press("full_stop")  # the busiest lane's first op in view
        assert selected() == ("compute", "layer_forward", 0, 3)
        info = rows_of(lane_view)[-1]
        assert info.startswith("layer_forward layers.0[0]  400 ms  waited for load_weights layers.0 (h2d)")
        await pilot.press("full_stop")
        assert selected() == ("compute", "layer_forward", 1, 3)
        assert "waited for nothing" in rows_of(lane_view)[-1]
        await pilot.press("comma", "comma")
        assert selected() == ("compute", "layer_forward", 3, 2)  # the step before: it comes into view
        assert lane_view.mode == "free"
        assert lane_view.window[0] < lane_view.selected.end_s
        await pilot.press("up")
        assert selected()[:2] == ("h2d", "load_weights")
        assert "95.4 MiB  500 MB/s" in rows_of(lane_view)[-1]
        await pilot.press(*["down"] * 9)
        assert (lane_view.lane, lane_view.selected) == ("nvme_write", None)  # nothing there
        await pilot.press("full_stop")
        assert lane_view.selected is pilot.app.screen.chosen[-1] is None  # type: ignore[attr-defined]
        lane_view.clear_selection()
        assert "f fit" in rows_of(lane_view)[-1]
    async with shown(LaneView(store_of(5))) as (lane_view, pilot):
        lane_view.update_live(10.0, [], True)
        rows_of(lane_view)
        await pilot.press("w")
        assert (lane_view.mode, drawn_width(lane_view)) == ("live", pytest.approx(1.0))
        await pilot.press("minus", "s")
        assert drawn_width(lane_view) == pytest.approx(4.0)
        end = lane_view.window[1]
        await pilot.press("a")
        assert (lane_view.mode, lane_view.window[1]) == ("free", pytest.approx(end - 1.0))
        lane_view.update_live(12.0, [], True)
        assert lane_view.window[1] == pytest.approx(end - 1.0)  # held
        await pilot.press(*["left"] * 8)
        assert lane_view.window[0] == pytest.approx(0.0)  # not before the first span
        await pilot.press(*["right"] * 12)
        assert lane_view.mode == "live"  # at the edge it follows again
        await pilot.press("f")
        rows_of(lane_view)
        assert (lane_view.mode, lane_view.window) == ("step", (8.0, 10.0))
        await pilot.press("f")
        assert lane_view.mode == "live"
        await pilot.press(*["w"] * 60)
        assert drawn_width(lane_view) >= 1e-5
        await pilot.press(*["s"] * 60)
        assert drawn_width(lane_view) <= 20


async def test_an_empty_store_and_one_that_drops_what_is_selected() -> None:
    store = SpanStore(capacity=20)
    async with shown(LaneView(store)) as (lane_view, pilot):
        lane_view.update_live(None, [], True)
        assert "no ops yet" in rows_of(lane_view)[-1]
        for key in ("w", "s", "a", "d", "f", "full_stop", "comma", "up", "down"):
            await pilot.press(key)
            assert rows_of(lane_view)
        store.add(step_spans(1, 0.0))
        lane_view.update_live(2.0, [], True)
        await pilot.press("full_stop")
        assert lane_view.row_of_selected() is not None
        for step in range(2, 9):
            store.add(step_spans(step, 2.0 * step))
            lane_view.update_live(2.0 * step, [], True)
            rows_of(lane_view)
        assert lane_view.row_of_selected() is None
        assert "no longer kept" in rows_of(lane_view)[-1]


async def test_mouse_selects_zooms_and_drags() -> None:
    async with shown(LaneView(store_of(2), live=False), (80, 9)) as (lane_view, pilot):
        y = next(i for i, line in enumerate(rows_of(lane_view)) if line.startswith("compute"))
        await pilot.click(lane_view, offset=(40, y))
        assert (lane_view.selected.lane, lane_view.selected.step) == ("compute", 2)
        await pilot.click(lane_view, offset=(40, y + 3))
        assert (lane_view.lane, lane_view.selected) == ("nvme_write", None)
        assert "nothing running on nvme_write" in rows_of(lane_view)[-1]
        before = lane_view.window
        await pilot._post_mouse_events([MouseScrollUp], lane_view, offset=(40, y))
        start, end = lane_view.window
        assert end - start == pytest.approx((before[1] - before[0]) / 2)
        at = (40 - 11 + 0.5) / (80 - 11 - 5 - 9)
        assert start + at * (end - start) == pytest.approx(before[0] + at * (before[1] - before[0]))
        await pilot.mouse_down(lane_view, offset=(40, y))
        await pilot.hover(lane_view, offset=(50, y))
        await pilot.mouse_up(lane_view, offset=(50, y))
        assert lane_view.window[0] < start
        assert drawn_width(lane_view) == pytest.approx(end - start)
