"""A layer's experts as a block of their own.

In such a layer a stand-in takes the experts' place: it notes what the router sends them and returns zeros, so that the
layer's output is all but theirs. The block of experts adds theirs to it. That is exact where a layer adds its experts'
outputs to the rest without more ado; where it does not, the self-check finds other gradients than transformers.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Container, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.engine.model import skeleton
from penstock.engine.model.spec import ModelSpec
from penstock.engine.model.sums import GradientSums

_ARGUMENTS = 3
"""What transformers hands to a module of experts: hidden states, which experts and how much of each, in this order."""


class Routed(NamedTuple):
    """What a router sends to experts."""

    hidden: Tensor
    """[n, hidden]"""
    experts: Tensor
    """int64 [n, k]: which of them a token goes to."""
    shares: Tensor
    """[n, k]: how much of each one's output it gets."""


def find_experts(layer: nn.Module) -> str | None:
    """The name in a layer of the module that holds its experts' weights, stacked; None where it has none."""
    for name, module in layer.named_modules():
        stacked = any(parameter.dim() == 3 for parameter in module.parameters(recurse=False))
        if stacked and len(inspect.signature(inspect.unwrap(type(module).forward)).parameters) == 1 + _ARGUMENTS:
            return str(name)
    return None


class Outbox:
    """Where the copies of a layer leave what their routers have sent; a copy of it is itself."""

    def __init__(self) -> None:
        self.sent: Routed | None = None

    def __deepcopy__(self, memo: Any) -> Outbox:
        return self

    def take(self) -> Routed | None:
        sent, self.sent = self.sent, None
        return sent


class Sender(nn.Module):
    """Stands for the experts in a layer."""

    def __init__(self, outbox: Outbox) -> None:
        super().__init__()
        self.outbox = outbox

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        self.outbox.sent = Routed(hidden_states, top_k_index, top_k_weights)
        return torch.zeros_like(hidden_states)


class ExpertRunner:
    """The experts of each layer that has them as a block of their own; see ModelRunner for `weights` and `grads`."""

    def __init__(
        self,
        spec: ModelSpec,
        layers: nn.ModuleList,
        prefix: str,
        stays: Container[str],
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """`layers`: those of the model, on the meta device; `prefix`: their name in it; `stays`: names of parameters
        that are never trained."""
        self._spec, self._dtype = spec, dtype
        self._prefixes = [f"{prefix}.{index}.{name}." for index, name in enumerate(spec.expert_modules)]
        self._templates: dict[int, nn.Module] = {}
        for index in sorted({spec.structures[i] for i, name in enumerate(spec.expert_modules) if name is not None}):
            module = copy.deepcopy(layers[index].get_submodule(str(spec.expert_modules[index])))
            for owner in module.modules():
                for key, parameter in owner._parameters.items():
                    if parameter is not None:
                        trained = f"{self._prefixes[index]}{key}" not in stays
                        owner._parameters[key] = skeleton.placeholder(parameter, device, dtype, trained=trained)
            self._templates[index] = module

    def forward(self, index: int, weights: Mapping[str, Tensor], x: Tensor, routed: Routed) -> Tensor:
        """x [n, hidden], what layer `index` makes without its experts, with their outputs added."""
        with torch.no_grad():
            result: Tensor = self._bound(index, weights)(*self._typed(routed))
            return result.add_(x)

    def backward(
        self, index: int, weights: Mapping[str, Tensor], routed: Routed, dy: Tensor, grads: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Gradients of `routed.hidden` and `routed.shares` for dy [n, hidden]; adds the parameters' to `grads`."""
        module, sums = self._bound(index, weights), grads if isinstance(grads, GradientSums) else GradientSums(grads)
        routed = self._typed(routed)
        hidden, shares = routed.hidden.detach().requires_grad_(), routed.shares.detach().requires_grad_()
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        with torch.enable_grad():
            y = module(hidden, routed.experts, shares)
        dhidden, dshares, *computed = torch.autograd.grad(y, [hidden, shares, *trained.values()], dy)
        for name, gradient in zip(trained, computed, strict=True):
            sums.add(self._prefixes[index] + name, gradient)
        return dhidden, dshares

    def _typed(self, routed: Routed) -> Routed:
        """As routers send it, whatever it was kept as."""
        return Routed(routed.hidden, routed.experts.long(), routed.shares.to(self._dtype))

    def _bound(self, index: int, weights: Mapping[str, Tensor]) -> nn.Module:
        module = self._templates[self._spec.structures[index]]
        for name, parameter in module.named_parameters():
            parameter.data = weights[self._prefixes[index] + name]
        return module
