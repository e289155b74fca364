"""Attention over a rectangle of queries and keys by one backend: calls of one group merged, gradients added."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from penstock.engine.attention.backends import Backend, Gradients, Operands, work_dtype
from penstock.engine.attention.spans import Call


def group_forward(x: Operands, backend: Backend, group: Sequence[Call]) -> tuple[Tensor, Tensor]:
    """Output [rows, heads, v_dim] (q's dtype, or float32 where parts were merged) and lse of the group's queries."""
    out, lse = backend.forward(x.of(group[0]), group[0].geometry)
    for index, call in enumerate(group[1:]):
        other_out, other_lse = backend.forward(x.of(call), call.geometry)
        if index == 0:
            total, weight, other_weight = _weights(lse, other_lse)
            # The product with float32 weights is float32: no pass for the conversion.
            out = (out * weight).addcmul_(other_out, other_weight)
            lse = total
        else:
            lse = lse.contiguous()
            merge_(out, lse, other_out, other_lse)
    return out, lse


def group_backward(
    x: Operands, backend: Backend, group: Sequence[Call], given: Gradients, dk: Tensor, dv: Tensor
) -> Iterator[Tensor]:
    """What each call contributes to dq of the group's rows, to be summed; adds to dk, dv [m, kv_heads, dim]."""
    for call in group:
        keys = x.keys(call)
        call_dq, call_dk, call_dv = backend.backward(x.of(call), given.of(x.rows(call)), call.geometry)
        dk[keys].add_(call_dk)
        dv[keys].add_(call_dv)
        del call_dk, call_dv  # else they would be in memory beside those of the next call
        yield call_dq


def merge_(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Make `out` [n, heads, v_dim] and `lse` [heads, n] (float32; float64) attention over both sets of keys, in place.
    The sets are disjoint. A row that has seen no key has lse -inf and any finite out, on either side or on both."""
    assert out.dtype == work_dtype(out.dtype), "merging into a rounded output loses what it was given"
    total, weight, other_weight = _weights(lse, other_lse)
    out.mul_(weight).addcmul_(other_out, other_weight)
    lse.copy_(total)


def _weights(lse: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-sum-exp [heads, n] over both sets, and the weight [n, heads, 1] of each set's output."""
    total = torch.logaddexp(lse, other_lse)
    # No key on either side: weights 0 instead of exp(-inf - -inf).
    base = total.masked_fill(torch.isneginf(total), 0.0)
    weight, other_weight = (torch.exp(part - base).transpose(0, 1)[..., None] for part in (lse, other_lse))
    return total, weight, other_weight
