"""A layer with its attention in pieces, one chunk of keys after the other.

The plainest driver of what a schedule with a streamed window does (runtime/layer_ops.py); the self-check uses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engine.attention import chunk as attention
from engine.attention.chunk import AttentionState
from engine.model.layers import LayerInputs, LayerRunner


@torch.no_grad()
def forward_in_pieces(
    layers: LayerRunner,
    index: int,
    weights: Mapping[str, Tensor],
    x: Tensor,
    inputs: LayerInputs,
    state: AttentionState,
    ranges: Sequence[tuple[int, int]],
) -> Tensor:
    """LayerRunner.forward, for a stream cut at `ranges`; fills `state`."""
    p = layers.project(index, weights, x, inputs)
    state.k[state.start : state.end].copy_(p.k)
    state.v[state.start : state.end].copy_(p.v)
    documents = layers.documents(index, state.documents, state.k.shape[0])
    out = torch.zeros(state.out.shape, dtype=state.lse.dtype, device=x.device)
    lse = torch.full_like(state.lse, float("-inf"))
    for first, end in (r for r in ranges if r[0] < state.end):
        k, v = state.k[first:end], state.v[first:end]
        part = attention.attend(p.q, k, v, start=state.start, key_start=first, documents=documents, call=p.call)
        attention.merge_(out, lse, *part)
    out, lse = attention.finish(out, lse, p.call.sinks)
    state.out.copy_(out)
    state.lse.copy_(lse)
    return layers.forward_given(index, weights, x, inputs, state.out)


@torch.no_grad()
def backward_in_pieces(
    layers: LayerRunner,
    index: int,
    weights: Mapping[str, Tensor],
    x: Tensor,
    dy: Tensor,
    inputs: LayerInputs,
    state: AttentionState,
    grads: Mapping[str, Tensor],
    ranges: Sequence[tuple[int, int]],
) -> Tensor:
    """LayerRunner.backward, for a stream cut at `ranges`."""
    graph = layers.graph(index, weights, x, inputs, lambda p: state.out, keep=False)
    dout = graph.top(weights, dy, grads)
    assert dout is not None
    assert graph.projection is not None
    assert state.dk is not None
    assert state.dv is not None
    q, call = graph.projection.q.detach(), graph.projection.call
    documents = layers.documents(index, state.documents, state.k.shape[0])
    dq = torch.zeros(q.shape, dtype=state.dk.dtype, device=x.device)
    for first, end in (r for r in ranges if r[0] < state.end):
        attention.attend_backward(
            dout,
            q,
            state.k[first:end],
            state.v[first:end],
            state.out,
            state.lse,
            start=state.start,
            key_start=first,
            documents=documents,
            call=call,
            dq=dq,
            dk=state.dk[first:end],
            dv=state.dv[first:end],
        )
    own = slice(state.start, state.end)
    dsinks = None
    if call.sinks is not None:
        dsinks = attention.sink_gradient(dout, state.out, state.lse, call.sinks.detach())
    given = [g.to(q.dtype) for g in (dq, state.dk[own], state.dv[own])]
    return graph.bottom(weights, given, grads, dsinks)
