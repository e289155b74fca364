"""Last nets under all that is drawn: nothing that a terminal would obey, and ASCII alone where it has nothing else."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from rich.cells import cell_len
from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

from penstock.storage.files.untrusted import printable

_MOVES = str.maketrans("\t\n", "  ")


class TextFilter(LineFilter):
    """Gives text that is not `fine` as `mended` has it."""

    def __init__(self, fine: Callable[[str], bool], mended: Callable[[str], str]) -> None:
        super().__init__()
        self._fine, self._mended = fine, mended

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [
            segment if self._fine(segment.text) else Segment(self._mended(segment.text), segment.style, segment.control)
            for segment in segments
        ]


_FIRST_SYMBOL = 0x2000
"""Below it are letters."""
_REPLACED = str.maketrans(
    dict.fromkeys("─━═┄┈╌╴╶▔", "-")
    | dict.fromkeys("│┃║┆┊╎▌▐▎▏▊▍▋", "|")
    | dict.fromkeys("╭╮╰╯┌┐└┘├┤┬┴┼╔╗╚╝┏┓┗┛", "+")
    | dict.fromkeys("▁▂▃▄▅▆▇▀", " ")
    | {"█": "#", "…": "~", "●": "*", "▲": "^", "▼": "v"}
)


@lru_cache(maxsize=4096)
def _ascii(text: str) -> str:
    text = text.translate(_REPLACED)
    return "".join(char if ord(char) < _FIRST_SYMBOL else "?" * cell_len(char) for char in text)


PRINTABLE = TextFilter(str.isprintable, lambda text: printable(text).translate(_MOVES))
"""What a terminal would obey, in whatever text it came, is shown as U+FFFD: a last net under all that is drawn.

Tabs and line ends would leave the cells that a widget has: they are spaces."""
IN_ASCII = TextFilter(str.isascii, _ascii)
"""Gives what Textual itself draws in other characters, borders and scrollbars, in ASCII; letters stay."""
