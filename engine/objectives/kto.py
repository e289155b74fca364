"""Kahneman-Tversky optimization (arXiv 2402.01306): answers with a verdict each, not in pairs."""

from __future__ import annotations

import torch

from penstock.engine.config import PreferenceConfig
from penstock.engine.objectives.pairs import answers
from penstock.engine.objectives.sequences import CHOSEN, MISMATCHED, REJECTED, Measured, Sequences


def measure(given: Sequences, options: PreferenceConfig) -> Measured:
    """The mean over the step's answers. The KL divergence from the reference is estimated from answers to other prompts
    and is a constant of the step. apo_zero_unpaired (arXiv 2408.06266) does without."""
    wanted, unwanted = answers(given, CHOSEN), answers(given, REJECTED)
    metrics = {"rewards/chosen": options.beta * wanted.ratios, "rewards/rejected": options.beta * unwanted.ratios}
    metrics |= {"logps/chosen": wanted.logps, "logps/rejected": unwanted.logps}
    kl = torch.zeros((), dtype=torch.float64)
    if options.loss_type != "apo_zero_unpaired":
        of_step = given.totals.divergence
        mean = (
            answers(given, MISMATCHED).ratios.detach().mean()
            if of_step is None
            else torch.tensor(of_step, dtype=torch.float64)
        )
        kl = mean.clamp(min=0)
        metrics["kl"] = kl[None]
    gains = 1 - torch.sigmoid(options.beta * (wanted.ratios - kl))
    losses = 1 - torch.sigmoid(options.beta * (kl - unwanted.ratios))
    weighted = torch.cat([options.desirable_weight * gains, options.undesirable_weight * losses])
    metrics = {name: values.detach() for name, values in metrics.items()} | given.statistics()
    return Measured(weighted / given.totals.compared, metrics)
