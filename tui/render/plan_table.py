"""The planned step beside the run's: seconds and speed of the mean, share of each lane in the last step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.app.console.rows import Glyphs, Row, exactly
from penstock.app.runs.lanes import LANES
from penstock.storage.files.units import figure, percent_text
from penstock.tui.data.fields import number, text
from penstock.tui.data.run_data import RunData
from penstock.tui.render.one_row import bar

_LABEL = 11
_CELL = 9
_NAME = 10
"""Cells of a lane's name in the row of the bounds; its two columns take more than their share."""


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What was planned of a step, or what came of it; None where unknown."""

    step_s: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    bound_by: str | None = None
    shares: Mapping[str, float] | None = None
    """Lane -> share of the step in which it was busy."""


def planned_step(plan: dict[str, Any]) -> StepFigures:
    """What plan.json promised."""
    shares = {lane: share for lane in LANES if (share := number(plan, "lanes", lane, "share")) is not None}
    step_s, tokens_per_s, mfu = (number(plan, name) for name in ("step_s", "tokens_per_s", "mfu"))
    return StepFigures(step_s, tokens_per_s, mfu, text(plan, "bound_by"), shares)


def real_step(data: RunData) -> StepFigures:
    """The run's mean; lanes of the last step."""
    metrics, view = data.metrics, data.spans.view
    shares = {}
    if steps := view.steps():
        _, start_s, end_s = steps[-1]
        shares = {lane: view.busy_s(lane, start_s, end_s) / (end_s - start_s) for lane in LANES}
    bound_by = max(shares, key=lambda lane: shares[lane], default=None)
    return StepFigures(metrics.last("mean_step_s"), metrics.last("mean_tokens_per_s"), data.mfu, bound_by, shares)


def plan_rows(data: RunData, width: int, height: int, glyphs: Glyphs) -> list[Row]:
    """What was planned of a step beside what came of it."""
    return figure_rows(planned_step(data.plan), real_step(data), LANES, width, height, glyphs)


def figure_rows(
    planned: StepFigures, real: StepFigures, lanes: Sequence[str], width: int, height: int, glyphs: Glyphs
) -> list[Row]:
    """A row a figure: planned, mean of the run, and by how much they differ; then the lanes of the last step."""
    rows = [_head("mean", width)]
    rows.append(_row("step", planned.step_s, real.step_s, " s", width))
    rows.append(_row("tokens/s", planned.tokens_per_s, real.tokens_per_s, "", width))
    if planned.mfu is not None or real.mfu is not None:
        cells: Row = [("MFU".ljust(_LABEL), "dim"), (percent_text(planned.mfu).rjust(_CELL), "predicted")]
        rows.append(exactly([*cells, (percent_text(real.mfu).rjust(_CELL), "text")], width))
    rows.append(_head("last step", width))
    bound: Row = [("bound by".ljust(_LABEL + 2 * (_CELL - _NAME - 1)), "dim")]
    for name in (planned.bound_by, real.bound_by):
        bound.append(((name or "n/a")[:_NAME].rjust(_NAME + 1), f"lane.{name}" if name else "dim"))
    rows.append(exactly(bound, width))
    for lane in lanes:
        before, now = (planned.shares or {}).get(lane), (real.shares or {}).get(lane)
        row: Row = [(lane.ljust(_LABEL)[:_LABEL], f"lane.{lane}"), (percent_text(before, 0).rjust(_CELL), "predicted")]
        row.append((percent_text(now, 0).rjust(_CELL), "text"))
        room = width - _LABEL - 2 * _CELL - 1
        if room >= 6 and now is not None:
            row += [(" ", "text"), *bar(room, now, before, glyphs, f"lane.{lane}")]
        rows.append(exactly(row, width))
    return rows[:height]


def _head(real: str, width: int) -> Row:
    cells: Row = [("planned".rjust(_LABEL + _CELL), "predicted"), (real.rjust(_CELL + 1), "title")]
    return exactly(cells, width)


def _row(label: str, planned: float | None, real: float | None, unit: str, width: int) -> Row:
    row: Row = [(label.ljust(_LABEL), "dim")]
    for value, token in ((planned, "predicted"), (real, "bold")):
        text = figure(value) + (unit if value is not None else "")
        row.append((text[:_CELL].rjust(_CELL), token))
    if planned and real:
        ratio = real / planned - 1
        row.append((f"  {ratio:+.0%}", "dim" if abs(ratio) < 0.1 else "warn"))
    return exactly(row, width)
