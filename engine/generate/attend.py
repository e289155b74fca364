"""Attention of a layer that reads new tokens of several sequences, laid end to end as one stream [n]: the queries of
each see its own earlier keys and values only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.engine.attention import chunk as attention
from penstock.engine.attention.chunk import AttentionCall, Handler, Operands, work_dtype
from penstock.engine.generate.decode import Row
from penstock.engine.generate.places import Place


class KeysValues(NamedTuple):
    """Of all sequences in one layer, in the rows of their places; in the compute dtype."""

    k: Tensor
    """[rows, kv_heads, qk_dim]"""
    v: Tensor
    """[rows, kv_heads, v_dim]"""


class Keys(NamedTuple):
    """Of n single queries."""

    parts: Sequence[Tensor | slice]
    """Their rows, so many at a time: int64 [n, m], or of one query m neighbours."""
    there: Tensor | None
    """Bool [n, sum of m]: whether a query sees them; None: it does."""


@dataclass(slots=True)
class NewTokens:
    """Of several sequences, laid end to end."""

    rows: Sequence[Row]
    places: Sequence[Place]
    """Of each row's sequence."""
    written: Tensor
    """int64 [n], on the compute device: the row of each token's keys and values."""
    single: Tensor
    """int64 [6, s], on the compute device: of each row of one token its place in the stream, position, and Place."""
    keys_at_once: int
    """Of single queries, that are in float32."""

    def alone(self, number: int) -> NewTokens:
        """Those of one row."""
        row, before = self.rows[number], self.rows[:number]
        first, singles = sum(len(one.ids) for one in before), sum(len(one.ids) == 1 for one in before)
        single = self.single[:, singles : singles + (len(row.ids) == 1)] - self.single.new_tensor([[first], *[[0]] * 5])
        written = self.written[first : first + len(row.ids)]
        return NewTokens([row], [self.places[number]], written, single, self.keys_at_once)


def rows_handler(new: NewTokens, cached: KeysValues, chunk: int | None) -> Handler:
    """Attention of new tokens: puts their keys and values into `cached`, which holds those before the start of each
    row, and attends to all up to their own. `chunk`: AttentionShape.chunk of the layer. Exact for windows, chunks,
    soft-caps, sinks and grouped heads."""

    def handle(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        cached.k.index_copy_(0, new.written, k)
        cached.v.index_copy_(0, new.written, v)
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
        first = 0
        for row, place in zip(new.rows, new.places, strict=True):
            here = slice(first, first := first + len(row.ids))
            if len(row.ids) > 1:
                out[here] = _several(q[here], cached, row, place, call, chunk)
        singles = [(row, place) for row, place in zip(new.rows, new.places, strict=True) if len(row.ids) == 1]
        seen = [row.end - _first_seen(row.start, call.window, chunk) for row, _ in singles]
        for some in _groups(seen, new.keys_at_once):
            at, ((row, place), *others) = new.single[0, some], singles[some]
            step = max(1, new.keys_at_once // (1 + len(others)))
            if others or place.copies > 1:
                rows, there = _keys(new.single[1:, some], max(seen[some]), call.window, chunk)
                keys = Keys(rows.split(step, dim=1), there)
            else:
                ((low, end),) = place.ranges(row.end - seen[some.start], row.end)
                keys = Keys([slice(each, min(each + step, end)) for each in range(low, end, step)], None)
            out.index_copy_(0, at, _single(q.index_select(0, at), cached, keys, call))
        return out

    return handle


def _several(q: Tensor, cached: KeysValues, row: Row, place: Place, call: AttentionCall, chunk: int | None) -> Tensor:
    """[length, heads, v_dim]: attention of one sequence's new queries [length, heads, qk_dim]."""
    ((first, end),) = place.ranges(0, row.end)
    documents = [0] if chunk is None else attention.split_documents([0], row.end, chunk)
    x = Operands(q, cached.k[first:end], cached.v[first:end], call, row.start, 0, documents)
    return attention.finish(*attention.attend(x), call.sinks)[0].to(q.dtype)


def _first_seen(position: int, window: int | None, chunk: int | None) -> int:
    seen = 0 if window is None else max(0, position - window + 1)
    return seen if chunk is None else max(seen, position - position % chunk)


def _groups(lengths: Sequence[int], most: int) -> Iterator[slice]:
    """Neighbours that come to `most` keys, each with as many as the longest of them has; or one that has more."""
    first, longest = 0, 0
    for number, length in enumerate(lengths):
        if number > first and (number + 1 - first) * max(longest, length) > most:
            yield slice(first, number)
            first, longest = number, 0
        longest = max(longest, length)
    if lengths:
        yield slice(first, len(lengths))


def _keys(queries: Tensor, count: int, window: int | None, chunk: int | None) -> tuple[Tensor, Tensor]:
    """(rows int64 [n, count], bool [n, count] whether they are seen) of the keys of queries: `queries` [5, n] are the
    position of each, and Place of its sequence."""
    position, first, shared, which, copies = queries[..., None]
    seen = torch.zeros_like(position) if window is None else (position - (window - 1)).clamp(min=0)
    if chunk is not None:
        seen = torch.maximum(seen, position - position % chunk)
    keys = seen + torch.arange(count, device=position.device)
    rows = first + torch.where(keys < shared, keys, shared + which + (keys - shared) * copies)
    there = keys <= position
    return torch.where(there, rows, rows[:, :1]), there


def _single(q: Tensor, cached: KeysValues, keys: Keys, call: AttentionCall) -> Tensor:
    """[n, heads, v_dim]: attention of single queries [n, heads, qk_dim] to their keys and values, in float32."""
    work, (n, heads, width), kv_heads = work_dtype(q.dtype), q.shape, cached.k.shape[1]
    group = heads // kv_heads
    queries = q.to(work).view(n, kv_heads, group, width).transpose(0, 1).reshape(kv_heads * n, group, width)
    parts = [queries @ _taken(cached.k, part, n, work).transpose(1, 2) for part in keys.parts]
    sizes = [part.shape[-1] for part in parts]
    scores = torch.cat(parts, dim=-1)
    scores = scores.mul_(call.softmax_scale).view(kv_heads, n, group, -1)
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if keys.there is not None:
        scores.masked_fill_(~keys.there[None, :, None, :], float("-inf"))
    if call.sinks is not None:
        sinks = call.sinks.to(work).view(kv_heads, 1, group, 1).expand(-1, n, -1, -1)
        scores = torch.cat([scores, sinks], dim=-1)
    shares = torch.softmax(scores, dim=-1).view(kv_heads * n, group, -1)[..., : sum(sizes)].split(sizes, dim=-1)
    out = queries.new_zeros(kv_heads * n, group, cached.v.shape[2])
    for share, part in zip(shares, keys.parts, strict=True):
        out += share @ _taken(cached.v, part, n, work)
    return out.view(kv_heads, n, group, -1).transpose(0, 1).reshape(n, heads, -1).to(q.dtype)


def _taken(cached: Tensor, rows: Tensor | slice, n: int, dtype: torch.dtype) -> Tensor:
    """[kv_heads * n, m, dim]: `rows` [n, m] of `cached` [..., kv_heads, dim], head by head."""
    taken = cached[rows] if isinstance(rows, slice) else cached.index_select(0, rows.flatten())
    taken = taken.view(n, -1, *cached.shape[1:]).permute(2, 0, 1, 3)
    result = torch.empty(taken.shape, dtype=dtype, device=cached.device)
    return result.copy_(taken).flatten(0, 1)
