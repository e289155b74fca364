"""Gauges: bars against budgets, with a mark at what was planned; and what the drives of a run do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.app.console.rows import Glyphs, Row, exactly
from penstock.app.runs.lanes import DRIVE
from penstock.storage.files.units import bytes_text, figure, of_text, rate_text
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
    found = []
    for folder in folders:
        at = [drive for drive in planned if folder.startswith(text(drive, "path") or "\0")]
        if not at and len(planned) == 1 == len(folders):
            at = planned
        endurance = number(max(at, key=lambda drive: len(text(drive, "path") or "")), "endurance_bytes") if at else None
        temperature = number(temperatures, folder, "temperature_c")
        found.append(Drive(folder, data.metrics.written_bytes.get(folder, 0.0), endurance, temperature))
    return found


def tier_pane_rows(data: RunData, width: int, height: int, glyphs: Glyphs) -> list[Row]:
    """Gauges in two rows each where there is room, then drive rates, temperature, bytes written against endurance."""
    found, below = tiers(data), _drive_rows(data, width, glyphs)
    each = 2 if height >= 2 * len(found) + min(2, len(below)) else 1
    rows = tier_rows(found, width, each, glyphs) or [exactly([("no plan yet", "dim")], width)]
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
    found = drives(data)
    for drive in found:
        row: Row = [(fit(drive.folder[-14:], 15, glyphs.ellipsis), "dim")] if len(found) > 1 else []
        row += [("written ", "dim"), (bytes_text(drive.written_bytes), "text")]
        if drive.endurance_bytes:
            share = drive.written_bytes / drive.endurance_bytes
            row.append((f" of {drive.endurance_bytes / 1e12:,.0f} TBW ({figure(100 * share, 2)}%)", "dim"))
        if drive.temperature_c is not None:
            degree = "°C" if glyphs.braille else " C"
            row.append((f"  {drive.temperature_c:.0f}{degree}", "warn" if drive.temperature_c >= _HOT_C else "text"))
        rows.append(row)
    return [exactly(row, width) for row in rows]
