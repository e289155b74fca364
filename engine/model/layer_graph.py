"""The autograd graph of one decoder layer on one chunk; it can outlive the weights' slot.

It is cut at the layer's attention, where that is computed elsewhere, or whole. What a whole graph holds can leave for a
flat slot and be looked up in another one when backward comes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from penstock.engine.attention.chunk import AttentionCall
from penstock.engine.model.sums import GradientSums, Product


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
    part of a saved graph: it can outlive the slot that they were in, and reads them from wherever `top` and
    `bottom` get them.
    """

    x: Tensor | GradientEdge
    """Leaf [1, n, hidden], or where its gradient arrives."""
    y: Tensor | GradientEdge
    """Output [n, hidden], or where its gradient begins."""
    names: Sequence[str]
    """State-dict names of the layer's trained parameters."""
    parameters: Sequence[Tensor]
    before: Sequence[Tensor] = ()
    """Further leaves: the recurrent state that the chunk began with."""
    sent: Sequence[Tensor] = ()
    """Further outputs: what a router sent to experts that are a block of their own, the state behind the chunk."""
    products: Sequence[Product] = ()
    """What the gradients of other trained parameters are products of, named as in a state dict."""
    projection: Projection | None = None
    """With its graph down to x; None where the graph is not cut."""
    out: Tensor | None = None
    """Attention's output, a leaf [n, heads, v_dim], where the graph is cut."""
    lse: Tensor | None = None
    """Its log-sum-exp [heads, n], where the graph is cut and saved."""
    _weights: SavedTensors | None = None
    """Where the graph is saved."""
    _project: Callable[[Mapping[str, Tensor]], tuple[Projection, Sequence[Product]]] | None = None
    """Makes the projection again, with a graph of its own down to x, and the products in it."""
    _dx: Tensor | None = None
    dbefore: Sequence[Tensor] = ()
    """Gradients of `before`, after `top`, of a graph that is not cut."""

    def top(
        self,
        weights: Mapping[str, Tensor],
        dy: Tensor,
        grads: Mapping[str, Tensor],
        dsent: Sequence[Tensor] = (),
    ) -> Tensor | None:
        """Backward of what follows attention, for dy [n, hidden] and the gradients of `sent`; the gradient of
        attention's output."""
        if self.projection is not None and _nodes([self._tensor(self.y), *self.sent]) & _nodes(self.projection[:3]):
            # What leads to attention leads past it too: this backward frees it, so the other needs a graph of its own.
            assert self._project is not None
            with torch.enable_grad():
                self.projection, again = self._project(weights)
        else:
            again = self.products
        wanted = self._wanted() if self.out is None else [*self._wanted(), self.out]
        given = [gradient.to(sent.dtype).view(sent.shape) for gradient, sent in zip(dsent, self.sent, strict=True)]
        result = self._backward([self.y, *self.sent], [dy, *given], wanted, weights)
        self._dx, *rest = result[: len(self._wanted())]
        found = zip(self.before, rest, strict=False)
        self.dbefore = [torch.zeros_like(leaf) if gradient is None else gradient for leaf, gradient in found]
        self._add(rest[len(self.before) :], grads)
        self.products = again
        return None if self.out is None else result[-1]

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
        result = self._backward(outputs, gradients, self._wanted(), weights)
        self._add(result[1:], grads)
        through = result[0]
        assert through is not None
        return through[0] if self._dx is None else through.add_(self._dx)[0]

    @property
    def output(self) -> Tensor:
        """The output [n, hidden] of a graph that holds it."""
        return self._tensor(self.y).detach()

    @property
    def nbytes(self) -> int:
        """Memory of a saved graph, each storage once, and of its log-sum-exp."""
        assert self._weights is not None
        held = [self.x, self.y, *(self.projection or ())[:3], self.out, self.lse]
        storages = self._weights.storages() | {
            t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held if isinstance(t, Tensor)
        }
        return sum(storages.values())

    def offload(self, slot: Tensor, also: Sequence[Tensor]) -> bool:
        """Copy all that the graph holds, and `also`, to `slot`, uint8, and release it; whether it fits there."""
        assert self._weights is not None
        return self._weights.offload(slot, also)

    def restore(self, slot: Tensor) -> list[Tensor]:
        """Backward finds in `slot` what was copied by `offload`; the tensors that were given to it, there."""
        assert self._weights is not None
        return self._weights.restore(slot)

    @staticmethod
    def _tensor(end: Tensor | GradientEdge) -> Tensor:
        assert isinstance(end, Tensor)
        return end

    def dx_past(self) -> Tensor:
        """dx [n, hidden] as far as it does not come through attention, after `top`, of a graph that is cut."""
        assert isinstance(self.x, Tensor)
        return torch.zeros_like(self.x[0]) if self._dx is None else self._dx[0]

    def dx(self) -> Tensor:
        """dx [n, hidden], after `top`, of a graph that is not cut."""
        assert self._dx is not None
        return self._dx[0]

    def _backward(
        self,
        outputs: Sequence[Tensor | GradientEdge],
        gradients: Sequence[Tensor],
        wanted: Sequence[Tensor | GradientEdge],
        weights: Mapping[str, Tensor],
    ) -> Sequence[Tensor | None]:
        if self._weights is not None:
            self._weights.now = weights
        result: Sequence[Tensor | None] = torch.autograd.grad(outputs, wanted, gradients, allow_unused=True)  # type: ignore[arg-type]
        return result

    def _wanted(self) -> list[Tensor | GradientEdge]:
        """What backward is to find the gradients of: inputs, parameters, factors of products."""
        factors = [factor for product in self.products for factor in (product.into, product.onto)]
        return [self.x, *self.before, *self.parameters, *factors]

    def _add(self, result: Sequence[Tensor | None], grads: Mapping[str, Tensor]) -> None:
        sums = grads if isinstance(grads, GradientSums) else GradientSums(grads)
        for name, grad in zip(self.names, result, strict=False):
            if grad is not None:
                sums.add(name, grad)
        factors = iter(result[len(self.names) :])
        for product, x, dy in zip(self.products, factors, factors, strict=True):
            if x is not None and dy is not None:
                sums.add_product(product.weights, dy, x)
                sums.add_rows(product.biases, dy)


