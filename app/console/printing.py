"""Rows of text (`rows`) printed on a console, in its own colours."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.text import Text

from penstock.app.console.rows import ASCII, UNICODE, Page, Row

_STYLES = {"good": "green", "warn": "yellow", "bad": "red", "accent": "cyan", "ema": "cyan", "title": "bold"}
_STYLES |= {"dim": "dim", "axis": "dim", "lane": "cyan", "tier": "cyan"}


def print_rows(rows: Iterable[Row], console: Console) -> None:
    """Print rows in a console's own colours."""
    for row in rows:
        line = Text.assemble(*((text, _style(token)) for text, token in row))
        line.rstrip()
        console.print(line, soft_wrap=True, highlight=False)


def _style(token: str) -> str:
    name, *extras = token.split()
    style = _STYLES.get(name.partition(".")[0], "")
    return " ".join([style, *("underline" if extra == "line" else extra for extra in extras)]).strip()


def console_page(console: Console) -> Page:
    """A page as wide as the console, in characters that it shows."""
    return Page(max(60, min(120, console.width)), ASCII if console.options.ascii_only else UNICODE)


def short_path(path: str | Path) -> str:
    """The path, or from the current folder where that is shorter."""
    return min(str(path), os.path.relpath(path), key=len)
