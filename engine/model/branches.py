"""Parts of layers as blocks of their own (engine/branches): the stand-in for one in its layer, and what computes it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.model import skeleton
from penstock.engine.model.skeleton import Tensors
from penstock.engine.model.spec import ModelSpec
from penstock.engine.model.sums import GradientSums


class Outbox:
    """Where the copies of a layer leave what they have handed to their branch; a copy of it is itself."""

    def __init__(self) -> None:
        self.sent: tuple[Tensor, ...] = ()

    def __deepcopy__(self, memo: Any) -> Outbox:
        return self

    def take(self) -> tuple[Tensor, ...]:
        sent, self.sent = self.sent, ()
        return sent


class Sender(nn.Module):
    """Stands for a branch in its layer."""

    def __init__(self, outbox: Outbox) -> None:
        super().__init__()
        self.outbox = outbox

    def forward(self, *sent: Tensor) -> Tensor:
        self.outbox.sent = sent
        return torch.zeros_like(sent[0])


class BranchRunner:
    """The branches of layers; see ModelRunner for `weights` and `grads`. Tensors that are sent are [n, width]."""

    def __init__(
        self, spec: ModelSpec, layers: nn.ModuleList, prefix: str, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        """`layers`: those of the model, on the meta device; `prefix`: their name in it."""
        self._spec, self._dtype = spec, dtype
        self._prefixes = [f"{prefix}.{index}.{name}." for index, name in enumerate(spec.branches)]
        self._templates: dict[int, nn.Module] = {}
        for index in sorted({spec.structures[i] for i, name in enumerate(spec.branches) if name is not None}):
            module = copy.deepcopy(layers[index].get_submodule(str(spec.branches[index])))
            skeleton.empty(module, self._prefixes[index], spec, device, dtype)
            self._templates[index] = module

    def forward(self, index: int, weights: Tensors, x: Tensor, sent: Sequence[Tensor]) -> Tensor:
        """x [n, hidden], what layer `index` makes without its branch, with the branch's output added."""
        with torch.no_grad():
            result: Tensor = self._bound(index, weights)(*self._typed(sent))
            return result.add_(x)

    def backward(
        self, index: int, weights: Tensors, sent: Sequence[Tensor], dy: Tensor, grads: Tensors
    ) -> list[Tensor]:
        """Gradients of what was `sent`, of those that have any, for dy [n, hidden]; adds the parameters' to `grads`."""
        module, sums = self._bound(index, weights), grads if isinstance(grads, GradientSums) else GradientSums(grads)
        given = [tensor.detach() for tensor in self._typed(sent)]
        wanted = [tensor.requires_grad_() for tensor in self.with_gradient(given)]
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        with torch.enable_grad():
            y = module(*given)
        result = torch.autograd.grad(y, [*wanted, *trained.values()], dy)
        for name, gradient in zip(trained, result[len(wanted) :], strict=True):
            sums.add(self._prefixes[index] + name, gradient)
        return list(result[: len(wanted)])

    def with_gradient(self, sent: Sequence[Tensor]) -> list[Tensor]:
        """Those of what is sent that have a gradient."""
        return [tensor for tensor, each in zip(sent, self._spec.sent, strict=True) if each.has_gradient]

    def _typed(self, sent: Sequence[Tensor]) -> list[Tensor]:
        """As layers send it, whatever it travelled as."""
        given = zip(sent, self._spec.sent, strict=True)
        return [t.view(-1, e.width).to(self._dtype if e.has_gradient else torch.int64) for t, e in given]

    def _bound(self, index: int, weights: Tensors) -> nn.Module:
        module = self._templates[self._spec.structures[index]]
        for name, parameter in module.named_parameters():
            parameter.data = weights[self._prefixes[index] + name]
        return module
