"""The tiers pane: what each tier holds of its budget, and what its drives do."""

from __future__ import annotations

from typing import NamedTuple

from penstock.app.rows import Row, exactly
from penstock.storage.units import bytes_text, figure, rate_text
from penstock.tui.data.fields import number, objects, text
from penstock.tui.data.run_data import RunData
from penstock.tui.data.tiers import tiers
from penstock.tui.render.bars import tier_rows
from penstock.tui.render.ticks import fit
from penstock.tui.widgets.lines import RunPane

RATE_S = 5.0
"""Drive rates are those of the last so many seconds."""
_HOT_C = 70.0


class Drive(NamedTuple):
    """One drive folder of the run."""

    folder: str
    written_bytes: float
    endurance_bytes: float | None
    temperature_c: float | None


def drive_rates(data: RunData) -> tuple[float, float] | None:
    """Bytes a second read from and written to the NVMe tier lately; None while nothing has been measured."""
    view, clock_s = data.spans.view, data.clock_s
    if clock_s is None or not view.num_spans:
        return None
    end_s = clock_s if data.state == "running" else view.last_end_s
    start_s = max(end_s - RATE_S, view.first_start_s)
    if end_s <= start_s:
        return None
    moved = view.bytes_by_lane(start_s, end_s)
    return moved.get("nvme_read", 0) / (end_s - start_s), moved.get("nvme_write", 0) / (end_s - start_s)


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


class TierGauges(RunPane, can_focus=True):
    """Bars against budgets, drive rates, temperature, bytes written against endurance."""

    def rows(self, width: int, height: int) -> list[Row]:
        """Gauges in two rows each where there is room, then the drives."""
        found = tiers(self._data)
        below = self._drive_rows(width)
        each = 2 if height >= 2 * len(found) + min(2, len(below)) else 1
        rows = tier_rows(found, width, each, self.glyphs)
        if not rows:
            rows = [exactly([("no plan yet", "dim")], width)]
        if height > len(rows) + len(below):
            rows.append([(" " * width, "text")])
        return (rows + below)[:height]

    def _drive_rows(self, width: int) -> list[Row]:
        glyphs = self.glyphs
        rates = drive_rates(self._data)
        rows: list[Row] = []
        if rates is not None:
            read, written = map(rate_text, rates)
            row: Row = [("read ", "dim"), (read.ljust(11), "lane.nvme_read")]
            rows.append(exactly([*row, ("write ", "dim"), (written, "lane.nvme_write")], width))
        found = drives(self._data)
        for drive in found:
            parts: Row = []
            if len(found) > 1:
                parts.append((fit(drive.folder[-14:], 15, glyphs.ellipsis), "dim"))
            parts += [("written ", "dim"), (bytes_text(drive.written_bytes), "text")]
            if drive.endurance_bytes:
                share = drive.written_bytes / drive.endurance_bytes
                parts.append((f" of {drive.endurance_bytes / 1e12:,.0f} TBW ({figure(100 * share, 2)}%)", "dim"))
            degree = "°C" if glyphs.braille else " C"
            if drive.temperature_c is not None:
                hot = drive.temperature_c >= _HOT_C
                parts.append((f"  {drive.temperature_c:.0f}{degree}", "warn" if hot else "text"))
            rows.append(exactly(parts, width))
        return rows
