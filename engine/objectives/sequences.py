"""The targets of whole sequences, as objectives are given them, and what objectives give back.

All of it is float64 in host memory: the same numbers whatever device computed the log-probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.engine.objectives.statistics import ENTROPY, MEAN_LOGIT

SIDE, REFERENCE = "side", "reference"
"""Columns of documents: CHOSEN, REJECTED or MISMATCHED; and the sum of the completion's log-probabilities under the
reference model, nats."""
CHOSEN, REJECTED, MISMATCHED = range(3)
"""Answers that are wanted; that are not; and answers to another prompt."""


class Totals(NamedTuple):
    """Counts of a whole step, of which an objective is given a part at a time."""

    sequences: int
    """With a target."""
    compared: int
    """Pairs, or answers with a verdict."""
    chosen: float
    """Sum of the weights of the targets of chosen answers."""
    divergence: float | None = None
    """Mean of the log-ratios of answers to other prompts, nats; None: those that are given are all there are."""


class Sequences(NamedTuple):
    """The targets of whole sequences, one sequence behind the other."""

    scores: Tensor
    """float64 [t]: the log-probability of each target, nats; or a reward model's value."""
    weights: Tensor
    """float64 [t], above 0: how much each counts, by the data."""
    sequence: Tensor
    """int64 [t], ascending: which sequence it is of, of D."""
    prompt: Tensor
    """bool [t]: whether it is a token of a prompt, no part of the answer."""
    columns: Mapping[str, Tensor]
    """Name -> float64 [D], what is known of each sequence."""
    of_targets: Mapping[str, Tensor]
    """Name -> float64 [t], what is known of each target; statistics are there where they were asked for."""
    num: int
    """D."""
    totals: Totals

    def sums(self, values: Tensor) -> Tensor:
        """[D]: `values` [t] of the targets of each sequence's answer, added up."""
        result = torch.zeros(self.num, dtype=values.dtype)
        return result.index_add(0, self.sequence, torch.where(self.prompt, 0.0, values))

    def logps(self) -> Tensor:
        """[D]: the log-probability of each sequence's answer, its targets by their weights."""
        return self.sums(self.weights * self.scores)

    def lengths(self) -> Tensor:
        """[D]: the sum of the weights of the answer's targets: their number where each counts as much."""
        return self.sums(self.weights)

    def statistics(self) -> dict[str, Tensor]:
        """What TRL reports of the statistics, each answer token counting as much: `entropy` of all answers but those to
        other prompts, `logits/chosen` and `logits/rejected` of the sides."""
        answered = ~self.prompt
        side = self.columns[SIDE][self.sequence] if SIDE in self.columns else torch.zeros_like(self.sequence)
        result = {}
        if (logits := self.of_targets.get(MEAN_LOGIT)) is not None:
            result["logits/chosen"] = logits[answered & (side == CHOSEN)]
            result["logits/rejected"] = logits[answered & (side == REJECTED)]
        if (entropy := self.of_targets.get(ENTROPY)) is not None:
            result["entropy"] = entropy[answered & (side != MISMATCHED)]
        return result


class Measured(NamedTuple):
    """What an objective finds of some sequences of a step."""

    losses: Tensor
    """[n], with a gradient with respect to `Sequences.scores`: the step's loss is the sum over all of its sequences."""
    metrics: Mapping[str, Tensor]
    """Name, as TRL has it -> values [m] without a gradient; the step's is the mean over all of them, or as EXTREMES has
    it."""


EXTREMES = {"min_reward": min, "max_reward": max}
"""What a step's value of such a name is, of all those of its parts."""


class Found:
    """Collects what an objective finds of the parts of a step, or of a validation."""

    def __init__(self) -> None:
        self._losses: list[float] = []
        self._values: dict[str, list[float]] = {}

    def add(self, measured: Measured) -> None:
        self._losses += measured.losses.detach().tolist()
        for name, values in measured.metrics.items():
            self._values.setdefault(name, []).extend(values.tolist())

    @staticmethod
    def of(parts: Iterable[Found]) -> Found:
        """What has been found of all of them."""
        result = Found()
        for part in parts:
            result._losses += part._losses
            for name, values in part._values.items():
                result._values.setdefault(name, []).extend(values)
        return result

    @property
    def loss(self) -> float:
        """Exactly rounded: the same however a step is cut into parts."""
        return exact_sum(self._losses)

    @property
    def metrics(self) -> dict[str, float]:
        """By name; exactly rounded as well."""
        found = {name: values for name, values in self._values.items() if values}
        return {n: EXTREMES[n](all_) if n in EXTREMES else exact_sum(all_) / len(all_) for n, all_ in found.items()}


def exact_sum(values: Sequence[float]) -> float:
    """Exactly rounded, in whatever order; NaN where one is not finite."""
    return math.fsum(values) if all(map(math.isfinite, values)) else math.nan
