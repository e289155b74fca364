"""A reward model (arXiv 2203.02155, equation 1): of two answers the chosen one is to have the larger value."""

from __future__ import annotations

import torch

from penstock.engine.config import PreferenceConfig
from penstock.engine.objectives.pairs import smoothed
from penstock.engine.objectives.sequences import CHOSEN, REJECTED, SIDE, Measured, Sequences


def measure(given: Sequences, options: PreferenceConfig) -> Measured:
    """The mean over the step's pairs. With a center_rewards_coefficient values are drawn towards 0 (arXiv 2312.09244,
    section 2)."""
    rewards, side = given.logps(), given.columns[SIDE]
    chosen, rejected = rewards[side == CHOSEN], rewards[side == REJECTED]
    losses = smoothed(chosen - rejected, 0)
    if options.center_rewards_coefficient is not None:
        losses = losses + options.center_rewards_coefficient * (chosen + rejected).square()
    better, worse = chosen.detach(), rejected.detach()
    both = torch.cat([better, worse])
    metrics = {"accuracy": (better > worse).double(), "margin": better - worse}
    metrics |= {"min_reward": both, "mean_reward": both, "max_reward": both}
    return Measured(losses / given.totals.compared, metrics)
