"""The targets of whole sequences, as objectives are given them, and what objectives give back.

All of it is float64 in host memory: the same numbers whatever device computed the log-probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

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
    """Name -> float64 [t], what is known of each target."""
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

    @property
    def loss(self) -> float:
        """Exactly rounded: the same however a step is cut into parts."""
        return math.fsum(self._losses) if all(map(math.isfinite, self._losses)) else math.nan

    @property
    def metrics(self) -> dict[str, float]:
        found = {name: values for name, values in self._values.items() if values}
        return {n: EXTREMES[n](all_) if n in EXTREMES else sum(all_) / len(all_) for n, all_ in found.items()}
