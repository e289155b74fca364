"""The autograd graph of one decoder layer on one chunk, cut at its attention; it can outlive the weights' slot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.engine.attention.chunk import AttentionCall


class Projection(NamedTuple):
    """What a layer asks of attention: q [n, heads, qk_dim], k [n, kv_heads, qk_dim], v [n, kv_heads, v_dim]."""

    q: Tensor
    k: Tensor
    v: Tensor
    call: AttentionCall


@dataclass(slots=True)
class LayerGraph:
    """The autograd graph of one layer on one chunk, cut at attention: backward is `top`, attention, `bottom`.

    A graph that is not cut, since its attention is part of it or the layer has none, has `top` only. Weights are not
    part of a graph made to be kept: it can outlive the slot that they were in, and reads them from wherever `top` and
    `bottom` are told that they are.
    """

    x: Tensor
    """Leaf [1, n, hidden]."""
    y: Tensor
    names: Sequence[str]
    """State-dict names of the layer's trained parameters."""
    parameters: Sequence[Tensor]
    projection: Projection | None = None
    """With its graph down to x; None where the graph is not cut."""
    out: Tensor | None = None
    """Attention's output, a leaf [n, heads, v_dim], where the graph is cut."""
    lse: Tensor | None = None
    """Its log-sum-exp [heads, n], where the graph is cut and kept."""
    _weights: KeptWeights | None = None
    """Where the graph is kept."""
    _project: Callable[[Mapping[str, Tensor]], Projection] | None = None
    """Makes the projection again, with a graph of its own down to x."""
    _dx: Tensor | None = None

    def top(self, weights: Mapping[str, Tensor], dy: Tensor, grads: Mapping[str, Tensor]) -> Tensor | None:
        """Backward of what follows attention, for dy [n, hidden]; the gradient of attention's output."""
        if self.projection is not None and _nodes([self.y]) & _nodes(self.projection[:3]):
            # What leads to attention leads past it too: this backward frees it, so the other needs a graph of its own.
            assert self._project is not None
            with torch.enable_grad():
                self.projection = self._project(weights)
        wanted = [self.x, *self.parameters] if self.out is None else [self.x, *self.parameters, self.out]
        found = self._backward([self.y], [dy], wanted, weights)
        self._dx = found[0]
        self._add(found[1 : 1 + len(self.parameters)], grads)
        return None if self.out is None else found[-1]

    def bottom(
        self, weights: Mapping[str, Tensor], given: Sequence[Tensor], grads: Mapping[str, Tensor], dsinks: Tensor | None
    ) -> Tensor:
        """Backward of what leads to attention, for the gradients of q, k, v (and of the sinks); dx [n, hidden]."""
        assert self.projection is not None
        outputs, gradients = list(self.projection[:3]), list(given)
        sinks = self.projection.call.sinks
        if sinks is not None and sinks.requires_grad:
            assert dsinks is not None
            outputs.append(sinks)
            gradients.append(dsinks)
        found = self._backward(outputs, gradients, [self.x, *self.parameters], weights)
        self._add(found[1:], grads)
        through = found[0]
        assert through is not None
        return through[0] if self._dx is None else through.add_(self._dx)[0]

    @property
    def nbytes(self) -> int:
        """Memory of a kept graph, each storage once, and of its log-sum-exp."""
        assert self._weights is not None
        held = [self.x, self.y, *(self.projection or ())[:3], self.out, self.lse]
        storages = self._weights.storages | {
            t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held if t is not None
        }
        return sum(storages.values())

    def dx(self) -> Tensor:
        """dx [n, hidden], after `top`, of a graph that is not cut."""
        assert self._dx is not None
        return self._dx[0]

    def _backward(
        self,
        outputs: Sequence[Tensor],
        gradients: Sequence[Tensor],
        wanted: Sequence[Tensor],
        weights: Mapping[str, Tensor],
    ) -> Sequence[Tensor | None]:
        if self._weights is not None:
            self._weights.now = weights
        found: Sequence[Tensor | None] = torch.autograd.grad(outputs, wanted, gradients, allow_unused=True)
        return found

    def _add(self, found: Sequence[Tensor | None], grads: Mapping[str, Tensor]) -> None:
        for name, grad in zip(self.names, found, strict=True):
            if grad is not None:
                grads[name].add_(grad)


def _nodes(tensors: Sequence[Tensor]) -> set[Any]:
    """The autograd nodes that backward from `tensors` passes, leaves excluded."""
    found: set[Any] = set()
    left = [t.grad_fn for t in tensors if t.grad_fn is not None]
    while left:
        node = left.pop()
        if node in found or not node.next_functions:
            continue
        found.add(node)
        left += [following for following, _ in node.next_functions if following is not None]
    return found


class _WeightView(NamedTuple):
    """A view into a flat buffer of a layer's weights, wherever that is."""

    name: str
    """A parameter in that buffer."""
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    """Elements from that parameter's first one."""


@dataclass(slots=True)
class KeptWeights:
    """Saved-tensor hooks that keep views of the weights as views, and count the rest."""

    now: Mapping[str, Tensor]
    """Views of all parameters: one flat buffer holds those that are trained, another the frozen ones."""
    names: dict[int, str] = field(init=False)
    """Storage of a flat buffer -> a parameter in it."""
    storages: dict[int, int] = field(default_factory=dict)
    """Storage (by its handle, which tensors without data have too) -> bytes, of all that the graph holds."""

    def __post_init__(self) -> None:
        self.names = {tensor.untyped_storage()._cdata: name for name, tensor in self.now.items()}

    def pack(self, tensor: Tensor) -> Tensor | _WeightView:
        storage = tensor.untyped_storage()
        if (name := self.names.get(storage._cdata)) is not None:
            offset = tensor.storage_offset() - self.now[name].storage_offset()
            return _WeightView(name, tensor.size(), tensor.stride(), offset)
        self.storages[storage._cdata] = storage.nbytes()
        return tensor

    def unpack(self, packed: Tensor | _WeightView) -> Tensor:
        if isinstance(packed, _WeightView):
            near = self.now[packed.name]
            return near.as_strided(packed.size, packed.stride, near.storage_offset() + packed.offset)
        return packed
