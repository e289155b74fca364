"""Group relative policy optimization (arXiv 2402.03300) and RLOO (arXiv 2402.14740): completions that the model
sampled, each with an advantage over the others of its prompt, and a clipped ratio of probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.engine.config import GrpoConfig
from penstock.engine.objectives.sequences import Measured, Sequences

ADVANTAGE, GENERATED = "advantage", "generated"
"""Columns of completions: the advantage; and the trained tokens of the generation for each of its steps."""
OLD, BASE = "old", "base"
"""Columns of tokens: log-probabilities as the completion was sampled, and under the reference model, nats."""


def measure(given: Sequences, options: GrpoConfig) -> Measured:
    """The mean by options.loss_type: over completions and the tokens in each (grpo), over the step's tokens (bnpo), by
    a constant (dr_grpo, arXiv 2503.20783), over the generation's tokens (dapo, arXiv 2503.14476). The ratio is each
    token's, or the geometric mean of the completion's (arXiv 2507.18071). KL is estimated token by token, as k3 in
    Schulman's "Approximating KL divergence"."""
    scores, lengths = given.scores, given.lengths()
    old = given.of_targets.get(OLD, scores.detach())
    log_ratios = scores - old
    if options.importance_sampling_level == "sequence":
        log_ratios = (given.sums(log_ratios) / lengths.clamp(min=1))[given.sequence]
    ratios, advantages = torch.exp(log_ratios), given.columns[ADVANTAGE][given.sequence]
    losses, clipped = _clipped(ratios, advantages, options)
    metrics = {"clip_ratio/region_mean": clipped}
    if options.beta:
        behind = given.of_targets[BASE] - scores
        kl = (torch.exp(behind) - behind - 1) * (ratios if options.use_bias_correction_kl else 1)
        losses = losses + options.beta * kl
        metrics["kl"] = kl.detach()
    sums = given.sums(given.weights * losses)
    if options.loss_type == "grpo":
        sums = sums / lengths.clamp(min=1) / given.totals.compared
    elif options.loss_type == "bnpo":
        sums = sums / max(1.0, given.totals.chosen)
    elif options.loss_type == "dr_grpo":
        sums = sums / (given.totals.compared * options.max_completion_length)
    else:
        sums = sums / given.columns[GENERATED].clamp(min=1)
    return Measured(sums[lengths > 0], metrics | given.statistics())


def measure_rloo(given: Sequences, options: GrpoConfig) -> Measured:
    """The mean over the step's completions, each with the one ratio of its probability."""
    lengths = given.lengths()
    ratios = given.logps() - given.sums(given.weights * given.of_targets.get(OLD, given.scores.detach()))
    losses, clipped = _clipped(torch.exp(ratios), given.columns[ADVANTAGE], options)
    some = lengths > 0
    metrics = {"clip_ratio/region_mean": clipped[some], **given.statistics()}
    return Measured(losses[some] / given.totals.compared, metrics)


def _clipped(ratios: Tensor, advantages: Tensor, options: GrpoConfig) -> tuple[Tensor, Tensor]:
    """The loss -min(ratio A, clipped ratio A) of each; and, float64 without gradient, 1 where clipping took its own."""
    high = options.epsilon if options.epsilon_high is None else options.epsilon_high
    low, high = 1 - options.epsilon, 1 + high
    losses = -torch.minimum(ratios * advantages, ratios.clamp(low, high) * advantages)
    clipped = ((ratios < low) & (advantages < 0)) | ((ratios > high) & (advantages > 0))
    return losses, clipped.double()
