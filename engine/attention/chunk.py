"""Exact attention of one sequence chunk, registered with transformers under the name "penstock".

A stream of T tokens holds whole documents laid end to end; its chunks are computed in order forward and in reverse
order backward. Forward writes the chunk's keys and values into windows over the whole stream and saves output and
log-sum-exp; backward recomputes the layer around the saved output and adds what later queries owe to earlier keys into
float32 windows: at a chunk's turn its dK and dV are complete. A layer reaches its state through a module global set by
`use`: layers run on one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from penstock.engine.attention.backends import AttentionCall as AttentionCall
from penstock.engine.attention.backends import Gradients as Gradients
from penstock.engine.attention.backends import Operands as Operands
from penstock.engine.attention.backends import work_dtype as work_dtype
from penstock.engine.attention.compute import group_backward, group_forward
from penstock.engine.attention.compute import merge_ as merge_
from penstock.engine.attention.select import Attends as Attends
from penstock.engine.attention.select import attention_report as attention_report
from penstock.engine.attention.select import launches
from penstock.engine.attention.select import prepare as prepare
from penstock.engine.attention.spans import prefix_spans
from penstock.engine.attention.spans import split_documents as split_documents
from penstock.engine.attention.workspace import workspace_bytes as workspace_bytes
from penstock.storage.files.errors import UserError

NAME = "penstock"
"""What `attn_implementation` is called in transformers."""


Ranges = Sequence[tuple[int, int]]
"""Ranges of a stream's tokens, (first, end), in order."""


@dataclass(slots=True)
class AttentionState:
    """What attention of one layer keeps for one chunk of a stream of T tokens.

    `k` [T, kv_heads, qk_dim] and `v` [T, kv_heads, v_dim] in the compute dtype: forward writes rows start..end and
    reads rows before them of the same document. `dk`, `dv`: the same shapes in float32, zeroed by the caller before
    the last chunk's backward; None in forward. `out` [n, heads, v_dim] (compute dtype) and `lse` [heads, n] (float32)
    with n = end - start: forward fills them, backward reads them. `documents`: sorted starts of the stream's documents,
    the first is 0; tokens see only their own document, and of an earlier one the prefix from which it goes on
    (`spans.Documents`). `both_ways`: ranges of the stream, each within one chunk, whose tokens see the later ones of
    theirs too, as those of an image do in some models.
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
    both_ways: Ranges = ()

    @property
    def sums(self) -> tuple[Tensor, Tensor]:
        """`dk` and `dv`, which backward has."""
        assert self.dk is not None
        assert self.dv is not None
        return self.dk, self.dv

    def write(self, k: Tensor, v: Tensor) -> None:
        """Put the chunk's own keys and values into the windows."""
        self.k[self.start : self.end].copy_(k)
        self.v[self.start : self.end].copy_(v)

    def operands(self, q: Tensor, call: AttentionCall, keys: slice | None = None) -> Operands:
        """The chunk's queries over `keys` of the windows, or over all up to its own."""
        keys = slice(0, self.end) if keys is None else keys
        rest = (self.start, keys.start, self.documents, self.both_ways)
        return Operands(q, self.k[keys], self.v[keys], call, *rest)


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
        state.write(k, v)
        _chunk_forward(state, q, call)
        return state.out

    return handle


def backward_handler(state: AttentionState) -> Handler:
    """Stands in for attention in the recomputed layer: the saved output forward, exact gradients backward."""

    return SavedAttention(state).saved


