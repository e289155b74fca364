"""Attention written out in one softmax, for the tests of the chunked one."""

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.engine.attention.spans import Documents, Prefix, prefixes_of


def dense(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, softcap: float | None = None,
          sinks: Tensor | None = None) -> Tensor:  # fmt: skip
    """q [n, heads, d], k and v [m, kv_heads, d], visible [n, m]; a row that sees no key (and no sink) is 0."""
    groups = q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = torch.einsum("nhd,mhd->hnm", q, keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, scores.shape[1], 1)], dim=-1)
    empty = torch.isneginf(scores).all(dim=-1, keepdim=True)
    probabilities = scores.masked_fill(empty, 0.0).softmax(dim=-1).masked_fill(empty, 0.0)
    return torch.einsum("hnm,mhd->nhd", probabilities[..., : visible.shape[1]], values)


def random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def causal_band(n: int, m: int, left: int | None = None) -> Tensor:
    """Bool [n, m]: query r sees keys r + m - n - left .. r + m - n."""
    queries, keys = torch.arange(m - n, m)[:, None], torch.arange(m)
    return (keys <= queries) & (keys >= queries - (m if left is None else left))


def visible_keys(total: int, documents: Sequence[int], window: int | None) -> Tensor:
    """Bool [total, total]: which keys each query of a stream sees."""
    owner = torch.bucketize(torch.arange(total), torch.tensor(documents), right=True)
    result = (owner[:, None] == owner) & causal_band(total, total, None if window is None else window - 1)
    for document, first, end in prefixes_of(documents):
        for number, query in enumerate((owner == owner[document]).nonzero().flatten().tolist()):
            before = total if window is None else max(0, window - 1 - number)
            result[query, max(first, end - before) : end] = True
    return result


def with_prefixes(documents: Sequence[int], chosen: Sequence[tuple[int, int] | None]) -> Documents:
    """These documents, each going on from an earlier one by `chosen` (which one, how many of its tokens) or not."""
    prefixes = []
    for number, choice in enumerate(chosen[: len(documents) - 1], start=1):
        if choice is not None:
            first, after = documents[choice[0] % number], documents[choice[0] % number + 1]
            prefixes.append(Prefix(documents[number], first, first + 1 + choice[1] % (after - first)))
    return Documents(documents, prefixes)
