"""Gauges: a bar against its budget, with a mark at what was planned."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.app.console.rows import Glyphs, Row, exactly
from penstock.storage.files.units import bytes_text, of_text
from penstock.tui.data.tiers import FULL_SHARE, Tier
from penstock.tui.render.bar import bar
from penstock.tui.render.ticks import fit


def tier_rows(tiers: Sequence[Tier], width: int, rows_each: int, glyphs: Glyphs) -> list[Row]:
    """One or two rows a tier: held of budget, the planned peak, and the bar."""
    rows: list[Row] = []
    for tier in tiers:
        share = tier.share
        planned = tier.planned_bytes / tier.budget_bytes if tier.planned_bytes and tier.budget_bytes else None
        alert = "bad" if share is not None and share > 1 else "warn" if share is not None and share > FULL_SHARE else ""
        percent = "n/a" if share is None else f"{share:.0%}"
        measured = tier.held_bytes
        filled = None if measured is None else share
        figures = of_text(tier.planned_bytes if measured is None else measured, tier.budget_bytes)
        figures = f"planned {figures}" if measured is None else figures
        if rows_each >= 2:
            plan = f"  plan {bytes_text(tier.planned_bytes)}" if measured is not None and planned is not None else ""
            text = fit(
                f"{figures}{plan}" if len(figures + plan) <= width - 10 else figures, width - 10, glyphs.ellipsis
            )
            rows.append(
                [(fit(tier.name, 5), f"tier.{tier.name} bold"), (text, "text"), (percent.rjust(5), alert or "text")]
            )
            row: Row = [*bar(width, filled, planned, glyphs, f"tier.{tier.name}")]
        else:
            cells = min(len(figures), max(0, width - 18))
            size = max(4, width - 5 - 5 - (cells + 1 if cells >= len(figures) else 0))
            row = [
                (fit(tier.name, 5), f"tier.{tier.name} bold"),
                *bar(size, filled, planned, glyphs, f"tier.{tier.name}"),
            ]
            row.append((percent.rjust(5), alert or "text"))
            if cells >= len(figures):
                row.append((" " + figures, "dim"))
        rows.append(row)
    return [exactly(row, width) for row in rows]
