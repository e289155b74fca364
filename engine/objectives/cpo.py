"""Contrastive preference optimization (arXiv 2401.08417): no reference model; chosen answers are trained as well."""

from __future__ import annotations

import torch

from penstock.engine.config import PreferenceConfig
from penstock.engine.objectives.pairs import both, reward_metrics, smoothed
from penstock.engine.objectives.sequences import Measured, Sequences


def measure(given: Sequences, options: PreferenceConfig) -> Measured:
    """The mean over the step's pairs, and cpo_alpha times the mean over the tokens of its chosen answers."""
    chosen, rejected = both(given)
    beta, kind = options.beta, options.loss_type or "sigmoid"
    rewards = beta * chosen.logps, beta * rejected.logps
    margin = rewards[0] - rewards[1]
    if kind == "sigmoid":
        losses = smoothed(margin, options.label_smoothing)
    elif kind == "hinge":
        losses = torch.relu(1 - margin)
    else:
        assert kind == "ipo", kind
        losses = (chosen.means - rejected.means - 1 / (2 * beta)).square()
        rewards = beta * chosen.means, beta * rejected.means
    likelihood = -chosen.logps / given.totals.chosen
    metrics = {**reward_metrics(chosen, rejected, rewards), "nll_loss": -chosen.means.detach()}
    return Measured(torch.cat([losses / given.totals.compared, options.cpo_alpha * likelihood]), metrics)
