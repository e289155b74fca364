"""The last spans of a run in columns, and how busy each lane was: exact shares, in tens of microseconds.

One thread adds to a `SpanStore`; any thread reads its `view`, which never changes once it is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.app.runs.files import Span as Span
from penstock.app.runs.files import span_of
from penstock.app.runs.lanes import LANES, union
from penstock.app.runs.ops import BETWEEN_STEPS, STEP_END

MAX_LANES = 24
MAX_NAMES = 20_000
"""Distinct ops and blocks; far more than a run has. What a foreign file holds beyond them is called `OTHER`."""
OTHER = "(other)"

_NAME_LENGTH = 80
_LOOK_BACK = 1000
"""So many of the last spans may stand for what is under way now."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class StepWindow(NamedTuple):
    """From the end of the step before's `clip` to the end of its own."""

    step: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Busy:
    """The times at which a lane had an op under way: disjoint intervals in order."""

    start_s: Floats
    end_s: Floats
    before_s: Floats
    """Busy seconds before each interval."""

    def until(self, times: Floats) -> Floats:
        """Busy seconds before each of `times`."""
        if not len(self.start_s):
            return np.zeros(len(times))
        i = np.searchsorted(self.start_s, times, side="right") - 1
        at = np.maximum(i, 0)
        inside = np.minimum(times, self.end_s[at]) - self.start_s[at]
        return np.where(i >= 0, self.before_s[at] + inside, 0.0)

    def between(self, start_s: float, end_s: float) -> float:
        begin, end = self.until(np.array([start_s, end_s]))
        return float(end - begin)

    def coverage(self, edges: Floats) -> Floats:
        """Share of each cell between two `edges` in which the lane had an op under way."""
        return np.diff(self.until(edges)) / np.diff(edges)

    def merge(self, start_s: Floats, end_s: Floats) -> Busy:
        """With further intervals; only what lies behind the earliest of them is worked on."""
        if not len(start_s):
            return self
        keep = int(np.searchsorted(self.end_s, start_s.min(), side="left"))
        start_s, end_s = union(
            np.concatenate((self.start_s[keep:], start_s)), np.concatenate((self.end_s[keep:], end_s))
        )
        first = self.before_s[keep - 1] + self.end_s[keep - 1] - self.start_s[keep - 1] if keep else 0.0
        before = np.empty(len(start_s))
        before[0] = first
        np.cumsum(end_s[:-1] - start_s[:-1], out=before[1:])
        before[1:] += first
        return Busy(
            np.concatenate((self.start_s[:keep], start_s)),
            np.concatenate((self.end_s[:keep], end_s)),
            np.concatenate((self.before_s[:keep], before)),
        )


IDLE = Busy(np.zeros(0), np.zeros(0), np.zeros(0))


_COLUMNS = {
    "lane": np.int8,
    "op": np.int16,
    "block": np.int16,
    "chunk": np.int64,
    "start_s": np.float64,
    "end_s": np.float64,
    "bytes": np.int64,
    "step": np.int64,
    "id": np.int64,
}


def _columns(available: int) -> dict[str, NDArray[Any]]:
    return {name: np.empty(available, dtype) for name, dtype in _COLUMNS.items()}


