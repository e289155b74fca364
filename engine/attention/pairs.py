"""How many pairs of a query and a key attention has to look at."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.engine.attention.spans import prefix_spans, spans, split_documents


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
        documents = split_documents(documents, end, span)
    rectangle = start, end, *(keys or (0, end)), documents
    parts = [*spans(*rectangle, window), *(part for one in prefix_spans(*rectangle) for part in one.parts(window))]
    return sum(part.call.geometry.pairs for part in parts)


def _triangle(length: int) -> int:
    return length * (length + 1) // 2
