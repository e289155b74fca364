"""Attention of a layer that reads new tokens of several sequences, laid end to end as one stream [n]: the queries of
each see its own earlier keys and values only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.engine.attention import chunk as attention
from penstock.engine.attention.chunk import AttentionCall, Handler, Operands, work_dtype
from penstock.engine.generate.decode import Row

_KEYS_AT_ONCE = 4096
"""Keys of a single query that are taken to float32 at once."""


class KeysValues(NamedTuple):
    """Of one sequence in one layer, a row for each position from 0; in the compute dtype."""

    k: Tensor
    """[capacity, kv_heads, qk_dim]"""
    v: Tensor
    """[capacity, kv_heads, v_dim]"""


def rows_handler(rows: Sequence[Row], cached: Sequence[KeysValues], chunk: int | None) -> Handler:
    """Attention of a stream of new tokens: puts their keys and values into `cached`, attends to all up to their own.
    `rows` and `cached`: of each sequence in the stream, in order; rows before `start` are filled. `chunk`:
    AttentionShape.chunk of the layer. Exact for windows, chunks, soft-caps, sinks and grouped heads."""

    def handle(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
        first = 0
        for row, mine in zip(rows, cached, strict=True):
            new = slice(first, first := first + len(row.ids))
            mine.k[row.start : row.end].copy_(k[new])
            mine.v[row.start : row.end].copy_(v[new])
            out[new] = _attend(q[new], mine, row, call, chunk)
        return out

    return handle


def _attend(q: Tensor, cached: KeysValues, row: Row, call: AttentionCall, chunk: int | None) -> Tensor:
    """[length, heads, v_dim]: attention of one sequence's new queries [length, heads, qk_dim]."""
    if len(row.ids) == 1:
        position = row.start
        seen = 0 if call.window is None else max(0, position - call.window + 1)
        if chunk is not None:
            seen = max(seen, position - position % chunk)
        return _single(q[0], cached.k[seen : position + 1], cached.v[seen : position + 1], call)[None]
    documents = [0] if chunk is None else attention.split_documents([0], row.end, chunk)
    x = Operands(q, cached.k[: row.end], cached.v[: row.end], call, row.start, 0, documents)
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
