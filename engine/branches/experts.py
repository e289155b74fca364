"""The experts of a mixture: their block comes after the router knows who is needed."""

from __future__ import annotations

import inspect

from torch import nn

from penstock.engine.branches.base import Sent


def find(layer: nn.Module) -> str | None:
    """The module that holds the experts' weights, stacked."""
    for name, module in layer.named_modules():
        stacked = any(parameter.dim() == 3 for parameter in module.parameters(recurse=False))
        if stacked and len(inspect.signature(inspect.unwrap(type(module).forward)).parameters) == 1 + len(sent(0, 0)):
            return str(name)
    return None


def sent(hidden_size: int, experts_per_token: int) -> list[Sent]:
    """Hidden states, to which experts, and how much of each."""
    return [Sent(hidden_size), Sent(experts_per_token, "int32"), Sent(experts_per_token, "float32")]
