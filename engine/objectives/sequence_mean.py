"""The mean over a step's sequences of each one's mean loss: short ones count as much as long ones."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.engine.objectives.sequences import Sequences


def coefficients(result: Sequences) -> Tensor:
    """w_t / (sum of w over t's sequence) / (sequences of the step)."""
    _, which, counts = torch.unique_consecutive(result.sequence, return_inverse=True, return_counts=True)
    totals = torch.segment_reduce(result.weights, "sum", lengths=counts)
    return result.weights / totals[which] / result.num_sequences
