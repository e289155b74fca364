import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from seen import span
from textual.app import ComposeResult
from textual.events import MouseScrollUp
from textual.pilot import Pilot

from penstock.app.rows import UNICODE
from penstock.tui.app import PenstockApp
from penstock.tui.data.spans import SpanStore
from penstock.tui.screens.base import PenstockScreen
from penstock.tui.widgets.lane_keys import LaneKeys
from penstock.tui.widgets.lane_view import LAG_S, LaneView

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

    def on_lane_view_selected(self, message: LaneView.Selected) -> None:
        self.chosen.append(message.span)


@asynccontextmanager
async def shown(lane_view: LaneView, size: tuple[int, int] = (80, 12)) -> AsyncIterator[tuple[LaneView, Pilot[None]]]:
    app = PenstockApp(Path("/nowhere"), glyphs=UNICODE)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        await app.push_screen(OneLaneView(lane_view))
        lane_view.focus()
        await pilot.pause()
        yield lane_view, pilot


def text_of(lane_view: LaneView) -> list[str]:
    return [lane_view.render_line(y).text for y in range(lane_view.size.height)]


def drawn_width(lane_view: LaneView) -> float:
    """Of its window once it is drawn, in seconds."""
    text_of(lane_view)
    return lane_view.window[1] - lane_view.window[0]


def lane_line(lane_view: LaneView, lane: str) -> str:
    """A lane's row up to its busy share; its history follows."""
    line = next(line for line in text_of(lane_view) if line.startswith(lane))
    return line[: line.rindex("%") + 1]


def store_of(num_steps: int) -> SpanStore:
    store = SpanStore()
    for step in range(1, num_steps + 1):
        store.add(step_spans(step, 2.0 * (step - 1)))
    return store


async def test_live_follows_the_clock_by_whole_cells() -> None:
    store = store_of(3)
    async with shown(LaneView(store)) as (lane_view, _):
        now = {"compute": [{"op": "layer_forward", "block": "layers.0", "chunk": 0, "step": 4, "start_s": 6.2}]}
        store.add(step_spans(4, 6.0)[:1])
        ends = []
        for clock in (7.0, 7.5, 7.51, 7.6, 8.0):
            lane_view.update_live(clock, now, True)
            title = text_of(lane_view)[0]
            assert "last step 3, 2.00 s" in title
            assert "live, 2.00 s in view" in title
            assert drawn_width(lane_view) == pytest.approx(2.0)
            ends.append(lane_view.window[1])
            assert 0 <= ends[-1] - (clock - LAG_S) <= 2.0 / 40
        cell = 2.0 / (80 - 11 - 5 - 9)
        moved = [(b - a) / cell for a, b in itertools.pairwise(ends)]
        assert moved == pytest.approx([round(m) for m in moved], abs=1e-6)
        assert lane_line(lane_view, "compute").endswith(" 80%")  # of 5 to 7 s: 5 to 5.8 before clip, 6.2 to 7 under way
        assert text_of(lane_view)[-1].startswith("now  layer_forward layers.0[0]")
        lane_view.update_live(5.0, now, True)  # a clock that falls back a little does not move the display back
        text_of(lane_view)
        assert lane_view.window[1] == ends[-1]


async def test_an_op_under_way_is_not_drawn_twice_once_its_span_is_there() -> None:
    async with shown(LaneView(store_of(1))) as (lane_view, _):
        ended = {"d2h": [{"op": "store_gradient", "block": "layers.0", "chunk": -1, "start_s": 1.8}]}
        lane_view.update_live(4.0, ended, True)
        assert lane_line(lane_view, "d2h").endswith("  5%")
        garbage: list[Any] = [None, 3, {"d2h": 3}, {"d2h": [1, {}, {"op": [], "start_s": "x", "chunk": {}}]}, {1: [{}]}]
        for clock, now, live in (*((4.1, now, True) for now in garbage), (NAN, None, True), (None, None, False)):
            lane_view.update_live(clock, now, live)
            assert text_of(lane_view)


async def test_zoom_pan_and_fit_by_keys() -> None:
    async with shown(LaneView(store_of(5))) as (lane_view, pilot):
        lane_view.update_live(10.0, {}, True)
        text_of(lane_view)
        await pilot.press("w")
        assert (lane_view.mode, drawn_width(lane_view)) == ("live", pytest.approx(1.0))
        await pilot.press("minus", "s")
        assert drawn_width(lane_view) == pytest.approx(4.0)
        end = lane_view.window[1]
        await pilot.press("a")
        assert (lane_view.mode, lane_view.window[1]) == ("free", pytest.approx(end - 1.0))
        lane_view.update_live(12.0, {}, True)
        assert lane_view.window[1] == pytest.approx(end - 1.0)  # held
        await pilot.press(*["left"] * 8)
        assert lane_view.window[0] == pytest.approx(0.0)  # not before the first span
        await pilot.press(*["right"] * 12)
        assert lane_view.mode == "live"  # at the edge it follows again
        await pilot.press("f")
        text_of(lane_view)
        assert (lane_view.mode, lane_view.window) == ("step", (8.0, 10.0))
        await pilot.press("f")
        assert lane_view.mode == "live"
        await pilot.press(*["w"] * 60)
        assert drawn_width(lane_view) >= 1e-5
        await pilot.press(*["s"] * 60)
        assert drawn_width(lane_view) <= 20


