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
_LEAST_STEPS = 20
"""Before which no loss is a spike: the mean is not known yet."""
_CHANGES = 5.0
"""Mean changes from one step to the next above the mean from which a loss is a spike; of normally distributed losses
5.6 sigma, whether or not they are falling."""
_LEAST_SHARE = 0.1
"""Of the mean that a spike lies above it at least: losses that hardly vary are no reason to look."""


def require_usable(kind: str, block: str, step: int, values: Tensor) -> None:
    """Raise DivergedError unless `values` [n] of a kind of state on the CPU, updated by `step`, can be trained on:
    moments finite, master weights at most LARGEST. One pass over them."""
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
        self._multiple = multiple
        self.mean = mean
        """Running mean of the losses (nats), exponential; each counts as `multiple` times the mean at most."""

    def is_good(self, loss: float) -> bool:
        """Take the loss of a step; whether it is finite and at most `multiple` times the mean of those before it."""
        if not math.isfinite(loss):
            return False
        limit = math.inf
        if self._multiple is not None and self.mean:  # 0: of steps that had nothing to train
            limit = self._multiple * self.mean
        self.mean = loss if not self.mean else _DECAY * self.mean + (1 - _DECAY) * min(loss, limit)
        return loss <= limit


class LossSpikes:
    """Says of a loss whether it leapt out of those before it, of losses that stay high only of the first; it hardly
    moves what is expected."""

    def __init__(self, record: object = None) -> None:
        """`record`: what `to_json` of a generation says; anything else begins anew."""
        self._mean, self._change, self._last, self._seen, self._is_high = 0.0, 0.0, 0.0, 0, False
        wanted = [float, float, float, int, bool]
        if not isinstance(record, list) or [type(value) for value in record] != wanted:
            return
        if all(math.isfinite(value) for value in record[:3]) and record[3] >= 0:
            self._mean, self._change, self._last, self._seen, self._is_high = record

    def to_json(self) -> list[float | int]:
        """Running means of the losses and of the size of their changes, and the last loss, nats; how many there were;
        whether the last was high."""
        return [self._mean, self._change, self._last, self._seen, self._is_high]

    @property
    def expected(self) -> float | None:
        """The running mean, once enough losses are known."""
        return self._mean if self._seen >= _LEAST_STEPS else None

    def take(self, loss: float) -> bool:
        """Take the loss of a step that had targets; whether it is a spike."""
        if not math.isfinite(loss):
            return True
        known = self._seen >= _LEAST_STEPS
        limit = self._mean + max(_CHANGES * self._change, _LEAST_SHARE * self._mean) if known else math.inf
        counted = min(loss, limit)
        weight = max(1 - _DECAY, 1 / (self._seen + 1))
        self._mean += weight * (counted - self._mean)
        if self._seen:
            self._change += max(1 - _DECAY, 1 / self._seen) * (abs(counted - self._last) - self._change)
        self._last, self._seen = counted, self._seen + 1
        was_high, self._is_high = self._is_high, loss > limit
        return self._is_high and not was_high
