"""Which keys a chunk's queries see, cut into what attention kernels can compute.

Positions count from the start of the stream. A `Span` is the part of a key range that the queries of one document see;
`spans` cuts any rectangle of queries and keys into them, `cut` turns spans into kernel calls. A document that goes on
from the beginning of an earlier one sees that as well (`prefix_spans`).
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Cut = Literal["whole", "split"]
"""How spans become kernel calls. whole: as they are, several in one call where the kernel takes segments. split: the
queries' own keys (causal, square) and the earlier keys (all visible) apart, and at a sliding window's edge tiles."""

SEGMENT_ROWS = 128
"""Rows of a kernel's tile: a segment's own sums begin at a new one."""


class Prefix(NamedTuple):
    """The document of a stream that starts at `document` goes on from tokens first..end of an earlier one: its tokens
    see those too, as if they lay right before it."""

    document: int
    first: int
    end: int


class Documents(list[int]):
    """Sorted starts of a stream's documents, the first is 0; and the prefixes, sorted, of those that have one."""

    def __init__(self, starts: Iterable[int] = (), prefixes: Iterable[Prefix] = ()) -> None:
        super().__init__(starts)
        self.prefixes = list(prefixes)


def prefixes_of(documents: Sequence[int]) -> Sequence[Prefix]:
    """Those of a stream's documents; plain starts have none."""
    return documents.prefixes if isinstance(documents, Documents) else ()


@dataclass(frozen=True, slots=True)
class Geometry:
    """Which of m keys n queries see: query r sees keys r + m - n - left .. r + m - n, or to the last if not causal.

    Both limits are thus aligned at the bottom right corner; `left` None: no lower limit. `cu_q`, `cu_k`: where several
    segments lie end to end, the cumulative ends of each, beginning with 0, and the rule holds within each; else empty.
    Every query sees a key.
    """

    n: int
    m: int
    causal: bool
    left: int | None = None
    cu_q: tuple[int, ...] = ()
    cu_k: tuple[int, ...] = ()

    @property
    def pairs(self) -> int:
        """(query, key) pairs that are visible."""
        if not self.cu_q:
            return _pairs(self.n, self.m, self.causal, self.left)
        lengths = zip(_lengths(self.cu_q), _lengths(self.cu_k), strict=True)
        return sum(_pairs(n, m, self.causal, self.left) for n, m in lengths)

    @property
    def needs_mask(self) -> bool:
        """Neither all pairs nor the lower triangle of a square."""
        return self.left is not None or (self.causal and self.n != self.m) or len(self.cu_q) > 2


def _lengths(cumulative: Sequence[int]) -> list[int]:
    return [b - a for a, b in itertools.pairwise(cumulative)]


def _pairs(n: int, m: int, causal: bool, left: int | None) -> int:
    # Keys above the diagonal of the bottom right corner, and those more than `left` below it.
    hidden = n * (n - 1) // 2 if causal else 0
    if left is not None:
        old = max(0, m - 1 - left)
        # The last query does not see `old` keys, each one before it one fewer.
        rows = min(n, old)
        hidden += rows * old - rows * (rows - 1) // 2
    return n * m - hidden


@dataclass(frozen=True, slots=True)
class Call:
    """Queries q0..q1 against keys k0..k1, one launch of a kernel."""

    q0: int
    q1: int
    k0: int
    k1: int
    geometry: Geometry


@dataclass(frozen=True, slots=True)
class Span:
    """Queries q0..q1 of one document against keys k0..k1; each query sees at least one of them.

    Either k1 == q1 and queries see keys up to their own, or k1 <= q0. `window`: the visible keys including the query's
    own, None where it hides none of these.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    window: int | None

    @property
    def causal(self) -> bool:
        """The queries' own keys are among the keys."""
        return self.k1 == self.q1

    @property
    def call(self) -> Call:
        return _call(self.q0, self.q1, self.k0, self.k1, self.window)


def _call(q0: int, q1: int, k0: int, k1: int, window: int | None) -> Call:
    left = None if window is None or q1 - k0 <= window else window - 1 - (q1 - k1)
    return Call(q0, q1, k0, k1, Geometry(q1 - q0, k1 - k0, causal=k1 == q1, left=left))


def spans(
    start: int, end: int, key_start: int, key_end: int, documents: Sequence[int], window: int | None
) -> list[Span]:
    """What queries start..end see of keys key_start..key_end, in order; queries that see none are in no span. Queries
    and keys of the causal spans follow one another without gaps; at most one span, the last, is not causal."""
    result = []
    position = start
    while position < end:
        index = bisect_right(documents, position)
        stop = min(end, documents[index]) if index < len(documents) else end
        first = max(documents[index - 1], key_start)
        for q0, q1 in ((max(position, first), min(stop, key_end)), (max(position, key_end), stop)):
            k0, k1 = first, min(q1, key_end)
            if window is not None:
                # Later queries see none of the keys, and no query sees earlier keys.
                q1 = min(q1, k1 + window - 1)
                k0 = max(k0, q0 - window + 1)
            if q0 < q1 and k0 < k1:
                result.append(Span(q0, q1, k0, k1, window if window is not None and q1 - k0 > window else None))
        position = stop
    return result


@dataclass(frozen=True, slots=True)
class PrefixSpan:
    """Queries q0..q1 that see keys k0..k1 of their document's prefix."""

    q0: int
    q1: int
    k0: int
    k1: int
    shift: int
    """How many tokens further to the front the queries would be right behind their prefix, from where what a window
    hides of it is counted."""

    def parts(self, window: int | None) -> list[Span]:
        """What they see of it, where they would be."""
        return spans(self.q0 - self.shift, self.q1 - self.shift, self.k0, self.k1, (0,), window)


