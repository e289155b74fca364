"""Where keys and values of sequences that are continued lie, in rows that are the same in every layer."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Place(NamedTuple):
    """Of one sequence."""

    first: int
    """Row of its first token."""
    shared: int = 0
    """So many of its first tokens other sequences have there as well."""
    own: int = 0
    """Row of the first token behind those."""

    def ranges(self, start: int, end: int) -> list[tuple[int, int]]:
        """Rows of the tokens from position `start` to `end`, as (first, end) of one range or two."""
        if start == end:
            return []
        parts = []
        if start < self.shared:
            parts.append((self.first + start, self.first + min(end, self.shared)))
        if end > self.shared:
            behind = self.own - self.shared
            parts.append((behind + max(start, self.shared), behind + end))
        if len(parts) == 2 and parts[0][1] == parts[1][0]:
            return [(parts[0][0], parts[1][1])]
        return parts


def lay_out(lengths: Sequence[int], copies: int = 1, new_tokens: int = 0, *, share: bool = True) -> list[Place]:
    """Places for `copies` sequences of each prompt, one prompt behind the other. `lengths`: tokens that each comes to,
    of which, where copies `share` their prompt, the last `new_tokens` are a copy's own."""
    result: list[Place] = []
    end = 0
    for length in lengths:
        shared = length - new_tokens if share and copies > 1 else 0
        own = range(end + shared, end + shared + copies * (length - shared), length - shared)
        result += [Place(end, shared, row) if shared else Place(row, 0, row) for row in own]
        end = own.stop
    return result


def distinct(places: Sequence[Place], read: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Rows of the first tokens of sequences, each once: `read` has pairs of (sequence, number of tokens)."""
    ranges = (places[sequence].ranges(0, count) for sequence, count in read)
    return list(dict.fromkeys(itertools.chain.from_iterable(ranges)))
