"""One sample of a run: its prompt and what the model wrote behind it, wrapped."""

from __future__ import annotations

import textwrap

from rich.cells import cell_len, set_cell_size

from penstock.app.console.rows import Glyphs, Page, Row
from penstock.storage.files.untrusted import printable
from penstock.tui.data.sample_log import Samples

_MOST_ROWS = 2000


def sample_rows(found: Samples, prompt: int, note: str, width: int, glyphs: Glyphs) -> list[Row]:
    """The samples of a step at one prompt; `note` stands at the end of the first row."""
    page, sample, number = Page(width, glyphs), found.samples[prompt], len(found.samples)
    which = f"prompt {prompt + 1:,} of {number:,}  " if number > 1 else ""
    tokens = "n/a" if sample.tokens is None else f"{sample.tokens:,}"
    ended = "ended by the model" if sample.ended else "cut off"
    page.ends([(f"step {found.step:,}", "value"), (f"  {which}{tokens} tokens, {ended}", "dim")], [(note, "dim")])
    for piece in _wrapped(sample.prompt, width):
        page.line([(piece, "dim")])
    for piece in _wrapped(sample.text, width) or [""]:
        page.line([(piece, "text")])
    return page.rows


def _wrapped(text: str, width: int) -> list[str]:
    """The lines of a text in at most `width` cells, with nothing in them that a terminal would obey."""
    found: list[str] = []
    for line in text.expandtabs(4).split("\n"):
        clean = printable(line)
        space = max(1, width // 2 if cell_len(clean) > len(clean) else width)
        found += textwrap.wrap(clean, space, replace_whitespace=False) or [""]
        if len(found) >= _MOST_ROWS:
            break
    return [set_cell_size(piece, width) if cell_len(piece) > width else piece for piece in found[:_MOST_ROWS]]