@dataclass(frozen=True)
class SpanView:
    """What a SpanStore held at one moment. Rows are in order of arrival, roughly that of their ends."""

    lanes: tuple[str, ...]
    ops: Sequence[str]
    blocks: Sequence[str]
    lane: NDArray[np.int8]
    op: NDArray[np.int16]
    block: NDArray[np.int16]
    chunk: Ints
    start_s: Floats
    end_s: Floats
    bytes: Ints
    step: Ints
    id: Ints
    busy: tuple[Busy, ...]
    complete_from_s: float
    """No span that was dropped for room ends after this time; 0 where none was."""
    _total_bytes: Floats
    """Of each op's number, of all spans that ever were."""
    _waited: list[tuple[tuple[int, ...], tuple[tuple[int, float], ...]]]
    """Of each row Span.waited and Span.awaited."""
    _offset: int

    @property
    def num_spans(self) -> int:
        return len(self.lane)

    @cached_property
    def first_start_s(self) -> float:
        return float(self.start_s.min()) if self.num_spans else 0.0

    @cached_property
    def last_end_s(self) -> float:
        return float(self.end_s.max()) if self.num_spans else 0.0

    def span(self, row: int) -> Span:
        return Span(
            self.lanes[self.lane[row]],
            self.ops[self.op[row]],
            self.blocks[self.block[row]],
            int(self.chunk[row]),
            float(self.start_s[row]),
            float(self.end_s[row]),
            int(self.bytes[row]),
            int(self.step[row]),
            int(self.id[row]),
            *self._waited[self._offset + row],
        )

    def waited(self, row: int) -> tuple[int, ...]:
        return self._waited[self._offset + row][0]

    def row_of_id(self, op_id: int) -> int | None:
        """The row of an op; None where it is not held."""
        ids, rows = self._by_id
        at = int(np.searchsorted(ids, op_id, side="right")) - 1
        return int(rows[at]) if at >= 0 and ids[at] == op_id else None

    def busy_s(self, lane: str, start_s: float, end_s: float) -> float:
        return self.busy_of(lane).between(start_s, end_s)

    def bytes_by_lane(self, start_s: float, end_s: float) -> dict[str, int]:
        """Lane -> payload of the ops that ended in a window."""
        rows = np.flatnonzero((self.end_s > start_s) & (self.end_s <= end_s))
        moved = np.bincount(self.lane[rows], weights=self.bytes[rows], minlength=len(self.lanes))
        return {lane: int(count) for lane, count in zip(self.lanes, moved, strict=True)}

    def bytes_by_op(self, start_s: float, end_s: float) -> dict[str, int]:
        """Op -> payload of those that ended in a window."""
        rows = np.flatnonzero((self.end_s > start_s) & (self.end_s <= end_s))
        moved = np.bincount(self.op[rows], weights=self.bytes[rows])
        return {self.ops[number]: int(moved[number]) for number in np.flatnonzero(moved).tolist()}

    @property
    def moved_bytes(self) -> dict[str, float]:
        """Op -> payload of all spans that ever were added."""
        return {
            self.ops[number]: float(self._total_bytes[number]) for number in np.flatnonzero(self._total_bytes).tolist()
        }

    def rows_between(self, start_s: float, end_s: float) -> Ints:
        """Rows of all lanes under way in a window, in order of their start."""
        rows = np.flatnonzero((self.end_s > start_s) & (self.start_s < end_s))
        return rows[np.argsort(self.start_s[rows], kind="stable")]

    def rows_of(self, lane: str) -> Ints:
        """All rows of a lane in order of their start."""
        if lane not in self._rows_of_lane:
            index = self.lanes.index(lane) if lane in self.lanes else -1
            rows = np.flatnonzero(self.lane == index)
            self._rows_of_lane[lane] = rows[np.argsort(self.start_s[rows], kind="stable")]
        return self._rows_of_lane[lane]

    def rows_at(self, lane: str, time_s: float) -> Ints:
        """Rows of a lane under way at a moment, in order of their start: several where its ops overlap."""
        rows = self.rows_of(lane)
        return rows[(self.start_s[rows] <= time_s) & (self.end_s[rows] > time_s)]

    def ended_since(self, time_s: float) -> list[tuple[str, str, str]]:
        """(lane, op, block) of the last ops, as far as they have ended since a moment: the newest first."""
        first = max(0, self.num_spans - _LOOK_BACK)
        rows = np.flatnonzero(self.end_s[first:] >= time_s)[::-1] + first
        numbers = zip(self.lane[rows].tolist(), self.op[rows].tolist(), self.block[rows].tolist(), strict=True)
        return [(self.lanes[lane], self.ops[op], self.blocks[block]) for lane, op, block in numbers]

    def between_s(self, window: StepWindow) -> tuple[float, str]:
        """Seconds at a step's beginning until validation and samples of the step before had ended, and which there
        were, for people; 0 where there were none."""
        until_s, words = window.start_s, []
        for op in BETWEEN_STEPS.keys() & set(self.ops):
            ends = self.end_s[self.op == self.ops.index(op)]
            ends = ends[(ends > window.start_s) & (ends < window.end_s)]
            if len(ends):
                until_s = max(until_s, float(ends.max()))
                words.append(BETWEEN_STEPS[op])
        return until_s - window.start_s, " and ".join(sorted(words))

    def figures(self, step: StepWindow) -> dict[str, float]:
        """Lane -> bytes a second of a step; of a lane that moves nothing the share of it in which it was busy."""
        length_s = step.end_s - step.start_s
        moved = self.bytes_by_lane(step.start_s, step.end_s)
        return {lane: (moved[lane] or self.busy_s(lane, step.start_s, step.end_s)) / length_s for lane in self.lanes}

    @cached_property
    def _by_id(self) -> tuple[Ints, Ints]:
        known = np.flatnonzero(self.id >= 0)
        rows = known[np.argsort(self.id[known], kind="stable")]
        return self.id[rows], rows

    @cached_property
    def _rows_of_lane(self) -> dict[str, Ints]:
        return {}

    @cached_property
    def steps(self) -> list[StepWindow]:
        """The steps held whole, in order of time. Steps done again after a crash come twice."""
        if STEP_END not in self.ops:
            return []
        ends = np.flatnonzero(self.op == self.ops.index(STEP_END))
        ends = ends[np.argsort(self.end_s[ends], kind="stable")]
        windows = []
        before_step, before_s = None, self.complete_from_s
        for row in ends:
            step, end_s = int(self.step[row]), float(self.end_s[row])
            if before_step == step - 1:
                windows.append(StepWindow(step, before_s, end_s))
            elif before_step is not None or (step == 1 and before_s == 0.0):
                of_step = (self.step == step) & (self.start_s >= before_s) & (self.start_s < end_s)
                windows.append(StepWindow(step, float(self.start_s[of_step].min(initial=end_s)), end_s))
            before_step, before_s = step, end_s
        return [window for window in windows if window.end_s > window.start_s]

    def busy_of(self, lane: str) -> Busy:
        """When the lane had an op under way."""
        return self.busy[self.lanes.index(lane)] if lane in self.lanes else IDLE


