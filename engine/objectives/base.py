"""The objectives that there are: train.objective -> how a step's loss follows from its targets.

next_token is the mean negative log-likelihood of the targets: the head is visited once. Any other is a function of the
log-probabilities of whole sequences. Then the head is visited twice: the first visit finds the log-probability of every
target, the derivative of the loss with respect to it is that target's coefficient, and the second visit is the head's
forward and backward with these coefficients.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from penstock.engine.config import SAMPLED, GrpoConfig, PreferenceConfig, Recipe, nearest
from penstock.engine.objectives.statistics import ENTROPY, MEAN_LOGIT
from penstock.storage.files.errors import UserError

if TYPE_CHECKING:
    from penstock.engine.objectives.sequences import Measured, Sequences


@dataclass(frozen=True, slots=True)
class Objective:
    """An entry of `OBJECTIVES`."""

    implementation: str | None = None
    """`module:function` from (engine.objectives.sequences.Sequences, `options`) to Measured; None: the mean negative
    log-likelihood of the targets."""
    compares: Literal["", "pairs", "unpaired", "prompts"] = ""
    """What the data have to be: answers in pairs, or each with a verdict, or prompts to complete; empty: texts."""
    reference: bool = False
    """Whether it needs log-probabilities of the model as it was before training."""
    mismatched: bool = False
    """Whether it also needs answers to other prompts (KTO's estimate of the KL divergence), of the whole step."""
    prompts: bool = False
    """Whether tokens of the chosen answers' prompts are targets too."""
    reward_model: bool = False
    """Whether what is trained is a reward model (model/reward.py): each answer has one target, its last token, whose
    score is the model's value there."""
    statistics: tuple[str, ...] = ()
    """Of targets (objectives/statistics.py), which it reports; each costs a little time."""
    options: PreferenceConfig | GrpoConfig = field(default_factory=PreferenceConfig)
    """The section of the recipe that it reads."""

    @property
    def whole_sequences(self) -> bool:
        """Whether coefficients need the scores of whole sequences."""
        return self.implementation is not None

    @property
    def score_bytes(self) -> int:
        """Device memory of a token for its score, statistics and coefficient, and whether it is the likeliest."""
        return 8 * (2 + len(self.statistics)) + 1 if self.whole_sequences else 0

    @property
    def temperature(self) -> float:
        """What logits are divided by before they are probabilities: as completions are sampled."""
        return self.options.temperature if isinstance(self.options, GrpoConfig) else 1.0

    def measure(self, sequences: Sequences) -> Measured:
        module, _, name = str(self.implementation).partition(":")
        result: Measured = getattr(importlib.import_module(module), name)(sequences, self.options)
        return result


_ALL = (ENTROPY, MEAN_LOGIT)

OBJECTIVES = {
    "next_token": Objective(),
    "sequence_mean": Objective("penstock.engine.objectives.sequence_mean:measure"),
    "dpo": Objective("penstock.engine.objectives.dpo:measure", "pairs", reference=True, statistics=_ALL),
    "cpo": Objective("penstock.engine.objectives.cpo:measure", "pairs"),
    "simpo": Objective("penstock.engine.objectives.simpo:measure", "pairs"),
    "orpo": Objective("penstock.engine.objectives.orpo:measure", "pairs", prompts=True),
    "reward": Objective("penstock.engine.objectives.reward:measure", "pairs", reward_model=True),
    "grpo": Objective("penstock.engine.objectives.grpo:measure", "prompts", statistics=(ENTROPY,)),
    "rloo": Objective("penstock.engine.objectives.grpo:measure_rloo", "prompts", statistics=(ENTROPY,)),
    "kto": Objective(
        "penstock.engine.objectives.kto:measure", "unpaired", reference=True, mismatched=True, statistics=_ALL
    ),
}
"""train.objective -> what it is."""


def find_objective(recipe: Recipe) -> Objective:
    """The recipe's objective. Raises UserError with the nearest name for an unknown one."""
    name, preference = recipe.train.objective, recipe.preference
    if name not in OBJECTIVES:
        raise UserError(f"train.objective: '{name}' is unknown; {nearest(name, OBJECTIVES)}")
    result = replace(OBJECTIVES[name], options=recipe.grpo if name in SAMPLED else preference)
    return replace(result, mismatched=result.mismatched and preference.loss_type != "apo_zero_unpaired")
