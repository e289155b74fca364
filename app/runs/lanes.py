"""How busy a run's lanes were, from its spans: busy shares, rates, and the I/O that computing waited for. A step runs
from the end of the step before (its `clip`) to its own."""

from __future__ import annotations

import json
import re
import sys
from array import array
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.app.runs.files import JsonLines
from penstock.app.runs.ops import STEP_END
from penstock.app.runs.rank_spans import spans_of
from penstock.app.runs.speed import WARMUP_STEPS, MeanSpeed, speed_text
from penstock.engine.events import Span
from penstock.engine.schedule import action
from penstock.storage.files.errors import UserError
from penstock.storage.files.units import seconds_text
from penstock.storage.files.untrusted import one_line

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

LANES: tuple[str, ...] = action.WORKING
WAITS: str = action.WAITS
DRIVE = ("nvme_read", "nvme_write")


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
    awaited_s: dict[int, float]
    """Other GPU -> seconds in which ops of this one waited for its work; several may at once."""


def union(start_s: Floats, end_s: Floats) -> tuple[Floats, Floats]:
    """The same points as disjoint intervals in order (starts, ends)."""
    import numpy as np

    order = np.argsort(start_s, kind="stable")
    start_s, end_s = start_s[order], np.maximum.accumulate(end_s[order])
    first = np.ones(len(start_s), dtype=bool)
    first[1:] = start_s[1:] > end_s[:-1]
    return start_s[first], end_s[np.roll(first, -1)]


class LaneTimes:
    """When the ops of a run ran, lane by lane; lanes of another version are left out."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self._lanes = {lane: array("d") for lane in LANES}
        """Start, end and bytes of one op after another: a long run has millions."""
        self._awaited: list[tuple[float, int, float]] = []
        """When an op ended, the GPU that it waited for, and seconds."""
        self.ends: dict[int, float] = {}
        """Step -> where it ended; of steps done twice the last time counts."""
        for span in spans:
            if span.op == STEP_END:
                self.ends[span.step] = span.end_s
            self._awaited += [(span.end_s, gpu, seconds) for gpu, seconds in span.awaited]
            if span.lane in self._lanes:
                self._lanes[span.lane].extend((span.start_s, span.end_s, span.bytes))

    def shares(self, first: int, last: int) -> LaneShares:
        """Shares over steps `first` to `last`. Raises UserError when the spans do not hold these steps whole."""
        import numpy as np

        ends = self.ends
        if first - 1 not in ends or last not in ends or first > last:
            have = f"steps {min(ends) + 1} to {max(ends)}" if len(ends) > 1 else "no step after the first"
            raise UserError(f"--steps {first}:{last}: the run's log has {have} in full; choose from these")
        start, end = ends[first - 1], ends[last]
        window = end - start
        if window <= 0:
            raise UserError(
                f"--steps {first}:{last}: in the run's log the last of them ends before the first; choose other steps"
            )
        result, moved = {}, {}
        for lane, ops in self._lanes.items():
            began, ended, size = np.frombuffer(ops).reshape(-1, 3).T
            inside = (ended > start) & (began < end)
            result[lane] = np.stack([began[inside].clip(start), ended[inside].clip(max=end)], axis=1)
            moved[lane] = int(size[(ended > start) & (ended <= end)].sum())
        moving = [result[lane] for lane in (*DRIVE, "h2d", "d2h")]
        busy = {lane: _covered(result[lane]) for lane in LANES}
        working = _covered(*moving, result["compute"])
        awaited: dict[int, float] = defaultdict(float)
        for ended_s, gpu, seconds in self._awaited:
            if start < ended_s <= end:
                awaited[gpu] += seconds
        return LaneShares(
            steps=last - first + 1,
            window_s=window,
            busy={lane: seconds / window for lane, seconds in busy.items()},
            bytes=moved,
            drive_busy=_covered(*(result[lane] for lane in DRIVE)) / window,
            exposed_io=(working - busy["compute"]) / window,
            idle=1 - working / window,
            awaited_s=dict(sorted(awaited.items())),
        )


def _covered(*pieces: Floats) -> float:
    """Seconds in which at least one of these intervals, [intervals, 2], runs."""
    import numpy as np

    start_s, end_s = union(*np.concatenate(pieces).T)
    return float((end_s - start_s).sum())


def lanes_report(run_path: Path, steps: str | None, *, as_json: bool, gpu: int = 0) -> str:
    """The shares and mean speed of a run's steps (`FIRST:LAST`; by default after the warm-up, or the first) as text, or
    JSON. Standard error tells of damaged lines. UserError for steps that there are not."""
    wanted = parse_steps(steps) if steps else None
    lines = JsonLines(spans_of(run_path, gpu))
    times = LaneTimes(lines.spans())
    if (warning := lines.warning()) is not None:
        print(f"warning: {warning}", file=sys.stderr)
    if len(times.ends) < 2:
        raise UserError(f"{lines.path}: has fewer than two steps; shares are counted from the end of the first one")
    end = max(times.ends)
    first, last = wanted or (min(max(min(times.ends), WARMUP_STEPS) + 1, end), end)
    shares = times.shares(first, last)
    steps_lines = JsonLines(run_path / "metrics.jsonl").steps()
    mean = MeanSpeed.of(line for line in steps_lines if first <= line["step"] <= last)
    if as_json:
        return json.dumps(
            asdict(shares) | {"mean_step_s": mean.step_s, "mean_tokens_per_s": mean.tokens_per_s}, indent=2
        )
    rows = [
        f"steps {first} to {last}: {seconds_text(mean.step_s)} a step, {speed_text(mean.tokens_per_s, None)}; "
        f"shares are of {seconds_text(shares.window_s)}, validations between the steps included"
    ]
    for lane in LANES:
        moved = shares.bytes[lane]
        busy_s = shares.busy[lane] * shares.window_s
        rate = f"{moved / busy_s / 1e9:6.2f} GB/s" if moved and busy_s else ""
        rows.append(f"{lane:<12}{shares.busy[lane]:7.1%} busy  {rate}".rstrip())
    rows.append(f"{'drive':<12}{shares.drive_busy:7.1%} busy (reading or writing)")
    rows.append(f"{'exposed I/O':<12}{shares.exposed_io:7.1%} of the time something moved while nothing computed")
    rows.append(f"{'idle':<12}{shares.idle:7.1%} of the time nothing computed and nothing moved")
    for other, seconds in shares.awaited_s.items():
        rows.append(f"waited for GPU {other}: {seconds_text(seconds / shares.steps)} a step, all lanes together")
    return "\n".join(rows)


def parse_steps(text: str) -> tuple[int, int]:
    """The two numbers of `--steps FIRST:LAST`. Raises UserError for anything else."""
    match = re.fullmatch(r"([0-9]{1,15}):([0-9]{1,15})", text)
    if match is None:
        raise UserError(f"--steps {one_line(text, 80)}: write FIRST:LAST, for example 10:20")
    return int(match.group(1)), int(match.group(2))
