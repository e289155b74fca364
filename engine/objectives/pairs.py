"""Pairs of answers to one prompt, and what is reported of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from penstock.engine.objectives.sequences import CHOSEN, REFERENCE, REJECTED, SIDE, Sequences


class Answers(NamedTuple):
    """One side of n pairs, or n answers; float64 [n]."""

    logps: Tensor
    """Log-probability of the answer behind its prompt, nats."""
    lengths: Tensor
    """Its trained tokens, by their weights."""
    reference: Tensor
    """The reference model's log-probability; 0 where none is needed."""

    @property
    def means(self) -> Tensor:
        """Log-probability for each token."""
        return self.logps / self.lengths

    @property
    def ratios(self) -> Tensor:
        """log(probability / the reference model's)."""
        return self.logps - self.reference


def answers(sequences: Sequences, side: int) -> Answers:
    """Those of one side, in order."""
    (which,) = (sequences.columns[SIDE] == side).nonzero(as_tuple=True)
    logps, lengths = sequences.logps()[which], sequences.lengths()[which]
    reference = sequences.columns.get(REFERENCE)
    return Answers(logps, lengths, torch.zeros_like(lengths) if reference is None else reference[which])


def both(sequences: Sequences) -> tuple[Answers, Answers]:
    """(chosen, rejected): the i-th of each are a pair."""
    return answers(sequences, CHOSEN), answers(sequences, REJECTED)


def smoothed(logits: Tensor, smoothing: float) -> Tensor:
    """Negative log-likelihood of n preferences, of which a share of `smoothing` may be the wrong way round."""
    return -(1 - smoothing) * logsigmoid(logits) - smoothing * logsigmoid(-logits)


def reward_metrics(chosen: Answers, rejected: Answers, rewards: tuple[Tensor, Tensor]) -> Mapping[str, Tensor]:
    """What TRL reports of pairs whose answers have these `rewards` [n]."""
    better, worse = (reward.detach() for reward in rewards)
    return {
        "rewards/chosen": better,
        "rewards/rejected": worse,
        "rewards/accuracies": (better > worse).double(),
        "rewards/margins": better - worse,
        "logps/chosen": chosen.logps.detach(),
        "logps/rejected": rejected.logps.detach(),
    }
