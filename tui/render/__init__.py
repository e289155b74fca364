"""Pure renderers: figures in, rows of text out; no Textual here.

A row is a list of (text, token). A token names a style of the theme (tui/theme.py): a renderer knows no colours.
"""

from __future__ import annotations

from collections.abc import Iterable

Row = list[tuple[str, str]]


def plain(rows: Iterable[Row]) -> str:
    """The rows' text alone, a line each."""
    return "\n".join("".join(text for text, _ in row) for row in rows)
