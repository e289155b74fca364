"""The steps of a run as numpy columns that only grow, so that no thread sees half a row; and its samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.app.runs.measured import MOST_NAMES, by_weight, measured_of
from penstock.app.runs.recall_view import RecallMap, recall_of
from penstock.app.runs.speed import WARMUP_STEPS
from penstock.tui.data.fields import get, number, objects, text, whole

Floats = NDArray[np.float64]

MEAN = ("mean_tokens_per_s", "mean_step_s", "mean_model_tflops_per_s")
"""The run's mean speed up to the row, as the run's process counted it (app/runs/speed.py)."""
READ = ("loss", "grad_norm", "lr", "tokens", "step_s", "tokens_per_s", *MEAN, "time")
"""Columns that a line has under the same name; NaN where it has not."""
DERIVED = ("step", "ema", "total_tokens", "total_s")
"""`ema`: the averaged loss. `total_*`: trained tokens and seconds up to the row."""

X_COLUMNS = {"step": "step", "tokens": "total_tokens", "time": "total_s"}

_MOST_STEPS = 2**53
"""Larger ones are no longer distinguished, and are nobody's."""

ETA_STEPS = 20
_Z_STEPS = 100
_Z_LEAST = 20


class MetricsLog:
    """One row a step. `rows` is written last: slice columns by a `rows` that was read before."""

    def __init__(self) -> None:
        self.rows = 0
        self._columns: dict[str, Floats] = {name: np.empty(256) for name in READ + DERIVED}
        self.written_bytes: dict[str, float] = {}
        """Drive folder -> bytes written in all steps."""
        self.tier_bytes: dict[str, float] = {}
        """Tier -> most bytes held so far, as the last line with any says."""
        self.skipped = 0
        """Objects that were no step."""
        self.newest: dict[str, float] = {}
        """What the objective measured beside its loss: name -> value of the last row that has it, NaN where that is not
        finite; replaced, never changed."""
        self._measured: dict[str, tuple[Floats, Floats]] = {}
        """Name -> values, and the same averaged."""
        self.validation: tuple[Floats, Floats] = (np.empty(0), np.empty(0))
        """Steps and losses of the validations, ascending."""
        self.validated: dict[str, tuple[Floats, Floats]] = {}
        """The same of what else was measured: name -> steps and values; replaced, never changed."""
        self.recall: list[RecallMap] = []
        """The first map of what was found in haystacks, and the last; none where there is none."""

    def column(self, name: str, rows: int | None = None) -> Floats:
        """The values of the first `rows` rows, all by default."""
        return self._columns[name][: self.rows if rows is None else rows]

    @property
    def measured_names(self) -> list[str]:
        """Of all that was measured beside the loss, those first that say most."""
        return by_weight(self.newest | self.validated)

    def measured(self, name: str, rows: int | None = None) -> tuple[Floats, Floats]:
        """What the objective measured as `name` in the first `rows` rows, and the same averaged; NaN where it was not
        measured."""
        rows = self.rows if rows is None else rows
        nothing = np.full(rows, math.nan)
        values, averages = self._measured.get(name, (nothing, nothing))
        return values[:rows], averages[:rows]

    def last(self, name: str) -> float | None:
        """The last row's value; None where there is none or it is not finite."""
        value = float(self._columns[name][self.rows - 1]) if self.rows else math.nan
        return value if math.isfinite(value) else None

    @property
    def last_step(self) -> int:
        """The last row's step; 0 before the first."""
        return int(self._columns["step"][self.rows - 1]) if self.rows else 0

    def add(self, lines: Iterable[dict[str, Any]]) -> int:
        """Append the lines that are steps; their number. A step that was done again replaces the rows from it on."""
        added = 0
        for line in lines:
            step = number(line, "step")
            if step is None or not 0 <= step <= _MOST_STEPS:
                self.skipped += 1
                continue
            row = self.rows
            if row and step <= self._columns["step"][row - 1]:
                row = self.rows = int(np.searchsorted(self._columns["step"][:row], step))
            self._append(row, step, line)
            added += 1
        return added

    def _append(self, row: int, step: float, line: dict[str, Any]) -> None:
        if row == len(self._columns["step"]):
            self._grow()
        columns = self._columns
        for name in READ:
            value = number(line, name)
            columns[name][row] = math.nan if value is None else value
        columns["step"][row] = step
        columns["ema"][row] = _average(columns["ema"], row, columns["loss"][row])
        self._append_measured(row, measured_of(line))
        for name, total in (("tokens", "total_tokens"), ("step_s", "total_s")):
            value = columns[name][row]
            columns[total][row] = (columns[total][row - 1] if row else 0.0) + (value if value > 0 else 0.0)
        written, held = get(line, "nvme_written_bytes"), get(line, "tier_bytes")
        for folder in written if isinstance(written, dict) else ():
            if (size := number(written, folder)) is not None:
                self.written_bytes[folder] = self.written_bytes.get(folder, 0.0) + size
        if isinstance(held, dict):
            self.tier_bytes = {tier: size for tier in held if (size := number(held, tier)) is not None}
        self.rows = row + 1

    def _append_measured(self, row: int, measured: dict[str, float]) -> None:
        new = [name for name in measured if name not in self._measured][: MOST_NAMES - len(self._measured)]
        for name in new:
            size = len(self._columns["step"])
            self._measured = self._measured | {name: (np.full(size, math.nan), np.full(size, math.nan))}
        for name, (values, averages) in self._measured.items():
            values[row] = measured.get(name, math.nan)
            averages[row] = _average(averages, row, values[row])
        if measured:
            self.newest = self.newest | {name: measured[name] for name in measured if name in self._measured}

    def _grow(self) -> None:
        # New arrays, in a new dict: who holds the old ones keeps whole rows.
        self._columns = {name: _grown(column) for name, column in self._columns.items()}
        self._measured = {name: (_grown(values), _grown(means)) for name, (values, means) in self._measured.items()}

    def eta_s(self, total_steps: int, started: float | None = None, now: float | None = None) -> float | None:
        """Seconds to the end: the mean of the last steps, without the process's first ones, which compile.

        `started`: Unix s of the process's start. With `now`, what has passed of the current step counts as done.
        """
        remaining = total_steps - self.last_step
        if remaining <= 0:
            return 0.0
        rows = self.rows
        first = 0
        if started is not None:
            looked_at = max(0, rows - ETA_STEPS - WARMUP_STEPS)
            before = np.flatnonzero(self.column("time", rows)[looked_at:] < started)
            first = looked_at + int(before[-1]) + 1 if len(before) else 0
        recent = self.column("step_s", rows)[max(first + WARMUP_STEPS, rows - ETA_STEPS) : rows]
        recent = recent[np.isfinite(recent)]
        if not len(recent):
            return None
        step_s = float(recent.mean())
        ended = self.last("time")
        passed_s = 0.0 if now is None or ended is None else min(max(0.0, now - ended), step_s)
        return step_s * remaining - passed_s

    def recent_step_s(self) -> float | None:
        """The mean seconds of the last ETA_STEPS steps that have them, the log's first two left out."""
        values = self.column("step_s")[max(WARMUP_STEPS, self.rows - ETA_STEPS) :]
        values = values[np.isfinite(values)]
        return float(values.mean()) if len(values) else self.last("step_s")

    def z_score(self, name: str) -> float | None:
        """How many standard deviations the last value is above the mean of the 100 before; None while they are few."""
        rows = self.rows
        before = self.column(name, rows)[max(0, rows - 1 - _Z_STEPS) : max(0, rows - 1)]
        before = before[np.isfinite(before)]
        last = self.last(name)
        if last is None or len(before) < _Z_LEAST:
            return None
        spread = float(before.std())
        return (last - float(before.mean())) / spread if spread > 0 else None

    def add_validation(self, lines: Iterable[dict[str, Any]], *, anew: bool = False) -> int:
        """Append validations; their number. One that was done again replaces those from its step on, `anew` all."""
        if anew:
            self.validation, self.recall, self.validated = (np.empty(0), np.empty(0)), [], {}
        steps, losses = (column.tolist() for column in self.validation)
        added = 0
        for line in lines:
            step, loss = number(line, "step"), number(line, "loss")
            measured = measured_of(line)
            if step is None or (loss is None and not measured):
                self.skipped += 1
                continue
            while steps and step <= steps[-1]:
                steps.pop()
                losses.pop()
            if loss is not None:
                steps.append(step)
                losses.append(loss)
            added += 1
            self._add_validated(step, measured)
            if (recall := recall_of(line)) is not None:
                self.recall = [*(one for one in self.recall[:1] if one.step < recall.step), recall]
        if added:
            self.validation = (np.array(steps), np.array(losses))
        return added

    def _add_validated(self, step: float, measured: dict[str, float]) -> None:
        """Take what a validation measured; what was done again is dropped from its step on."""
        if not measured and not self.validated:
            return
        new = [name for name in measured if name not in self.validated][: MOST_NAMES - len(self.validated)]
        result = self.validated | dict.fromkeys(new, (np.empty(0), np.empty(0)))
        for name, (steps, values) in result.items():
            kept = int(np.searchsorted(steps, step))
            more = [measured[name]] if name in measured else []
            result[name] = np.append(steps[:kept], [step] * len(more)), np.append(values[:kept], more)
        self.validated = result

    def at_steps(self, steps: Sequence[float] | Floats, name: str) -> Floats:
        """Where steps are in a column that ascends: the steps themselves, tokens or seconds."""
        rows = self.rows
        if name == "step" or not rows:
            return np.array(steps, float) if name == "step" else np.full(len(steps), np.nan)
        return np.interp(steps, self.column("step", rows), self.column(name, rows))


