"""The tiers pane: what each tier holds of its budget, and what its drives do."""

from __future__ import annotations

from typing import NamedTuple

from penstock.app.console.rows import Row, exactly
from penstock.app.runs.lanes import DRIVE
from penstock.storage.files.units import bytes_text, figure, rate_text
from penstock.tui.data.fields import number, objects, text
from penstock.tui.data.flow import rate_window
from penstock.tui.data.run_data import RunData
from penstock.tui.data.tiers import tiers
from penstock.tui.render.bars import tier_rows
from penstock.tui.render.ticks import fit
from penstock.tui.widgets.lines import RunPane

_HOT_C = 70.0


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
        rows: list[Row] = []
        window = rate_window(self._data)
        if window is not None:
            moved = self._data.spans.view.bytes_by_lane(window.start_s, window.end_s)
            seconds = window.end_s - window.start_s
            read, written = (rate_text(moved.get(lane, 0) / seconds) for lane in DRIVE)
            row: Row = [("read ", "dim"), (read.ljust(11), "lane.nvme_read")]
            row += [("write ", "dim"), (written, "lane.nvme_write")]
            if 22 + len(written) + len(window.words) <= width:
                row.append((f"  {window.words}", "dim"))
            rows.append(exactly(row, width))
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
