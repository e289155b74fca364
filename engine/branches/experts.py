"""The experts of a mixture: their block comes after the router knows who is needed."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor, nn

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


def chosen(sent: Sequence[Tensor]) -> Tensor:
    """Of what a layer sends, to which experts: [n, experts per token]."""
    return sent[1]


def shrink_to(module: nn.Module, count: int) -> None:
    """Make an experts' module one of so many of its experts, whose weights it is given."""
    module.num_experts = count  # type: ignore[assignment]  # what transformers' modules have for their number


def run_group(
    module: nn.Module, rows: tuple[int, int], hidden: Tensor, chosen: Tensor, shares: Tensor
) -> Tensor | None:
    """What the experts `rows` (first, end), those of `module`, make of the tokens that chose them: [n, width] for
    hidden states [n, width], int64 [n, k] of experts and their shares [n, k]; None where no token did.

    A choice at a time: the tokens of one are all different, so that what is added up has one order on any device.
    """
    mine = (chosen >= rows[0]) & (chosen < rows[1])
    choice, which = mine.T.nonzero(as_tuple=True)
    if not len(which):
        return None
    lengths = mine.sum(dim=0).tolist()
    tokens = which.split(lengths)
    inputs = torch.cat([hidden.index_select(0, own) for own in tokens])
    made = module(inputs, chosen[which, choice][:, None] - rows[0], shares[which, choice][:, None])
    result = torch.zeros_like(hidden)
    for own, part in zip(tokens, made.split(lengths), strict=True):
        result = result.index_add(0, own, part)
    return result
