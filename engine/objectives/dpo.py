"""Direct preference optimization (arXiv 2305.18290) and its variants: a pair's loss follows from how much likelier each
answer is than under the reference model."""

from __future__ import annotations

import torch

from penstock.engine.config import PreferenceConfig
from penstock.engine.objectives.pairs import both, reward_metrics, smoothed
from penstock.engine.objectives.sequences import Measured, Sequences


def measure(given: Sequences, options: PreferenceConfig) -> Measured:
    """The mean over the step's pairs.

    sigmoid: label smoothing as in cDPO (its section on noisy labels); ipo: arXiv 2310.12036, log-ratios for each token,
    as its authors advise; robust: arXiv 2403.00409; apo_zero, apo_down: arXiv 2408.06266.
    """
    chosen, rejected = both(given)
    beta, smoothing, kind = options.beta, options.label_smoothing, options.loss_type or "sigmoid"
    better, worse = beta * chosen.ratios, beta * rejected.ratios
    margin = better - worse
    of_token = chosen.ratios / chosen.lengths - rejected.ratios / rejected.lengths
    if kind == "sigmoid":
        losses = smoothed(margin, smoothing)
    elif kind == "hinge":
        losses = torch.relu(1 - margin)
    elif kind == "ipo":
        losses = (of_token - 1 / (2 * beta)).square()
    elif kind == "sigmoid_norm":
        losses = smoothed(beta * of_token, smoothing)
    elif kind == "robust":
        wrong = smoothed(-margin, 0)
        losses = ((1 - smoothing) * smoothed(margin, 0) - smoothing * wrong) / (1 - 2 * smoothing)
    elif kind == "apo_zero":
        losses = 1 - torch.sigmoid(better) + torch.sigmoid(worse)
    else:
        assert kind == "apo_down", kind
        losses = torch.sigmoid(better) + 1 - torch.sigmoid(margin)
    metrics = {**reward_metrics(chosen, rejected, (better, worse)), **given.statistics()}
    return Measured(losses / given.totals.compared, metrics)
