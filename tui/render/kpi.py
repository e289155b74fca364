"""The line of key figures, where what matters most stays in narrow terminals; and what a run prepares at first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.app.console.rows import Glyphs, Row, exactly
from penstock.tui.render.one_row import bar
from penstock.tui.render.ticks import fit

if TYPE_CHECKING:
    from penstock.tui.data.run_data import Prepared

STATE_TOKENS = {
    "running": "good",
    "finished": "good",
    "preparing": "accent",
    "paused": "warn",
    "stopped": "warn",
    "stale": "warn",
    "failed": "bad",
    "crashed": "bad",
    "gone": "bad",
    "damaged": "bad",
}
_GAP = 2
_NAME_CELLS = 12
"""A longer name is cut to so many where figures need the room."""


@dataclass(frozen=True, slots=True)
class Figure:
    text: str
    short: str = ""
    """What remains of it where room is scarce; the same text by default."""
    token: str = "text"
    label: str = ""

    @property
    def head(self) -> str:
        return f"{self.label} " if self.label else ""


def kpi_row(width: int, name: str, state: str, figures: Sequence[Figure], glyphs: Glyphs) -> Row:
    """The run's name, its state, and its figures by falling weight, as many as there is room for.

    Name and state always stay, the name cut to some cells where need be; first the figures' long forms go, then the
    last figures.
    """
    mark = {"running": glyphs.dot, "finished": glyphs.check, "failed": glyphs.cross, "crashed": glyphs.cross}.get(
        state, glyphs.diamond if glyphs.braille else "!"
    )
    token = STATE_TOKENS.get(state, "dim")
    shown = f"{mark} {state}"
    cells = max(0, min(len(name), _NAME_CELLS, width - len(shown) - _GAP))
    left = width - len(shown) - (cells + _GAP if cells else 0)
    chosen: list[tuple[Figure, str]] = []
    for figure in figures:
        text = figure.short or figure.text
        size = _GAP + len(figure.head + text)
        if size > left:
            break
        chosen.append((figure, text))
        left -= size
    for index, (figure, text) in enumerate(chosen):
        if (more := len(figure.text) - len(text)) <= left:
            chosen[index] = figure, figure.text
            left -= more
    row: Row = []
    if cells:
        row.append((fit(name, min(len(name), cells + left), glyphs.ellipsis) + " " * _GAP, "title"))
    row.append((shown, f"{token} bold"))
    for figure, text in chosen:
        row += [(" " * _GAP, "text"), (figure.head, "dim"), (text, figure.token)]
    return exactly(row, width)


_ITEM_CELLS = 32
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
    cells = min(_ITEM_CELLS, width - 2 - _SECONDS_CELLS)
    if cells < _LEAST_CELLS:  # no room for a column of times
        return [*mark, (fit(name, max(0, width - 2), glyphs.ellipsis), token)]
    return [*mark, (fit(name, cells, glyphs.ellipsis), token), (seconds.rjust(_SECONDS_CELLS), token)]


def _seconds(seconds: float | None) -> str:
    return "n/a" if seconds is None else f"{seconds:,.1f} s"
