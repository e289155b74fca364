"""Odds ratio preference optimization (arXiv 2403.07691): fine-tuning on the chosen texts, and the odds of answers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from penstock.engine.config import PreferenceConfig
from penstock.engine.objectives.pairs import both, reward_metrics
from penstock.engine.objectives.sequences import CHOSEN, SIDE, Measured, Sequences


def measure(given: Sequences, options: PreferenceConfig) -> Measured:
    """The mean over all tokens of the step's chosen texts, prompts as well (as in TRL), and beta times the mean of the
    log odds ratio over its pairs."""
    chosen, rejected = both(given)
    rewards = options.beta * chosen.means, options.beta * rejected.means
    odds = chosen.means - rejected.means - (_log_complement(chosen.means) - _log_complement(rejected.means))
    preferred = logsigmoid(odds)
    of_chosen = given.columns[SIDE][given.sequence] == CHOSEN
    likelihood = torch.zeros(given.num, dtype=torch.float64).index_add(
        0, given.sequence[of_chosen], -(given.weights * given.scores)[of_chosen]
    )
    metrics = {
        **reward_metrics(chosen, rejected, rewards),
        "log_odds_ratio": preferred.detach(),
        "log_odds_chosen": odds.detach(),
    }
    losses = torch.cat([likelihood / given.totals.chosen, -options.beta * preferred / given.totals.compared])
    return Measured(losses, metrics)


def _log_complement(logps: Tensor) -> Tensor:
    """log(1 - exp(logps)), logps below 0 (Maechler 2012, "Accurately computing log(1 - exp(-|a|))")."""
    small = logps > -0.6931471805599453
    near = torch.log(-torch.expm1(torch.where(small, logps, -1.0)))
    return torch.where(small, near, torch.log1p(-torch.exp(torch.where(small, -1.0, logps))))
