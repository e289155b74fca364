"""The compute ops of decoder layers and of their branches, and the copies of activations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.attention import chunk as attention
from penstock.engine.attention.chunk import AttentionCall, AttentionState, Gradients, Operands, SavedAttention
from penstock.engine.branches import experts
from penstock.engine.model.layer_graph import SLOT_ALIGNMENT, LayerGraph, Projection
from penstock.engine.model.layers import LayerInputs
from penstock.engine.model.spec import AttentionShape
from penstock.engine.plan.activations import ACTIVATIONS
from penstock.engine.plan.chunks import Chunk
from penstock.engine.plan.plan import offloaded_graph_bytes
from penstock.engine.runtime.exchange import Exchange
from penstock.engine.runtime.handlers import handles
from penstock.engine.runtime.idle import Idle
from penstock.engine.runtime.views import Views, keys_and_values, laid_out
from penstock.engine.schedule import actions as a
from penstock.engine.schedule import resources as r
from penstock.engine.schedule.ops import Op


@dataclass(frozen=True, slots=True)
class _Waiting:
    graph: LayerGraph | None
    """None: it was larger than its slot, and backward recomputes it."""
    attends: SavedAttention | None
    nbytes: int
    """Bytes on the compute device that it holds itself."""


class LayerOps:
    """All compute ops run on one lane, in the schedule's order."""

    def __init__(self, views: Views, idle: Idle | None, exchange: Exchange) -> None:
        self._views, self._idle, self._exchange = views, idle, exchange
        self._plan, self._gpu = views.plan, views.gpu
        self._layers, self._dtype = views.runner.layers, views.dtype
        self._shapes = views.runner.spec.attention
        self._graphs: dict[tuple[int, int], _Waiting] = {}
        """(layer, chunk) -> the graph that waits for backward."""
        self.graphs_bytes = 0
        """Bytes of the graphs that wait."""
        self.graphs_peak_bytes = 0
        self.last_graph_bytes = 0
        """Bytes of the graph that was made last, wherever it waits."""
        self.outgrown: dict[tuple[str, int], int] = {}
        """(layer, chunk) whose graph was larger than its slot, so that backward computed it again -> its bytes."""
        self._projection: Projection | None = None
        """Streamed: what the running chunk's layer asked of attention; its tensors are in the window's slots."""
        self._graph: LayerGraph | None = None
        """Streamed: the running chunk's layer, between the two halves of its backward."""
        self._counted_step = self._settled_step = -1
        """Step whose routing is being counted, and the last one that has been."""

    # ------------------------------------------------------------------ operands

    def _layer(self, op: Op) -> tuple[int, Chunk]:
        return self._views.layer(op), self._views.chunk(op)

    def _operands(self, op: Op) -> tuple[int, Mapping[str, Tensor], Tensor, LayerInputs]:
        """The op's layer, and what it is run on: weights, input, arguments."""
        views, (layer, chunk) = self._views, self._layer(op)
        return layer, views.weights(op), views.hidden(op.slots[a.X], chunk), views.layer_inputs(op, chunk)

    def _shape(self, layer: int) -> AttentionShape:
        shape = self._shapes[layer]
        assert shape is not None
        return shape

    def _window(self, kind: str, shape: AttentionShape, micro_batch: int) -> list[Tensor]:
        """Whole: K and V ("kv") or dK and dV ("dkv") of all tokens of the micro-batch."""
        dtype, windows = self._dtype if kind == "kv" else torch.float32, self._gpu.window[kind]
        return keys_and_values(windows[micro_batch % len(windows)], self._plan.window_tokens, shape, dtype)

    def _slot(self, kind: str, op: Op, shape: AttentionShape) -> list[Tensor]:
        """Streamed: K and V, or dK and dV, of the chunk in the op's slot."""
        tokens, dtype = _tokens(self._views.keys(op)), self._dtype if kind == "kv" else torch.float32
        return keys_and_values(self._gpu.window[kind][op.slots[kind]], tokens, shape, dtype)

    def _typed(self, name: str, dtype: torch.dtype, *size: int) -> Tensor:
        """Streamed: one of the running chunk's own buffers."""
        return laid_out(self._gpu.window[name][0], (dtype, size))[0]

    def _queries(self, op: Op, shape: AttentionShape) -> Tensor:
        return self._typed("q", self._dtype, _tokens(self._views.chunk(op)), shape.heads, shape.qk_dim)

    def _saved(self, op: Op, shape: AttentionShape, slot: int | None = None) -> tuple[Tensor, Tensor]:
        """Attention output [tokens, heads, v_dim] and log-sum-exp [heads, tokens] of the op's chunk, in its slot."""
        raw = self._gpu.slots[r.GPU_SAVED][op.slots[a.SAVED] if slot is None else slot]
        tokens, heads = _tokens(self._views.chunk(op)), shape.heads
        lse, out = laid_out(raw, (torch.float32, (heads, tokens)), (self._dtype, (tokens, heads, shape.v_dim)))
        return out, lse

    def _state(self, op: Op, out: Tensor, lse: Tensor) -> AttentionState:
        """Attention of the op's chunk over the whole window, with its gradients in backward."""
        layer, chunk = self._layer(op)
        shape = self._shape(layer)
        k, v = self._window("kv", shape, chunk.micro_batch)
        documents, both_ways = self._views.documents(op, chunk), self._views.both_ways(op)
        state = AttentionState(k, v, out, lse, chunk.start, chunk.end, documents, both_ways=both_ways)
        if op.action is a.LAYER_BACKWARD:
            state.dk, state.dv = self._window("dkv", shape, chunk.micro_batch)
            if a.ZERO_DKV in op.flags:  # of the stream's last chunk: what is behind it is padding
                state.dk[: chunk.end].zero_()
                state.dv[: chunk.end].zero_()
        return state

    def _watch_routers(self, op: Op) -> None:
        """What the routers of the op's layer are about to see, where their balance is trained."""
        balance = self._layers.balance
        if balance is None:
            return
        views, chunk = self._views, self._views.chunk(op)
        if op.action.phase == "forward" and op.step != self._counted_step:
            balance.begin()
            self._counted_step = op.step
        elif op.action.phase == "backward" and op.step != self._settled_step:
            if self._exchange.count > 1:
                balance.counts.copy_(self._exchange.of_all("routes", balance.counts).sum(0))
            balance.settle(sum(m.num_filled for m in views.steps[op.step].whole))
            self._settled_step = op.step
        filled = views.batch(op).micro_batches[chunk.micro_batch].num_filled
        rows = max(0, min(filled, chunk.end) - chunk.start)
        balance.watch(rows, counting=op.action.phase == "forward")

    # ------------------------------------------------------------------ layers

    @handles(a.LAYER_FORWARD, a.LAYER_FORWARD_BOTTOM, a.LAYER_EVALUATE, a.LAYER_EVALUATE_BOTTOM)
    def _forward(self, op: Op) -> None:
        views, (layer, chunk) = self._views, self._layer(op)
        self._watch_routers(op)
        if a.SAVED_GRAPH in op.flags:
            y = self._forward_saving(op)
        else:
            shape = self._shapes[layer]
            if shape is not None and op.action in (a.LAYER_FORWARD_BOTTOM, a.LAYER_EVALUATE_BOTTOM):
                y = self._layers.forward_given(*self._operands(op), self._saved(op, shape)[0])
            else:
                state = None if shape is None else self._state(op, *self._saved(op, shape))
                if views.runner.spec.state_of(layer) is None:
                    y = self._layers.forward(*self._operands(op), state)
                else:
                    y = self._forward_segments(op, state)
        out = views.hidden(op.slots[a.OUT], chunk)
        out.copy_(y)
        if (images := views.images(op)) is not None:
            images.add(layer, out)
        if a.SENT in op.slots:
            views.send(op.slots[a.SENT], chunk, self._layers.sent)
            if self._idle is not None:
                self._idle.note(op, experts.chosen(self._layers.sent))

    def _forward_segments(self, op: Op, state: AttentionState | None) -> Tensor:
        """Run a layer with a recurrent state forward, document by document; leaves the state behind the chunk."""
        views, (layer, chunk) = self._views, self._layer(op)
        weights, x = views.weights(op), views.hidden(op.slots[a.X], chunk)
        handlers = self._layers.segment_handlers(layer, state)
        y, behind = self._layers.forward_segments(
            layer, weights, x, views.segments(op, chunk), handlers, self._before(op)
        )
        if a.BEHIND in op.slots:
            for target, source in zip(views.recurrent(layer, op.slots[a.BEHIND]), behind, strict=True):
                target.copy_(source)
        return y

    def _before(self, op: Op) -> list[Tensor] | None:
        """The recurrent state that the op's chunk begins with."""
        if a.RECURRENT not in op.slots:
            return None
        return self._views.recurrent(self._layer(op)[0], op.slots[a.RECURRENT])

    def _forward_saving(self, op: Op) -> Tensor:
        """Run a layer forward and save its graph until backward; its output."""
        layer, weights, x, inputs = self._operands(op)
        attends: SavedAttention | None = None
        offloads, shape = a.GRAPH in op.slots, self._shapes[layer]
        if shape is not None and self._plan.streamed:
            out, lse = self._saved(op, shape)
            graph = self._layers.graph(layer, weights, x, inputs, out, save_graph=True)
            graph.lse, y = lse.clone(), graph.output
        else:
            if shape is not None:
                state = self._layers.in_blocks(layer, self._state(op, *self._saved(op, shape)))
                attends = SavedAttention(state, apart=not offloads)
            handler = None if attends is None else attends.forward
            graph, y = self._layers.save_graph(layer, weights, x if offloads else x.clone(), inputs, handler)
        # Of a graph that is cut the log-sum-exp is its own.
        nbytes = self.last_graph_bytes = graph.nbytes + (0 if attends is None else attends.state.lse.nbytes)
        waiting: LayerGraph | None = graph
        if offloads:
            nbytes = 0
            also = [] if attends is None else [attends.state.out, attends.state.lse]
            if not graph.offload(self._graph_slot(op), also):
                waiting = None
                self.outgrown[op.block, op.index] = self.last_graph_bytes
                for target, source in zip(self._recompute_inputs(op), (x, *self._outputs(op)), strict=True):
                    target.copy_(source)
        self._graphs[layer, op.index] = _Waiting(waiting, attends, nbytes)
        self.graphs_bytes += nbytes
        self.graphs_peak_bytes = max(self.graphs_peak_bytes, self.graphs_bytes)
        return y

    def _graph_slot(self, op: Op) -> Tensor:
        """The bytes of the op's slot for a graph that are stored and loaded."""
        block = self._plan.blocks[self._views.block_index(op.block)]
        nbytes = offloaded_graph_bytes(block, _tokens(self._views.chunk(op)))
        return self._gpu.slots[r.GPU_GRAPH_SLOT][op.slots[a.GRAPH]][:nbytes]

    def _recompute_inputs(self, op: Op) -> list[Tensor]:
        """What a graph larger than its slot is recomputed from, there: the input, attention's output, log-sum-exp."""
        result, start = [], 0
        x = self._views.hidden(0, self._views.chunk(op))
        for like in (x, *self._outputs(op, 0)):
            end = start + like.numel() * like.dtype.itemsize
            result.append(self._graph_slot(op)[start:end].view(like.dtype).view(like.shape))
            start = -(-end // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        return result

    def _outputs(self, op: Op, slot: int | None = None) -> tuple[Tensor, ...]:
        """Attention's output and log-sum-exp in the op's slot for them, or in `slot`; nothing of a layer without."""
        shape = self._shapes[self._layer(op)[0]]
        return () if shape is None else self._saved(op, shape, slot)

    def _release(self, op: Op) -> _Waiting:
        waiting = self._graphs.pop((self._layer(op)[0], op.index))
        self.graphs_bytes -= waiting.nbytes
        return waiting

    @handles(a.LAYER_RECOMPUTE)
    def _recompute(self, op: Op) -> None:
        """Keys and values into the window, attention's output and log-sum-exp, of a layer that saved its input only."""
        operands = self._operands(op)
        layer, projection = operands[0], self._layers.project(*operands)
        state = self._state(op, *self._saved(op, self._shape(layer)))
        with torch.no_grad():
            attention.forward_handler(self._layers.in_blocks(layer, state))(*projection)

    @handles(a.LAYER_BACKWARD)
    def _backward(self, op: Op) -> None:
        views, layer = self._views, self._views.layer(op)
        gradients, dy, shape = views.gradients(op), self._given_gradient(op), self._shapes[layer]
        self._watch_routers(op)
        if a.SAVED_GRAPH in op.flags:
            dx = self._backward_saved(op, dy, gradients)
        else:
            state = None if shape is None else self._state(op, *self._saved(op, shape))
            if views.runner.spec.state_of(layer) is None:
                _, weights, x, inputs = self._operands(op)
                dx = self._layers.backward(
                    layer, weights, x, dy, inputs, state, gradients, dsent=views.dsent(op, a.DSENT)
                )
            else:
                dx = self._backward_segments(op, dy, state, gradients)
        gradients.settle()
        self._hand_down(op, dx)

    def _backward_segments(
        self, op: Op, dy: Tensor, state: AttentionState | None, gradients: dict[str, Tensor]
    ) -> Tensor:
        """The same document by document; the gradient of the state before the chunk goes to the chunk before."""
        views, (layer, chunk) = self._views, self._layer(op)
        handed = views.recurrent_gradient(layer)
        dx, dbefore = self._layers.backward_segments(
            layer,
            views.weights(op),
            views.hidden(op.slots[a.X], chunk),
            dy,
            views.segments(op, chunk),
            self._layers.segment_handlers(layer, state),
            self._before(op),
            handed if views.continued(op, chunk) else (),
            gradients,
            dsent=views.dsent(op, a.DSENT),
        )
        for target, source in zip(handed, dbefore, strict=False):  # nothing, where no document goes on from there
            target.copy_(source)
        return dx

    def _given_gradient(self, op: Op) -> Tensor:
        """The gradient of a layer's output, of which what was added of images is saved for the vision tower."""
        layer, chunk = self._layer(op)
        dy = self._views.hidden(op.slots[a.DY], chunk)
        if (images := self._views.images(op)) is not None:
            images.take(layer + 1, dy)
        return dy

    def _hand_down(self, op: Op, dx: Tensor) -> None:
        """The gradient of a layer's input to its slot, unless nothing below is trained."""
        if a.OUT in op.slots:
            self._views.hidden(op.slots[a.OUT], self._views.chunk(op)).copy_(dx)

    def _backward_saved(self, op: Op, dy: Tensor, gradients: dict[str, Tensor]) -> Tensor:
        """Backward through a saved graph that is not cut."""
        waiting, layer, weights = self._release(op), self._layer(op)[0], self._views.weights(op)
        graph, attends = waiting.graph, waiting.attends
        if graph is None:
            x, *outputs = self._recompute_inputs(op)
            inputs = self._views.layer_inputs(op, self._views.chunk(op))
            state = self._state(op, *outputs) if outputs else None
            return self._layers.backward(layer, weights, x, dy, inputs, state, gradients)
        result = graph.restore(self._graph_slot(op)) if a.GRAPH in op.slots else []
        if attends is not None:
            out, lse = result or (attends.state.out, attends.state.lse)
            attends.state = self._layers.in_blocks(layer, self._state(op, out, lse))
        graph.top(weights, dy, gradients)
        return graph.dx()

    # ------------------------------------------------------------------ attention in pieces

    @handles(a.LAYER_PROJECT, a.LAYER_PUBLISH)
    def _project(self, op: Op) -> None:
        """Streamed: queries, keys and values of a chunk into their slots, as far as they are asked for."""
        layer, weights, x, inputs = self._operands(op)
        p, shape = self._layers.project(layer, weights, x, inputs), self._shape(layer)
        if op.action is a.LAYER_PROJECT:
            self._queries(op, shape).copy_(p.q)
        if a.KV in op.slots:
            for slot, part in zip(self._slot("kv", op, shape), (p.k, p.v), strict=True):
                slot.copy_(part)
        self._projection = p._replace(q=x[:0], k=x[:0], v=x[:0])

    @handles(a.ATTEND)
    def _attend(self, op: Op) -> None:
        """Streamed: attention of a chunk over one chunk of keys, merged into that over the ones before."""
        layer, chunk = self._layer(op)
        shape = self._shape(layer)
        assert self._projection is not None
        call, tokens = self._projection.call, _tokens(chunk)
        out, lse = attention.attend(self._over_keys(op, call))
        total = self._typed("partial", torch.float32, tokens, shape.heads, shape.v_dim)
        total_lse = self._typed("partial_lse", torch.float32, shape.heads, tokens)
        if a.FIRST in op.flags:
            total.copy_(out)
            total_lse.copy_(lse)
        else:
            attention.merge_(total, total_lse, out, lse)
        if a.LAST in op.flags:
            out, lse = attention.finish(total, total_lse, call.sinks)
            saved_out, saved_lse = self._saved(op, shape)
            saved_out.copy_(out)
            saved_lse.copy_(lse)

    @handles(a.LAYER_BACKWARD_TOP)
    def _backward_top(self, op: Op) -> None:
        """Streamed: backward of what follows attention; queries and the gradient of its output to their slots."""
        views, (layer, chunk) = self._views, self._layer(op)
        weights, gradients, shape = views.weights(op), views.gradients(op), self._shape(layer)
        self._watch_routers(op)
        if a.SAVED_GRAPH in op.flags:
            waiting = self._graphs[layer, op.index].graph
            assert waiting is not None
            graph = waiting
        else:
            graph = self._layers.graph(*self._operands(op), self._saved(op, shape)[0], save_graph=False)
        dout = graph.top(weights, self._given_gradient(op), gradients, views.dsent(op, a.DSENT))
        gradients.settle()
        assert dout is not None
        assert graph.projection is not None
        self._queries(op, shape).copy_(graph.projection.q)
        self._typed("dout", self._dtype, _tokens(chunk), shape.heads, shape.v_dim).copy_(dout)
        self._graph = graph
        if self._plan.problem.sharded:
            self._hand_down(op, graph.dx_past())

    @handles(a.ATTEND_BACKWARD)
    def _attend_backward(self, op: Op) -> None:
        """Streamed: what a chunk's queries and one chunk of keys owe to each other."""
        layer, chunk = self._layer(op)
        shape, tokens = self._shape(layer), _tokens(chunk)
        assert self._graph is not None
        assert self._graph.projection is not None
        dq = self._typed("partial", torch.float32, tokens, shape.heads, shape.qk_dim)
        dk, dv = self._slot("dkv", op, shape)
        if a.FIRST in op.flags:
            dq.zero_()
        if a.ZERO_DKV in op.flags:
            dk.zero_()
            dv.zero_()
        call = self._graph.projection.call
        attention.attend_backward(self._over_keys(op, call), self._given(op, shape), dq, dk, dv)
        if a.DQ in op.slots and a.LAST in op.flags:
            target, dsinks = self._dq(op, shape)
            target.copy_(dq)
            if (found := attention.sink_gradient(self._given(op, shape), call)) is not None:
                dsinks.copy_(found)
            self._graph = None

    def _dq(self, op: Op, shape: AttentionShape) -> list[Tensor]:
        """The gradients of a chunk's queries [tokens, heads, qk_dim] and of the sinks [heads], in their slot."""
        raw, tokens = self._gpu.slots[r.GPU_DQ][op.slots[a.DQ]], _tokens(self._views.chunk(op))
        dsinks, dq = laid_out(raw, (torch.float32, (shape.heads,)), (self._dtype, (tokens, shape.heads, shape.qk_dim)))
        return [dq, dsinks]

    def _over_keys(self, op: Op, call: AttentionCall) -> Operands:
        """Streamed: the running chunk's queries over one chunk of keys."""
        layer, chunk = self._layer(op)
        keys = self._views.keys(op)
        # What the layer's tokens may see: its documents, or the blocks that it cuts them into.
        documents = self._layers.documents(layer, self._views.documents(op, chunk), self._plan.window_tokens)
        shape = self._shape(layer)
        k, v = self._slot("kv", op, shape)
        both_ways = self._views.both_ways(op)
        return Operands(self._queries(op, shape), k, v, call, chunk.start, keys.start, documents, both_ways)

    def _given(self, op: Op, shape: AttentionShape) -> Gradients:
        """Streamed: the gradient of attention's output, which is in its slot or in the chunk's saved graph."""
        tokens = _tokens(self._views.chunk(op))
        dout = self._typed("dout", self._dtype, tokens, shape.heads, shape.v_dim)
        if a.SAVED in op.slots:
            return Gradients(dout, *self._saved(op, shape))
        assert self._graph is not None
        assert self._graph.out is not None
        assert self._graph.lse is not None
        return Gradients(dout, self._graph.out.detach(), self._graph.lse)

    @handles(a.LAYER_BACKWARD_BOTTOM)
    def _backward_bottom(self, op: Op) -> None:
        """Streamed: backward of a layer's projections, from the summed gradients of queries, keys and values."""
        views, (layer, chunk) = self._views, self._layer(op)
        shape, graph = self._shape(layer), self._graph
        if a.DQ in op.slots:
            self._backward_projection(op, shape)
            return
        assert graph is not None
        assert graph.projection is not None
        dq = self._typed("partial", torch.float32, _tokens(chunk), shape.heads, shape.qk_dim)
        call = graph.projection.call
        dsinks = None if call.sinks is None else attention.sink_gradient(self._given(op, shape), call)
        given = [g.to(self._dtype) for g in (dq, *self._slot("dkv", op, shape))]
        dx = graph.bottom(views.weights(op), given, views.gradients(op), dsinks)
        self._graph = None
        if a.SAVED_GRAPH in op.flags:
            self._release(op)
        self._hand_down(op, dx)

    def _backward_projection(self, op: Op, shape: AttentionShape) -> None:
        """The same long after the rest of the layer's backward, which has handed down its part."""
        past = self._views.hidden(op.slots[a.OUT], self._views.chunk(op)) if a.OUT in op.slots else None
        graph, (dq, of_sinks) = self._layers.projected(*self._operands(op), past), self._dq(op, shape)
        assert graph.projection is not None
        given = [dq, *(gradient.to(self._dtype) for gradient in self._slot("dkv", op, shape))]
        sinks = graph.projection.call.sinks
        dsinks = None if sinks is None else of_sinks.to(sinks.dtype)
        self._hand_down(op, graph.bottom(self._views.weights(op), given, self._views.gradients(op), dsinks))

    # ------------------------------------------------------------------ links

    def _both_ends(self, op: Op) -> Iterator[tuple[Tensor, Tensor]]:
        """(on the compute device, where it is offloaded to) of what a copy is about; keys and values are two. The op's
        bytes say how many tokens: a copy may outlive what is known of its batch."""
        kind, offloaded = op.action.kind, self._views.offloaded(op)
        if kind == "kv":
            shape = self._shape(self._views.layer(op))
            per_token = shape.kv_heads * (shape.qk_dim + shape.v_dim) * self._dtype.itemsize
            tokens, chunk = op.nbytes // per_token, self._plan.chunks[op.index]
            start = chunk.start
            if self._plan.streamed:
                here = keys_and_values(self._gpu.window["kv"][op.slots[a.SLOT]], tokens, shape, self._dtype)
            else:
                here = [window[start : start + tokens] for window in self._window("kv", shape, chunk.micro_batch)]
            yield from zip(here, keys_and_values(offloaded, tokens, shape, self._dtype), strict=True)
        else:
            slots = self._gpu.slots.get(ACTIVATIONS[kind].gpu) or self._gpu.window[kind]
            yield slots[op.slots[a.SLOT]][: op.nbytes], offloaded

    @handles(*a.LOAD.values(), *a.STORE.values())
    def _copy(self, op: Op) -> None:
        for here, there in self._both_ends(op):
            target, source = (here, there) if op.lane == "h2d" else (there, here)
            self._views.ram.copy(target, source)


class BranchOps:
    """Parts of layers that are blocks of their own."""

    def __init__(self, views: Views) -> None:
        self._views, self._branches = views, views.runner.branches

    @handles(*a.BRANCH_FORWARD.values(), *a.BRANCH_EVALUATE.values(), *a.BRANCH_GENERATE.values())
    def _forward(self, op: Op) -> None:
        """What the layer made of a chunk, with its branch's output added."""
        views, chunk = self._views, self._views.chunk(op)
        x, sent = views.hidden(op.slots[a.X], chunk), views.sent(op.slots[a.SENT], chunk)
        y = self._branches.forward(views.layer(op), views.weights(op), x, sent, group=views.group(op))
        views.hidden(op.slots[a.OUT], chunk).copy_(y)

    @handles(*a.BRANCH_BACKWARD.values())
    def _backward(self, op: Op) -> None:
        views, chunk = self._views, self._views.chunk(op)
        sent, dy = views.sent(op.slots[a.SENT], chunk), views.hidden(op.slots[a.DY], chunk)
        gradients, dsent = views.gradients(op), views.dsent(op, a.DSENT)
        group = views.group(op)
        result = self._branches.backward(
            views.layer(op), views.weights(op), sent, dy, gradients, group=group, dsent=dsent
        )
        gradients.settle()
        if a.OUT in op.slots:  # else nothing below is trained
            views.hidden(op.slots[a.OUT], chunk).copy_(dy)
            targets = views.dsent(op, a.DSENT_OUT)
            for target, gradient in zip(targets, result, strict=True):
                target.copy_(gradient)


def _tokens(chunk: Chunk) -> int:
    return chunk.end - chunk.start
