"""Whether the state of a run can be trusted: no value that ends training, and losses that stay where they were."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from penstock.engine.runtime.failures import DivergedError

LARGEST = math.sqrt(torch.finfo(torch.float32).max)
"""Of a master weight, 1.8e19: the square of a larger one is infinite in float32, and so is every norm that it is in."""
_DECAY = 0.95
"""Of the running mean of losses, per step."""


def require_usable(kind: str, block: str, step: int, values: Tensor) -> None:
    """Raise DivergedError unless `values` [n] of a kind of state on the CPU, updated by `step`, can be trained on.

    One pass over them. Moments may be any finite number, master weights at most LARGEST.
    """
    least, most = (float(value) for value in torch.aminmax(values))
    largest = LARGEST if kind == "master" else math.inf
    if math.isfinite(least) and math.isfinite(most) and max(-least, most) <= largest:
        return
    what = f"is as large as {max(-least, most):.1e}" if math.isfinite(least + most) else "is not finite"
    raise DivergedError(f"step {step}: {kind} of block {block} {what} after its update, so it is not committed")


class LossWatch:
    """Says of a loss whether the weights that it was computed with have proved good: it is near the running mean."""

    def __init__(self, multiple: float | None, mean: float | None) -> None:
        """`multiple` of the running mean that a loss may reach, None: any; `mean` so far, if any."""
        self._multiple = multiple or math.inf
        self.mean = mean
        """Running mean of the losses (nats), exponential; each counts as `multiple` times the mean at most."""

    def is_good(self, loss: float) -> bool:
        """Take the loss of a step; whether it is finite and at most `multiple` times the mean of those before it."""
        if not math.isfinite(loss):
            return False
        limit = self._multiple * self.mean if self.mean else math.inf  # 0: of steps that had nothing to train
        self.mean = loss if not self.mean else _DECAY * self.mean + (1 - _DECAY) * min(loss, limit)
        return loss <= limit
