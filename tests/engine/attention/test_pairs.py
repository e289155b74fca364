"""Visible pairs of a chunk, counted one by one."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.pairs import chunk_pairs, visible_pairs


def seen(query: int, key: int, documents: list[int], window: int | None, span: int | None) -> bool:
    """Whether the query sees the key, of one stream whose documents start at `documents`."""
    document = max(start for start in documents if start <= query)
    if not document <= key <= query:
        return False
    if span is not None and (query - document) // span != (key - document) // span:
        return False
    return window is None or query - key < window


@st.composite
def masks(draw: Any) -> tuple[list[int], int | None, int | None]:
    """Starts of documents in a stream of up to 60 tokens, and a window, a span or neither."""
    documents = sorted({0, *draw(st.lists(st.integers(1, 59), max_size=6))})
    reach = draw(st.none() | st.integers(1, 70))
    return (documents, None, reach) if draw(st.booleans()) else (documents, reach, None)


@settings(deadline=None)
@given(masks(), st.integers(0, 60), st.integers(0, 60), st.none() | st.tuples(st.integers(0, 60), st.integers(0, 60)))
def test_chunk_pairs_are_those_of_the_mask(
    mask: tuple[list[int], int | None, int | None], a: int, b: int, keys: tuple[int, int] | None
) -> None:
    documents, window, span = mask
    start, end = sorted((a, b))
    among = (0, 60) if keys is None else (min(keys), max(keys))
    counted = sum(
        seen(query, key, documents, window, span) for query in range(start, end) for key in range(among[0], among[1])
    )
    assert chunk_pairs(start, end, documents, window, span, None if keys is None else among) == counted
    assert visible_pairs(end, window, span) == chunk_pairs(0, end, [0], window, span, None)


def test_by_hand() -> None:
    # Documents of 4 and 6 tokens, a chunk over tokens 2..7: queries 2, 3 see 3 + 4 keys, queries 4, 5, 6 see 1 + 2 + 3.
    assert chunk_pairs(2, 7, [0, 4], None, None, None) == 13
    # Of keys 0..4 only: 3 + 4. Of keys 5..7: query 5 one, query 6 two.
    assert chunk_pairs(2, 7, [0, 4], None, None, (0, 4)) == 7
    assert chunk_pairs(2, 7, [0, 4], None, None, (5, 7)) == 3
    # A window of 2: 2 + 2, then 1 + 2 + 2. Spans of 2 tokens: 1 + 2, then 1 + 2 + 1.
    assert chunk_pairs(2, 7, [0, 4], 2, None, None) == 9
    assert chunk_pairs(2, 7, [0, 4], None, 2, None) == 7
