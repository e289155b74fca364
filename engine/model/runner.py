"""Running the blocks of a model on one chunk, forward and backward, with weights that live elsewhere: layers by
model/layers.py, what surrounds them by the model's own forward (model/skeleton.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.engine.model import loss as loss_terms
from penstock.engine.model import skeleton
from penstock.engine.model.branches import BranchRunner
from penstock.engine.model.layers import LayerInputs, LayerRunner
from penstock.engine.model.recurrence import Segment, document_ranges
from penstock.engine.model.reward import is_reward
from penstock.engine.model.router import RouterBalance, find_router
from penstock.engine.model.skeleton import LayerCall, Skeleton, Tensors
from penstock.engine.model.spec import ModelSpec, rotary_threshold
from penstock.engine.model.tokens import ChunkTokens
from penstock.engine.model.tower import TowerRunner


class Evaluated(NamedTuple):
    """What the head finds of t targets, on the compute device."""

    scores: Tensor
    """float64 [1 + statistics, t]: the log-probability of each, nats, or a reward model's value; and its statistics, in
    the order in which they were asked for."""
    right: Tensor
    """bool [t]: whether it is the likeliest token; False of a reward model."""


class ModelRunner:
    """Computes the blocks of `spec` on `device` in `dtype`, chunk by chunk, on one thread; results are deterministic.

    `weights` hold, by state-dict name, all parameters of the block's buffers in `dtype`, as views of flat buffers;
    `grads` float32 views of those that are trained, into which gradients are added. A template goes on pointing at the
    last weights that it was given; else neither is kept.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        compile: bool = False,
        constants: Tensors | None = None,
        router_aux_loss: float = 0.0,
    ) -> None:
        """`constants`: values of `spec.constants`; the model's initial ones where not given. `router_aux_loss`: weight
        of a load-balancing loss, which the model must define (model/router.py)."""
        self.spec = spec
        self.device = torch.device(device)
        self.dtype = dtype
        self.compiled = compile
        model = skeleton.build(spec.config, adapter=spec.adapter)
        prefix, layers = skeleton.find_layers(model)
        skeleton.materialise_buffers(model, model.named_modules(), self.device)
        for name, tensor in (constants or {}).items():
            model.get_buffer(name).data = tensor.to(self.device)
        balance = None
        if router_aux_loss:
            router = find_router(model)
            routing = sum(any(isinstance(part, router.module) for part in layer.modules()) for layer in layers)
            balance = RouterBalance(router, router_aux_loss, routing, self.device)
        self.layers = LayerRunner(
            spec, layers, prefix, device=self.device, dtype=dtype, compile=compile, balance=balance
        )
        self.branches = BranchRunner(spec, layers, prefix, device=self.device, dtype=dtype)
        self._skeleton = Skeleton(
            model, device=self.device, dtype=dtype, returns=spec.returns, counting=spec.counts_positions
        )
        self.tower = None if spec.vision is None else TowerRunner(spec.config, self.device, dtype)
        self._frozen = spec.frozen_params
        self._gives_rewards = is_reward(spec.config)
        self._cross_entropy = self._make_loss()
        self._logits_cost: loss_terms.LogitsCost | None = None

    def compile(self, compiled: bool) -> None:
        self.compiled = compiled
        self.layers.compile(compiled)
        self._cross_entropy = self._make_loss()

    def _make_loss(self) -> loss_terms.CrossEntropy | loss_terms.NegatedValue:
        return loss_terms.NegatedValue() if self._gives_rewards else loss_terms.CrossEntropy(compile=self.compiled)

    def inputs(self, positions: Tensor, longest: Tensor | int | None) -> LayerInputs:
        """Arguments of every layer for tokens at `positions` (int64 [n], from the start of their document, or [n, 4] as
        Images has them). `longest`: for each token the last position of its whole document (int64 [n], in host memory),
        or one for all, by which rotary tables are made that depend on a document's length."""
        positions = positions.to(self.device)
        with torch.no_grad():
            if not self.spec.length_dependent_rotary:
                return LayerInputs(tuple(self._skeleton.calls(positions)))
            assert longest is not None
            # Up to the threshold all have the same tables.
            longest = torch.as_tensor(longest).clamp(min=rotary_threshold(self.spec.config) - 1)
            first, *others = longest.unique().tolist()
            calls = self._calls_of(positions, first)
            for last in others:
                calls = _merged(calls, self._calls_of(positions, last), (longest == last).to(self.device))
        return LayerInputs(calls)

    def segments(
        self, positions: Tensor, longest: Tensor | None, start: int, documents: Sequence[int]
    ) -> list[Segment]:
        """The tokens of a chunk that begins at `start` of a stream, document by document, with the arguments of every
        layer for each; `positions` and `longest` [n] as for `inputs`, `documents`: the stream's."""
        result = []
        for first, end, continues in document_ranges(start, start + len(positions), documents):
            segment = Segment(first, end, continues, ())
            own, last = segment.of(positions), None if longest is None else segment.of(longest)
            if segment.lengthened:
                own = own + torch.arange(2, device=own.device).view(2, *(1,) * (own.dim() - 1))
            result.append(replace(segment, calls=self.inputs(own, last).calls))
        return result

    def _calls_of(self, positions: Tensor, last: int) -> tuple[LayerCall, ...]:
        """Arguments of every layer for tokens [n] of a document that ends at position `last`."""
        count = positions.shape[0]
        # A position beyond, of a longer document, would count as the length.
        calls = self._skeleton.calls(torch.cat([positions.clamp(max=last), positions.new_full((1,), last)]))
        shared: dict[int, Tensor] = {}

        def cut(tensor: Tensor) -> Tensor:
            if id(tensor) not in shared:
                axis = next((i for i, size in enumerate(tensor.shape) if size == count + 1), None)
                shared[id(tensor)] = tensor if axis is None else tensor.narrow(axis, 0, count)
            return shared[id(tensor)]

        return tuple(LayerCall(*pytree.tree_map_only(Tensor, cut, (call.args, call.kwargs))) for call in calls)

    def table(self, length: int) -> list[bytes]:
        """Equal for two lengths of a document exactly when its rotary tables are."""
        calls = self.inputs(torch.ones(1, dtype=torch.int64), length - 1).calls
        leaves = {id(leaf): leaf for leaf in pytree.tree_leaves([(call.args, call.kwargs) for call in calls])}
        return [leaf.cpu().float().numpy().tobytes() for leaf in leaves.values() if isinstance(leaf, Tensor)]

    def embed(self, weights: Tensors, ids: Tensor, positions: Tensor) -> Tensor:
        """First layer's input [n, hidden] of token ids at positions (int64 [n])."""
        with torch.no_grad(), self._skeleton.bound(weights):
            return self._skeleton.embed(ids.to(self.device), positions.to(self.device))

    def embed_backward(self, weights: Tensors, tokens: ChunkTokens, dx: Tensor, grads: Tensors) -> None:
        """Add the embedding's gradient for dx [n, hidden], the gradient of `embed`'s result for these tokens; the
        table's is computed for the chunk's distinct ids only."""
        with (
            self._skeleton.compact_vocabulary(weights, tokens.distinct) as (compact, tables, padding),
            self._skeleton.bound(compact, self._frozen) as bound,
        ):
            if not (wanted := _trained(bound)):
                return  # only what is below is trained
            with torch.enable_grad():
                x = self._skeleton.embed(tokens.row_of, tokens.positions)
            computed = torch.autograd.grad(x, list(wanted.values()), dx, allow_unused=True)
        for name, grad in zip(wanted, computed, strict=True):
            if grad is None:
                continue
            axis = tables.get(name)
            if axis is not None:
                if padding is not None:
                    grad.masked_fill_((tokens.distinct == padding).unsqueeze(1 - axis), 0)
                grads[name].index_add_(axis, tokens.distinct, grad.to(grads[name].dtype))
            else:
                grads[name].add_(grad)

    def head(
        self,
        weights: Tensors,
        x: Tensor,
        tokens: ChunkTokens,
        loss_scale: float,
        grads: Tensors,
        logits_bytes: int,
        *,
        z_loss: float = 0.0,
        temperature: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """Loss and gradients of the last layer's output x [n, hidden] against the labels of those tokens that have one.

        Returns the sum over labels of weight x cross entropy (float64, 0-dim, not scaled) and dx [n, hidden], the
        gradient of loss_scale x that sum and its z_loss (model/loss.py); adds to `grads`. Logits, divided by
        `temperature`, exist for as many tokens at once as fit `logits_bytes`, at least one. Of a reward model the cross
        entropy is minus its value.
        """
        dx = torch.zeros_like(x)
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        with self._skeleton.bound(weights, self._frozen) as bound:
            cost, trained = self._find_logits_cost(bound), _trained(bound)
            step, work_bytes = loss_terms.rows_at_once(logits_bytes, cost), logits_bytes // loss_terms.WORK_SHARE
            for part, labels, shares in _pieces(tokens, step):
                part_x = x.index_select(0, part).requires_grad_()
                with torch.enable_grad():
                    logits = self._skeleton.logits(part_x)
                # `data`, as autograd would see a write to `detach()` and rebuild the way back with a copy of it.
                dlogits = logits.data if cost.in_place else logits.data.clone()
                if temperature != 1:
                    dlogits.div_(temperature)
                scale = loss_scale / temperature
                loss += self._cross_entropy(dlogits, labels, shares, scale, work_bytes, z_loss)
                wanted = [part_x, *trained.values()]
                part_dx, *computed = torch.autograd.grad(logits, wanted, dlogits, allow_unused=True)
                del logits, dlogits
                dx.index_copy_(0, part, part_dx)
                for name, grad in zip(trained, computed, strict=True):
                    if grad is not None:
                        grads[name].add_(grad)
                del computed
        return loss, dx

    def evaluate(
        self,
        weights: Tensors,
        x: Tensor,
        tokens: ChunkTokens,
        logits_bytes: int,
        temperature: float = 1.0,
        statistics: Sequence[str] = (),
    ) -> Evaluated:
        """What there is to find of the targets, by logits / temperature; `statistics`: which of those in
        objectives/statistics.py. They cost another pass over rows in float32, and no memory."""
        shape = 1 + len(statistics), len(tokens.labels)
        scores = torch.zeros(shape, dtype=torch.float64, device=tokens.labels.device)
        right = torch.zeros_like(tokens.labels, dtype=torch.bool)
        with torch.no_grad(), self._skeleton.bound(weights, self._frozen) as bound:
            step = loss_terms.rows_at_once(logits_bytes, self._find_logits_cost(bound))
            done = 0
            for part, labels, _ in _pieces(tokens, step):
                logits = self._skeleton.logits(x.index_select(0, part))
                here = slice(done, done := done + len(labels))
                if self._gives_rewards:
                    scores[0, here] = logits[:, 0]
                    continue
                torch.eq(logits.argmax(dim=-1), labels, out=right[here])
                if temperature != 1:
                    logits.div_(temperature)
                work_bytes = logits_bytes // loss_terms.WORK_SHARE
                scores[:, here] = loss_terms.log_probabilities_(logits, labels, work_bytes, statistics)
                del logits
        return Evaluated(scores, right)

    def logits(self, weights: Tensors, x: Tensor) -> Tensor:
        """Logits [n, vocab] of the last layer's output x [n, hidden]."""
        with torch.no_grad(), self._skeleton.bound(weights):
            return self._skeleton.logits(x)

    def _find_logits_cost(self, bound: Tensors) -> loss_terms.LogitsCost:
        if self._logits_cost is None:
            x = torch.zeros(2, self.spec.hidden_size, dtype=self.dtype, device=self.device).requires_grad_()
            with torch.enable_grad():
                self._logits_cost = loss_terms.LogitsCost.of(lambda: self._skeleton.logits(x), bound.values())
        return self._logits_cost


def _merged(calls: Sequence[LayerCall], others: Sequence[LayerCall], mask: Tensor) -> tuple[LayerCall, ...]:
    """`calls`, and of the tokens in `mask` (bool [n]) `others`."""
    shared: dict[tuple[int, int], Tensor] = {}

    def merge(one: Any, other: Any) -> Any:
        if not isinstance(one, Tensor):
            return one
        axis = next((i for i, size in enumerate(one.shape) if size == len(mask)), None)
        if axis is None:
            return one
        if (id(one), id(other)) not in shared:
            view = mask.view([-1 if i == axis else 1 for i in range(one.dim())])
            shared[id(one), id(other)] = torch.where(view, other, one)
        return shared[id(one), id(other)]

    pairs = zip(calls, others, strict=True)
    return tuple(LayerCall(*pytree.tree_map(merge, (a.args, a.kwargs), (b.args, b.kwargs))) for a, b in pairs)


def _trained(bound: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in bound.items() if parameter.requires_grad}


def _pieces(tokens: ChunkTokens, most: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Rows, labels and weights of the tokens that have a target, at most so many at once; nothing if none has one."""
    if tokens.rows.numel():
        result = (loss_terms.even_pieces(tensor, most) for tensor in (tokens.rows, tokens.labels, tokens.weights))
        yield from zip(*result, strict=True)
