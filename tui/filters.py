"""Last nets under all that is drawn: nothing that a terminal would obey, and ASCII alone where it has nothing else."""

from __future__ import annotations

from functools import lru_cache

from rich.cells import cell_len
from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

from penstock.storage.files.untrusted import printable

_MOVES = str.maketrans("\t\n", "  ")


class PrintableFilter(LineFilter):
    """What a terminal would obey, in whatever text it came, is shown as U+FFFD: a last net under all that is drawn.

    Tabs and line ends would leave the cells that a widget has: they are spaces.
    """

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [
            segment
            if segment.text.isprintable()
            else Segment(printable(segment.text).translate(_MOVES), segment.style, segment.control)
            for segment in segments
        ]


class AsciiFilter(LineFilter):
    """Gives what Textual itself draws in other characters, borders and scrollbars, in ASCII; letters stay."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [
            segment if segment.text.isascii() else Segment(_ascii(segment.text), segment.style, segment.control)
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
