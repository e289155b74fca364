"""The panes of figures: what tiers hold of their budgets, what drives do, and the planned step beside the run's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.app.console.rows import Glyphs, Row, exactly
from penstock.app.runs.lanes import DRIVE, LANES
from penstock.storage.files.units import bytes_text, figure, of_text, percent_text, rate_text
from penstock.tui.data.fields import number, objects, text
from penstock.tui.data.flow import FULL_SHARE, Tier, rate_window, tiers
from penstock.tui.data.run_data import RunData
from penstock.tui.render.one_row import bar
from penstock.tui.render.ticks import fit

_HOT_C = 70.0


def tier_bar(tier: Tier, width: int, glyphs: Glyphs) -> Row:
    """What a tier holds of its budget, with a mark at the planned peak."""
    return bar(
        width, tier.share if tier.held_bytes is not None else None, tier.planned_share, glyphs, f"tier.{tier.name}"
    )


def tier_text(tier: Tier) -> str:
    """`96.0 of 128 GiB`, `planned 100 of 128 GiB`."""
    if tier.held_bytes is None:
        return f"planned {of_text(tier.planned_bytes, tier.budget_bytes)}"
    return of_text(tier.held_bytes, tier.budget_bytes)


def tier_rows(tiers: Sequence[Tier], width: int, rows_each: int, glyphs: Glyphs) -> list[Row]:
    """One or two rows a tier: held of budget, the planned peak, and the bar."""
    rows: list[Row] = []
    for tier in tiers:
        share, figures = tier.share, tier_text(tier)
        token = "text" if share is None or share <= FULL_SHARE else "bad" if share > 1 else "warn"
        name = (fit(tier.name, 5), f"tier.{tier.name} bold")
        percent = (("n/a" if share is None else f"{share:.0%}").rjust(5), token)
        if rows_each >= 2:
            measured = tier.held_bytes is not None and tier.planned_share is not None
            plan = f"  plan {bytes_text(tier.planned_bytes)}" if measured else ""
            figures += plan if len(figures + plan) <= width - 10 else ""
            rows += [
                [name, (fit(figures, width - 10, glyphs.ellipsis), "text"), percent],
                tier_bar(tier, width, glyphs),
            ]
        else:
            fits = len(figures) <= width - 18
            size = max(4, width - 10 - (len(figures) + 1 if fits else 0))
            rows.append([name, *tier_bar(tier, size, glyphs), percent, (f" {figures}" if fits else "", "dim")])
    return [exactly(row, width) for row in rows]


class Drive(NamedTuple):
    """One drive folder of the run."""

    folder: str
    written_bytes: float
    endurance_bytes: float | None
    temperature_c: float | None


def drives(data: RunData) -> list[Drive]:
    """The drives as metrics, status and plan know them."""
    planned = objects(data.plan, "run", "drives")
    temperatures = data.status.get("drives")
    folders = dict.fromkeys(data.metrics.written_bytes)
    if isinstance(temperatures, dict):
        folders |= dict.fromkeys(folder for folder in temperatures if isinstance(folder, str))
    result = []
    for folder in folders:
        at = [drive for drive in planned if folder.startswith(text(drive, "path") or "\0")]
        if not at and len(planned) == 1 == len(folders):
            at = planned
        endurance = number(max(at, key=lambda drive: len(text(drive, "path") or "")), "endurance_bytes") if at else None
        temperature = number(temperatures, folder, "temperature_c")
        result.append(Drive(folder, data.metrics.written_bytes.get(folder, 0.0), endurance, temperature))
    return result


def tier_pane_rows(data: RunData, width: int, height: int, glyphs: Glyphs) -> list[Row]:
    """Gauges in two rows each where there is room, then drive rates, temperature, bytes written against endurance."""
    result, below = tiers(data), _drive_rows(data, width, glyphs)
    each = 2 if height >= 2 * len(result) + min(2, len(below)) else 1
    rows = tier_rows(result, width, each, glyphs) or [exactly([("no plan yet", "dim")], width)]
    if height > len(rows) + len(below):
        rows.append([(" " * width, "text")])
    return (rows + below)[:height]


def _drive_rows(data: RunData, width: int, glyphs: Glyphs) -> list[Row]:
    rows: list[Row] = []
    window = rate_window(data)
    if window is not None:
        moved = data.spans.view.bytes_by_lane(window.start_s, window.end_s)
        seconds = window.end_s - window.start_s
        read, written = (rate_text(moved.get(lane, 0) / seconds) for lane in DRIVE)
        when = f"  {window.words}" if 22 + len(written) + len(window.words) <= width else ""
        rows.append([("read ", "dim"), (read.ljust(11), "lane.nvme_read"), ("write ", "dim")])
        rows[0] += [(written, "lane.nvme_write"), (when, "dim")]
    result = drives(data)
    for drive in result:
        row: Row = [(fit(drive.folder[-14:], 15, glyphs.ellipsis), "dim")] if len(result) > 1 else []
        row += [("written ", "dim"), (bytes_text(drive.written_bytes), "text")]
        if drive.endurance_bytes:
            share = drive.written_bytes / drive.endurance_bytes
            row.append((f" of {drive.endurance_bytes / 1e12:,.0f} TBW ({figure(100 * share, 2)}%)", "dim"))
        if drive.temperature_c is not None:
            degree = "°C" if glyphs.braille else " C"
            row.append((f"  {drive.temperature_c:.0f}{degree}", "warn" if drive.temperature_c >= _HOT_C else "text"))
        rows.append(row)
    return [exactly(row, width) for row in rows]


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
        available = width - _LABEL - 2 * _CELL - 1
        if available >= 6 and now is not None:
            row += [(" ", "text"), *bar(available, now, before, glyphs, f"lane.{lane}")]
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
