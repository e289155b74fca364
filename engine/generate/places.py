"""Where keys and values of sequences that are continued lie, in rows that are the same in every layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Place(NamedTuple):
    """Of one sequence: alone in neighbouring rows, or side by side with others. Then the first tokens of all prompts
    come first, the second ones behind them, and so on; behind the longest prompt, in the same order, the tokens that
    each copy of each prompt has for itself. So one product computes with the keys of all, where they lie."""

    first: int
    """Row of the first token that it has for itself, but for its number among such."""
    shared: int = 0
    """So many of its first tokens the other copies of its prompt have as well."""
    prompt: int = 0
    """Of the prompts, counted from 0."""
    prompts: int = 1
    which: int = 0
    """Of the prompt's copies, counted from 0."""
    copies: int = 1

    @property
    def number(self) -> int:
        """Among the sequences that lie side by side."""
        return self.prompt * self.copies + self.which

    @property
    def width(self) -> int:
        """Sequences that lie side by side."""
        return self.prompts * self.copies

    def row(self, position: int) -> int:
        if position < self.shared:
            return self.prompt + position * self.prompts
        return self.first + self.number + (position - self.shared) * self.width

    def ranges(self, start: int, end: int) -> list[tuple[int, int]]:
        """Rows of the tokens from position `start` to `end`, as (first, end) of neighbours, in order."""
        if self.width == 1:
            return [(self.first + start, self.first + end)] * (start < end)
        return merged((row, row + 1) for row in map(self.row, range(start, end)))


def lay_out(lengths: Sequence[int], copies: int = 1, new_tokens: int = 0, *, share: bool = True) -> list[Place]:
    """Places for `copies` sequences of each prompt. `lengths`: tokens that each comes to, of which, where copies
    `share` their prompt and all lie side by side, the last `new_tokens` are a copy's own."""
    prompts = [length - new_tokens for length in lengths]
    if share and copies > 1:
        first = max(prompts) * len(prompts)
        pairs = ((number, which) for number in range(len(prompts)) for which in range(copies))
        return [Place(first, prompts[number], number, len(prompts), which, copies) for number, which in pairs]
    result: list[Place] = []
    end = 0
    for length in lengths:
        result += [Place(end + which * length) for which in range(copies)]
        end += copies * length
    return result


def distinct(places: Sequence[Place], read: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Rows of the first tokens of sequences, each once, and whatever lies between those that are side by side: `read`
    has pairs of (sequence, number of tokens)."""
    ends: dict[int, int] = {}
    for sequence, count in read:
        place = places[sequence]
        if place.shared:
            ends[0] = max(ends.get(0, 0), min(count, place.shared) * place.prompts)
        if own := max(0, count - place.shared):
            ends[place.first] = max(ends.get(place.first, 0), place.first + own * place.width)
    return merged(sorted(ends.items()))


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Those that touch as one."""
    result: list[tuple[int, int]] = []
    for first, end in ranges:
        if result and result[-1][1] == first:
            result[-1] = (result[-1][0], end)
        else:
            result.append((first, end))
    return result
