"""The panes of figures: what tiers hold of their budgets, what drives do, and the planned step beside the run's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
    temperatures = data.status.get("drives")
    folders = dict.fromkeys(data.metrics.written_bytes)
    if isinstance(temperatures, dict):
        folders |= dict.fromkeys(folder for folder in temperatures if isinstance(folder, str))
    for folder in folders:
        written_bytes = data.metrics.written_bytes.get(folder, 0.0)
        row: Row = [(fit(folder[-14:], 15, glyphs.ellipsis), "dim")] if len(folders) > 1 else []
        row += [("written ", "dim"), (bytes_text(written_bytes), "text")]
        if endurance_bytes := _endurance_bytes(data, folder, len(folders)):
            share = written_bytes / endurance_bytes
            row.append((f" of {endurance_bytes / 1e12:,.0f} TBW ({figure(100 * share, 2)}%)", "dim"))
        if (celsius := number(temperatures, folder, "temperature_c")) is not None:
            degree = "°C" if glyphs.braille else " C"
            row.append((f"  {celsius:.0f}{degree}", "warn" if celsius >= _HOT_C else "text"))
        rows.append(row)
    return [exactly(row, width) for row in rows]


def _endurance_bytes(data: RunData, folder: str, num_folders: int) -> float | None:
    """Of the drive on which a folder is, as the plan knows it."""
    planned = objects(data.plan, "run", "drives")
    at = [drive for drive in planned if folder.startswith(text(drive, "path") or "\0")]
    if not at and len(planned) == 1 == num_folders:
        at = planned
    return number(max(at, key=lambda drive: len(text(drive, "path") or "")), "endurance_bytes") if at else None


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
    shares: Mapping[str, float] = field(default_factory=dict)
    """Lane -> share of the step in which it was busy."""


def planned_step(plan: dict[str, Any]) -> StepFigures:
    shares = {lane: share for lane in LANES if (share := number(plan, "lanes", lane, "share")) is not None}
    step_s, tokens_per_s, mfu = (number(plan, name) for name in ("step_s", "tokens_per_s", "mfu"))
    return StepFigures(step_s, tokens_per_s, mfu, text(plan, "bound_by"), shares)


def real_step(data: RunData) -> StepFigures:
    """The run's mean; lanes of the last step."""
    metrics, view = data.metrics, data.spans.view
    shares = {}
    if steps := view.steps:
        _, start_s, end_s = steps[-1]
        shares = {lane: view.busy_s(lane, start_s, end_s) / (end_s - start_s) for lane in LANES}
    bound_by = max(shares, key=lambda lane: shares[lane], default=None)
    return StepFigures(metrics.last("mean_step_s"), metrics.last("mean_tokens_per_s"), data.mfu, bound_by, shares)


def plan_rows(data: RunData, width: int, height: int, glyphs: Glyphs) -> list[Row]:
    return figure_rows(planned_step(data.plan), real_step(data), width, height, glyphs)


def figure_rows(planned: StepFigures, real: StepFigures, width: int, height: int, glyphs: Glyphs) -> list[Row]:
    """A row a figure: planned, mean of the run, and by how much they differ; then the lanes of the last step."""
    rows = [_head("mean"), _row("step", planned.step_s, real.step_s, " s")]
    rows.append(_row("tokens/s", planned.tokens_per_s, real.tokens_per_s, ""))
    if planned.mfu is not None or real.mfu is not None:
        rows.append(_percents("MFU", "dim", planned.mfu, real.mfu))
    rows.append(_head("last step"))
    bound: Row = [("bound by".ljust(_LABEL + 2 * (_CELL - _NAME - 1)), "dim")]
    for name in (planned.bound_by, real.bound_by):
        bound.append(((name or "n/a")[:_NAME].rjust(_NAME + 1), f"lane.{name}" if name else "dim"))
    rows.append(bound)
    available = width - _LABEL - 2 * _CELL - 1
    for lane in LANES:
        before, now = planned.shares.get(lane), real.shares.get(lane)
        rows.append(_percents(lane, f"lane.{lane}", before, now, 0))
        if available >= 6 and now is not None:
            rows[-1] += [(" ", "text"), *bar(available, now, before, glyphs, f"lane.{lane}")]
    return [exactly(row, width) for row in rows[:height]]


def _head(real: str) -> Row:
    return [("planned".rjust(_LABEL + _CELL), "predicted"), (real.rjust(_CELL + 1), "title")]


def _percents(label: str, token: str, planned: float | None, real: float | None, decimals: int = 1) -> Row:
    texts = (percent_text(share, decimals).rjust(_CELL) for share in (planned, real))
    return [(label.ljust(_LABEL)[:_LABEL], token), *zip(texts, ("predicted", "text"), strict=True)]


def _row(label: str, planned: float | None, real: float | None, unit: str) -> Row:
    row: Row = [(label.ljust(_LABEL), "dim")]
    for value, token in ((planned, "predicted"), (real, "bold")):
        text = figure(value) + (unit if value is not None else "")
        row.append((text[:_CELL].rjust(_CELL), token))
    if planned and real:
        ratio = real / planned - 1
        row.append((f"  {ratio:+.0%}", "dim" if abs(ratio) < 0.1 else "warn"))
    return row
