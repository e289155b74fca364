"""Attention of a layer that reads new tokens of several sequences at once, each with keys and values of its own.

The new tokens lie end to end as one stream [n]; a sequence's queries see its own earlier tokens and no other's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.engine.attention import chunk as attention
from penstock.engine.attention.chunk import AttentionCall, Handler, Operands, work_dtype

_KEYS_AT_ONCE = 4096
"""Keys of a single query that are taken to float32 at once."""


class RowRange(NamedTuple):
    """Where new tokens of one sequence stand in it."""

    start: int
    """Position of the first."""
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


class KeysValues(NamedTuple):
    """Of one sequence in one layer, a row for each position from 0; in the compute dtype."""

    k: Tensor
    """[capacity, kv_heads, qk_dim]"""
    v: Tensor
    """[capacity, kv_heads, v_dim]"""


def positions_of(ranges: Sequence[RowRange]) -> Tensor:
    """int64 [n]: the positions of the stream's tokens, on the host."""
    return torch.cat([torch.arange(range_.start, range_.end) for range_ in ranges])


def rows_handler(ranges: Sequence[RowRange], cached: Sequence[KeysValues], chunk: int | None) -> Handler:
    """Attention of a stream of new tokens: puts their keys and values into `cached`, and attends to all up to their
    own.

    `ranges` and `cached`: of each sequence that is part of the stream, in order; rows before `start` are filled.
    `chunk`: AttentionShape.chunk of the layer. Exact for sliding windows, chunks, soft-caps, sinks and grouped heads.
    """

    def handle(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
        first = 0
        for range_, mine in zip(ranges, cached, strict=True):
            rows = slice(first, first + range_.length)
            first += range_.length
            mine.k[range_.start : range_.end].copy_(k[rows])
            mine.v[range_.start : range_.end].copy_(v[rows])
            out[rows] = _attend(q[rows], mine, range_, call, chunk)
        return out

    return handle


def _attend(q: Tensor, cached: KeysValues, range_: RowRange, call: AttentionCall, chunk: int | None) -> Tensor:
    """[length, heads, v_dim]: attention of one sequence's new queries [length, heads, qk_dim]."""
    if range_.length == 1:
        position = range_.start
        seen = 0 if call.window is None else max(0, position - call.window + 1)
        if chunk is not None:
            seen = max(seen, position - position % chunk)
        return _single(q[0], cached.k[seen : position + 1], cached.v[seen : position + 1], call)[None]
    documents = [0] if chunk is None else attention.split_documents([0], range_.end, chunk)
    x = Operands(q, cached.k[: range_.end], cached.v[: range_.end], call, range_.start, 0, documents)
    return attention.finish(*attention.attend(x), call.sinks)[0].to(q.dtype)


def _single(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """[heads, v_dim]: attention of one query [heads, qk_dim] to all of k, v [m, kv_heads, dim], in float32."""
    work, (heads, width), kv_heads = work_dtype(q.dtype), q.shape, k.shape[1]
    queries = q.to(work).view(kv_heads, heads // kv_heads, width)
    parts = [queries @ keys.to(work).permute(1, 2, 0) for keys in k.split(_KEYS_AT_ONCE)]
    scores = torch.cat(parts, dim=-1) * call.softmax_scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if call.sinks is not None:
        scores = torch.cat([scores, call.sinks.to(work).view(kv_heads, -1, 1)], dim=-1)
    shares = torch.softmax(scores, dim=-1)[..., : k.shape[0]].split(_KEYS_AT_ONCE, dim=-1)
    out = queries.new_zeros(kv_heads, heads // kv_heads, v.shape[2])
    for share, values in zip(shares, v.split(_KEYS_AT_ONCE), strict=True):
        out += share @ values.to(work).transpose(0, 1)
    return out.view(heads, v.shape[2]).to(q.dtype)
