"""Where keys and values of sequences that are continued lie, in rows that are the same in every layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Place(NamedTuple):
    """Of one sequence. Where several begin alike, the tokens that they have in common lie there once; behind them are
    the first token of each, the second of each, and so on, as they are written side by side."""

    first: int
    """Row of its first token."""
    shared: int = 0
    """So many of its first tokens other sequences have there as well."""
    which: int = 0
    """Of the sequences that have them, counted from 0."""
    copies: int = 1
    """How many there are."""

    def ranges(self, start: int, end: int) -> list[tuple[int, int]]:
        """Rows of the tokens from position `start` to `end`, as (first, end) of neighbours, in order."""
        if self.copies == 1:
            return [(self.first + start, self.first + end)] * (start < end)
        own = self.first + self.shared + self.which
        rows = [own + (position - self.shared) * self.copies for position in range(max(start, self.shared), end)]
        shared = (self.first + start, self.first + min(end, self.shared))
        return merged([shared] * (start < min(end, self.shared)) + [(row, row + 1) for row in rows])

    def end(self, count: int) -> int:
        """Row behind those of the first `count` tokens of all copies."""
        return self.first + min(count, self.shared) + max(0, count - self.shared) * self.copies


def lay_out(lengths: Sequence[int], copies: int = 1, new_tokens: int = 0, *, share: bool = True) -> list[Place]:
    """Places for `copies` sequences of each prompt, one prompt behind the other. `lengths`: tokens that each comes to,
    of which, where copies `share` their prompt, the last `new_tokens` are a copy's own."""
    result: list[Place] = []
    end = 0
    for length in lengths:
        if share and copies > 1:
            result += [Place(end, length - new_tokens, which, copies) for which in range(copies)]
            end = result[-1].end(length)
        else:
            result += [Place(end + which * length) for which in range(copies)]
            end += copies * length
    return result


def distinct(places: Sequence[Place], read: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Rows of the first tokens of sequences, each once, and of others that begin alike as far as these are: `read` has
    pairs of (sequence, number of tokens)."""
    ends: dict[int, int] = {}
    for sequence, count in read:
        place = places[sequence]
        ends[place.first] = max(place.end(count), ends.get(place.first, 0))
    return merged(ends.items())


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Those that touch as one."""
    result: list[tuple[int, int]] = []
    for first, end in ranges:
        if result and result[-1][1] == first:
            result[-1] = (result[-1][0], end)
        else:
            result.append((first, end))
    return result
