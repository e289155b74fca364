"""What backward's recomputation of a layer can leave out.

Backward runs a layer's forward again for the sake of its graph; the layer's output itself is read by nobody. In most
architectures a layer ends with `residual + projection(...)`: the projection's product is then wasted, a sixteenth of
all the work of a layer whose MLP is three times as wide as the hidden state. Whether that holds is found by trying.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.engine.model.adapters import BASE, adapted_module, is_adapter


class _GradientsOfLinear(torch.autograd.Function):
    """y = x W^T + b with y left at zero, and the gradients of the real thing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return x.new_zeros((*x.shape[:-1], weight.shape[0]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        x, weight = ctx.saved_tensors
        rows = dy.reshape(-1, dy.shape[-1])
        dweight = rows.t() @ x.reshape(-1, x.shape[-1]) if ctx.needs_input_grad[1] else None
        dbias = rows.sum(dim=0) if ctx.needs_input_grad[2] else None
        return dy @ weight, dweight, dbias


class GradientOnlyLinear(nn.Module):
    """Shares the parameters of an nn.Linear; its output is zero, its gradients are right."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> zeros [..., out_features]."""
        y: Tensor = _GradientsOfLinear.apply(x, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return y


def sharing_copy(layer: nn.Module) -> nn.Module:
    """A copy of `layer` with the same parameters and buffers."""
    shared = [*layer.parameters(), *layer.buffers()]
    return copy.deepcopy(layer, {id(tensor): tensor for tensor in shared})


def for_backward(layer: nn.Module, name: str) -> nn.Module:
    """A copy of `layer` with the same parameters and buffers, whose linear module `name` is not computed forward."""
    twin = sharing_copy(layer)
    linear = twin.get_submodule(name)
    assert isinstance(linear, nn.Linear)
    twin.set_submodule(name, GradientOnlyLinear(linear))
    return twin


def unread_linear(layer: nn.Module, run: Callable[[nn.Module], Tensor], x: Tensor) -> str | None:
    """The layer's last linear module if no gradient depends on what it returns, else None.

    Where that one belongs to an adapter, it is the module of the base that the adapter stands beside. `run(layer)` is
    the layer's output for x, a leaf that requires grad.
    """
    order: list[str] = []
    hooks = [
        module.register_forward_hook(lambda *_, name=name: order.append(name))
        for name, module in layer.named_modules()
        if type(module) is nn.Linear
    ]
    with torch.no_grad():
        run(layer)
    for hook in hooks:
        hook.remove()
    last = _of_base(order[-1]) if order else ""
    if order.count(last) != 1:
        return None
    # Copied before any run under grad: a layer may keep what it computed last, which then could not be copied.
    twin = for_backward(layer, last)

    def gradients(module: nn.Module) -> list[Tensor]:
        y, wanted = run(module), [x, *module.parameters()]
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(0))
        grads = torch.autograd.grad(y, wanted, dy, allow_unused=True)
        return [torch.zeros_like(w) if g is None else g for w, g in zip(wanted, grads, strict=True)]

    expected, computed = gradients(layer), gradients(twin)
    same = all(
        functional.mse_loss(a, b).sqrt() <= 1e-5 * b.square().mean().sqrt()
        for a, b in zip(computed, expected, strict=True)
    )
    return last if same else None


def _of_base(linear: str) -> str:
    """The module of the base where the linear module `linear` is an adapter's."""
    return f"{adapted_module(linear)}.{BASE}" if is_adapter(linear) else linear
