"""The line of key figures: what matters most stays when the terminal is narrow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.app.console.rows import Glyphs, Row, exactly
from penstock.tui.render.ticks import fit

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
    """One figure of the line."""

    text: str
    short: str = ""
    """What remains of it where room is scarce; the same text by default."""
    token: str = "text"
    label: str = ""


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
    chosen: list[Figure] = []
    for figure in figures:
        size = _GAP + len(_cells(figure, short=True))
        if size > left:
            break
        chosen.append(figure)
        left -= size
    texts = []
    for figure in chosen:
        more = len(_cells(figure)) - len(_cells(figure, short=True))
        long = more <= left
        left -= more if long else 0
        texts.append((figure, long))
    row: Row = []
    if cells:
        row.append((fit(name, min(len(name), cells + left), glyphs.ellipsis) + " " * _GAP, "title"))
    row.append((shown, f"{token} bold"))
    for figure, long in texts:
        row.append((" " * _GAP, "text"))
        if figure.label:
            row.append((figure.label + " ", "dim"))
        row.append((figure.text if long or not figure.short else figure.short, figure.token))
    return exactly(row, width)


def _cells(figure: Figure, *, short: bool = False) -> str:
    text = figure.short if short and figure.short else figure.text
    return f"{figure.label} {text}" if figure.label else text