def _average(averages: Floats, row: int, value: float) -> float:
    """Exponential mean over about the last tenth of the run: 10 steps at least, 200 at most."""
    before = averages[row - 1] if row else math.nan
    if math.isnan(before):
        return value
    if math.isnan(value):
        return float(before)
    share = 2.0 / (1.0 + min(200.0, max(10.0, row / 10.0)))
    share = max(share, 1.0 / (row + 1.0))  # the first rows are an ordinary mean
    return float(before + share * (value - before))


def _grown(column: Floats) -> Floats:
    return np.concatenate([column, np.empty(len(column))])


class Sample(NamedTuple):
    """What the model wrote behind one prompt."""

    prompt: str
    text: str
    tokens: int | None
    ended: bool
    """The model ended it; else it is cut off."""
    reward: float | None = None
    """Of a completion that is trained on."""


class Samples(NamedTuple):
    """The samples of one step, in the order of the prompts."""

    step: int
    samples: list[Sample]


def with_samples(known: Sequence[Samples], lines: Iterable[dict[str, Any]]) -> tuple[list[Samples], int]:
    """Samples step by step, with those of further lines, and how many lines were none.

    What was written again replaces those from its step on.
    """
    result, skipped = list(known), 0
    for line in lines:
        step = whole(line, "step")
        samples = [
            Sample(
                prompt=text(s, "prompt") or "",
                text=text(s, "text") or "",
                tokens=whole(s, "tokens"),
                ended=get(s, "ended") is True,
                reward=number(s, "reward"),
            )
            for s in objects(line, "samples")
        ]
        if step is None or not samples:
            skipped += 1
            continue
        while result and result[-1].step >= step:
            result.pop()
        result.append(Samples(step, samples))
    return result, skipped
