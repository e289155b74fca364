"""The compute ops of decoder layers, and the copies of what their attention keeps: see engine/runtime/runtime.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.attention import chunk as attention
from engine.attention.chunk import AttentionState, KeptAttention
from engine.model.layers import LayerGraph, Projection
from engine.model.spec import AttentionShape
from engine.plan.plan import Chunk
from engine.schedule.ops import Op

if TYPE_CHECKING:
    from engine.runtime.runtime import Runtime


class LayerOps:
    """One method `_op_ACTION` per action. All compute ops run on one lane, in the schedule's order."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._plan, self._gpu, self._ram = runtime.plan, runtime.gpu, runtime.ram
        self._layers, self._dtype = runtime.runner.layers, runtime.runner.dtype
        self._shapes = runtime.runner.spec.attention
        self._kept: dict[tuple[int, int], tuple[LayerGraph, KeptAttention | None, int]] = {}
        """(layer, chunk) -> the graph that waits for backward, the attention in it, and its bytes."""
        self.kept_bytes = 0
        """Bytes of the graphs that wait."""
        self.kept_peak_bytes = 0
        self._projection: Projection | None = None
        """Streamed: what the running chunk's layer asked of attention; its tensors are in the window's slots."""
        self._graph: LayerGraph | None = None
        """Streamed: the running chunk's layer, between the two halves of its backward."""

    def actions(self) -> dict[str, Callable[[Op], None]]:
        """Action -> its method."""
        return {name[4:]: getattr(self, name) for name in dir(self) if name.startswith("_op_")}

    # ------------------------------------------------------------------ operands

    def _layer(self, op: Op) -> tuple[int, Chunk]:
        return self._runtime.block_index(op.block) - 1, self._plan.chunks[op.index]

    def _shape(self, layer: int) -> AttentionShape:
        shape = self._shapes[layer]
        assert shape is not None
        return shape

    def _keys_and_values(self, raw: Tensor, tokens: int, shape: AttentionShape, dtype: torch.dtype) -> list[Tensor]:
        """k [tokens, kv_heads, qk_dim] and v [tokens, kv_heads, v_dim] that lie one after the other in uint8 `raw`."""
        found, start = [], 0
        for width in (shape.qk_dim, shape.v_dim):
            end = start + tokens * shape.kv_heads * width * dtype.itemsize
            found.append(raw[start:end].view(dtype).view(tokens, shape.kv_heads, width))
            start = end
        return found

    def _window(self, kind: str, shape: AttentionShape) -> list[Tensor]:
        """Whole: K and V ("kv") or dK and dV ("dkv") of all tokens of the micro-batch."""
        dtype = self._dtype if kind == "kv" else torch.float32
        return self._keys_and_values(self._gpu.window[kind][0], self._plan.window_tokens, shape, dtype)

    def _slot(self, kind: str, op: Op, shape: AttentionShape) -> list[Tensor]:
        """Streamed: K and V, or dK and dV, of the chunk in the op's slot."""
        chunk = self._plan.chunks[op.slots.get("keys", op.index)]
        dtype = self._dtype if kind == "kv" else torch.float32
        return self._keys_and_values(self._gpu.window[kind][op.slots[kind]], _tokens(chunk), shape, dtype)

    def _typed(self, name: str, dtype: torch.dtype, *size: int) -> Tensor:
        """Streamed: one of the running chunk's own buffers."""
        raw = self._gpu.window[name][0]
        return raw[: math.prod(size) * dtype.itemsize].view(dtype).view(*size)

    def _queries(self, op: Op, shape: AttentionShape) -> Tensor:
        return self._typed("q", self._dtype, _tokens(self._plan.chunks[op.index]), shape.heads, shape.qk_dim)

    def _saved(self, op: Op, shape: AttentionShape) -> tuple[Tensor, Tensor]:
        """Attention output [tokens, heads, v_dim] and log-sum-exp [heads, tokens] of the op's chunk."""
        raw, tokens = self._gpu.saved[op.slots["saved"]], _tokens(self._plan.chunks[op.index])
        lse_bytes = 4 * shape.heads * tokens
        out_bytes = tokens * shape.heads * shape.v_dim * self._dtype.itemsize
        lse = raw[:lse_bytes].view(torch.float32).view(shape.heads, tokens)
        out = raw[lse_bytes : lse_bytes + out_bytes].view(self._dtype).view(tokens, shape.heads, shape.v_dim)
        return out, lse

    def _documents(self, op: Op, layer: int, chunk: Chunk) -> Sequence[int]:
        """What the layer's tokens may see, for attention that is computed here."""
        return self._layers.documents(layer, self._runtime.documents(op, chunk), self._plan.window_tokens)

    def _state(self, op: Op, out: Tensor, lse: Tensor) -> AttentionState:
        """Attention of the op's chunk over the whole window, with its gradients in backward."""
        layer, chunk = self._layer(op)
        shape = self._shape(layer)
        k, v = self._window("kv", shape)
        state = AttentionState(k, v, out, lse, chunk.start, chunk.end, self._runtime.documents(op, chunk))
        if op.action == "layer_backward":
            state.dk, state.dv = self._window("dkv", shape)
            if "zero:dkv" in op.flags:
                state.dk.zero_()
                state.dv.zero_()
        return state

    # ------------------------------------------------------------------ layers

    def _op_layer_forward(self, op: Op) -> None:
        runtime, (layer, chunk) = self._runtime, self._layer(op)
        if "kept" in op.flags:
            y = self._keep(op)
        else:
            weights, inputs = runtime.weights(op), runtime.layer_inputs(op, chunk)
            x, shape = runtime.hidden(op.slots["x"], chunk), self._shapes[layer]
            if shape is None:
                y = self._layers.forward(layer, weights, x, inputs, None)
            elif "attended" in op.flags:
                y = self._layers.forward_given(layer, weights, x, inputs, self._saved(op, shape)[0])
            else:
                y = self._layers.forward(layer, weights, x, inputs, self._state(op, *self._saved(op, shape)))
        runtime.hidden(op.slots["out"], chunk).copy_(y)

    _op_layer_score = _op_layer_forward

    def _keep(self, op: Op) -> Tensor:
        """Run a layer forward and keep its graph until backward; its output."""
        runtime, (layer, chunk) = self._runtime, self._layer(op)
        weights, inputs = runtime.weights(op), runtime.layer_inputs(op, chunk)
        x, shape = runtime.hidden(op.slots["x"], chunk), self._shapes[layer]
        attends: KeptAttention | None = None
        if shape is None:
            graph = self._layers.keep(layer, weights, x, inputs, None)
        elif self._plan.streamed:
            out, lse = self._saved(op, shape)
            graph = self._layers.graph(layer, weights, x, inputs, lambda p: out, keep=True)
            graph.lse = lse.clone()
        else:
            attends = KeptAttention(self._layers.in_blocks(layer, self._state(op, *self._saved(op, shape))))
            graph = self._layers.keep(layer, weights, x, inputs, attends.forward)
        self._kept[layer, op.index] = graph, attends, graph.nbytes
        self.kept_bytes += graph.nbytes
        self.kept_peak_bytes = max(self.kept_peak_bytes, self.kept_bytes)
        return graph.y.detach()

    def _release(self, op: Op) -> tuple[LayerGraph, KeptAttention | None]:
        graph, attends, nbytes = self._kept.pop((self._layer(op)[0], op.index))
        self.kept_bytes -= nbytes
        return graph, attends

    def _op_layer_again(self, op: Op) -> None:
        """Keys and values into the window, attention's output and log-sum-exp, of a layer that saved its input only."""
        runtime, (layer, chunk) = self._runtime, self._layer(op)
        x, inputs = runtime.hidden(op.slots["x"], chunk), runtime.layer_inputs(op, chunk)
        projection = self._layers.project(layer, runtime.weights(op), x, inputs)
        state = self._state(op, *self._saved(op, self._shape(layer)))
        with torch.no_grad():
            attention.forward_handler(self._layers.in_blocks(layer, state))(*projection)

    def _op_layer_backward(self, op: Op) -> None:
        runtime, (layer, chunk) = self._runtime, self._layer(op)
        weights, gradients = runtime.weights(op), runtime.gradients(op)
        dy, shape = runtime.hidden(op.slots["dy"], chunk), self._shapes[layer]
        if "attended" in op.flags:
            dx = self._finish_streamed(op, weights, gradients)
        elif "kept" in op.flags:
            dx = self._backward_kept(op, weights, dy, gradients)
        else:
            x, inputs = runtime.hidden(op.slots["x"], chunk), runtime.layer_inputs(op, chunk)
            state = None if shape is None else self._state(op, *self._saved(op, shape))
            dx = self._layers.backward(layer, weights, x, dy, inputs, state, gradients)
        runtime.hidden(op.slots["out"], chunk).copy_(dx)

    def _backward_kept(self, op: Op, weights: dict[str, Tensor], dy: Tensor, gradients: dict[str, Tensor]) -> Tensor:
        """Backward through a kept graph that is not cut."""
        graph, attends = self._release(op)
        if attends is not None:
            state = self._state(op, attends.state.out, attends.state.lse)
            attends.state = self._layers.in_blocks(self._layer(op)[0], state)
        graph.top(weights, dy, gradients)
        return graph.dx()

    # ------------------------------------------------------------------ attention in pieces

    def _op_layer_project(self, op: Op) -> None:
        """Streamed: queries, keys and values of a chunk into their slots."""
        runtime, (layer, chunk) = self._runtime, self._layer(op)
        x, inputs = runtime.hidden(op.slots["x"], chunk), runtime.layer_inputs(op, chunk)
        p = self._layers.project(layer, runtime.weights(op), x, inputs)
        shape = self._shape(layer)
        self._queries(op, shape).copy_(p.q)
        for slot, part in zip(self._slot("kv", op, shape), (p.k, p.v), strict=True):
            slot.copy_(part)
        self._projection = p._replace(q=x[:0], k=x[:0], v=x[:0])

    def _op_attend(self, op: Op) -> None:
        """Streamed: attention of a chunk over one chunk of keys, merged into that over the ones before."""
        layer, chunk = self._layer(op)
        shape, other = self._shape(layer), self._plan.chunks[op.slots["keys"]]
        assert self._projection is not None
        call = self._projection.call
        k, v = self._slot("kv", op, shape)
        out, lse = attention.attend(
            self._queries(op, shape),
            k,
            v,
            start=chunk.start,
            key_start=other.start,
            documents=self._documents(op, layer, chunk),
            call=call,
        )
        tokens = _tokens(chunk)
        total = self._typed("partial", torch.float32, tokens, shape.heads, shape.v_dim)
        total_lse = self._typed("partial_lse", torch.float32, shape.heads, tokens)
        if "first" in op.flags:
            total.copy_(out)
            total_lse.copy_(lse)
        else:
            attention.merge_(total, total_lse, out, lse)
        if "last" in op.flags:
            out, lse = attention.finish(total, total_lse, call.sinks)
            saved_out, saved_lse = self._saved(op, shape)
            saved_out.copy_(out)
            saved_lse.copy_(lse)

    def _op_layer_backward_top(self, op: Op) -> None:
        """Streamed: backward of what follows attention; queries and the gradient of its output to their slots."""
        runtime, (layer, chunk) = self._runtime, self._layer(op)
        weights, gradients, shape = runtime.weights(op), runtime.gradients(op), self._shape(layer)
        if "kept" in op.flags:
            graph = self._kept[layer, op.index][0]
        else:
            x, inputs = runtime.hidden(op.slots["x"], chunk), runtime.layer_inputs(op, chunk)
            out = self._saved(op, shape)[0]
            graph = self._layers.graph(layer, weights, x, inputs, lambda p: out, keep=False)
        dout = graph.top(weights, runtime.hidden(op.slots["dy"], chunk), gradients)
        assert dout is not None
        assert graph.projection is not None
        self._queries(op, shape).copy_(graph.projection.q)
        self._typed("dout", self._dtype, _tokens(chunk), shape.heads, shape.v_dim).copy_(dout)
        self._graph = graph

    def _op_attend_backward(self, op: Op) -> None:
        """Streamed: what a chunk's queries and one chunk of keys owe to each other."""
        layer, chunk = self._layer(op)
        shape, other, tokens = self._shape(layer), self._plan.chunks[op.slots["keys"]], _tokens(chunk)
        assert self._graph is not None
        assert self._graph.projection is not None
        out, lse = self._attended(op, shape)
        dq = self._typed("partial", torch.float32, tokens, shape.heads, shape.qk_dim)
        dk, dv = self._slot("dkv", op, shape)
        if "first" in op.flags:
            dq.zero_()
        if "zero:dkv" in op.flags:
            dk.zero_()
            dv.zero_()
        k, v = self._slot("kv", op, shape)
        attention.attend_backward(
            self._typed("dout", self._dtype, tokens, shape.heads, shape.v_dim),
            self._queries(op, shape),
            k,
            v,
            out,
            lse,
            start=chunk.start,
            key_start=other.start,
            documents=self._documents(op, layer, chunk),
            call=self._graph.projection.call,
            dq=dq,
            dk=dk,
            dv=dv,
        )

    def _attended(self, op: Op, shape: AttentionShape) -> tuple[Tensor, Tensor]:
        """Attention's output and log-sum-exp of the running chunk, from its slot or its kept graph."""
        if "saved" in op.slots:
            return self._saved(op, shape)
        assert self._graph is not None
        assert self._graph.out is not None
        assert self._graph.lse is not None
        return self._graph.out.detach(), self._graph.lse

    def _finish_streamed(self, op: Op, weights: dict[str, Tensor], gradients: dict[str, Tensor]) -> Tensor:
        layer, chunk = self._layer(op)
        shape, graph = self._shape(layer), self._graph
        assert graph is not None
        assert graph.projection is not None
        tokens, sinks = _tokens(chunk), graph.projection.call.sinks
        dq = self._typed("partial", torch.float32, tokens, shape.heads, shape.qk_dim)
        dsinks = None
        if sinks is not None:
            dout = self._typed("dout", self._dtype, tokens, shape.heads, shape.v_dim)
            dsinks = attention.sink_gradient(dout, *self._attended(op, shape), sinks.detach())
        given = [g.to(self._dtype) for g in (dq, *self._slot("dkv", op, shape))]
        dx = graph.bottom(weights, given, gradients, dsinks)
        self._graph = None
        if "kept" in op.flags:
            self._release(op)
        return dx

    # ------------------------------------------------------------------ links

    def _op_load_saved(self, op: Op) -> None:
        region = self._runtime.activation("saved", op)
        self._gpu.saved[op.slots["saved"]][: op.nbytes].copy_(region, non_blocking=True)

    def _op_store_saved(self, op: Op) -> None:
        region = self._runtime.activation("saved", op)
        region.copy_(self._gpu.saved[op.slots["saved"]][: op.nbytes], non_blocking=True)

    def _kv_regions(self, op: Op) -> list[tuple[Tensor, Tensor]]:
        """(on the compute device, copy in RAM) of a chunk's keys and of its values."""
        layer, chunk = self._layer(op)
        shape = self._shape(layer)
        if self._plan.streamed:
            here = self._slot("kv", op, shape)
        else:
            here = [window[chunk.start : chunk.end] for window in self._window("kv", shape)]
        raw = self._runtime.activation("kv", op)
        return list(zip(here, self._keys_and_values(raw, _tokens(chunk), shape, self._dtype), strict=True))

    def _op_store_kv(self, op: Op) -> None:
        for window, copy in self._kv_regions(op):
            copy.copy_(window, non_blocking=True)

    def _op_load_kv(self, op: Op) -> None:
        for window, copy in self._kv_regions(op):
            window.copy_(copy, non_blocking=True)

    def _dkv_pair(self, op: Op) -> tuple[Tensor, Tensor]:
        there = self._ram.window["dkv"][self._plan.chunks[op.index].local][: op.nbytes]
        return self._gpu.window["dkv"][op.slots["dkv"]][: op.nbytes], there

    def _op_load_dkv(self, op: Op) -> None:
        here, there = self._dkv_pair(op)
        here.copy_(there, non_blocking=True)

    def _op_store_dkv(self, op: Op) -> None:
        here, there = self._dkv_pair(op)
        there.copy_(here, non_blocking=True)


def _tokens(chunk: Chunk) -> int:
    return chunk.end - chunk.start
