"""The objectives that there are: train.objective -> the coefficient of each target.

The loss is the sum over a step's targets of coefficient times negative log-likelihood. An objective that knows them
beforehand takes one visit of the head. One that needs whole sequences takes two: the first finds the log-probability of
every target, the objective makes coefficients of them, and the second is the head's forward and backward.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from penstock.engine.config import TrainConfig, nearest
from penstock.storage.files.errors import UserError


@dataclass(frozen=True, slots=True)
class Objective:
    """An entry of `OBJECTIVES`."""

    implementation: str | None = None
    """`module:function` from engine.objectives.sequences.Sequences to float64 [t], the coefficients of their targets;
    None: a target's share of the step's weights."""

    @property
    def whole_sequences(self) -> bool:
        """Whether coefficients need the scores of whole sequences."""
        return self.implementation is not None

    def coefficients(self, result: Any) -> Any:
        module, _, name = str(self.implementation).partition(":")
        return getattr(importlib.import_module(module), name)(result)


OBJECTIVES = {
    "next_token": Objective(),
    "sequence_mean": Objective("penstock.engine.objectives.sequence_mean:coefficients"),
}
"""train.objective -> what it is."""


def find_objective(train: TrainConfig) -> Objective:
    """The recipe's objective. Raises UserError with the nearest name for an unknown one."""
    if train.objective not in OBJECTIVES:
        raise UserError(f"train.objective: '{train.objective}' is unknown; {nearest(train.objective, OBJECTIVES)}")
    return OBJECTIVES[train.objective]
