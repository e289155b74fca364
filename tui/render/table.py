"""A table that is only read: aligned columns, scrolled with the arrows, cut at the right."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.app.console.rows import Row, exactly
from penstock.tui.render.ticks import fit


def table_rows(
    head: Sequence[tuple[str, str]], body: Sequence[Sequence[str]], width: int, ellipsis: str, *, changed: bool = False
) -> list[Row]:
    """Rows of exactly `width` cells: `head` is (text, token) per column; the first column is dimmed.

    `changed` sets values that differ from the second column's in bold.
    """
    columns = len(head)
    lengths = [max(len(text) for text in (head[i][0], *(row[i] for row in body))) for i in range(columns)]
    first = min(lengths[0], max(8, width // 3))
    available = max(4, (width - first - 2 * (columns - 1)) // max(1, columns - 1))
    widths = [first, *(min(length, available) for length in lengths[1:])]
    rows = [_row([text for text, _ in head], [token for _, token in head], widths, width, ellipsis)]
    for cells in body:
        tokens = ["dim"] + ["bold" if changed and text != cells[1] else "text" for text in cells[1:]]
        rows.append(_row(cells, tokens, widths, width, ellipsis))
    return rows


def _row(cells: Sequence[str], tokens: Sequence[str], widths: Sequence[int], width: int, ellipsis: str) -> Row:
    pieces = zip(cells, tokens, widths, strict=True)
    row = [(fit(text.replace("\n", " "), available, ellipsis) + "  ", token) for text, token, available in pieces]
    return exactly(row, width)