async def test_selecting_by_keys() -> None:
    async with shown(LaneView(store_of(3), live=False), (100, 12)) as (lane_view, pilot):

        def selected() -> tuple[Any, ...]:
            return lane_view.lane, lane_view.selected.op, lane_view.selected.chunk, lane_view.selected.step

        assert "f fit" in text_of(lane_view)[-1]
        await pilot.press("full_stop")  # the busiest lane's first op in view
        assert selected() == ("compute", "layer_forward", 0, 3)
        info = text_of(lane_view)[-1]
        assert info.startswith("layer_forward layers.0[0]  400 ms  waited for load_weights layers.0 (h2d)")
        await pilot.press("full_stop")
        assert selected() == ("compute", "layer_forward", 1, 3)
        assert "waited for nothing" in text_of(lane_view)[-1]
        await pilot.press("comma", "comma")
        assert selected() == ("compute", "layer_forward", 3, 2)  # the step before: it comes into view
        assert lane_view.mode == "free"
        assert lane_view.window[0] < lane_view.selected.end_s
        await pilot.press("up")
        assert selected()[:2] == ("h2d", "load_weights")
        assert "95.4 MiB  500 MB/s" in text_of(lane_view)[-1]
        await pilot.press(*["down"] * 9)
        assert (lane_view.lane, lane_view.selected) == ("nvme_write", None)  # nothing there
        await pilot.press("full_stop")
        assert lane_view.selected is pilot.app.screen.chosen[-1] is None  # type: ignore[attr-defined]
        lane_view.clear_selection()
        assert "f fit" in text_of(lane_view)[-1]


async def test_selection_survives_what_arrives_and_says_when_it_is_dropped() -> None:
    store = SpanStore(capacity=20)
    store.add(step_spans(1, 0.0))
    async with shown(LaneView(store)) as (lane_view, pilot):
        lane_view.update_live(2.0, {}, True)
        await pilot.press("full_stop")
        assert lane_view.row_of_selected() is not None
        for step in range(2, 9):
            store.add(step_spans(step, 2.0 * step))
            lane_view.update_live(2.0 * step, {}, True)
            text_of(lane_view)
        assert lane_view.row_of_selected() is None
        assert "no longer kept" in text_of(lane_view)[-1]


async def test_runs_of_before_say_that_nothing_is_recorded() -> None:
    store = SpanStore()
    store.add([{k: v for k, v in line.items() if k not in ("id", "waited")} for line in step_spans(1, 0.0)])
    async with shown(LaneView(store, live=False)) as (lane_view, pilot):
        await pilot.press("full_stop")
        assert "what it waited for is not recorded" in text_of(lane_view)[-1]


async def test_mouse_selects_zooms_and_drags() -> None:
    async with shown(LaneView(store_of(2), live=False), (80, 9)) as (lane_view, pilot):
        y = next(i for i, line in enumerate(text_of(lane_view)) if line.startswith("compute"))
        await pilot.click(lane_view, offset=(40, y))
        assert (lane_view.selected.lane, lane_view.selected.step) == ("compute", 2)
        await pilot.click(lane_view, offset=(40, y + 3))
        assert (lane_view.lane, lane_view.selected) == ("nvme_write", None)
        assert "nothing running on nvme_write" in text_of(lane_view)[-1]
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


async def test_freezing_holds_the_spans_too_and_the_last_step_is_shown_in_the_end() -> None:
    store = store_of(2)
    async with shown(LaneView(store)) as (lane_view, _):
        lane_view.update_live(4.0, {}, True)
        lane_view.freeze(True)
        before = text_of(lane_view)
        store.add(step_spans(3, 4.0))
        lane_view.update_live(6.0, {}, True)
        assert text_of(lane_view)[1:-1] == before[1:-1]
        assert "frozen" in text_of(lane_view)[0]
        lane_view.freeze(False)
        lane_view.update_live(6.0, {}, True)
        assert text_of(lane_view)[1:-1] != before[1:-1]
        lane_view.update_live(6.0, {}, False)
        assert lane_line(lane_view, "compute").endswith("80%")
        assert lane_view.window == (4.0, 6.0)


async def test_an_empty_store() -> None:
    async with shown(LaneView(SpanStore())) as (lane_view, pilot):
        lane_view.update_live(None, None, True)
        assert "no ops yet" in text_of(lane_view)[-1]
        for key in ("w", "s", "a", "d", "f", "full_stop", "comma", "up", "down"):
            await pilot.press(key)
            assert text_of(lane_view)
