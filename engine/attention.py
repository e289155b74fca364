"""Exact attention of one sequence chunk, registered with transformers under the name "penstock".

A stream of T tokens holds whole documents laid end to end; chunks of it are computed in order forward and in reverse
order backward. Forward writes the chunk's keys and values into windows over the whole stream and saves output and
log-sum-exp; backward recomputes the layer around the saved output and adds what later queries owe to earlier keys into
float32 windows. When a chunk's turn comes in backward, all later chunks have been there, so its dK and dV are complete.

A layer reaches its state through a module global set by `use`: layers run on one thread.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from engine.attention_backends import choose_backend
from storage.errors import UserError

NAME = "penstock"
"""What `attn_implementation` is called in transformers."""


@dataclass(slots=True)
class AttentionState:
    """What attention of one layer keeps for one chunk of a stream of T tokens.

    `k` [T, kv_heads, qk_dim] and `v` [T, kv_heads, v_dim] in the compute dtype: forward writes rows start..end and
    reads rows before them of the same document. `dk`, `dv`: the same shapes in float32, zeroed by the caller before
    the last chunk's backward; None in forward. `out` [n, heads, v_dim] (compute dtype) and `lse` [heads, n] (float32)
    with n = end - start: forward fills them, backward reads them. `documents`: sorted starts of the stream's documents,
    the first is 0; tokens see only their own document.
    """

    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    start: int
    end: int
    documents: Sequence[int]
    dk: Tensor | None = None
    dv: Tensor | None = None


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What a layer asks of its attention: `window` counts the visible keys including the query's own."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


Handler = Callable[[Tensor, Tensor, Tensor, AttentionCall], Tensor]
"""(q [n, heads, qk_dim], k [n, kv_heads, qk_dim], v [n, kv_heads, v_dim], call) -> out [n, heads, v_dim]."""

_handler: Handler | None = None


@contextmanager
def use(handler: Handler) -> Iterator[None]:
    """Every attention call inside the block is given to `handler`."""
    global _handler
    previous, _handler = _handler, handler
    try:
        yield
    finally:
        _handler = previous


def forward_handler(state: AttentionState) -> Handler:
    """Attention of one chunk; fills the chunk's rows of k and v, and out and lse."""

    def handle(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        state.k[state.start : state.end].copy_(k)
        state.v[state.start : state.end].copy_(v)
        _chunk_forward(state, q, call)
        return state.out

    return handle


def backward_handler(state: AttentionState) -> Handler:
    """Stands in for attention in the recomputed layer: the saved output forward, exact gradients backward."""

    def handle(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        out: Tensor = _SavedAttention.apply(q, k, v, call.sinks, call, state)  # type: ignore[no-untyped-call]
        return out

    return handle


@dataclass(frozen=True, slots=True)
class Piece:
    """Queries q0..q1 against keys k0..k1 of the stream; `kind` band needs a mask at the sliding window's edge."""

    q0: int
    q1: int
    k0: int
    k1: int
    kind: Literal["causal", "full", "band"]

    def mask(self, window: int, device: torch.device) -> Tensor | None:
        """Bool [q1 - q0, k1 - k0], true where the key is visible; None where no mask is needed."""
        if self.kind != "band":
            return None
        queries = torch.arange(self.q0, self.q1, device=device)[:, None]
        keys = torch.arange(self.k0, self.k1, device=device)
        return (keys <= queries) & (keys > queries - window)


def pieces(start: int, end: int, documents: Sequence[int], window: int | None) -> list[list[Piece]]:
    """The rectangles that cover the visible keys of queries start..end exactly once, grouped by query range."""
    groups = []
    position = start
    while position < end:
        index = bisect_right(documents, position)
        stop = min(end, documents[index]) if index < len(documents) else end
        document = documents[index - 1]
        if window is None or stop - document <= window:
            own = Piece(position, stop, position, stop, "causal")
            earlier = [Piece(position, stop, document, position, "full")] if document < position else []
            groups.append([own, *earlier])
        else:
            groups += _window_pieces(position, stop, document, window)
        position = stop
    return groups


def _window_pieces(start: int, stop: int, document: int, window: int) -> list[list[Piece]]:
    # Tiles of a quarter of the window waste little on masked scores and still are large enough for the kernels.
    tile = min(max(window // 4, 64), 1024)
    groups = []
    for q0 in range(start, stop, tile):
        q1 = min(q0 + tile, stop)
        first = max(document, q0 - window + 1)
        whole = max(document, q1 - window)
        if whole >= q0:
            groups.append([Piece(q0, q1, first, q1, "band")])
            continue
        group = [Piece(q0, q1, q0, q1, "causal")]
        if whole < q0:
            group.append(Piece(q0, q1, whole, q0, "full"))
        if first < whole:
            group.append(Piece(q0, q1, first, whole, "band"))
        groups.append(group)
    return groups


def _chunk_forward(state: AttentionState, q: Tensor, call: AttentionCall) -> None:
    for group in pieces(state.start, state.end, state.documents, call.window):
        rows = slice(group[0].q0 - state.start, group[0].q1 - state.start)
        out, lse = _piece_forward(state, q[rows], group[0], call)
        for piece in group[1:]:
            other_out, other_lse = _piece_forward(state, q[rows], piece, call)
            out, lse = _merge(out, lse, other_out, other_lse)
        if call.sinks is not None:
            # A sink is one more key with a learned score and no value.
            total = torch.logaddexp(lse, call.sinks.to(lse.dtype)[:, None])
            out = out * torch.exp(lse - total).transpose(0, 1)[..., None]
            lse = total
        state.out[rows].copy_(out)
        state.lse[:, rows].copy_(lse)


def _piece_forward(state: AttentionState, q: Tensor, piece: Piece, call: AttentionCall) -> tuple[Tensor, Tensor]:
    k, v = state.k[piece.k0 : piece.k1], state.v[piece.k0 : piece.k1]
    mask = piece.mask(call.window or 0, q.device)
    backend = choose_backend(q, v, softcap=call.softcap, mask=mask)
    return backend.forward(q, k, v, causal=piece.kind == "causal", scale=call.scale, mask=mask, softcap=call.softcap)


def _merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys from the attention over each; the first lse is finite everywhere."""
    total = torch.logaddexp(lse, other_lse)
    weight = torch.exp(lse - total).transpose(0, 1)[..., None]
    other_weight = torch.exp(other_lse - total).transpose(0, 1)[..., None]
    return out * weight + other_out * other_weight, total


class _SavedAttention(torch.autograd.Function):
    """Saved attention output going forward; going backward the gradients of attention over all visible keys."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: AttentionCall, state: AttentionState
    ) -> Tensor:
        # k and v are not kept: forward left the same values in the windows.
        ctx.save_for_backward(q)
        ctx.call = call
        ctx.state = state
        return state.out.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dout,) = grads
        (q,) = ctx.saved_tensors
        call, state = ctx.call, ctx.state
        assert state.dk is not None, "backward needs the dk window"
        assert state.dv is not None, "backward needs the dv window"
        dq = torch.empty_like(q)
        for group in pieces(state.start, state.end, state.documents, call.window):
            rows = slice(group[0].q0 - state.start, group[0].q1 - state.start)
            partial = torch.zeros((), dtype=state.dk.dtype, device=q.device)
            for piece in group:
                keys = slice(piece.k0, piece.k1)
                k, v = state.k[keys], state.v[keys]
                mask = piece.mask(call.window or 0, q.device)
                backend = choose_backend(q, v, softcap=call.softcap, mask=mask)
                piece_dq, dk, dv = backend.backward(
                    dout[rows],
                    q[rows],
                    k,
                    v,
                    state.out[rows],
                    state.lse[:, rows],
                    causal=piece.kind == "causal",
                    scale=call.scale,
                    mask=mask,
                    softcap=call.softcap,
                )
                state.dk[keys].add_(dk)
                state.dv[keys].add_(dv)
                partial = piece_dq if piece is group[0] else partial.to(state.dk.dtype).add_(piece_dq)
            dq[rows] = partial
        own = slice(state.start, state.end)
        dsinks = _sink_gradient(dout, state, call.sinks) if call.sinks is not None else None
        return dq, state.dk[own].to(q.dtype), state.dv[own].to(q.dtype), dsinks, None, None


def _sink_gradient(dout: Tensor, state: AttentionState, sinks: Tensor) -> Tensor:
    """[heads]: the softmax gradient of a key whose value is zero, -p * (dout . out), summed over the queries."""
    delta = (dout.to(state.lse.dtype) * state.out).sum(dim=-1).transpose(0, 1)
    probability = torch.exp(sinks.to(state.lse.dtype)[:, None] - state.lse)
    return -(probability * delta).sum(dim=-1).to(sinks.dtype)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def penstock_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, heads, n, qk_dim] -> ([1, n, heads, v_dim], None).

    Raises UserError for what would be computed wrongly: a mask of the model's own, a position bias, bidirectional
    attention.
    """
    assert _handler is not None, "attention called outside of a block"
    name = type(module).__name__
    if attention_mask is not None:
        raise UserError(
            f"{name} builds an attention mask of its own; only causal and sliding-window masks are supported"
        )
    if position_bias is not None:
        raise UserError(f"{name} adds a position bias to its attention scores, which is not supported")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise UserError(f"{name} is not causal; only causal language models can be trained")
    call = AttentionCall(
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    out = _handler(query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), call)
    return out[None], None


@dataclass(frozen=True, slots=True)
class MaskPattern:
    """A causal mask that hides old keys: all but the last `size` (sliding), or those of earlier blocks of `size` tokens
    counted from the document's start (chunked)."""

    kind: Literal["sliding", "chunked"]
    size: int


_show_patterns = False


@contextmanager
def mask_patterns() -> Iterator[None]:
    """Inside the block a model's layers are given MaskPattern objects as masks, for reading; outside None."""
    global _show_patterns
    _show_patterns = True
    try:
        yield
    finally:
        _show_patterns = False


def mask_pattern(
    *args: Any, mask_function: Callable[..., Tensor] | None = None, local_size: int | None = None, **kwargs: Any
) -> MaskPattern | None:
    """transformers' mask interface. No mask is made: attention itself handles causality, windows and documents."""
    if not _show_patterns or local_size is None or mask_function is None:
        return None
    zero = torch.tensor(0)
    # Of the first query that no longer sees key 0, only a sliding window shows key 1.
    sees_next = bool(mask_function(zero, zero, torch.tensor(local_size), torch.tensor(1)))
    return MaskPattern("sliding" if sees_next and local_size > 1 else "chunked", local_size)


def split_documents(documents: Sequence[int], end: int, chunk: int) -> list[int]:
    """Starts of the blocks of `chunk` tokens of each document; a chunked mask is these taken for documents."""
    stops = [*documents[1:], end]
    return [block for start, stop in zip(documents, stops, strict=True) for block in range(start, stop, chunk)]


def register() -> None:
    """Make `attn_implementation="penstock"` known to transformers; harmless to repeat."""
    AttentionInterface.register(NAME, penstock_attention)
    AttentionMaskInterface.register(NAME, mask_pattern)
