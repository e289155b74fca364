"""The stream timeline as a widget: follows a running run, or shows a step of a past one; zoom, pan, select."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from textual import events
from textual.message import Message

from penstock.app.console.rows import Row
from penstock.storage.files.units import seconds_text
from penstock.tui.data.alerts import why_no_ops
from penstock.tui.data.critical import StepAnalysis, path_busy
from penstock.tui.data.run_data import UnderWay
from penstock.tui.data.spans import Busy, Span, SpanStore, SpanView, StepWindow
from penstock.tui.render.lanes import LaneScene, Layout, lanes_rows, layout
from penstock.tui.render.step_detail import now_row, ops_at, span_row, without_ended
from penstock.tui.widgets.lines import LineWidget

LAG_S = 1.0
"""Live, the right edge is so long ago: by then the spans of all lanes have arrived, and no cell changes any more."""

_SHORTEST_S = 2e-5
_ZOOM = 0.5
"""The wheel's zoom: how much of the time stays in view."""
_PAN = 0.125
"""The wheel's way, as a share of what is in view."""
_MARGIN = 0.02
"""How far before and behind a step one can look, as a share of it."""
_HISTORY_STEPS = 24
_NO_STEP_S = 5.0


class LaneView(LineWidget, can_focus=True):
    """Lanes of a SpanStore: `live` follows the run's last seconds, `step` fits a step, `free` holds what was chosen."""

    class Selected(Message):
        """Another lane, span, or no span, is selected."""

    def __init__(
        self, store: SpanStore | None = None, *, live: bool = True, id: str | None = None, classes: str | None = None
    ) -> None:
        super().__init__(id=id, classes=classes)
        self.store = store or SpanStore(capacity=1)
        self.predicted: SpanStore | None = None
        self.show_predicted = False
        self.predicted_note = ""
        self.frozen = False
        self.selected: Span | None = None
        self.mode = "live" if live else "step"
        """`live`, `step` or `free`."""
        self._held: SpanView | None = None
        """What is shown instead of the store's newest: while frozen, or a step that was looked up."""
        self._step: StepWindow | None = None
        self._critical: dict[str, Busy] | None = None
        self.lane: str | None = None
        self._cursor_s: float | None = None
        self._live_s: float | None = None
        """Seconds in view while live; None: as long as a step takes."""
        self._auto_s = _NO_STEP_S
        self.window = (0.0, 1.0)
        """Start and end of what is in view, in the spans' clock."""
        self._until_s = -math.inf
        self._running = False
        self._under_way: list[UnderWay] = []
        self._drag: tuple[int, float, float] | None = None
        self._info: tuple[Span, Row] | None = None
        self.nothing = why_no_ops("", live=True)
        self._history: dict[StepWindow, dict[str, float]] = {}

    @property
    def view(self) -> SpanView:
        return self._held if self._held is not None else self.store.view

    @property
    def is_empty(self) -> bool:
        return not self.view.num_spans

    @property
    def viewport(self) -> tuple[object, ...]:
        """What is looked at: another one where a key has done something."""
        over = not self._running and self.mode == "live"  # then it shows the last step
        mode = "step" if over and self._live_s is None else self.mode
        return mode, self.window if mode == "free" else None, self._live_s, self.lane, self.selected

    def update_live(self, clock_s: float | None, now: Sequence[UnderWay], running: bool) -> None:
        """Take the spans' clock and what is under way; more spans may be there as well."""
        if self.frozen:
            self._held = self._held or self.store.view
            return
        self._held = None
        view = self.store.view
        self._running = running
        frontier = view.last_end_s
        if running and clock_s is not None and math.isfinite(clock_s):
            frontier = min(max(clock_s - LAG_S, 0.0), max(view.last_end_s, clock_s))
            if self._until_s - 10 * LAG_S < frontier < self._until_s:
                frontier = self._until_s
        self._until_s = frontier
        self._under_way = without_ended(now, view) if running else []
        if not self.is_mounted or self.size.width:
            self.redraw()

    def show_step(self, view: SpanView, window: StepWindow, analysis: StepAnalysis) -> None:
        """Show a step that was looked up, with its critical path."""
        self._held, self._step = view, window
        self._critical = path_busy(view, analysis)
        self.mode = "step"
        self._running = False
        self._under_way = []
        self._until_s = math.inf
        self.clear_selection()

    def freeze(self, frozen: bool) -> None:
        self.frozen = frozen
        self._held = self.store.view if frozen else None
        self.redraw()

    def toggle_predicted(self) -> None:
        self.show_predicted = not self.show_predicted
        self.redraw()

    def zoom(self, factor: float, at_s: float | None = None) -> None:
        """Show `factor` times as long; `at_s` (the cursor, else the middle; live, the right edge) stays where it is."""
        start_s, end_s = self.window
        length = min(max((end_s - start_s) * factor, _SHORTEST_S), self._longest_s())
        if self.mode == "live" and at_s is None:
            self._live_s = length
            self.redraw()
            return
        if at_s is None:
            inside = self._cursor_s is not None and start_s <= self._cursor_s <= end_s
            at_s = self._cursor_s if inside and self._cursor_s is not None else (start_s + end_s) / 2
        begin = at_s - (at_s - start_s) * length / (end_s - start_s)
        self._hold(begin, begin + length)

    def pan(self, share: float) -> None:
        """Move by a share of what is in view; live, past the right edge, it follows again."""
        start_s, end_s = self.window
        moved = (end_s - start_s) * share
        if self.mode == "live" and share > 0:
            return
        if self._step is None and share > 0 and end_s + moved >= self._known_s:
            self._live_s = end_s - start_s
            self._set_mode("live")
            return
        self._hold(start_s + moved, end_s + moved)

    def fit(self) -> None:
        """Fit the step; once more: follow the run again."""
        self._live_s = None
        self._set_mode("live" if self.mode == "step" and self._step is None else "step")

    def clear_selection(self) -> None:
        self._cursor_s = None
        self._select(None)

    def select(self, span: Span) -> None:
        self.lane = span.lane
        start_s, end_s = self.window
        self._cursor_s = max(span.start_s, start_s) if span.end_s > start_s else span.start_s
        if self.mode == "live" or span.end_s <= start_s or span.start_s >= end_s:
            length = end_s - start_s
            inside = span.end_s > start_s and span.start_s < end_s
            begin = start_s if inside else (span.start_s + span.end_s - length) / 2
            self._hold(begin, begin + length)
        self._select(span)

    def row_of_selected(self) -> int | None:
        """The row of the selected span; None where there is none, or it is not held any more."""
        span, view = self.selected, self.view
        if span is None or span.lane not in view.lanes:
            return None
        rows = view.rows_of(span.lane)
        first = int(np.searchsorted(view.start_s[rows], span.start_s, side="left"))
        for row in rows[first : first + 64]:
            if view.start_s[row] > span.start_s:
                break
            if view.end_s[row] == span.end_s and view.id[row] == span.id:
                return int(row)
        return None

    def rows(self, width: int, height: int) -> list[Row]:
        return lanes_rows(width, height, self._scene(width, height), self.glyphs)

    def _scene(self, width: int, height: int) -> LaneScene:
        view = self.view
        steps = [self._step] if self._step is not None else view.steps
        row = self.row_of_selected()
        now = ops_at(view, self._under_way, self._known_s) if self.mode == "live" and self._running else None
        scene = LaneScene(
            view=view,
            start_s=self.window[0],
            end_s=self.window[1],
            until_s=self._known_s if self._step is None else None,
            origin_s=self._step.start_s if self._step else 0.0,
            steps=steps,
            under_way=self._under_way,
            now=now,
            predicted=self._predicted_view(),
            critical=self._critical,
            lane=self.lane if self.has_focus or self.selected is not None else None,
            row=row,
            cursor_s=self._cursor_s,
            history=self._figures(view, steps[-_HISTORY_STEPS:]) if self._step is None else {},
            title=self._title(steps[-1] if steps else None),
            info=self._info_row(view, row, now),
        )
        self._place_window(scene, width, height)
        start_s, end_s = self.window
        return replace(scene, start_s=start_s, end_s=end_s, status=self._status(end_s - start_s))

    def _figures(self, view: SpanView, steps: list[StepWindow]) -> dict[str, list[float]]:
        """Lane -> its rate in each of these steps, or its busy share where it moves nothing."""
        self._history = {step: self._history.get(step) or view.figures(step) for step in steps}
        result = self._history.values()
        return {lane: [figures.get(lane, 0.0) for figures in result] for lane in view.lanes} if result else {}

    def _place_window(self, scene: LaneScene, width: int, height: int) -> None:
        if self.mode == "free":
            return
        step = scene.steps[-1] if scene.steps else None
        if step is not None and (self.mode == "step" or (not self._running and self._live_s is None)):
            self.window = (step.start_s, step.end_s)
            return
        if step is not None and not 0.7 < (step.end_s - step.start_s) / self._auto_s < 1.2:
            self._auto_s = step.end_s - step.start_s
        length = self._live_s or self._auto_s
        known_s = self._known_s if scene.view.num_spans or self._running else length
        # Cells keep their borders while the window moves: it moves by whole cells, and none flickers.
        grid = layout(width, height, replace(scene, start_s=known_s - length, end_s=known_s))
        cell_s = length / grid.num_cells
        end_s = math.ceil(known_s / cell_s) * cell_s
        self.window = (end_s - length, end_s)

    def _predicted_view(self) -> SpanView | None:
        if self.predicted is None or not self.show_predicted or not self.predicted.view.num_spans:
            return None
        return self.predicted.view

    @property
    def _known_s(self) -> float:
        return self._until_s if math.isfinite(self._until_s) else self.view.last_end_s

    def _longest_s(self) -> float:
        first_s, last_s = self._limits()
        return last_s - first_s if self._step is not None else max(1.0, self._known_s - first_s)

    def _hold(self, start_s: float, end_s: float) -> None:
        first_s, last_s = self._limits()
        length = end_s - start_s
        start_s = max(min(start_s, last_s - length), first_s)
        self.window = (start_s, start_s + length)
        self._set_mode("free")

    def _limits(self) -> tuple[float, float]:
        """From where to where one can look."""
        if self._step is not None:
            margin = _MARGIN * (self._step.end_s - self._step.start_s)
            return self._step.start_s - margin, self._step.end_s + margin
        view = self.view
        return max(view.complete_from_s, view.first_start_s), max(self._known_s, view.last_end_s)

    def _set_mode(self, mode: str) -> None:
        self.mode = mode
        self.redraw()

    def _title(self, step: StepWindow | None) -> str:
        if step is None:
            return "lanes"
        which = f"step {step.step}" if self._step is not None else f"last step {step.step},"
        between_s, doing = self.view.between_s(step)
        between = f", {seconds_text(between_s)} of it {doing}" if between_s else ""
        return f"lanes  {which} {seconds_text(step.end_s - step.start_s)}{between}"

    def _status(self, length_s: float) -> str:
        how = "frozen, " if self.frozen else "live, " if self.mode == "live" and self._running else ""
        note = f"{self.predicted_note}   " if self._predicted_view() is not None and self.predicted_note else ""
        return f"{note}{how}{seconds_text(length_s)} in view"

    def _info_row(self, view: SpanView, row: int | None, now: list[UnderWay] | None) -> Row:
        """The selected op, what is under way, or what keys do."""
        if self.selected is not None:
            if row is None:
                return [("the selected op is no longer kept", "dim")]
            if self._info is None or self._info[0] != self.selected:
                self._info = (self.selected, span_row(view, row))
            return self._info[1]
        if not view.num_spans:
            return [(self.nothing, "dim")]
        if self._cursor_s is not None:
            return [(f"nothing running on {self.lane} at {self._cursor_s:.6f} s", "dim")]
        if now:
            return now_row(now)
        return [(". , op   up down lane   w s zoom   a d pan   f fit", "dim")] if self.has_focus else []

    def _select(self, span: Span | None, *, of_lane: bool = False) -> None:
        """`of_lane`: another lane is selected as well."""
        changed = of_lane or span != self.selected
        self.selected = span
        self.redraw()
        if changed and self.is_mounted:
            self.post_message(self.Selected())

    def move_lane(self, by: int) -> None:
        lanes = self.view.lanes
        index = lanes.index(self.lane) + by if self.lane in lanes else 0 if by > 0 else len(lanes) - 1
        self.lane = lanes[min(max(index, 0), len(lanes) - 1)]
        selected = self.selected if self._cursor_s is None else self._span_near(self.lane, self._cursor_s)
        self._select(selected, of_lane=True)

    def _span_near(self, lane: str, time_s: float, by: int = 0) -> Span | None:
        """The lane's span at a moment, or else the next one (`by` 1), the one before (-1), or the nearest."""
        view = self.view
        rows = view.rows_at(lane, time_s)
        if len(rows):
            return view.span(int(rows[0]))
        rows = view.rows_of(lane)
        if not len(rows):
            return None
        following = int(np.searchsorted(view.start_s[rows], time_s))
        if by == 0:
            away = np.minimum(np.abs(view.start_s[rows] - time_s), np.abs(view.end_s[rows] - time_s))
            following = int(away.argmin())
        elif by < 0:
            following -= 1
        return view.span(int(rows[min(max(following, 0), len(rows) - 1)]))

    def action_move(self, by: int) -> None:
        view = self.view
        if self.lane not in view.lanes:
            self.lane = max(view.lanes, key=lambda lane: view.busy_s(lane, *self.window))
        rows = view.rows_of(self.lane)
        if not len(rows):
            self._cursor_s = None
            self._select(None)
            return
        row = self.row_of_selected()
        if row is None or self.selected is None or self.selected.lane != self.lane:
            span = self._span_near(self.lane, self._entry_s(by) if self._cursor_s is None else self._cursor_s, by)
            assert span is not None
            self.select(span)
            return
        at = int(np.flatnonzero(rows == row)[0]) + by
        if 0 <= at < len(rows):
            self.select(view.span(int(rows[at])))

    def _entry_s(self, by: int) -> float:
        """Where selecting begins: live, with what ended last; else at the edge of what is in view."""
        start_s, end_s = self.window
        if self.mode == "live":
            return min(end_s, self._known_s)
        inside_s = (end_s - start_s) / 1e4
        return start_s + inside_s if by > 0 else end_s - inside_s

    def _time_at(self, x: int) -> float:
        grid = self._grid()
        start_s, end_s = self.window
        cell = min(max(x - grid.label_cells, 0), grid.num_cells - 1)
        return start_s + (cell + 0.5) * (end_s - start_s) / grid.num_cells

    def _grid(self) -> Layout:
        width, height = self.size
        return layout(width, height, self._scene(width, height))

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Zoom in where the pointer is; with shift or ctrl, back."""
        self._wheel(event, _ZOOM, -_PAN)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Zoom out; with shift or ctrl, on."""
        self._wheel(event, 1 / _ZOOM, _PAN)

    def on_mouse_scroll_left(self) -> None:
        self.pan(-_PAN)

    def on_mouse_scroll_right(self) -> None:
        self.pan(_PAN)

    def _wheel(self, event: events.MouseEvent, factor: float, share: float) -> None:
        event.stop()
        if event.shift or event.ctrl:
            self.pan(share)
        else:
            self.zoom(factor, None if self.mode == "live" else self._time_at(event.x))

    def on_mouse_down(self, event: events.MouseDown) -> None:
        self.capture_mouse()
        self._drag = (event.x, *self.window)

    def on_mouse_move(self, event: events.MouseMove) -> None:
        if self._drag is None or event.x == self._drag[0]:
            return
        x, start_s, end_s = self._drag
        moved = (x - event.x) * (end_s - start_s) / self._grid().num_cells
        self._hold(start_s + moved, end_s + moved)

    def on_mouse_up(self, event: events.MouseUp) -> None:
        """A click selects the lane and the op under the pointer; a further one there, the next op beneath it."""
        self.release_mouse()
        drag, self._drag = self._drag, None
        grid = self._grid()
        lane = grid.lane_at(event.y)
        if drag is None or drag[0] != event.x or lane is None or grid.cell_at(event.x) is None:
            return
        self.lane = lane
        time_s = self._time_at(event.x)
        half = (self.window[1] - self.window[0]) / grid.num_cells / 2
        rows = [int(row) for row in self.view.rows_between(time_s - half, time_s + half)]
        rows = [row for row in rows if self.view.lanes[self.view.lane[row]] == lane]
        if not rows:
            self._cursor_s = time_s
            self._select(None)
            return
        before = self.row_of_selected()
        self.select(self.view.span(rows[(rows.index(before) + 1) % len(rows)] if before in rows else rows[0]))

    def on_focus(self) -> None:
        self.redraw()

    on_blur = on_focus