def _nodes(tensors: Sequence[Tensor]) -> set[Any]:
    """The autograd nodes that backward from `tensors` passes, leaves excluded."""
    result: set[Any] = set()
    left = [t.grad_fn for t in tensors if t.grad_fn is not None]
    while left:
        node = left.pop()
        if node in result or not node.next_functions:
            continue
        result.add(node)
        left += [following for following, _ in node.next_functions if following is not None]
    return result


class _WeightView(NamedTuple):
    """A view into a flat buffer of a layer's weights, wherever that is."""

    name: str
    """A parameter in that buffer."""
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    """Elements from that parameter's first one."""


@dataclass(slots=True, eq=False)
class _Held:
    """A tensor that a graph holds: itself, or where in a slot it is."""

    tensor: Tensor | None
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    at: int = 0
    """First byte in the slot."""

    @property
    def nbytes(self) -> int:
        """Bytes from the first element to behind the last one."""
        if 0 in self.size:
            return 0
        return (1 + sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))) * self.dtype.itemsize


@dataclass(slots=True)
class SavedTensors:
    """Saved-tensor hooks that keep views of the weights as views, and what else there is until it leaves."""

    now: Mapping[str, Tensor]
    """Views of all parameters: one flat buffer holds those that are trained, another the frozen ones."""
    names: dict[int, str] = field(init=False)
    """Storage of a flat buffer (by its handle, which tensors without data have too) -> a parameter in it."""
    _held: list[_Held] = field(default_factory=list)
    _also: list[_Held] = field(default_factory=list)
    _slot: Tensor | None = None
    """Where that is which has left, in backward."""

    def __post_init__(self) -> None:
        self.names = {tensor.untyped_storage()._cdata: name for name, tensor in self.now.items()}

    def pack(self, tensor: Tensor) -> _Held | _WeightView:
        if (name := self.names.get(tensor.untyped_storage()._cdata)) is not None:
            offset = tensor.storage_offset() - self.now[name].storage_offset()
            return _WeightView(name, tensor.size(), tensor.stride(), offset)
        # With its place in the graph it would hold the graph, which holds these hooks, which hold it.
        return self._hold(tensor.detach())

    def _hold(self, tensor: Tensor) -> _Held:
        self._held.append(held := _Held(tensor, tensor.dtype, tensor.size(), tensor.stride()))
        return held

    def unpack(self, packed: _Held | _WeightView) -> Tensor:
        if isinstance(packed, _WeightView):
            near = self.now[packed.name]
            return near.as_strided(packed.size, packed.stride, near.storage_offset() + packed.offset)
        if packed.tensor is not None:
            return packed.tensor
        assert self._slot is not None
        flat = self._slot[packed.at : packed.at + packed.nbytes].view(packed.dtype)
        return flat.as_strided(packed.size, packed.stride, flat.storage_offset())

    def storages(self) -> dict[int, int]:
        """Storage -> bytes, of all that the graph holds."""
        result = (held.tensor.untyped_storage() for held in self._held if held.tensor is not None)
        return {storage._cdata: storage.nbytes() for storage in result}

    def offload(self, slot: Tensor, also: Sequence[Tensor]) -> bool:
        """See LayerGraph. Of each storage the bytes between the first and the last that are used are copied, once."""
        self._also = [self._hold(tensor) for tensor in also]
        ranges: dict[int, list[int]] = {}
        offloaded = [held for held in self._held if held.tensor is not None and held.tensor.device == slot.device]
        for held in offloaded:
            start, storage = _start(held), held.tensor.untyped_storage()._cdata  # type: ignore[union-attr]
            known = ranges.setdefault(storage, [start, start])
            known[:] = min(known[0], start), max(known[1], start + held.nbytes)
        offsets, end = {}, 0
        for storage, (first, behind) in ranges.items():
            offsets[storage] = end
            end += -(-(behind - first) // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        if end > slot.numel():
            return False
        copied: set[int] = set()
        for held in offloaded:
            assert held.tensor is not None
            storage = held.tensor.untyped_storage()
            (first, behind), offset = ranges[storage._cdata], offsets[storage._cdata]
            held.at = offset + _start(held) - first
            if storage._cdata not in copied:
                copied.add(storage._cdata)
                source = torch.empty(0, dtype=torch.uint8, device=slot.device).set_(storage)
                slot[offset : offset + behind - first].copy_(source[first:behind])
        for held in offloaded:
            held.tensor = None
        return True

    def restore(self, slot: Tensor) -> list[Tensor]:
        self._slot = slot
        return [self.unpack(held) for held in self._also]


SLOT_ALIGNMENT = 256
"""What leaves starts at a multiple of so many bytes of its slot, as CUDA's allocations do."""


def _start(held: _Held) -> int:
    """First byte of a held tensor in its storage."""
    assert held.tensor is not None
    return int(held.tensor.storage_offset()) * held.dtype.itemsize
