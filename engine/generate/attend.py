"""Attention of a layer that reads new tokens of several sequences, laid end to end as one stream [n]: the queries of
each see its own earlier keys and values only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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


_SCARCE = 4
"""Where fewer than one in so many of the sequences that lie side by side goes on, its keys are gathered."""


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
    """int64 [8, s], on the compute device: of each row of one token its place in the stream, position, and Place."""
    keys_at_once: int
    """Of single queries, that are gathered, or as much memory in another form."""
    singles: Sequence[tuple[Row, Place]] = field(init=False)
    """Rows of one token."""
    side_by_side: bool = field(init=False)
    """Most sequences of those that lie side by side have such a row, behind their prompts and as far as any."""

    def __post_init__(self) -> None:
        self.singles = [(row, at) for row, at in zip(self.rows, self.places, strict=True) if len(row.ids) == 1]
        width = self.singles[0][1].width if self.singles else 1
        behind = {(row.start - place.shared, place.first) for row, place in self.singles}
        self.side_by_side = len(behind) == 1 and min(behind)[0] >= 0 and 1 < width <= _SCARCE * len(self.singles)

    def alone(self, number: int) -> NewTokens:
        """Those of one row."""
        row, before = self.rows[number], self.rows[:number]
        first, singles = sum(len(one.ids) for one in before), sum(len(one.ids) == 1 for one in before)
        single = self.single[:, singles : singles + (len(row.ids) == 1)].clone()
        single[0] -= first
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
        singles = new.singles
        if new.side_by_side and (prompts := _prompts_at_once(new, cached, q.shape[1])):
            at = new.single[0]
            return out.index_copy_(0, at, _in_place(q.index_select(0, at), cached, new, prompts, call, chunk))
        seen = [row.end - _first_seen(row.start, call.window, chunk) for row, _ in singles]
        for some in _groups(seen, new.keys_at_once):
            at, ((row, place), *others) = new.single[0, some], singles[some]
            step = max(1, new.keys_at_once // (1 + len(others)))
            if others or place.width > 1:
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
    rows = slice(place.first, place.first + row.end)
    if place.width > 1:
        assert row.end <= place.shared, "several new tokens behind a prompt that others have as well"
        rows = slice(place.prompt, place.row(row.end - 1) + 1, place.prompts)
    documents = [0] if chunk is None else attention.split_documents([0], row.end, chunk)
    k, v = (each[rows].contiguous() for each in cached)
    x = Operands(q, k, v, call, row.start, 0, documents)
    return attention.finish(*attention.attend(x), call.sinks)[0].to(q.dtype)


def _first_seen(position: int, window: int | None, chunk: int | None) -> int:
    seen = 0 if window is None else max(0, position - window + 1)
    return seen if chunk is None else max(seen, position - position % chunk)


def _seen_from(position: Tensor, window: int | None, chunk: int | None) -> Tensor:
    seen = torch.zeros_like(position) if window is None else (position - (window - 1)).clamp(min=0)
    return seen if chunk is None else torch.maximum(seen, position - position % chunk)


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
    """(rows int64 [n, count], bool [n, count] whether they are seen) of the keys of queries: `queries` [7, n] are the
    position of each, and Place of its sequence."""
    position, place = queries[0][:, None], Place(*queries[1:, :, None])
    keys = _seen_from(position, window, chunk) + torch.arange(count, device=position.device)
    own = place.first + place.number + (keys - place.shared) * place.width
    rows = torch.where(keys < place.shared, place.prompt + keys * place.prompts, own)
    there = keys <= position
    return torch.where(there, rows, rows[:, :1]), there


def _in_place(
    q: Tensor, cached: KeysValues, new: NewTokens, some: int, call: AttentionCall, chunk: int | None
) -> Tensor:
    """[n, heads, v_dim]: attention of single queries [n, heads, qk_dim] of sequences that lie side by side to keys and
    values where these lie, of `some` prompts at a time. Sequences without a query are computed as well, whatever comes
    of it."""
    (row, place), (_, heads, width), kv_heads = new.singles[0], q.shape, cached.k.shape[1]
    count, group, own = place.copies, heads // kv_heads, row.end - place.shared
    position, here = new.single[1], Place(*new.single[2:])
    order: Any = here.number

    def of_all(values: Tensor) -> Tensor:
        return values.new_zeros(place.width, *values.shape[1:]).index_copy_(0, order, values)

    longest = place.first // place.prompts
    shared = of_all(torch.as_tensor(here.shared))[:, None]
    low = of_all(_seen_from(position, call.window, chunk))[:, None]
    at = torch.arange(longest + own, device=q.device)
    there = torch.where(at < longest, (at >= low) & (at < shared), at - longest + shared >= low)
    queries, result = of_all(q), q.new_empty(place.width, heads, cached.v.shape[2])
    for start in range(0, place.prompts, some):
        end = min(start + some, place.prompts)
        mine = slice(start * count, end * count)

        def held(values: Tensor, start: int = start, end: int = end) -> tuple[Tensor, Tensor]:
            """[prompts * kv_heads, longest, dim] and [prompts * copies * kv_heads, own, dim], where they lie."""
            tail, dim = place.first + own * place.width, values.shape[2]
            prompts = values[: place.first].view(longest, place.prompts, kv_heads, dim)[:, start:end]
            copies = values[place.first : tail].view(own, place.width, kv_heads, dim)[:, start * count : end * count]
            return prompts.flatten(1, 2).transpose(0, 1), copies.flatten(1, 2).transpose(0, 1)

        def by_prompt(values: Tensor, prompts: int = end - start) -> Tensor:
            """[prompts * kv_heads, copies * group, ...] of [prompts * copies, kv_heads, group, ...]."""
            return values.view(prompts, count, *values.shape[1:]).transpose(1, 2).flatten(2, 3).flatten(0, 1)

        def by_copy(values: Tensor, prompts: int = end - start) -> Tensor:
            return values.view(prompts, kv_heads, count, group, -1).transpose(1, 2).flatten(0, 1)

        asked, (of_prompts, of_copies) = queries[mine].view(-1, kv_heads, group, width), held(cached.k)
        scores = [
            by_copy(_product(by_prompt(asked), of_prompts.transpose(1, 2))),
            _product(asked.flatten(0, 1), of_copies.transpose(1, 2)).view(-1, kv_heads, group, own),
        ]
        shares = _shares(torch.cat(scores, dim=-1), there[mine][:, None, None], call)
        of_prompts, of_copies = held(cached.v)
        found = by_copy(_product(by_prompt(shares[..., :longest]), of_prompts))
        found += _product(shares[..., longest:].flatten(0, 1), of_copies).view(found.shape)
        result[mine] = found.flatten(1, 2)
    return result.index_select(0, order)


def _prompts_at_once(new: NewTokens, cached: KeysValues, heads: int) -> int:
    """Prompts whose scores, with what is converted of their keys and values, take no more memory than
    `new.keys_at_once`; 0: not even those of one."""
    (row, place), width = new.singles[0], cached.k.shape[1] * (cached.k.shape[2] + cached.v.shape[2])
    longest, own = place.first // place.prompts, row.end - place.shared
    converted = cached.k.dtype != work_dtype(cached.k.dtype) and cached.k.device.type != "cuda"
    each = 3 * heads * place.copies * (longest + own) + converted * width * (longest + place.copies * own)
    return new.keys_at_once * width // each


def _product(x: Tensor, y: Tensor) -> Tensor:
    """x y [b, n, m], summed and returned in float32, or in the dtype of y if that is larger; on a GPU x is rounded to
    the dtype of y."""
    work = work_dtype(y.dtype)
    if y.device.type == "cuda" and y.dtype != work:
        return torch.bmm(x.to(y.dtype), y, out_dtype=work)
    return torch.bmm(x.to(work), y.to(work))


def _shares(scores: Tensor, there: Tensor | None, call: AttentionCall) -> Tensor:
    """What attention [n, kv_heads, group, m] gives to each key, of their products with queries, which change."""
    scores = scores.mul_(call.softmax_scale)
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if there is not None:
        scores.masked_fill_(~there, float("-inf"))
    if call.sinks is not None:
        n, kv_heads, group, _ = scores.shape
        sinks = call.sinks.to(scores.dtype).view(1, kv_heads, group, 1).expand(n, -1, -1, -1)
        scores = torch.cat([scores, sinks], dim=-1)
    shares = torch.softmax(scores, dim=-1)
    return shares if call.sinks is None else shares[..., :-1]


def _single(q: Tensor, cached: KeysValues, keys: Keys, call: AttentionCall) -> Tensor:
    """[n, heads, v_dim]: attention of single queries [n, heads, qk_dim] to their keys and values, which are gathered
    for it; sums are in float32."""
    (n, heads, width), kv_heads = q.shape, cached.k.shape[1]
    queries = q.view(n * kv_heads, heads // kv_heads, width)
    parts = [_product(queries, _taken(cached.k, part, n).transpose(1, 2)) for part in keys.parts]
    sizes = [part.shape[-1] for part in parts]
    scores = torch.cat(parts, dim=-1).view(n, kv_heads, heads // kv_heads, -1)
    there = None if keys.there is None else keys.there[:, None, None]
    shares = _shares(scores, there, call).flatten(0, 1).split(sizes, dim=-1)
    out = sum(_product(share, _taken(cached.v, part, n)) for share, part in zip(shares, keys.parts, strict=True))
    return torch.as_tensor(out).view(n, heads, -1).to(q.dtype)


def _taken(cached: Tensor, rows: Tensor | slice, n: int) -> Tensor:
    """[n * kv_heads, m, dim]: `rows` [n, m] of `cached` [..., kv_heads, dim], head by head."""
    taken = cached[rows] if isinstance(rows, slice) else cached.index_select(0, rows.flatten())
    return taken.view(n, -1, *cached.shape[1:]).transpose(1, 2).flatten(0, 1)
