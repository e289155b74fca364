"""peft's layers in a form that torch.compile takes: the same sums, without what ends a graph each time it is met."""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn


class PlainDora(DoraLinearLayer):
    """peft's own asks whether the matrix is a quantised one, and passes an identity as wide as x through A and B."""

    def forward(
        self,
        x: Tensor,
        *,
        lora_A: nn.Linear,
        lora_B: nn.Linear,
        scaling: float,
        base_layer: Any,
        base_result: Tensor | None = None,
        adapter_name: str = "default",
    ) -> Tensor:
        """What is added to the module's output `base_result` [..., out] for x [..., in]."""
        assert base_result is not None, "there is no dropout"
        with torch.no_grad():
            matrix = base_layer.weight.T if self.fan_in_fan_out else base_layer.weight
            norm = torch.linalg.norm(matrix + scaling * (lora_B.weight @ lora_A.weight), dim=1)
        scale = (self.weight / norm).view(1, -1)
        if base_layer.bias is not None:
            base_result = base_result - base_layer.bias
        added: Tensor = (scale - 1) * base_result + scale * lora_B(lora_A(x)) * scaling
        return added


class EagerParameter(ParamWrapper):
    """It gives the module whose parameter it adapts another class for as long as that runs, so that runs eagerly."""

    forward = torch.compiler.disable(ParamWrapper.forward)


_FORMS: dict[type[nn.Module], type[nn.Module]] = {DoraLinearLayer: PlainDora, ParamWrapper: EagerParameter}


def make_compilable(model: nn.Module) -> None:
    """Give peft's layers in `model` the forms of this file."""
    for module in model.modules():
        form = _FORMS.get(type(module))
        if form is not None:
            module.__class__ = form
