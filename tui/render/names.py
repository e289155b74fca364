"""Names in few cells: cut in their middle, and never so that two that differ look the same."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size

_TAIL_SHARES = (0.5, 0.33, 0.67, 0.0, 1.0)
"""How much of what remains of a name is its end: the first at which all names differ is taken."""


def cut_middle(name: str, width: int, ellipsis: str, tail_share: float = 0.5) -> str:
    """The name in at most `width` cells, with `ellipsis` in the place of what is left out."""
    if cell_len(name) <= width:
        return name
    if width < 2:
        return ellipsis[:width]
    tail = round((width - 1) * tail_share)
    head = set_cell_size(name, width - 1 - tail).rstrip(" ")
    end = ""
    for char in reversed(name):
        if cell_len(char + end) > tail:
            break
        end = char + end
    return head + ellipsis + end


def distinct(names: Sequence[str], width: int, ellipsis: str) -> list[str]:
    """The names in at most `width` cells each, or as many as it takes for those that differ to look different."""
    longest = max(map(cell_len, names), default=0)
    for cells in range(max(2, width), longest):
        for share in _TAIL_SHARES:
            cut = [cut_middle(name, cells, ellipsis, share) for name in names]
            if len(set(cut)) == len(set(names)):
                return cut
    return list(names)
