"""How ranges of queries and keys are cut into kernel calls, and their visible pairs counted."""

from __future__ import annotations

from typing import Any

import torch
from attention_reference import visible_keys
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import sampled
from torch import Tensor

from penstock.engine.attention.pairs import chunk_pairs, visible_pairs
from penstock.engine.attention.spans import SEGMENT_ROWS, Cut, Geometry, cut, most_segments, spans


def visible(geometry: Geometry) -> Tensor:
    """Int32 [n, m], written out from the definition."""
    table = torch.zeros(geometry.n, geometry.m, dtype=torch.int32)
    ends_q, ends_k = geometry.cu_q or (0, geometry.n), geometry.cu_k or (0, geometry.m)
    for i in range(len(ends_q) - 1):
        n, m = ends_q[i + 1] - ends_q[i], ends_k[i + 1] - ends_k[i]
        rows, keys = torch.arange(n)[:, None] + m - n, torch.arange(m)
        seen = keys <= rows if geometry.causal else torch.ones(n, m, dtype=torch.bool)
        if geometry.left is not None:
            seen &= keys >= rows - geometry.left
        table[ends_q[i] : ends_q[i + 1], ends_k[i] : ends_k[i + 1]] = seen.int()
    return table


@st.composite
def divided_stream(draw: st.DrawFn) -> tuple[int, list[int], int, int, int | None]:
    total = draw(st.integers(1, 400))
    documents = sorted({0, *draw(st.lists(st.integers(0, total - 1), max_size=6))})
    length = st.integers(-(-total // 40), total)  # of at most 40 chunks and 40 pieces
    return total, documents, draw(length), draw(length), draw(st.none() | st.integers(1, 300))


@given(divided_stream(), st.sampled_from(["whole", "split"]), st.booleans(), st.none() | st.integers(1, 100))
@sampled(20, 150)
def test_calls_cover_the_visible_keys_exactly_once(
    stream: tuple[int, list[int], int, int, int | None], how: Cut, segments: bool, keys_per_call: int | None
) -> None:
    total, documents, chunk, piece, window = stream
    seen = torch.zeros(total, total, dtype=torch.int32)
    for start in range(0, total, chunk):
        for first in range(0, total, piece):
            found = spans(start, min(start + chunk, total), first, min(first + piece, total), documents, window)
            causal = [span for span in found if span.causal]
            assert len(found) - len(causal) <= 1
            for parts in (causal, found[len(causal) :]):
                for group in cut(parts, how, segments=segments, keys_per_call=keys_per_call) if parts else []:
                    assert len({(call.q0, call.q1) for call in group}) == 1
                    for call in group:
                        geometry = call.geometry
                        assert (geometry.n, geometry.m) == (call.q1 - call.q0, call.k1 - call.k0)
                        table = visible(geometry)
                        assert bool(table.any(dim=1).all()), "kernels need not know rows without keys"
                        assert geometry.left is None or geometry.left >= 0, "kernels take -1 for no limit"
                        assert int(table.sum()) == geometry.pairs
                        if keys_per_call is not None and window is None and len(geometry.cu_q) <= 2:
                            own = geometry.n if geometry.causal else 0
                            assert geometry.m - own <= keys_per_call
                        seen[call.q0 : call.q1, call.k0 : call.k1] += table
    assert torch.equal(seen, visible_keys(total, documents, window).int())


def test_documents_of_a_chunk_are_one_call_where_the_kernel_takes_segments() -> None:
    parts = spans(100, 200, 0, 200, [0, 40, 130, 131], None)
    ((call,),) = cut(parts, "whole", segments=True)
    assert (call.q0, call.q1, call.k0, call.k1) == (100, 200, 40, 200)
    assert (call.geometry.cu_q, call.geometry.cu_k) == ((0, 30, 31, 100), (0, 90, 91, 160))


@given(st.integers(1, 60), st.integers(1, 40), st.none() | st.integers(1, 50))
def test_short_documents_are_shared_out_evenly_among_few_calls(
    count: int, length: int, keys_per_call: int | None
) -> None:
    """Rows that a kernel adds to each segment are at most half of the queries, or 1,024."""
    rows = count * length
    parts = spans(0, rows, 0, rows, list(range(0, rows, length)), None)
    calls = [call for (call,) in cut(parts, "whole", segments=True, keys_per_call=keys_per_call)]
    sizes = [max(1, len(call.geometry.cu_q) - 1) for call in calls]
    assert sum(sizes) == count
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) * SEGMENT_ROWS <= max(1024, rows / 2)
    assert len(calls) == -(-count // most_segments(rows)), "more calls than there need be"


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
