"""What backward's recomputation of a layer can leave out.

Backward runs a layer's forward again for the sake of its graph; the layer's output itself is read by nobody. In most
architectures a layer ends with `residual + projection(...)`: the projection's product is then wasted, a sixteenth of
all the work of a layer whose MLP is three times as wide as the hidden state. Whether that holds is found by trying.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.engine.model.adapters import BASE, adapted_module, is_adapter
from penstock.engine.model.joined import inputs_of
from penstock.engine.model.sums import SummedTwin


def unread_linear(layer: nn.Module, run: Callable[[nn.Module], Tensor], x: Tensor) -> str | None:
    """The layer's last linear module if no gradient depends on what it returns, else None; where that is an adapter's,
    the base's that it stands beside. `run(layer)` is the layer's output for x, a leaf that requires grad."""
    linears = [name for name, module in layer.named_modules() if type(module) is nn.Linear]
    order = [name for name, _ in inputs_of(layer, linears, run)]
    last = _of_base(order[-1]) if order else ""
    if order.count(last) != 1:
        return None
    # Copied before any run under grad: a layer may keep what it computed last, which then could not be copied.
    twin = SummedTwin(layer, {}, last).module

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
