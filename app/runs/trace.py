"""A run's spans as a Chrome trace for Perfetto (https://ui.perfetto.dev): a track per lane and one of steps, arrows
from op to op, counters. A lane whose ops overlap takes further tracks, as the format allows none within one."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from penstock.app.runs.files import JsonLines
from penstock.app.runs.lanes import LANES
from penstock.app.runs.ops import STEP_END, action_of
from penstock.app.runs.rank_spans import spans_of
from penstock.app.runs.trace_events import PID, Arrows, Rates, Steps, microseconds
from penstock.engine.events import Span, op_text
from penstock.storage.files.disk import prepare_file, publish
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import printable

_MAX_ROWS = 100
"""Tracks of one lane; far more ops than a lane ever has under way at once."""
_PIECE_LINES = 4096
_TEXT = json.JSONEncoder(separators=(",", ":")).encode


class _Tracks:
    """Assigns spans to tracks. A track holds no overlaps: ops of a lane that run at once take further rows of it."""

    def __init__(self) -> None:
        self._lanes = {lane: index for index, lane in enumerate(LANES)}
        self._ends: dict[str, list[float]] = {lane: [0.0] for lane in LANES}
        """Per lane, the latest end of every row. Spans come roughly in the order of their ends."""
        self.count = 0

    def track(self, span: Span) -> int:
        self.count += 1
        self._lanes.setdefault(span.lane, len(self._lanes))
        ends = self._ends.setdefault(span.lane, [])
        row = next((row for row, end in enumerate(ends) if end <= span.start_s), len(ends))
        row = min(row, _MAX_ROWS - 1)
        ends[row : row + 1] = [span.end_s]
        return self._number(span.lane, row)

    def _number(self, lane: str, row: int) -> int:
        return 1 + self._lanes[lane] * _MAX_ROWS + row

    def names(self, run_name: str) -> list[dict[str, Any]]:
        """The metadata events that name the run and its tracks and order them."""
        events: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": PID, "args": {"name": run_name}}]
        for lane, ends in self._ends.items():
            for row in range(len(ends)):
                track = {"ph": "M", "pid": PID, "tid": self._number(lane, row)}
                name = lane if row == 0 else f"{lane} ({row + 1})"
                events.append({"name": "thread_name", **track, "args": {"name": name}})
                events.append({"name": "thread_sort_index", **track, "args": {"sort_index": track["tid"]}})
        return events


def _event(span: Span, track: int) -> dict[str, Any]:
    """A complete event; the format counts in microseconds."""
    action = action_of(span.op)
    args = {"block": span.block, "chunk": span.chunk, "step": span.step, "bytes": span.bytes}
    return {
        "name": op_text(span.op, span.block, span.chunk),
        "cat": span.lane,
        "ph": "X",
        "pid": PID,
        "tid": track,
        "ts": microseconds(span.start_s),
        "dur": round(microseconds(span.end_s) - microseconds(span.start_s), 1),
        "args": args if action is None else args | {"what": action.says},
    }


def warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


def write_trace(
    run_path: Path,
    out: Path,
    steps: tuple[int, int] | None = None,
    extent: tuple[int, int] | None = None,
    report: Callable[[str], None] = warn,
    gpu: int = 0,
) -> int:
    """Write the trace of a run's spans.jsonl to `out`; the number of spans. Memory does not grow with it.

    `gpu`: whose spans, where there are several; `steps`: the first and the last to write, with all that ran meanwhile;
    `extent`: the bytes of the file that hold them, where known. `report` hears of damaged lines. UserError for a run
    without spans or these steps, or `out`.
    """
    spans_path = spans_of(run_path, gpu)
    if not os.path.lexists(spans_path):
        raise UserError(f"{run_path}: has no spans.jsonl yet; its first step is not finished")
    lines, name = JsonLines(spans_path, extent), run_path.resolve().name
    name += f" GPU {gpu}" if gpu else ""
    spans, start_s = lines.spans(), None
    if steps is not None:
        start_s, end_s = _window(JsonLines(spans_path, extent).spans(), steps, run_path)
        spans = _inside(lines.spans(), start_s, end_s)
        first, last = steps
        name += f" step {first}" + (f" to {last}" if last > first else "")
    metrics = JsonLines(run_path / "metrics.jsonl").steps()
    count = write_spans(spans, printable(name), out, Steps(metrics, start_s))
    if (warning := lines.warning()) is not None:
        report(warning)
    return count


def _inside(spans: Iterable[Span], start_s: float, end_s: float) -> Iterator[Span]:
    return (span for span in spans if span.end_s > start_s and span.start_s < end_s)


def _window(spans: Iterable[Span], steps: tuple[int, int], run_path: Path) -> tuple[float, float]:
    """From the end of the step before the first to that of the last; of steps done twice the last ones count."""
    first, last = steps
    start_s, end_s, before_s = 0.0, -1.0, 0.0
    for span in spans:
        if span.op == STEP_END:
            start_s = before_s if span.step == first else start_s
            end_s = span.end_s if span.step == last else end_s
            before_s = span.end_s
    if not 0.0 <= start_s < end_s:
        raise UserError(f"{run_path}: its log does not contain the end of step {last}; choose a finished step")
    return start_s, end_s


def write_spans(spans: Iterable[Span], name: str, out: Path, steps: Steps | None = None) -> int:
    """Write the trace of `spans`, roughly in the order of their ends; their number. UserError."""
    if out.is_dir():
        raise UserError(f"{out}: is a folder; name a file for the trace")
    tracks = _Tracks()
    try:
        publish(prepare_file(out, _pieces(spans, name, tracks, steps or Steps())), out)
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror}); name another file") from None
    return tracks.count


def _pieces(spans: Iterable[Span], name: str, tracks: _Tracks, steps: Steps) -> Iterator[bytes]:
    texts = ['{"displayTimeUnit": "ms", "traceEvents": [']
    between = "\n"
    for event in _events(spans, name, tracks, steps):
        texts.append(between + _TEXT(event))
        between = ",\n"
        if len(texts) >= _PIECE_LINES:
            yield "".join(texts).encode()
            texts = []
    texts.append("\n]}\n")
    yield "".join(texts).encode()


def _events(spans: Iterable[Span], name: str, tracks: _Tracks, steps: Steps) -> Iterator[dict[str, Any]]:
    arrows, rates = Arrows(), Rates()
    for span in spans:
        track = tracks.track(span)
        yield _event(span, track)
        yield from arrows.of(span, track)
        yield from rates.of(span)
        yield from steps.of(span)
    yield from rates.rest()
    yield from tracks.names(name)
    if steps.count:
        yield from steps.names()