@dataclass(slots=True)
class SavedAttention:
    """Attention of one chunk inside a graph that outlives forward: its windows may be others in backward."""

    state: AttentionState
    """What the next forward or backward of the graph works with."""
    apart: bool = True
    """Forward writes out and lse to memory of the graph's own, in place of the state's."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        """A Handler: attention as `forward_handler` computes it, with a graph."""
        if self.apart:
            self.state = replace(self.state, out=torch.empty_like(self.state.out), lse=torch.empty_like(self.state.lse))
        with torch.no_grad():
            forward_handler(self.state)(q, k, v, call)
        return self.saved(q, k, v, call)

    def saved(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        """A Handler: the output that the state holds, with a graph."""
        out: Tensor = _SavedAttention.apply(q, k, v, call.sinks, call, self)  # type: ignore[no-untyped-call]
        return out


@dataclass(slots=True)
class Counts:
    """FLOPs that attention kernels really computed in this process, measurements left out; whoever reads resets.

    Pairs of a query and a key are counted as the kernel computes them: a causal kernel the triangle, a windowed one the
    band, a masked tile all of it. A pair costs 2 x heads x (qk_dim + v_dim) forward and
    2 x heads x (3 qk_dim + 2 v_dim) backward, where scores are computed again.
    """

    forward_flops: int = 0
    backward_flops: int = 0

    def reset(self) -> None:
        self.forward_flops = self.backward_flops = 0


COUNTS = Counts()


def attend(x: Operands) -> tuple[Tensor, Tensor]:
    """Attention of the queries over these keys and no others: causal but for `x.both_ways`, within their documents,
    these documents' prefixes and `x.call.window`.

    Any range of keys: the queries' own, earlier ones, both, later ones. Sinks are left to `finish`. Returns out
    [n, heads, v_dim] in q's dtype and lse [heads, n] in float32 (float64 for float64); a row that sees none of these
    keys has out 0 and lse -inf.
    """
    out, lse = _attend_causal(x)
    total = out
    for part in _beyond(x):
        total, lse = total.to(work_dtype(out.dtype)), lse.contiguous()
        other, other_lse = _attend_causal(part.operands)
        if part.reverse:
            other, other_lse = other.flip(0), other_lse.flip(1)
        merged, merged_lse = total[part.rows], lse[:, part.rows].contiguous()
        merge_(merged, merged_lse, other, other_lse)
        lse[:, part.rows] = merged_lse
    return total.to(out.dtype), lse


def _attend_causal(x: Operands) -> tuple[Tensor, Tensor]:
    """`attend`, of what is causal within a document."""
    result: tuple[Tensor, Tensor] | None = None
    for rows, out, lse in _forward(x):
        if rows == slice(0, x.q.shape[0]):
            return out.to(x.q.dtype), lse
        result = result or _nothing_seen(x)
        result[0][rows], result[1][:, rows] = out, lse
    return result or _nothing_seen(x)


class _Beyond(NamedTuple):
    """Queries and keys that they see beside what is causal within a document."""

    rows: slice
    keys: slice
    operands: Operands
    """These, as something causal."""
    reverse: bool
    """Whether they are in reverse order there."""


def _beyond(x: Operands) -> Iterator[_Beyond]:
    """What the queries see of their documents' prefixes. And what they see of later keys: all but the last token of a
    range see those behind them, which in reverse order is causal; a window hides none of them."""
    queries, keys = (x.start, x.start + x.q.shape[0]), (x.key_start, x.key_start + x.k.shape[0])
    for span in prefix_spans(*queries, *keys, x.documents):
        rows, seen = slice(span.q0 - x.start, span.q1 - x.start), slice(span.k0 - x.key_start, span.k1 - x.key_start)
        behind = Operands(x.q[rows], x.k[seen], x.v[seen], x.call, span.q0 - span.shift, span.k0)
        yield _Beyond(rows, seen, behind, reverse=False)
    for first, end in x.both_ways:
        if end - first > 1 and all(begin <= first and end <= stop for begin, stop in (queries, keys)):
            rows = slice(first - x.start, end - 1 - x.start)
            later = slice(first + 1 - x.key_start, end - x.key_start)
            call = replace(x.call, window=None, sinks=None)
            ahead = Operands(x.q[rows].flip(0), x.k[later].flip(0), x.v[later].flip(0), call)
            yield _Beyond(rows, later, ahead, reverse=True)


def _nothing_seen(x: Operands) -> tuple[Tensor, Tensor]:
    q, (n, heads, _) = x.q, x.q.shape
    return q.new_zeros(n, heads, x.v.shape[-1]), q.new_full((heads, n), float("-inf"), dtype=work_dtype(q.dtype))


def finish(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention merged over all its keys, with `sinks` [heads] applied: one more key with that score and no value."""
    if sinks is None:
        return out, lse
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    return out * torch.exp(lse - total).transpose(0, 1)[..., None], total


