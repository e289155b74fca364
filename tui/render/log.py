"""Log lines: wrapped, the newest at the bottom, as many as there is room for."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size

from penstock.app.console.rows import Row
from penstock.tui.data.run_data import LogLine

_TOKENS = {"error": "bad", "warning": "warn", "info": "text", "output": "dim"}
_MOST_ROWS = 60


def matches(line: LogLine, words: str) -> bool:
    """Whether a line has all `words`, in any case; a word with ! before it must not be there."""
    content = f"{line.level} {line.text}".lower()
    for word in words.lower().split():
        if word.startswith("!"):
            if len(word) > 1 and word[1:] in content:
                return False
        elif word not in content:
            return False
    return True


def log_rows(lines: Sequence[LogLine], width: int, height: int) -> list[Row]:
    """The last lines in at most `height` rows; what a line has too much is at the top, out of sight."""
    rows: list[Row] = []
    for line in reversed(lines):
        rows = _wrapped(line, width) + rows
        if len(rows) >= height:
            break
    return rows[-height:] if height > 0 else []


def _wrapped(line: LogLine, width: int) -> list[Row]:
    when = "" if line.time is None else time.strftime("%H:%M:%S ", _local(line.time))
    when = when if width >= 40 else ""
    token = _TOKENS.get(line.level, "text")
    head = f"{line.level}: " if line.level in ("error", "warning") else ""
    space = max(1, width - len(when))
    texts = [piece for part in (head + _printable(line.text)).split("\n") for piece in (_pieces(part, space) or [""])][
        :_MOST_ROWS
    ]
    return [
        [((when if number == 0 else " " * len(when)), "dim"), (set_cell_size(piece, space), token)]
        for number, piece in enumerate(texts)
    ]


def _pieces(text: str, space: int) -> list[str]:
    if cell_len(text) <= space:
        return [text]
    indent = text[: len(text) - len(text.lstrip())]
    pieces = textwrap.wrap(text[: space * _MOST_ROWS], space, replace_whitespace=False, initial_indent=indent[:space])
    return pieces if all(cell_len(piece) <= space for piece in pieces) else textwrap.wrap(text, max(1, space // 2))


def _printable(text: str) -> str:
    return "".join(c if c == "\n" or c.isprintable() else " " if c == "\t" else "" for c in text).rstrip("\n")


def _local(unix_s: float) -> time.struct_time:
    try:
        return time.localtime(unix_s)
    except (OverflowError, ValueError, OSError):
        return time.localtime(0)