def printable(name: str) -> str:
    """The name in characters that any terminal shows in one cell each, and not too many."""
    return "".join(c if " " <= c <= "~" else "?" for c in name[:_NAME_LENGTH])


class _Names:
    def __init__(self, most: int, known: Iterable[str] = ()) -> None:
        self.names: list[str] = list(known)
        self._number = {name: number for number, name in enumerate(self.names)}
        self._most = most

    def number(self, name: str) -> int:
        number = self._number.get(name)
        if number is None:
            shown = printable(name)
            if len(self.names) >= self._most - 1:
                shown = OTHER
            number = self._number.get(shown)
            if number is None:
                number = self._number[shown] = len(self.names)
                self.names.append(shown)
            if len(self._number) < 2 * self._most:
                self._number[name] = number
        return number


class SpanStore:
    """The last `capacity` spans. Memory stays bounded however long the run; one thread adds, any thread reads."""

    def __init__(self, capacity: int = 100_000) -> None:
        self.capacity = capacity
        self.num_rejected = 0
        self._lanes = _Names(MAX_LANES, LANES)
        self._ops = _Names(MAX_NAMES)
        self._blocks = _Names(MAX_NAMES)
        self._columns = _columns(2 * capacity)
        self._waited: list[tuple[tuple[int, ...], tuple[tuple[int, float], ...]]] = []
        self._length = 0
        self._busy: list[Busy] = [IDLE] * len(LANES)
        self._complete_from_s = 0.0
        self._total_bytes = np.zeros(0)
        self.view = self._snapshot()
        """What is held now; it stays as it is while more is added."""

    def add(self, spans: Iterable[Any]) -> int:
        """Append parsed lines of spans.jsonl; returns how many were spans. One thread only."""
        rows = [row for row in map(self._row, spans) if row is not None]
        for first in range(0, len(rows), self.capacity):
            self._append(rows[first : first + self.capacity])
        if rows:
            self.view = self._snapshot()
        return len(rows)

    def _row(self, line: Any) -> tuple[Any, ...] | None:
        span = span_of(line) if isinstance(line, dict) else None
        if span is None:
            self.num_rejected += 1
            return None
        return self._lanes.number(span.lane), self._ops.number(span.op), self._blocks.number(span.block), *span[3:]

    def _append(self, rows: list[tuple[Any, ...]]) -> None:
        if self._length + len(rows) > 2 * self.capacity:
            self._compact(self.capacity - len(rows))
        at, end = self._length, self._length + len(rows)
        *values, waited, awaited = zip(*rows, strict=True)
        for column, value in zip(self._columns.values(), values, strict=True):
            column[at:end] = value
        self._waited.extend(zip(waited, awaited, strict=True))
        self._length = end
        ops, sizes = self._columns["op"][at:end], self._columns["bytes"][at:end]
        total: Floats = np.bincount(ops, weights=sizes, minlength=len(self._total_bytes)).astype(np.float64)
        total[: len(self._total_bytes)] += self._total_bytes
        self._total_bytes = total
        self._merge(at, end)

    def _compact(self, keep: int) -> None:
        """Move the last `keep` rows to fresh columns: whoever reads the old ones still can."""
        old, first = self._columns, self._length - keep
        self._columns = _columns(2 * self.capacity)
        for name, column in self._columns.items():
            column[:keep] = old[name][first : self._length]
        self._waited = self._waited[first:]
        self._complete_from_s = max(self._complete_from_s, float(old["end_s"][:first].max()))
        self._length = keep
        self._busy = [IDLE] * len(self._busy)
        self._merge(0, keep)

    def _merge(self, at: int, end: int) -> None:
        lanes, starts, ends = (self._columns[name] for name in ("lane", "start_s", "end_s"))
        self._busy += [IDLE] * (len(self._lanes.names) - len(self._busy))
        for lane in np.unique(lanes[at:end]):
            rows = np.flatnonzero(lanes[at:end] == lane) + at
            self._busy[lane] = self._busy[lane].merge(starts[rows], ends[rows])

    def _snapshot(self) -> SpanView:
        first = max(0, self._length - self.capacity)
        left_out = self._columns["end_s"][:first]
        return SpanView(
            lanes=tuple(self._lanes.names),
            ops=self._ops.names,
            blocks=self._blocks.names,
            busy=tuple(self._busy),
            complete_from_s=max(self._complete_from_s, float(left_out.max(initial=0.0))),
            _total_bytes=self._total_bytes,
            _waited=self._waited,
            _offset=first,
            **{name: column[first : self._length] for name, column in self._columns.items()},
        )
