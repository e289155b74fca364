"""Simple preference optimization (arXiv 2405.14734): log-probabilities for each token, no reference model."""

from __future__ import annotations

from penstock.engine.config import PreferenceConfig
from penstock.engine.objectives.pairs import both, reward_metrics, smoothed
from penstock.engine.objectives.sequences import Measured, Sequences


def measure(given: Sequences, options: PreferenceConfig) -> Measured:
    """The mean over the step's pairs."""
    chosen, rejected = both(given)
    rewards = options.beta * chosen.means, options.beta * rejected.means
    losses = smoothed(rewards[0] - rewards[1] - options.simpo_gamma, options.label_smoothing)
    return Measured(losses / given.totals.compared, reward_metrics(chosen, rejected, rewards))
