"""How many pairs of a query and a key attention has to look at."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


def visible_pairs(length: int, window: int | None, span: int | None) -> int:
    """Pairs of a query and a key that it sees, in a document of `length` tokens. `window`: keys that a query sees, its
    own included; `span`: it sees those of its own span of so many tokens only."""
    if span is not None:
        whole, rest = divmod(length, span)
        return whole * _triangle(span) + _triangle(rest)
    if window is not None and length > window:
        return _triangle(window) + (length - window) * window
    return _triangle(length)


def chunk_pairs(
    start: int, end: int, documents: Sequence[int], window: int | None, span: int | None, keys: tuple[int, int] | None
) -> int:
    """Pairs of the queries start..end and the keys that they see. `documents`: sorted starts of the stream's documents,
    the first 0. `keys`: only keys of this range; None: all."""
    if span is not None:
        documents = [s for a, b in _bounds(documents, end) for s in range(a, b, span)]
    if keys is None:
        return _pairs_from(start, end, documents, window, 0)
    return _pairs_from(start, end, documents, window, keys[0]) - _pairs_from(start, end, documents, window, keys[1])


def _bounds(documents: Sequence[int], end: int) -> list[tuple[int, int]]:
    return [(a, b) for a, b in zip(documents, [*documents[1:], end], strict=True) if a < end]


def _pairs_from(start: int, end: int, documents: Sequence[int], window: int | None, first: int) -> int:
    """Pairs of the queries start..end and the keys from `first` on that they see."""
    total, index = 0, max(0, bisect_right(documents, start) - 1)
    while index < len(documents) and documents[index] < end:
        document = documents[index]
        until = documents[index + 1] if index + 1 < len(documents) else end
        low, high = max(start, document), min(end, until)
        origin = max(document, first)
        if high > origin:
            total += visible_pairs(high - origin, window, None) - visible_pairs(max(low - origin, 0), window, None)
        index += 1
    return total


def _triangle(length: int) -> int:
    return length * (length + 1) // 2
