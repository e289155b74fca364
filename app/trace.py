"""A run's spans as a Chrome trace, which Perfetto (https://ui.perfetto.dev) opens: one track per lane."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from app.rundir import read_jsonl
from engine.events import Span
from storage.errors import UserError

LANES = ("nvme_read", "h2d", "compute", "d2h", "optimizer", "nvme_write")
"""The order of the tracks; other lanes follow."""


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


def _track_names(tracks: dict[str, int], run_name: str) -> list[dict[str, Any]]:
    """The metadata events that name the process and its tracks and order them."""
    events: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": run_name}}]
    for lane, track in tracks.items():
        events.append({"name": "thread_name", "ph": "M", "pid": 1, "tid": track, "args": {"name": lane}})
        events.append({"name": "thread_sort_index", "ph": "M", "pid": 1, "tid": track, "args": {"sort_index": track}})
    return events


def write_trace(run_path: Path, out: Path) -> int:
    """Write the trace of a run's spans.jsonl to `out`; returns the number of spans. Memory does not grow with it.

    Raises UserError when the run has no spans yet, a line is damaged, or `out` cannot be written.
    """
    spans_path = run_path / "spans.jsonl"
    if not spans_path.exists():
        raise UserError(f"{run_path}: has no spans.jsonl yet; its first step is not done")
    tracks = {lane: track for track, lane in enumerate(LANES, start=1)}
    count = 0
    temporary = out.with_name(out.name + ".tmp")
    try:
        with temporary.open("w") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            for line in read_jsonl(spans_path):
                try:
                    span = Span(**line)
                except TypeError as error:
                    raise UserError(f"{spans_path}: a line is not a span ({error})") from None
                track = tracks.setdefault(span.lane, len(tracks) + 1)
                file.write(json.dumps(_event(span, track), separators=(",", ":")) + ",\n")
                count += 1
            names = _track_names(tracks, run_path.resolve().name)
            file.write(",\n".join(json.dumps(event, separators=(",", ":")) for event in names) + "\n]}\n")
        os.replace(temporary, out)
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror})") from None
    finally:
        temporary.unlink(missing_ok=True)
    return count