def attend_backward(x: Operands, given: Gradients, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Add to dq [n, heads, qk_dim], dk, dv [m, kv_heads, dim] (float32; float64) what `attend`'s rectangle contributes.
    `given` is of the finished attention over all keys."""
    for rows, keys, operands, reverse in _beyond(x):
        sums, of_rows = (dq[rows], dk[keys], dv[keys]), given.of(rows)
        if not reverse:
            _add_causal(operands, of_rows, *sums)
            continue
        flipped = Gradients(of_rows.dout.flip(0), of_rows.out.flip(0), of_rows.lse.flip(1))
        reversed_sums = [torch.zeros_like(part) for part in sums]
        _add_causal(operands, flipped, *reversed_sums)
        for part, total in zip(sums, reversed_sums, strict=True):
            part.add_(total.flip(0))
    _add_causal(x, given, dq, dk, dv)


def _add_causal(x: Operands, given: Gradients, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    """`attend_backward`, of what is causal within a document."""
    for rows, parts in _backward(x, given, dk, dv):
        for part in parts:
            dq[rows].add_(part)


def sink_gradient(given: Gradients, call: AttentionCall) -> Tensor | None:
    """[heads]: the softmax gradient of a key whose value is zero, -p * (dout . out), summed over the queries."""
    if call.sinks is None:
        return None
    sinks, lse = call.sinks.detach(), given.lse
    delta = (given.dout.to(lse.dtype) * given.out).sum(dim=-1).transpose(0, 1)
    probability = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
    return -(probability * delta).sum(dim=-1).to(sinks.dtype)


def _forward(x: Operands) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(rows, their output, their lse) of all queries that see a key, each once."""
    pair_flops = 2 * x.q.shape[1] * (x.q.shape[2] + x.v.shape[2])
    for launch in launches(x):
        out, lse = group_forward(x, launch.backend, launch.group)
        COUNTS.forward_flops += pair_flops * launch.pairs
        yield x.rows(launch.group[0]), out, lse


def _backward(x: Operands, given: Gradients, dk: Tensor, dv: Tensor) -> Iterator[tuple[slice, Iterator[Tensor]]]:
    """(rows, tensors whose sum is their dq) of all queries that see a key, each once; adds to dk and dv meanwhile."""
    pair_flops = 2 * x.q.shape[1] * (3 * x.q.shape[2] + 2 * x.v.shape[2])
    for launch in launches(x, given):
        yield x.rows(launch.group[0]), group_backward(x, launch.backend, launch.group, given, dk, dv)
        COUNTS.backward_flops += pair_flops * launch.pairs


def _chunk_forward(state: AttentionState, q: Tensor, call: AttentionCall) -> None:
    x = state.operands(q, call)
    if any(_beyond(x)):
        for saved, finished in zip((state.out, state.lse), finish(*attend(x), call.sinks), strict=True):
            saved.copy_(finished)
        return
    for rows, part_out, part_lse in _forward(x):
        out, lse = finish(part_out, part_lse, call.sinks)
        state.out[rows].copy_(out)
        state.lse[:, rows].copy_(lse)


def _chunk_backward(
    state: AttentionState, dout: Tensor, q: Tensor, call: AttentionCall
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv of the chunk itself (q's dtype) and of the sinks, for dout [n, heads, v_dim]; adds to the windows."""
    x = state.operands(q, call)
    if any(_beyond(x)):
        return backward_in_pieces(state, dout, q, call, [(0, state.end)])
    given, (dk, dv) = Gradients(dout, state.out, state.lse), state.sums
    dq = torch.empty_like(q)
    for rows, parts in _backward(x, given, dk[: state.end], dv[: state.end]):
        total = next(parts)
        for part in parts:
            total = total.to(dk.dtype).add_(part)
        dq[rows] = total
    own = slice(state.start, state.end)
    return dq, dk[own].to(q.dtype), dv[own].to(q.dtype), sink_gradient(given, call)


def forward_in_pieces(state: AttentionState, q: Tensor, call: AttentionCall, pieces: Ranges) -> None:
    """Fill out and lse as `forward_handler` does, from the keys of one of `pieces` of the stream at a time."""
    out = torch.zeros_like(state.out, dtype=state.lse.dtype)
    lse = torch.full_like(state.lse, float("-inf"))
    for first, end in (piece for piece in pieces if piece[0] < state.end):
        merge_(out, lse, *attend(state.operands(q, call, slice(first, end))))
    for saved, finished in zip((state.out, state.lse), finish(out, lse, call.sinks), strict=True):
        saved.copy_(finished)


def backward_in_pieces(
    state: AttentionState, dout: Tensor, q: Tensor, call: AttentionCall, pieces: Ranges
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """What `backward_handler` computes for dout, from the keys of one of `pieces` of the stream at a time."""
    given, (dk, dv) = Gradients(dout, state.out, state.lse), state.sums
    dq = torch.zeros_like(q, dtype=dk.dtype)
    for first, end in (piece for piece in pieces if piece[0] < state.end):
        keys = slice(first, end)
        attend_backward(state.operands(q, call, keys), given, dq, dk[keys], dv[keys])
    own = slice(state.start, state.end)
    return dq.to(q.dtype), dk[own].to(q.dtype), dv[own].to(q.dtype), sink_gradient(given, call)


class _SavedAttention(torch.autograd.Function):
    """Saved attention output going forward; going backward the gradients of attention over all visible keys."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: AttentionCall, saved: SavedAttention
    ) -> Tensor:
        # k and v are not kept: forward left the same values in the windows.
        ctx.save_for_backward(q)
        ctx.call = call
        ctx.saved = saved
        return saved.state.out.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dout,) = grads
        (q,) = ctx.saved_tensors
        return *_chunk_backward(ctx.saved.state, dout, q, ctx.call), None, None


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
    """transformers' attention interface: query [1, heads, n, qk_dim] -> ([1, n, heads, v_dim], None). Raises UserError
    for what would be computed wrongly: a mask of the model's own, a position bias, bidirectional attention."""
    assert _handler is not None, "attention called outside of a block"
    name = type(module).__name__
    if attention_mask is not None:
        raise UserError(f"{name} builds its own attention mask; only causal and sliding-window masks are supported")
    if position_bias is not None:
        raise UserError(f"{name} adds a position bias to its attention scores, which is not supported")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise UserError(f"{name} is not causal; only causal language models can be trained")
    call = AttentionCall(
        softmax_scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    # `squeeze`, as the way back from an index fills a tensor with zeros and copies the gradient into it.
    q, k, v = (part.squeeze(0).transpose(0, 1) for part in (query, key, value))
    out = _handler(q, k, v, call)
    return out[None], None


@dataclass(frozen=True, slots=True)
class MaskPattern:
    """Hides all keys but the last `size` (sliding), or those of earlier blocks of `size` tokens of a document
    (chunked)."""

    kind: Literal["sliding", "chunked"]
    size: int


@contextmanager
def mask_patterns() -> Iterator[None]:
    """Inside the block a model's layers are given MaskPattern objects as masks, for reading; outside None.

    Outside transformers knows of no mask for our attention and makes none: it need not look for document borders in
    the positions, for which it would wait for the device.
    """
    AttentionMaskInterface.register(NAME, mask_pattern)
    try:
        yield
    finally:
        AttentionMaskInterface._global_mapping.pop(NAME, None)


def mask_pattern(
    *args: Any, mask_function: Callable[..., Tensor] | None = None, local_size: int | None = None, **kwargs: Any
) -> MaskPattern | None:
    """transformers' mask interface. No mask is made: attention itself handles causality, windows and documents."""
    if local_size is None or mask_function is None:
        return None
    zero = torch.tensor(0)
    # Of the first query that no longer sees key 0, only a sliding window shows key 1.
    try:
        sees_next = bool(mask_function(zero, zero, torch.tensor(local_size), torch.tensor(1)))
    except IndexError:
        raise UserError("its attention mask depends on what the tokens are, which is not supported") from None
    return MaskPattern("sliding" if sees_next and local_size > 1 else "chunked", local_size)


def register() -> None:
    """Make `attn_implementation="penstock"` known to transformers; harmless to repeat."""
    AttentionInterface.register(NAME, penstock_attention)
