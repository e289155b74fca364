"""Rows of text that the command line and the terminal application draw: lists of (text, token). A token names a style
(of tui/theme.py, or of a console): who makes rows knows no colours."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size

Row = list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Glyphs:
    """One set of characters, each one cell wide."""

    eighths: str
    """Nine characters from nothing to a full cell, rising from the bottom."""
    braille: bool
    """Whether curves are drawn in dots of 2 x 4 a cell, or with `dot`."""
    bar_full: str
    bar_empty: str
    bar_peak: str
    hline: str
    vline: str
    tick: str
    """Where an axis carries a label."""
    dot: str
    check: str
    cross: str
    arrow: str
    diamond: str
    ellipsis: str
    up: str
    down: str
    left: str
    right: str
    """Heads of arrows."""
    shaft: str
    shaft_still: str
    """The line of an arrow, and of one that carries nothing."""
    corners: str
    """Of a box: top left and right, bottom left and right."""


_PAIRS = {
    "bar_full": "█#",
    "bar_empty": "░.",
    "bar_peak": "▏|",
    "hline": "─-",
    "vline": "│|",
    "tick": "┤+",
    "dot": "●*",
    "check": "✓v",
    "cross": "✗x",
    "arrow": "→>",
    "diamond": "◆<",
    "ellipsis": "…~",
    "up": "▲^",
    "down": "▼v",
    "left": "◄<",
    "right": "►>",
    "shaft": "━=",
    "shaft_still": "╌-",
}
"""Each glyph that is one character, in Unicode and in ASCII."""
UNICODE, ASCII = (
    Glyphs(eighths=eighths, braille=not at, corners=corners, **{name: pair[at] for name, pair in _PAIRS.items()})
    for at, eighths, corners in ((0, " ▁▂▃▄▅▆▇█", "╭╮╰╯"), (1, " .:-=+*%#", "++++"))
)


def plain(rows: Iterable[Row]) -> str:
    """The rows' text alone, a line each."""
    return "\n".join("".join(text for text, _ in row) for row in rows)


def merged(row: Iterable[tuple[str, str]]) -> Row:
    """The row with neighbours of the same token as one piece."""
    pieces = itertools.groupby(row, key=lambda piece: piece[1])
    return [("".join(text for text, _ in group), token) for token, group in pieces]


def exactly(row: Row, width: int, ellipsis: str = "") -> Row:
    """The row cut, with `ellipsis` at its end, or padded to `width` cells."""
    out: Row = []
    left = width
    for text, token in row:
        cells = cell_len(text)
        if cells > left:
            text = set_cell_size(text, left - 1) + ellipsis if left > 1 and ellipsis else set_cell_size(text, left)
            cells = left
        if text:
            out.append((text, token))
        left -= cells
    return [*out, (" " * left, "text")] if left > 0 else out


def beside(rows: Sequence[Row], right: Sequence[Row]) -> list[Row]:
    """The rows, with as many of the others two cells to the right of them."""
    return [
        [*row, ("  ", "text"), *other] for row, other in itertools.zip_longest(rows, right[: len(rows)], fillvalue=())
    ]


def filled(items: Sequence[str], separator: str, width: int) -> list[str]:
    """Whole items on as few lines as they need."""
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + len(separator) + len(item) <= width:
            lines[-1] += separator + item
        else:
            lines.append(item)
    return lines


class Page:
    """Rows being made, each of exactly `width` cells."""

    def __init__(self, width: int, glyphs: Glyphs) -> None:
        self.width, self.glyphs = width, glyphs
        self.rows: list[Row] = []

    def line(self, row: Row) -> None:
        """One row, cut or padded."""
        self.rows.append(exactly(row, self.width, self.glyphs.ellipsis))

    def ends(self, left: Row, right: Row) -> None:
        """One row with something at either end; the right one goes where there is no room for both."""
        used = sum(cell_len(text) for text, _ in (*left, *right))
        self.line([*left, (" " * (self.width - used), "text"), *right] if used < self.width else left)

    def head(self, title: str, note: str = "", token: str = "dim") -> None:
        """The title of a part, with a rule behind it."""
        rule = self.width - cell_len(title) - cell_len(note) - (2 if note else 1)
        self.line(
            [(title + " ", "title"), (self.glyphs.hline * max(1, rule), "axis"), (f" {note}" if note else "", token)]
        )

    def wrapped(self, text: str, token: str, indent: int = 0) -> None:
        """Whole words on as many rows as they need."""
        pad = " " * indent
        for line in textwrap.wrap(" ".join(text.split()), max(1, self.width - indent), break_on_hyphens=False):
            self.line([(pad + line, token)])

    def items(self, items: Sequence[str], separator: str, token: str, indent: int = 0) -> None:
        """Whole items on as few rows as they need."""
        for line in filled(items, separator, self.width - indent):
            self.line([(" " * indent + line, token)])
