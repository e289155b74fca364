"""What a trace shows beside the ops: steps, arrows, bytes that the tiers hold, rates of the lanes. Each class takes the
spans roughly in the order of their ends and gives events as it goes; what it remembers is bounded."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from penstock.app.runs.files import number, whole
from penstock.app.runs.ops import STEP_END
from penstock.engine.events import Span

Event = dict[str, Any]

PID = 1
STEPS_TRACK = 1_000_000
_TICK_US = 0.1
"""Times are written to this."""
_MOST_REMEMBERED = 1 << 16
"""Ops that may still be at an end of an arrow."""
_MOST_WAITING = 64
"""Ops of which one that has not come yet is remembered to be waited for."""
_MOST_ARROWS = 16
"""To one op: a commit comes after thousands of writes. Those that ended last stay."""
_MOST_TOGETHER = 8
"""Ops of a lane over which a rate is a mean."""
_GAP_S = 0.001
"""A lane that moves nothing for longer, and for longer than it did before, moves nothing."""


def microseconds(seconds: float) -> float:
    """The format's unit of time."""
    return round(seconds * 1e6, 1)


class _Slice(NamedTuple):
    track: int
    start_s: float
    end_s: float

    @property
    def last_us(self) -> float:
        """A moment in the slice, as late as can be."""
        return max(microseconds(self.start_s), round(microseconds(self.end_s) - _TICK_US, 1))


class Arrows:
    """From each op that an op waited for to that op: its dependencies that were not done when its lane reached it."""

    def __init__(self) -> None:
        self._done: dict[int, _Slice] = {}
        self._waiting: dict[int, deque[_Slice]] = {}
        """Op that has not come yet -> those that waited for it: lanes tell of their ops in turn."""
        self._count = 0

    def of(self, span: Span, track: int) -> Iterator[Event]:
        """The arrows whose second end is known with this span, which lies on `track`."""
        own = _Slice(track, span.start_s, span.end_s)
        known = [self._done[op] for op in span.waited if op in self._done]
        known.sort(key=lambda before: before.end_s, reverse=True)
        for before in known[:_MOST_ARROWS]:
            yield from self._arrow(before, own)
        if len(known) < _MOST_ARROWS:
            for op in islice((op for op in span.waited if op not in self._done), _MOST_ARROWS - len(known)):
                self._waiting.setdefault(op, deque(maxlen=_MOST_WAITING)).append(own)
        if span.id < 0:
            return
        for after in self._waiting.pop(span.id, ()):
            yield from self._arrow(own, after)
        self._done[span.id] = own
        for remembered in (self._done, self._waiting):
            if len(remembered) > _MOST_REMEMBERED:
                remembered.pop(next(iter(remembered)))

    def _arrow(self, before: _Slice, after: _Slice) -> Iterator[Event]:
        start, end = before.last_us, microseconds(after.start_s)
        if start > end:  # an arrow goes forward in time
            return
        self._count += 1
        both = {"name": "waits for", "cat": "dependency", "id": self._count, "pid": PID}
        yield {**both, "ph": "s", "tid": before.track, "ts": start}
        yield {**both, "ph": "f", "bp": "e", "tid": after.track, "ts": end}


class Steps:
    """A slice for every step, with what its line of `metrics` says, and the bytes that the tiers hold at its end."""

    def __init__(self, metrics: Iterable[Event] = (), start_s: float | None = None) -> None:
        """`start_s`: when the first step began; None: with the first span."""
        self._metrics = iter(metrics)
        self._line: Event | None = next(self._metrics, None)
        self._until_s = start_s
        self.count = 0

    def of(self, span: Span) -> Iterator[Event]:
        """What ends with this span."""
        if self._until_s is None:
            self._until_s = max(0.0, span.start_s)
        if span.op != STEP_END or span.end_s <= self._until_s:
            return
        self.count += 1
        start, end = microseconds(self._until_s), microseconds(span.end_s)
        self._until_s = span.end_s
        line = self._of_step(span.step)
        named = {name: number(line.get(name)) for name in ("loss", "grad_norm", "lr", "tokens_per_s")}
        args = {"step": span.step} | {name: value for name, value in named.items() if value is not None}
        both = {"name": f"step {span.step}", "cat": "step", "pid": PID, "tid": STEPS_TRACK}
        yield {**both, "ph": "B", "ts": start, "args": args}
        yield {**both, "ph": "E", "ts": end}
        held = line.get("tier_bytes")
        for tier in ("gpu", "ram", "nvme"):
            if isinstance(held, dict) and (size := whole(held.get(tier))) is not None:
                yield counter(f"{tier}, bytes held at most", end, "bytes", size)

    def _of_step(self, step: int) -> Event:
        while self._line is not None and self._line["step"] < step:
            self._line = next(self._metrics, None)
        return self._line if self._line is not None and self._line["step"] == step else {}

    @staticmethod
    def names() -> list[Event]:
        """The track's name and place, above the lanes."""
        track = {"ph": "M", "pid": PID, "tid": STEPS_TRACK}
        return [
            {"name": "thread_name", **track, "args": {"name": "steps"}},
            {"name": "thread_sort_index", **track, "args": {"sort_index": 0}},
        ]


class Rates:
    """What each lane moves, in GB/s: a mean over a few ops that follow one another, 0 where it moves nothing."""

    def __init__(self) -> None:
        self._lanes: dict[str, _Moving] = {}

    def of(self, span: Span) -> Iterator[Event]:
        """The rates that are known with this span."""
        if span.bytes > 0:
            moving = self._lanes.setdefault(span.lane, _Moving(f"{span.lane} GB/s"))
            yield from moving.add(span)

    def rest(self) -> Iterator[Event]:
        """Those of the last ops of all lanes."""
        for moving in self._lanes.values():
            yield from moving.flush()
            yield from moving.stop()


class _Moving:
    """The ops of a lane that share one rate."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._reported_s = -math.inf
        """Until when the rate has been reported."""
        self._start_s = self._end_s = 0.0
        self._bytes = self._count = 0

    def add(self, span: Span) -> Iterator[Event]:
        gap = span.start_s - self._end_s
        apart = gap > max(_GAP_S, self._end_s - self._start_s)
        if self._count and (apart or (self._count >= _MOST_TOGETHER and span.end_s > self._end_s)):
            yield from self.flush()
            if gap > _GAP_S:
                yield from self.stop()
        if not self._count:
            # What began while the rate of others was reported, or right behind it, counts from there.
            near = span.start_s - self._reported_s <= _GAP_S
            self._start_s = self._reported_s if near else span.start_s
            self._end_s = self._start_s
        self._count += 1
        self._bytes += span.bytes
        self._end_s = max(self._end_s, span.end_s)

    def flush(self) -> Iterator[Event]:
        """The rate of the ops so far; ops that took no time count with the next ones."""
        seconds = self._end_s - self._start_s
        if self._count and microseconds(self._end_s) > microseconds(self._start_s):
            rate = float(f"{self._bytes / seconds / 1e9:.4g}")
            yield counter(self._name, microseconds(self._start_s), "GB/s", rate)
            self._reported_s = self._end_s
            self._bytes = 0
        self._count = 0

    def stop(self) -> Iterator[Event]:
        """From the end of what was reported the lane moves nothing."""
        if self._reported_s > -math.inf:
            yield counter(self._name, microseconds(self._reported_s), "GB/s", 0.0)


def counter(name: str, at_us: float, unit: str, value: float) -> Event:
    """The value of a counter from a moment on."""
    return {"name": name, "ph": "C", "pid": PID, "ts": at_us, "args": {unit: value}}
