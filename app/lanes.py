"""How busy a run's lanes were, from its spans: busy shares, rates, and the I/O that computing waited for.

A step's window runs from the end of the step before (its `clip`) to the end of its own `clip`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from app.rundir import read_jsonl
from storage.errors import UserError
from storage.untrusted import is_whole, one_line

LANES = ("nvme_read", "h2d", "compute", "d2h", "optimizer", "nvme_write")
DRIVE = ("nvme_read", "nvme_write")

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class LaneShares:
    """A window of a run; shares are of its length."""

    steps: int
    window_s: float
    busy: dict[str, float]
    """Lane -> share of the window in which at least one of its ops was under way."""
    bytes: dict[str, int]
    """Lane -> payload of the ops that ended in the window."""
    drive_busy: float
    """Share in which a read or a write of the NVMe tier was under way."""
    exposed_io: float
    """Share in which no compute op ran and an op of the drive or of a link did."""
    idle: float
    """Share in which no compute, drive or link op ran."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as disjoint intervals in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Total length of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def lane_shares(spans: Sequence[dict[str, Any]], first: int, last: int) -> LaneShares:
    """Shares over steps `first` to `last`. Raises UserError when the spans do not hold these steps whole."""
    ends = {span["step"]: span["end_s"] for span in spans if span["op"] == "clip"}
    if first - 1 not in ends or last not in ends or first > last:
        have = f"steps {min(ends) + 1} to {max(ends)}" if len(ends) > 1 else "no step after the first"
        raise UserError(f"--steps {first}:{last}: the spans hold {have} whole; choose among these")
    start, end = ends[first - 1], ends[last]
    window = end - start
    if window <= 0:
        raise UserError(f"--steps {first}:{last}: the spans hold no time between these; the run's clock went back")
    found: dict[str, list[Interval]] = {lane: [] for lane in LANES}
    moved = dict.fromkeys(LANES, 0)
    for span in spans:
        if span["lane"] not in found:  # of a later version
            continue
        if span["end_s"] > start and span["start_s"] < end:
            found[span["lane"]].append((max(span["start_s"], start), min(span["end_s"], end)))
        if start < span["end_s"] <= end:
            moved[span["lane"]] += span["bytes"]
    busy = {lane: union(intervals) for lane, intervals in found.items()}
    drive = union(interval for lane in DRIVE for interval in found[lane])
    moving = union(interval for lane in (*DRIVE, "h2d", "d2h") for interval in found[lane])
    working = length(union(moving + busy["compute"]))
    return LaneShares(
        steps=last - first + 1,
        window_s=window,
        busy={lane: length(intervals) / window for lane, intervals in busy.items()},
        bytes=moved,
        drive_busy=length(drive) / window,
        exposed_io=(working - length(busy["compute"])) / window,
        idle=1 - working / window,
    )


def lanes_report(run_path: Path, steps: str | None, *, as_json: bool) -> str:
    """The shares of a run's steps (`FIRST:LAST`, default all but the first) as text, or as JSON.

    Raises UserError for a run without spans or steps that it does not have.
    """
    path = run_path / "spans.jsonl"
    spans = [require_span(line, path) for line in read_jsonl(path)] if path.exists() else []
    ends = [span["step"] for span in spans if span["op"] == "clip"]
    if len(ends) < 2:
        raise UserError(f"{path}: holds fewer than two steps; shares are counted from the end of the first one")
    first, last = parse_steps(steps) if steps else (min(ends) + 1, max(ends))
    shares = lane_shares(spans, first, last)
    if as_json:
        return json.dumps(asdict(shares), indent=2)
    lines = [f"steps {first} to {last}: {shares.window_s / shares.steps:.3f} s each"]
    for lane in LANES:
        moved = shares.bytes[lane]
        rate = f"{moved / (shares.busy[lane] * shares.window_s) / 1e9:6.2f} GB/s" if moved else ""
        lines.append(f"{lane:<12}{shares.busy[lane]:7.1%} busy  {rate}".rstrip())
    lines.append(f"{'drive':<12}{shares.drive_busy:7.1%} busy (reading or writing)")
    lines.append(f"{'exposed I/O':<12}{shares.exposed_io:7.1%} of the time something moved while nothing computed")
    lines.append(f"{'idle':<12}{shares.idle:7.1%} of the time nothing computed and nothing moved")
    return "\n".join(lines)


def require_span(line: dict[str, Any], path: Path) -> dict[str, Any]:
    """`line` if it is one of spans.jsonl (docs/run-directory.md); UserError naming file `path` for anything else."""
    values = {"block": "", "chunk": -1, "id": -1, "waited": []} | line
    texts = all(isinstance(values.get(name), str) for name in ("lane", "op", "block"))
    whole = all(is_whole(values.get(name)) for name in ("chunk", "bytes", "step", "id"))
    times = [line.get("start_s"), line.get("end_s")]
    timed = all(isinstance(t, int | float) and not isinstance(t, bool) and math.isfinite(t) for t in times)
    if not (texts and whole and timed and isinstance(values["waited"], list) and all(map(is_whole, values["waited"]))):
        raise UserError(f"{path}: a line is not a span ({one_line(line, 80)}); the file is damaged")
    return line


def parse_steps(text: str) -> tuple[int, int]:
    """The two numbers of `--steps FIRST:LAST`. Raises UserError for anything else."""
    match = re.fullmatch(r"([0-9]{1,15}):([0-9]{1,15})", text)
    if match is None:
        raise UserError(f"--steps {one_line(text, 80)}: write FIRST:LAST, for example 10:20")
    return int(match.group(1)), int(match.group(2))
