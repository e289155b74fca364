"""Running decoder layers on one chunk, forward and backward, with weights that live elsewhere.

Layers of one structure share one template, an unmodified transformers layer whose parameters are pointed at views of a
flat buffer. A layer runs from end to end (`forward`, `backward`), or in pieces around its attention (`project`,
`forward_given`, `graph`); a graph can be saved for its backward (`save_graph`, `graph`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from penstock.engine.attention import chunk as attention
from penstock.engine.attention.chunk import AttentionCall, AttentionState, Handler
from penstock.engine.model import skeleton
from penstock.engine.model.branches import Outbox, Sender
from penstock.engine.model.joined import JoinedTwin
from penstock.engine.model.layer_graph import LayerGraph, Projection, SavedTensors
from penstock.engine.model.recurrence import Segment, SegmentHandlers, States
from penstock.engine.model.router import RouterBalance
from penstock.engine.model.skeleton import LayerCall, Tensors, hidden_states
from penstock.engine.model.spec import ModelSpec
from penstock.engine.model.sums import Product, SummedTwin


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Arguments of every layer for one chunk, beside the hidden state (rotary tables, positions)."""

    calls: tuple[LayerCall, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the tensors take, each storage once."""
        leaves = pytree.tree_leaves([(call.args, call.kwargs) for call in self.calls])
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in leaves if isinstance(t, Tensor)
        }
        return sum(storages.values())


class _Entry(torch.autograd.Function):
    """x, with a graph that ends where its gradient arrives and does not hold it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:
        """`anchor` requires grad, so that what is computed of x has a graph."""
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


Ranges = Sequence[tuple[int, int]]
"""First and end of some ranges of tokens."""
Compiled = bool | Callable[..., Any]
"""Whether layers run through torch.compile, or by which backend of its own."""


class _Projected(BaseException):
    """Leaves a layer at its attention call, with the projection as its argument."""


def holding_little(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """A module that torch.compile runs, whose graph does not hold what elementwise operations make of the rest: by
    itself the partitioner does where a product of backward reads it, 136 KB a token of a layer of 8B instead of 99."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with functorch_config.patch(ban_recompute_materialized_backward=False):
            return compiled(*args, **kwargs)

    return run


class _Template:
    """One layer module that computes any layer of the structure of layer `index`."""

    def __init__(
        self, layer: nn.Module, spec: ModelSpec, index: int, prefix: str, device: torch.device, dtype: torch.dtype
    ) -> None:
        """`prefix` begins the names of the layer's parameters."""
        joined, unread, frozen = spec.joined[index], spec.unread[index], spec.frozen_params
        skeleton.empty(layer, prefix, spec, device, dtype)
        self.parameters = dict(layer.named_parameters())
        self.trained = {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}
        self._placeholders = {name: parameter.data for name, parameter in self.parameters.items()}
        self.buffers = dict(layer.named_buffers())
        self.plain, self._joined = layer, JoinedTwin(layer, joined)
        in_one = {name for members in joined for name in members}
        alone = [n for n in spec.summed[index] if f"{n}.weight" in self.trained and f"{prefix}{n}.bias" not in frozen]
        names = {name: (name,) for name in alone if name not in in_one} | self._joined.members
        whole = self._joined.module
        self.saving = SummedTwin(whole, names, None)
        """Its forward with a graph to save, and what backward recomputes."""
        self.recomputed = SummedTwin(whole, names, unread)
        self.modules = (whole, self.saving.module, self.recomputed.module)
        self._recurrent = spec.state_of(index) is not None
        self._indices: dict[int, list[tuple[nn.Module, str, Any]]] = {}

    def compile(self, compiled: Compiled) -> None:
        """Run through torch.compile from now on, or eagerly: forward, forward with a graph to save, and recompute. What
        runs document by document is never compiled: each length would be a graph of its own."""
        run: list[Callable[..., Any]] = [*self.modules]
        if compiled and not self._recurrent:
            # One graph per chunk length: a general-size graph would also slow down the usual length.
            backend = "inductor" if compiled is True else compiled
            run = [torch.compile(module, dynamic=False, backend=backend) for module in self.modules]
            run[1] = holding_little(run[1])
        self.forward, self.save_graph, self.recompute = run

    def adopt(self, index: int, layer: nn.Module) -> None:
        """Know of itself what `layer`, the model's layer `index`, knows of its place in the model."""
        if index not in self._indices:
            ours = {self.plain, *self.modules}
            self._indices[index] = [result for module in ours for result in skeleton.layer_index(module, layer)]
        for part, key, value in self._indices[index]:
            if vars(part)[key] != value:
                setattr(part, key, value)

    def unbind(self) -> None:
        for name, parameter in self.parameters.items():
            parameter.data = self._placeholders[name]
        self._joined.unbind()

    def bind(self, weights: Tensors, prefix: str) -> None:
        for name, parameter in self.parameters.items():
            parameter.data = weights[prefix + name]
        self._joined.bind(lambda name: weights[prefix + name])


class LayerRunner:
    """The layers of `spec` on `device` in `dtype`; see ModelRunner for what `weights` and `grads` are."""

    def __init__(
        self,
        spec: ModelSpec,
        layers: nn.ModuleList,
        prefix: str,
        *,
        device: torch.device,
        dtype: torch.dtype,
        compile: Compiled,
        balance: RouterBalance | None = None,
    ) -> None:
        """`layers`: those of a model on the meta device with its buffers on `device`, `prefix` their name in it."""
        self._spec, self._layers, self._device, self._dtype = spec, layers, device, dtype
        self._prefixes = [f"{prefix}.{index}." for index in range(len(layers))]
        self._outbox = Outbox()
        self._buffers = [dict(layer.named_buffers()) for layer in layers]
        self._templates = {
            i: _Template(self._without_branch(layers[i], i), spec, i, self._prefixes[i], device, dtype)
            for i in sorted(set(spec.structures))
        }
        self.compile(compile)
        self.sent: tuple[Tensor, ...] = ()
        """What the layer that was run last handed to its branch."""
        self.balance = balance
        if balance is not None:
            for template in self._templates.values():
                for module in set(template.modules):
                    balance.listen(module)

    def _without_branch(self, layer: nn.Module, index: int) -> nn.Module:
        """A copy of the layer, with a stand-in for a part that is a block of its own."""
        layer, branches = copy.deepcopy(layer), self._spec.branches
        if branches and branches[index] is not None:
            layer.set_submodule(str(branches[index]), Sender(self._outbox))
        return layer

    def compile(self, compiled: Compiled) -> None:
        for template in self._templates.values():
            template.compile(compiled)

    def unbind(self) -> None:
        """Let go of the weights that were given last, whose memory may then be freed."""
        for template in self._templates.values():
            template.unbind()

    # ------------------------------------------------------------------ from end to end

    def states(
        self, index: int, documents: Sequence[int], ranges: Ranges, both_ways: Ranges = ()
    ) -> list[AttentionState] | list[None]:
        """Attention of layer `index` for the chunks `ranges` of one stream: windows shared, in memory of their own."""
        shape, total = self._spec.attention[index], ranges[-1][1]
        if shape is None:
            return [None] * len(ranges)
        sums = attention.work_dtype(self._dtype)

        def zeros(*size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=self._device)

        k, dk = (zeros(total, shape.kv_heads, shape.qk_dim, dtype=dtype) for dtype in (self._dtype, sums))
        v, dv = (zeros(total, shape.kv_heads, shape.v_dim, dtype=dtype) for dtype in (self._dtype, sums))
        result = []
        for start, end in ranges:
            out = zeros(end - start, shape.heads, shape.v_dim, dtype=self._dtype)
            lse = zeros(shape.heads, end - start, dtype=sums)
            result.append(AttentionState(k, v, out, lse, start, end, documents, dk, dv, both_ways))
        return result

    def forward(
        self,
        index: int,
        weights: Tensors,
        x: Tensor,
        inputs: LayerInputs,
        state: AttentionState | None,
        *,
        keys: Ranges | None = None,
    ) -> Tensor:
        """Output [n, hidden] of layer `index` for x [n, hidden]; fills `state` (None for a layer without attention).
        `keys`: attention goes over these ranges of the stream one at a time; None: over all keys at once."""
        with torch.no_grad():
            call = inputs.calls[index]
            if state is None:
                return self._run(index, weights, x[None], call, None)
            state = self.in_blocks(index, state)
            if keys is None:
                return self._run(index, weights, x[None], call, attention.forward_handler(state))
            p = self.project(index, weights, x, inputs)
            state.write(p.k, p.v)
            attention.forward_in_pieces(state, p.q, p.call, keys)
            return self.forward_given(index, weights, x, inputs, state.out)

    def forward_by(
        self, index: int, weights: Tensors, x: Tensor, inputs: LayerInputs, handler: Handler | None
    ) -> Tensor:
        """Output [n, hidden] of layer `index` for x [n, hidden], with attention by `handler` (None: it has none). Never
        compiled: each n would be a graph of its own."""
        with torch.no_grad():
            return self._run(index, weights, x[None], inputs.calls[index], handler, self._template(index).plain)

    def backward(
        self,
        index: int,
        weights: Tensors,
        x: Tensor,
        dy: Tensor,
        inputs: LayerInputs,
        state: AttentionState | None,
        grads: Tensors,
        *,
        keys: Ranges | None = None,
        dsent: Sequence[Tensor] = (),
    ) -> Tensor:
        """Gradient [n, hidden] of layer `index`'s input for dy [n, hidden]; adds to `grads`. The layer is recomputed
        from its input x around the attention output in `state`; chunks of a stream come in reverse order. `keys`: as in
        `forward`. `dsent`: the gradients of what it handed to its branch."""
        if state is None or keys is None:
            handler = None if state is None else attention.backward_handler(self.in_blocks(index, state))
            graph = self._graph(index, weights, x, inputs.calls[index], handler, save_graph=False)
            graph.top(weights, dy, grads, dsent)
            return graph.dx()
        graph = self.graph(index, weights, x, inputs, state.out, save_graph=False)
        dout = graph.top(weights, dy, grads, dsent)
        assert dout is not None
        assert graph.projection is not None
        q, call = graph.projection.q.detach(), graph.projection.call
        *given, dsinks = attention.backward_in_pieces(self.in_blocks(index, state), dout, q, call, keys)
        return graph.bottom(weights, given, grads, dsinks)

    # ------------------------------------------------------------------ document by document

    def segment_handlers(self, index: int, state: AttentionState | None) -> SegmentHandlers:
        """Attention of the parts of a chunk with `state` (None: the layer has none)."""

        def handler(segment: Segment, backward: bool) -> Handler | None:
            if state is None:
                return None
            own = self.in_blocks(index, segment.attends(state))
            return attention.backward_handler(own) if backward else attention.forward_handler(own)

        return handler

    def forward_segments(
        self,
        index: int,
        weights: Tensors,
        x: Tensor,
        segments: Sequence[Segment],
        handlers: SegmentHandlers,
        before: States | None,
    ) -> tuple[Tensor, list[Tensor]]:
        """As `forward`, of a layer with a recurrent state: its output [n, hidden] for x [n, hidden], which begins with
        the state `before`, and the state behind it. `before` is read where a document began before x."""
        recurrent = self._spec.states[index]
        assert recurrent is not None
        parts: list[Tensor] = []
        sent: list[tuple[Tensor, ...]] = []
        behind = [] if before is None else [*before]
        filled = self._filled
        with torch.no_grad():
            for segment in segments:
                self._watch(segment, filled)
                call, cache = segment.call(index, recurrent, behind)
                handler = segment.handler(handlers(segment, False))
                parts.append(segment.own(self._run(index, weights, segment.of(x)[None], call, handler)))
                sent.append(tuple(segment.own(tensor.view(-1, tensor.shape[-1])) for tensor in self.sent))
                behind = cache.states(recurrent)
        self.sent = tuple(torch.cat(tensors) for tensors in zip(*sent, strict=True))
        return torch.cat(parts), behind

    def backward_segments(
        self,
        index: int,
        weights: Tensors,
        x: Tensor,
        dy: Tensor,
        segments: Sequence[Segment],
        handlers: SegmentHandlers,
        before: States | None,
        dbehind: States,
        grads: Tensors,
        *,
        dsent: Sequence[Tensor] = (),
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """As `backward`: the gradients of x and of the state `before`; `dbehind`: of the state behind x. Either is
        empty where no document goes on from chunk to chunk there."""
        recurrent = self._spec.states[index]
        assert recurrent is not None
        parts: list[Tensor] = []
        dbefore: Sequence[Tensor] = ()
        filled = self._filled
        for segment in reversed(segments):
            self._watch(segment, filled)
            leaves = [tensor.detach().requires_grad_() for tensor in before or ()] if segment.continues else []
            call, cache = segment.call(index, recurrent, leaves)
            handler = segment.handler(handlers(segment, True))
            graph = self._graph(index, weights, segment.of(x), call, handler, save_graph=False)
            graph.before, given = leaves, [segment.gradient_of(gradient) for gradient in dsent]
            if dbehind and segment is segments[-1]:
                graph.sent, given = [*graph.sent, *cache.states(recurrent)], [*given, *dbehind]
            graph.top(weights, segment.gradient_of(dy), grads, given)
            parts.append(segment.own(graph.dx()))
            dbefore = graph.dbefore
        return torch.cat(parts[::-1]), dbefore

    @property
    def _filled(self) -> int:
        """Tokens of the chunk that is run next that are no padding, where the routers' balance is trained."""
        return 0 if self.balance is None else self.balance.num_rows

    def _watch(self, segment: Segment, filled: int) -> None:
        """A part of a chunk with so many `filled` tokens is run next."""
        if self.balance is not None:
            self.balance.part(filled, segment.start, segment.end)

    # ------------------------------------------------------------------ documents

    def documents(self, index: int, documents: Sequence[int], tokens: int) -> Sequence[int]:
        """Starts of the documents of a stream of `tokens`, or of the blocks that layer `index` cuts them into."""
        shape = self._spec.attention[index]
        if shape is None or shape.chunk is None:
            return documents
        return attention.split_documents(documents, tokens, shape.chunk)

    def in_blocks(self, index: int, state: AttentionState) -> AttentionState:
        """`state` with `documents` for layer `index`."""
        documents = self.documents(index, state.documents, state.k.shape[0])
        return state if documents is state.documents else replace(state, documents=documents)

    # ------------------------------------------------------------------ in pieces

    def project(self, index: int, weights: Tensors, x: Tensor, inputs: LayerInputs) -> Projection:
        """What layer `index` asks of attention for x [n, hidden]; nothing after that is computed."""
        with torch.no_grad():
            return self._project(index, weights, x[None], inputs.calls[index])

    def _project(
        self, index: int, weights: Tensors, x: Tensor, call: LayerCall, run: Callable[..., Any] | None = None
    ) -> Projection:
        def leave(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
            raise _Projected(Projection(q, k, v, call))

        try:
            self._run(index, weights, x, call, leave, run)
        except _Projected as found:
            projection: Projection = found.args[0]
            return projection
        raise AssertionError(f"layer {index} does not attend")

    def forward_given(self, index: int, weights: Tensors, x: Tensor, inputs: LayerInputs, out: Tensor) -> Tensor:
        """Output [n, hidden] of layer `index` for x [n, hidden] and the output of its attention."""
        with torch.no_grad():
            return self._run(index, weights, x[None], inputs.calls[index], lambda q, k, v, call: out)

    def graph(
        self, index: int, weights: Tensors, x: Tensor, inputs: LayerInputs, out: Tensor, *, save_graph: bool
    ) -> LayerGraph:
        """Run layer `index` on x [n, hidden] with a graph cut at attention, whose output is `out`; with `save_graph`
        one that outlasts the slots of weights, x and `out`, else for backward at once, without what nobody reads."""
        seen: list[Projection] = []
        out = (out.clone() if save_graph else out.detach()).requires_grad_()

        def handle(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
            seen.append(Projection(q, k, v, call))
            return out

        graph = self._graph(index, weights, x, inputs.calls[index], handle, save_graph=save_graph)
        graph.projection, graph.out = seen[0], out
        leaf = graph.x  # not the graph: what refers to itself lives until garbage is collected
        assert isinstance(leaf, Tensor)

        def project(weights: Tensors) -> tuple[Projection, Sequence[Product]]:
            template = self._template(index)
            products, _, _ = self._summed(index, template.recomputed, leaf[0])
            return self._project(index, weights, leaf, inputs.calls[index], template.recompute), products

        graph._project = project
        return graph

    def projected(
        self, index: int, weights: Tensors, x: Tensor, inputs: LayerInputs, dx_past: Tensor | None
    ) -> LayerGraph:
        """What layer `index` asks of attention for x [n, hidden], with a graph for `bottom` alone, which adds `dx_past`
        to what it finds."""
        template = self._template(index)
        products, names, parameters = self._summed(index, template.recomputed, x)
        x = x[None].detach().requires_grad_()
        with torch.enable_grad():
            projection = self._project(index, weights, x, inputs.calls[index], template.recompute)
        graph = LayerGraph(
            x=x, y=projection.q, names=names, parameters=parameters, products=products, projection=projection
        )
        graph._dx = None if dx_past is None else dx_past[None]
        return graph

    def save_graph(
        self, index: int, weights: Tensors, x: Tensor, inputs: LayerInputs, handler: Handler | None
    ) -> tuple[LayerGraph, Tensor]:
        """Run layer `index` on x [n, hidden] with a graph to keep, with attention by `handler` (None: none) in it: the
        graph, which holds what backward wants of x and of `handler`'s output as it is, and the output [n, hidden]."""
        template, hooks = self._template(index), SavedTensors(weights)
        products, names, parameters = self._summed(index, template.saving, x)
        with torch.enable_grad():
            entered: Tensor = _Entry.apply(x[None], torch.zeros((), device=x.device, requires_grad=True))  # type: ignore[no-untyped-call]
            with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
                y = self._run(index, weights, entered, inputs.calls[index], handler, template.save_graph)
        graph = LayerGraph(
            x=get_gradient_edge(entered),
            y=get_gradient_edge(y),
            names=names,
            parameters=parameters,
            products=products,
            _weights=hooks,
        )
        return graph, y.detach()

    def _graph(
        self, index: int, weights: Tensors, x: Tensor, call: LayerCall, handler: Handler | None, *, save_graph: bool
    ) -> LayerGraph:
        template = self._template(index)
        products, names, parameters = self._summed(index, template.saving if save_graph else template.recomputed, x)
        x = (x[None].clone() if save_graph else x[None].detach()).requires_grad_()
        hooks = SavedTensors(weights)
        with torch.enable_grad():
            if save_graph:
                with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
                    y = self._run(index, weights, x, call, handler, template.save_graph)
            else:
                y = self._run(index, weights, x, call, handler, template.recompute)
        return LayerGraph(
            x=x,
            y=y,
            sent=[t for t, each in zip(self.sent, self._spec.sent, strict=False) if each.has_gradient],
            names=names,
            parameters=parameters,
            products=products,
            _weights=hooks if save_graph else None,
        )

    # ------------------------------------------------------------------ templates

    def _summed(self, index: int, twin: SummedTwin, x: Tensor) -> tuple[list[Product], list[str], list[nn.Parameter]]:
        """What a run of `twin` on x [n, hidden] has of products, by state-dict names, and the other parameters that are
        trained, with their names."""
        prefix, template = self._prefixes[index], self._template(index)
        result = twin.products(x[None])
        covered = {name for product in result for name in (*product.weights, *product.biases)}
        rest = {name: parameter for name, parameter in template.trained.items() if name not in covered}
        products = [
            product._replace(
                weights=tuple(prefix + name for name in product.weights),
                biases=tuple(prefix + name for name in product.biases),
            )
            for product in result
        ]
        return products, [prefix + name for name in rest], list(rest.values())

    def _template(self, index: int) -> _Template:
        return self._templates[self._spec.structures[index]]

    def _run(
        self,
        index: int,
        weights: Tensors,
        x: Tensor,
        call: LayerCall,
        handler: Handler | None,
        run: Callable[..., Any] | None = None,
    ) -> Tensor:
        """The layer's output [n, hidden] for x [1, n, hidden], by `run`, one of its template's ways; None: forward."""
        template = self._template(index)
        template.bind(weights, self._prefixes[index])
        for name, buffer in template.buffers.items():
            buffer.data = self._buffers[index][name]
        template.adopt(index, self._layers[index])
        run = template.forward if run is None else run
        if handler is None:
            output = run(x, *call.args, **call.kwargs)
        else:
            shape, attend = self._spec.attention[index], handler
            assert shape is not None, "attention of a layer without it"
            window = shape.window  # which a layer that leaves it to the mask does not pass on

            def in_window(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
                return attend(q, k, v, call if call.window else replace(call, window=window))

            with attention.use(in_window):
                output = run(x, *call.args, **call.kwargs)
        self.sent = self._outbox.take()
        y: Tensor = hidden_states(output)
        return y.squeeze(0)  # an index would copy the gradient on the way back
