"""How a step is cut into chunks, and which of them a rank computes.

Where ranks share every sequence (context parallel), a micro-batch's stream is cut into twice as many pieces as there
are shards, and shard i has the pieces i from either end: attention to all earlier tokens then costs each about the
same (zigzag order; Llama 3, arXiv 2407.21783, section 3.3.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from penstock.engine.plan.problem import PlanInput, chunks_of_piece

FOREIGN = -1
"""Index of a chunk that another rank computes."""
TILE = 128
"""Tokens: rows of the tiles in which products of matrices are computed."""

Filled = Sequence[int | None]
"""Per micro-batch its tokens before the padding that ends it; None: it has no padding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A contiguous range of tokens of one micro-batch's stream."""

    index: int
    """Position within what its rank computes of the step; FOREIGN: another one computes it."""
    micro_batch: int
    local: int
    """Position within what its rank computes of the micro-batch."""
    ordinal: int
    """Position within the micro-batch."""
    start: int
    end: int
    shard: int = 0
    """The part of a shared stream that it belongs to."""


Streams = Sequence[Sequence[Chunk]]
"""Per micro-batch its chunks in order, whoever computes them."""


def streams(problem: PlanInput, rank: int = 0) -> Streams:
    """The chunks of a step, as a rank sees them."""
    p = problem
    total, width = p.rows * p.row_tokens, p.row_tokens if p.chunk_per_row else p.chunk_tokens
    return _streams(p.micro_batches, total, width, p.replicas if p.sharded else 0, p.ranks, rank)


def cut_chunks(problem: PlanInput, rank: int = 0) -> tuple[Chunk, ...]:
    """Those that the rank computes, in order: each micro-batch's stream cut every `chunk_tokens`, or once per row, or
    as its shards are."""
    return tuple(own(streams(problem, rank)))


def own(streams: Streams) -> Iterable[Chunk]:
    return (chunk for stream in streams for chunk in stream if chunk.index != FOREIGN)


@lru_cache(maxsize=64)
def _streams(micro_batches: int, total: int, width: int, shards: int, ranks: int, rank: int) -> Streams:
    width = min(width, total)
    if not shards:
        ends = [*range(width, total, width), total]
        shard_of = [0] * len(ends)
    else:
        count = 2 * shards * chunks_of_piece(total, width, shards)
        unit = TILE if total >= 8 * TILE * count else 1  # whole tiles, where that leaves chunks about equal
        ends = [total * (i + 1) // (count * unit) * unit for i in range(count - 1)] + [total]
        pieces = [i * 2 * shards // count for i in range(count)]
        shard_of = [min(piece, 2 * shards - 1 - piece) for piece in pieces]
    mine = [i for i, shard in enumerate(shard_of) if shard % ranks == rank] if shards else range(len(ends))
    local = {ordinal: i for i, ordinal in enumerate(mine)}
    return [
        [
            Chunk(
                index=FOREIGN if i not in local else m * len(local) + local[i],
                micro_batch=m,
                local=local.get(i, FOREIGN),
                ordinal=i,
                start=ends[i - 1] if i else 0,
                end=end,
                shard=shard_of[i],
            )
            for i, end in enumerate(ends)
        ]
        for m in range(micro_batches)
    ]


def filled_streams(streams: Streams, filled: Filled, multiple: int = 1, every: int = 0) -> list[list[Chunk]]:
    """What a batch needs of the chunks whose micro-batches have `filled` tokens before their padding (None: it has
    none).

    What begins in the padding is left out, and what it begins in ends there, rounded up to `multiple` tokens from the
    chunk's start. The first chunk of each shard stays in every so many micro-batches, and where that is 0 the step's
    first one: a step goes through every block, whatever it holds.
    """
    result = []
    for stream, end in zip(streams, filled, strict=False):
        kept: list[Chunk] = []
        for chunk in stream:
            number = chunk.micro_batch
            real = chunk.end - chunk.start if end is None else end - chunk.start
            wanted = number % every == 0 if every else number == 0
            if real > 0 or (wanted and all(other.shard != chunk.shard for other in kept)):
                last = min(chunk.end, chunk.start + max(1, -(-real // multiple)) * multiple)
                kept.append(chunk if last == chunk.end else replace(chunk, end=last))
        result.append(kept)
    return result