def prefix_spans(start: int, end: int, key_start: int, key_end: int, documents: Sequence[int]) -> list[PrefixSpan]:
    """What queries start..end may see of keys key_start..key_end as prefixes of their documents, in order."""
    result = []
    for prefix in prefixes_of(documents):
        if prefix.document >= end:
            break
        index = bisect_right(documents, prefix.document)
        stop = documents[index] if index < len(documents) else end
        q0, q1 = max(prefix.document, start), min(stop, end)
        k0, k1 = max(prefix.first, key_start), min(prefix.end, key_end)
        if q0 < q1 and k0 < k1:
            result.append(PrefixSpan(q0, q1, k0, k1, prefix.document - prefix.end))
    return result


def split_documents(documents: Sequence[int], end: int, chunk: int) -> list[int]:
    """Starts of the blocks of `chunk` tokens of each document; a chunked mask is these taken for documents."""
    stops = [*documents[1:], end]
    return [block for start, stop in zip(documents, stops, strict=True) for block in range(start, stop, chunk)]


def cut(
    parts: Sequence[Span], how: Cut, *, segments: bool = False, keys_per_call: int | None = None
) -> list[list[Call]]:
    """Kernel calls that cover `parts` exactly once, grouped by query range; results of one group are to be merged.

    `parts` are all causal or one span that is not. `segments`: the kernel takes several spans in one call.
    `keys_per_call`: keys before a span's queries are cut into calls of so many, if there is no window.
    """
    if how == "split":
        return [group for span in parts for group in _split(span, keys_per_call)]
    if segments and len(parts) > 1:
        long = keys_per_call is not None and parts[0].q0 - parts[0].k0 > keys_per_call
        together = parts[1:] if long else parts
        if len(together) > 1:
            count = -(-len(together) // most_segments(parts[-1].q1 - parts[0].q0))
            bounds = [i * len(together) // count for i in range(count + 1)]
            joined = [[_join(together[a:b])] for a, b in itertools.pairwise(bounds)]
            return [*([_whole(parts[0], keys_per_call)] if long else []), *joined]
    return [_whole(span, keys_per_call) for span in parts]


def most_segments(rows: int) -> int:
    """Segments of one call, at most, of queries that have so many rows.

    Kernels lay out their own sums with up to `SEGMENT_ROWS` unused rows for each segment; these are then no more than
    half of the queries, or 1,024, however short the documents are.
    """
    return max(8, rows // (2 * SEGMENT_ROWS))


def _join(parts: Sequence[Span]) -> Call:
    """Causal spans that follow one another as one call with segments."""
    window = next((span.window for span in parts if span.window is not None), None)
    q0, k0 = parts[0].q0, parts[0].k0
    q1, k1 = parts[-1].q1, parts[-1].k1
    geometry = Geometry(
        q1 - q0,
        k1 - k0,
        causal=True,
        left=None if window is None else window - 1,
        cu_q=(0, *(span.q1 - q0 for span in parts)),
        cu_k=(0, *(span.k1 - k0 for span in parts)),
    )
    return Call(q0, q1, k0, k1, geometry)


def _whole(span: Span, keys_per_call: int | None) -> list[Call]:
    own = span.q0 if span.causal else span.k1
    if keys_per_call is None or span.window is not None or own - span.k0 <= keys_per_call:
        return [span.call]
    *earlier, (last, _) = _ranges(span.k0, own, keys_per_call)
    calls = [_call(span.q0, span.q1, k0, k1, None) for k0, k1 in earlier]
    return [_call(span.q0, span.q1, last, span.k1, None), *calls]


def _ranges(start: int, stop: int, size: int | None) -> list[tuple[int, int]]:
    return [(a, min(a + size, stop)) for a in range(start, stop, size)] if size else [(start, stop)]


def _split(span: Span, keys_per_call: int | None) -> Iterator[list[Call]]:
    if span.window is not None:
        yield from _tiles(span, span.window)
        return
    own = [_call(span.q0, span.q1, span.q0, span.q1, None)] if span.causal else []
    earlier = (span.k0, span.q0 if span.causal else span.k1)
    ranges = _ranges(*earlier, keys_per_call) if earlier[0] < earlier[1] else []
    yield [*own, *(_call(span.q0, span.q1, k0, k1, None) for k0, k1 in ranges)]


def _tiles(span: Span, window: int) -> Iterator[list[Call]]:
    # Tiles of a quarter of the window waste little on masked scores and still are large enough for the kernels.
    tile = min(max(window // 4, 64), 1024)
    for q0 in range(span.q0, span.q1, tile):
        q1 = min(q0 + tile, span.q1)
        k1 = q1 if span.causal else span.k1
        first, own = max(span.k0, q0 - window + 1), q0 if span.causal else span.k1
        # Keys whole..own are visible to all; the band before them ends with one that is too, so that no row is empty.
        whole = q1 - window + 1 if first < q1 - window else first
        if whole >= own:
            yield [_call(q0, q1, first, k1, window)]
            continue
        group = [_call(q0, q1, q0, q1, None)] if span.causal else []
        group.append(_call(q0, q1, whole, own, None))
        if first < whole:
            group.append(_call(q0, q1, first, whole, window))
        yield group
