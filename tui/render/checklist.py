"""The checklist of what a run prepares before its first step: what is done or being done, and how long it took."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.app.console.rows import Glyphs, Row, exactly
from penstock.tui.data.run_data import Prepared
from penstock.tui.render.one_row import bar
from penstock.tui.render.ticks import fit

_NAME_CELLS = 32
_SECONDS_CELLS = 9
_BAR_CELLS = 16
_PERCENT_CELLS = 6
_LEAST_CELLS = 10


def checklist_rows(items: Sequence[Prepared], width: int, height: int, glyphs: Glyphs, *, live: bool) -> list[Row]:
    """A row per item, and their sum below them where there is room; of too many items the last ones.

    The item that is not done is under way while the run is `live`, and was broken off where it is not. Narrow rows
    leave out the bar, then the end of the detail, then the share, then the end of the name.
    """
    shown = list(items[-height:]) if height > 0 else []
    rows = [_row(item, width, glyphs, live=live) for item in shown]
    if items and height > len(items):
        total = sum(item.seconds or 0.0 for item in items)
        rows.append(
            _columns([("  ", "dim")], "in all" if not live else "so far", _seconds(total), "dim", width, glyphs)
        )
    return [exactly(row, width) for row in rows]


def _row(item: Prepared, width: int, glyphs: Glyphs, *, live: bool) -> Row:
    if item.done:
        mark, token = (glyphs.check, "good"), "text"
    elif live:
        mark, token = (glyphs.arrow, "accent"), "accent"
    else:
        mark, token = (glyphs.cross, "bad"), "bad"
    row = _columns([(mark[0] + " ", mark[1])], item.name, _seconds(item.seconds), token, width, glyphs)
    left = width - sum(len(text) for text, _ in row)
    if item.done:
        return row
    if item.fraction is not None and left >= _PERCENT_CELLS:
        left -= _PERCENT_CELLS
        if left >= _BAR_CELLS + 2:
            left -= _BAR_CELLS + 2
            row += [("  ", "text"), *bar(_BAR_CELLS, item.fraction, None, glyphs, token)]
        row.append((f"{item.fraction:.0%}".rjust(_PERCENT_CELLS), token))
    if item.detail and left >= _LEAST_CELLS:
        row += [("  ", "text"), (fit(item.detail, left - 2, glyphs.ellipsis), "dim")]
    return row


def _columns(mark: Row, name: str, seconds: str, token: str, width: int, glyphs: Glyphs) -> Row:
    cells = min(_NAME_CELLS, width - 2 - _SECONDS_CELLS)
    if cells < _LEAST_CELLS:  # no room for a column of times
        return [*mark, (fit(name, max(0, width - 2), glyphs.ellipsis), token)]
    return [*mark, (fit(name, cells, glyphs.ellipsis), token), (seconds.rjust(_SECONDS_CELLS), token)]


def _seconds(seconds: float | None) -> str:
    return "n/a" if seconds is None else f"{seconds:,.1f} s"
