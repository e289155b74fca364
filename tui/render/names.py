"""Names in few cells: cut in their middle, and never so that two that differ look the same."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size

_TAIL_SHARES = (0.5, 0.33, 0.67, 0.0, 1.0)
"""How much of what is kept of a name is its end: the first at which all names differ is taken."""


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
        if (parted := _parted(names, cells, ellipsis)) is not None:
            return parted
    return list(names)


def _parted(names: Sequence[str], width: int, ellipsis: str) -> list[str] | None:
    """Like `distinct` in just `width` cells, each without what it shares with those it would look like."""
    cut = [cut_middle(name, width, ellipsis) for name in names]
    groups: dict[str, list[int]] = {}
    for i, text in enumerate(cut):
        groups.setdefault(text, []).append(i)
    for text, group in groups.items():
        same = [names[i] for i in group]
        if len(set(same)) == 1:
            continue
        begin = _same_begin(same)
        end = _same_begin([name[begin:][::-1] for name in same])
        for i in group:
            inner = names[i][begin : len(names[i]) - end] or ellipsis
            left = width - 2 - 2 * len(ellipsis)
            head = set_cell_size(text, 2)
            cut[i] = f"{head}{ellipsis}{cut_middle(inner, max(2, left), ellipsis)}{ellipsis}"
    fits = len(set(cut)) == len(set(names)) and all(cell_len(text) <= width for text in cut)
    return cut if fits else None


def _same_begin(names: Sequence[str]) -> int:
    """How many characters at their beginning all of them share."""
    low, high = min(names), max(names)
    return next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))
