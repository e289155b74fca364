"""The newest of what an objective measures beside its loss, on few rows."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rich.cells import cell_len

from penstock.app.console.rows import Glyphs, Row, exactly
from penstock.app.runs.measured import by_weight, group_of, label
from penstock.storage.files.units import figure

_MORE_CELLS = 5
"""Kept free for how many there was no room for."""


def measured_rows(newest: Mapping[str, float], drawn: str | None, width: int, most: int, glyphs: Glyphs) -> list[Row]:
    """Names and values on at most `most` rows of `width` cells; the last says how many there was no room for.

    Names are whole where all of them fit, else without the beginning that they share with the one before. `drawn`: the
    one that the chart shows.
    """
    whole = _placed(newest, drawn, width, short=False)
    rows = whole if len(whole) <= most else _placed(newest, drawn, width - _MORE_CELLS, short=True)
    shown, hidden = rows[:most], sum(len(row) // 2 for row in rows[most:])
    if shown and hidden:
        shown[-1].append((f"  +{hidden}", "dim"))
    return [exactly(row, width, glyphs.ellipsis) for row in shown]


def _placed(newest: Mapping[str, float], drawn: str | None, width: int, *, short: bool) -> list[Row]:
    """As many rows as it takes; of each name two pieces."""
    rows: list[Row] = []
    before: str | None = None
    left = 0
    for name in by_weight(newest):
        value = figure(newest[name])
        gap = 2 if before is not None and group_of(name) == group_of(before) else 3
        shown = label(name, before) if short else name
        cells = gap + cell_len(shown) + 1 + len(value)
        if not rows or cells > left:
            rows.append([])
            shown, gap = name, 0
            cells, left = cell_len(name) + 1 + len(value), width
        token = "title" if name == drawn else "dim"
        rows[-1] += [(" " * gap + shown + " ", token), (value, "bad" if math.isnan(newest[name]) else "text")]
        before, left = name, left - cells
    return rows
