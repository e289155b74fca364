"""What a run says and what its model writes: log lines and samples, wrapped."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size

from penstock.app.console.rows import Glyphs, Page, Row
from penstock.app.runs.files import local_time
from penstock.storage.files.untrusted import printable
from penstock.tui.data.metrics import Samples
from penstock.tui.data.run_data import LogLine

_TOKENS = {"error": "bad", "warning": "warn", "info": "text", "output": "dim"}
_MOST_ROWS = 60
"""Of one message; the rest of it is left out."""
_MOST_SAMPLE_ROWS = 2000


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
    when = "" if line.time is None else time.strftime("%H:%M:%S ", local_time(line.time))
    when = when if width >= 40 else ""
    head = f"{line.level}: " if line.level in ("error", "warning") else ""
    pieces = _pieces((head + line.text).rstrip("\n"), max(1, width - len(when)))[:_MOST_ROWS]
    starts = [when, *[" " * len(when)] * (len(pieces) - 1)]
    token = _TOKENS.get(line.level, "text")
    return [[(start, "dim"), (piece, token)] for start, piece in zip(starts, pieces, strict=True)]


def sample_rows(result: Samples, prompt: int, note: str, width: int, glyphs: Glyphs) -> list[Row]:
    """The samples of a step at one prompt; `note` stands at the end of the first row."""
    page, sample, number = Page(width, glyphs), result.samples[prompt], len(result.samples)
    which = f"prompt {prompt + 1:,} of {number:,}  " if number > 1 else ""
    tokens = "n/a" if sample.tokens is None else f"{sample.tokens:,}"
    ended = "ended by the model" if sample.ended else "cut off"
    reward = "" if sample.reward is None else f"  reward {sample.reward:.4g}"
    about = [(reward, "value"), (f"  {which}{tokens} tokens, {ended}", "dim")]
    page.ends([(f"step {result.step:,}", "value"), *about], [(note, "dim")])
    for text, token in ((sample.prompt, "dim"), (sample.text, "text")):
        for piece in _pieces(text, width):
            page.line([(piece, token)])
    return page.rows


def _pieces(text: str, width: int) -> list[str]:
    """The lines of a text, each of exactly `width` cells, with nothing in them that a terminal would obey."""
    result: list[str] = []
    for line in text.expandtabs(4).split("\n"):
        clean = printable(line)[: width * _MOST_SAMPLE_ROWS]
        space = max(1, width // 2 if cell_len(clean) > len(clean) else width)
        result += textwrap.wrap(clean, space, replace_whitespace=False) or [""]
        if len(result) >= _MOST_SAMPLE_ROWS:
            break
    return [set_cell_size(piece, width) for piece in result[:_MOST_SAMPLE_ROWS]]
