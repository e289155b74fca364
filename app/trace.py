"""A run's spans as a Chrome trace, which Perfetto (https://ui.perfetto.dev) opens: a track per lane.

A lane whose ops overlap takes further tracks, since the format allows no overlaps within one.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from app.lanes import LANES, require_span
from app.rundir import read_jsonl
from engine.events import Span
from storage.errors import UserError
from storage.untrusted import parse_object

_MAX_ROWS = 100
"""Tracks of one lane; far more ops than a lane ever has under way at once."""


class _Tracks:
    """Assigns spans to tracks. A track holds no overlaps: ops of a lane that run at once take further rows of it."""

    def __init__(self) -> None:
        self._lanes = {lane: index for index, lane in enumerate(LANES)}
        self._ends: dict[str, list[float]] = {lane: [0.0] for lane in LANES}
        """Per lane, the latest end of every row. Spans come roughly in the order of their ends."""

    def track(self, span: Span) -> int:
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
        events: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": run_name}}]
        for lane, ends in self._ends.items():
            for row in range(len(ends)):
                track = {"ph": "M", "pid": 1, "tid": self._number(lane, row)}
                name = lane if row == 0 else f"{lane} ({row + 1})"
                events.append({"name": "thread_name", **track, "args": {"name": name}})
                events.append({"name": "thread_sort_index", **track, "args": {"sort_index": track["tid"]}})
        return events


def _event(span: Span, track: int) -> dict[str, Any]:
    """A complete event; the format counts in microseconds."""
    chunk = f" [{span.chunk}]" if span.chunk >= 0 else ""
    return {
        "name": f"{span.op} {span.block}{chunk}",
        "cat": span.lane,
        "ph": "X",
        "pid": 1,
        "tid": track,
        "ts": round(span.start_s * 1e6, 1),
        "dur": round((span.end_s - span.start_s) * 1e6, 1),
        "args": {"block": span.block, "chunk": span.chunk, "step": span.step, "bytes": span.bytes},
    }


def write_trace(
    run_path: Path, out: Path, steps: tuple[int, int] | None = None, extent: tuple[int, int] | None = None
) -> int:
    """Write the trace of a run's spans.jsonl to `out`; returns the number of spans. Memory does not grow with it.

    `steps`: the first and the last of those to write, with all that ran meanwhile; `extent`: the bytes of the file that
    hold them, where that is known. Raises UserError when the run has no spans yet, or not these steps, a line is
    damaged, or `out` cannot be written.
    """
    spans_path = run_path / "spans.jsonl"
    if not spans_path.exists():
        raise UserError(f"{run_path}: has no spans.jsonl yet; its first step is not done")
    spans = _spans_of(spans_path, extent)
    name = run_path.resolve().name
    if steps is not None:
        start_s, end_s = _window(spans, steps, run_path)
        inside = (span for span in _spans_of(spans_path, extent) if span.end_s > start_s and span.start_s < end_s)
        first, last = steps
        return write_spans(inside, f"{name} step {first}" + (f" to {last}" if last > first else ""), out)
    return write_spans(spans, name, out)


def _window(spans: Iterable[Span], steps: tuple[int, int], run_path: Path) -> tuple[float, float]:
    """From the end of the step before the first to that of the last; of steps done twice the last ones count."""
    first, last = steps
    start_s, end_s, before_s = 0.0, -1.0, 0.0
    for span in spans:
        if span.op == "clip":
            start_s = before_s if span.step == first else start_s
            end_s = span.end_s if span.step == last else end_s
            before_s = span.end_s
    if not 0.0 <= start_s < end_s:
        raise UserError(f"{run_path}: its spans do not hold the end of step {last}; choose a step that is done")
    return start_s, end_s


def _spans_of(path: Path, extent: tuple[int, int] | None = None) -> Iterator[Span]:
    for line in read_jsonl(path) if extent is None else _lines_within(path, *extent):
        try:
            yield Span.of(require_span(line, path))
        except TypeError as error:
            raise UserError(f"{path}: a line is not a span ({error})") from None


def _lines_within(path: Path, start: int, end: int) -> Iterator[dict[str, Any]]:
    """The lines of a part of the file that begins and ends with whole ones; damaged ones are left out."""
    with path.open("rb") as file:
        file.seek(start)
        for line in file:
            with contextlib.suppress(ValueError):
                yield parse_object(line)
            start += len(line)
            if start >= end:
                return


def write_spans(spans: Iterable[Span], name: str, out: Path) -> int:
    """Write the trace of `spans`, roughly in the order of their ends, to `out`; returns their number.

    Raises UserError when `out` cannot be written.
    """
    tracks = _Tracks()
    count = 0
    if out.is_dir():
        raise UserError(f"{out}: is a folder; give a file for the trace")
    try:
        handle, made = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
                for span in spans:
                    file.write(json.dumps(_event(span, tracks.track(span)), separators=(",", ":")) + ",\n")
                    count += 1
                names = tracks.names(name)
                file.write(",\n".join(json.dumps(event, separators=(",", ":")) for event in names) + "\n]}\n")
            os.chmod(made, 0o644)
            os.replace(made, out)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(made)
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror})") from None
    return count
