"""Why a step took as long as it did: its critical path, and what each lane waited for while it was idle.

An op begins when its lane is free, when all it waits for is done, and, lanes being in order, not before the op in front
of it. Its blocker is what ended last of these. From the end of `clip`, where a step ends, blockers lead back to where
the step began.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from penstock.app.runs.ops import STEP_END
from penstock.tui.data.spans import IDLE, Busy, Ints, SpanView, StepWindow

EPSILON_S = 2e-6
"""Times on a GPU are no more exact."""

_MAX_OVERLAPS = 64
"""Ops of a lane under way at once, at most."""

IdleKind = Literal["waiting", "starting", "for no op", "no more work"]
"""waiting: for `cause_row`. starting: what it waited for was done. for no op: it waited for none, and yet did not
run: it was not scheduled yet, or its thread did not run. no more work: none follows in what was read."""


class PathPart(NamedTuple):
    """A stretch of the critical path: an op, or (`row` None) a gap between two in which neither ran."""

    row: int | None
    start_s: float
    end_s: float


class Idle(NamedTuple):
    """A stretch in which a lane had nothing under way."""

    start_s: float
    end_s: float
    kind: IdleKind
    cause_row: int | None


class IdleTotal(NamedTuple):
    """Idle seconds of a lane by cause."""

    kind: IdleKind
    op: str
    blocks: tuple[str, ...]
    """Of the ops waited for, longest wait first."""
    seconds: float


@dataclass(frozen=True)
class StepAnalysis:
    """What is known about a step's time."""

    window: StepWindow
    path: list[PathPart] = field(default_factory=list)
    """From the step's beginning to its end, without holes."""
    idle: dict[str, list[Idle]] = field(default_factory=dict)

    @property
    def length_s(self) -> float:
        return self.window.end_s - self.window.start_s

    @property
    def path_ops(self) -> list[tuple[int, float]]:
        """The path's ops in order: each one's row, and its seconds of the path."""
        return [(part.row, part.end_s - part.start_s) for part in self.path if part.row is not None]

    @property
    def path_rows(self) -> list[int]:
        return [row for row, _ in self.path_ops]

    @property
    def gap_s(self) -> float:
        return sum(part.end_s - part.start_s for part in self.path if part.row is None)

    def path_by_lane(self, view: SpanView) -> dict[str, float]:
        seconds: dict[str, float] = defaultdict(float)
        for row, length_s in self.path_ops:
            seconds[view.lanes[view.lane[row]]] += length_s
        return dict(sorted(seconds.items(), key=lambda item: -item[1]))

    def idle_s(self, lane: str) -> float:
        """Seconds of the step in which the lane had nothing under way."""
        return sum(part.end_s - part.start_s for part in self.idle.get(lane, []))

    def idle_totals(self, view: SpanView, lane: str) -> list[IdleTotal]:
        """The lane's idle seconds by cause, longest first; ops of the same name together."""
        blocks: dict[tuple[IdleKind, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for part in self.idle.get(lane, []):
            op = block = ""
            if part.cause_row is not None:
                op, block = view.ops[view.op[part.cause_row]], view.blocks[view.block[part.cause_row]]
            blocks[part.kind, op][block] += part.end_s - part.start_s
        totals = [
            IdleTotal(kind, op, tuple(sorted(result, key=lambda b: -result[b])), sum(result.values()))
            for (kind, op), result in blocks.items()
        ]
        return sorted(totals, key=lambda total: -total.seconds)


class Blockers:
    """Finds what each op of a view waited for last."""

    def __init__(self, view: SpanView) -> None:
        self.view = view
        lanes = [np.flatnonzero(view.lane == lane) for lane in range(len(view.lanes))]
        self._by_end: list[Ints] = [rows[np.argsort(view.end_s[rows], kind="stable")] for rows in lanes]
        self._by_id: list[Ints] = [rows[np.argsort(view.id[rows], kind="stable")] for rows in lanes]

    def waited(self, row: int) -> list[int]:
        """Rows of the ops that were not done when the lane reached this one, as far as the view holds them."""
        result = map(self.view.row_of_id, self.view.waited(row))
        return [other for other in result if other is not None and other != row]

    def blocker(self, row: int) -> int | None:
        """The row of what ended last of all that this op had to wait for; None where nothing held it."""
        return self._last(row, [*self._lane_was_free(row), *self._ops_in_turn(row)])

    def awaited(self, row: int) -> int | None:
        """Like `blocker`, without the lane's own earlier ops that ended before this one began."""
        return self._last(row, self._ops_in_turn(row))

    def _last(self, row: int, candidates: Iterable[int]) -> int | None:
        end_s = self.view.end_s
        known = [other for other in candidates if other != row and end_s[other] <= end_s[row]]
        return max(known, key=lambda other: end_s[other], default=None)

    def _lane_was_free(self, row: int) -> list[int]:
        view = self.view
        rows = self._by_end[int(view.lane[row])]
        at = int(np.searchsorted(view.end_s[rows], view.start_s[row] + EPSILON_S, side="right")) - 1
        while at >= 0 and rows[at] == row:
            at -= 1
        return [int(rows[at])] if at >= 0 else []

    def _ops_in_turn(self, row: int) -> list[int]:
        """What this op waited for, and the ops in front of it that were still under way when it began."""
        view = self.view
        result = self.waited(row)
        rows = self._by_id[int(view.lane[row])]
        at = int(np.searchsorted(view.id[rows], view.id[row], side="left"))
        for before in rows[max(0, at - _MAX_OVERLAPS) : at][::-1]:
            if view.end_s[before] <= view.start_s[row] + EPSILON_S:
                break
            result += self.waited(int(before))
            result += self._lane_was_free(int(before))
        return result


def analyse(view: SpanView, window: StepWindow) -> StepAnalysis:
    blockers = Blockers(view)
    idle = {lane: _idle_times(view, window, lane, blockers) for lane in view.lanes}
    return StepAnalysis(window, _critical_path(view, window, blockers), idle)


def path_busy(view: SpanView, analysis: StepAnalysis) -> dict[str, Busy]:
    """Lane -> the critical path's stretches on it."""
    parts: dict[str, list[tuple[float, float]]] = {lane: [] for lane in view.lanes}
    for part in analysis.path:
        if part.row is not None:
            parts[view.lanes[view.lane[part.row]]].append((part.start_s, part.end_s))
    return {
        lane: IDLE.merge(np.array([start for start, _ in result]), np.array([end for _, end in result]))
        for lane, result in parts.items()
    }


def _critical_path(view: SpanView, window: StepWindow, blockers: Blockers) -> list[PathPart]:
    ends = np.flatnonzero((view.end_s >= window.end_s - 1e-9) & (view.end_s <= window.end_s + 1e-9))
    clips = [int(row) for row in ends if view.ops[view.op[row]] == STEP_END and view.step[row] == window.step]
    if not clips:
        return [PathPart(None, window.start_s, window.end_s)]
    row: int | None = clips[-1]
    parts: list[PathPart] = []
    seen: set[int] = set()
    until = window.end_s
    while row is not None and until > window.start_s and row not in seen:
        seen.add(row)
        blocker = blockers.blocker(row)
        free_s = window.start_s if blocker is None else max(window.start_s, float(view.end_s[blocker]))
        start_s = min(until, max(free_s, float(view.start_s[row])))
        parts.append(PathPart(row, start_s, until))
        parts.append(PathPart(None, min(free_s, start_s), start_s))
        until = min(free_s, start_s)
        row = blocker
    parts.append(PathPart(None, window.start_s, until))
    return [part for part in reversed(parts) if part.end_s > part.start_s]


def _idle_times(view: SpanView, window: StepWindow, lane: str, blockers: Blockers) -> list[Idle]:
    rows = view.rows_of(lane)
    starts = view.start_s[rows]
    result: list[Idle] = []
    for start_s, end_s in _gaps(view, window, lane):
        at = int(np.searchsorted(starts, end_s - 1e-12, side="left"))
        if at == len(rows):
            result.append(Idle(start_s, end_s, "no more work", None))
            continue
        cause = blockers.awaited(int(rows[at]))
        if cause is None or view.end_s[cause] <= start_s:
            result.append(Idle(start_s, end_s, "for no op", None))
            continue
        done_s = min(end_s, float(view.end_s[cause]))
        result.append(Idle(start_s, done_s, "waiting", cause))
        if done_s < end_s:
            result.append(Idle(done_s, end_s, "starting", None))
    return result


def _gaps(view: SpanView, window: StepWindow, lane: str) -> list[tuple[float, float]]:
    busy = view.busy_of(lane)
    first = int(np.searchsorted(busy.end_s, window.start_s, side="right"))
    last = int(np.searchsorted(busy.start_s, window.end_s, side="left"))
    starts = np.maximum(busy.start_s[first:last], window.start_s).tolist()
    ends = np.minimum(busy.end_s[first:last], window.end_s).tolist()
    borders = zip([window.start_s, *ends], [*starts, window.end_s], strict=True)
    return [(begin, end) for begin, end in borders if end > begin]
