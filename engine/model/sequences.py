"""Whole sequences of a step's micro-batches, and what each of their targets counts in the loss of an objective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.engine.model.tokens import MicroBatch, targets
from penstock.engine.objectives.base import Objective
from penstock.engine.objectives.pairs import answers
from penstock.engine.objectives.sequences import (
    CHOSEN,
    MISMATCHED,
    REJECTED,
    SIDE,
    Measured,
    Sequences,
    Totals,
    exact_sum,
)


def totals_of(streams: Sequence[MicroBatch], objective: Objective) -> Totals:
    """Of the micro-batches of a whole step."""
    counted = [CHOSEN] if objective.compares == "pairs" else [CHOSEN, REJECTED]
    sequences, compared, chosen = 0, 0, 0.0
    for stream in streams:
        parts = _of_stream(stream)
        sequences += len(torch.unique(parts.sequence))
        if SIDE in stream.columns:
            side = stream.columns[SIDE]
            compared += int(torch.isin(side, torch.tensor(counted)).sum())
            chosen += float(parts.weights[side[parts.sequence] == CHOSEN].sum())
    return Totals(sequences, compared, chosen)


def sequences_of(
    streams: Sequence[MicroBatch], scores: Tensor, totals: Totals, statistics: Mapping[str, Tensor] | None = None
) -> Sequences:
    """Of the targets of `streams`, whose log-probabilities are `scores` [t], in order; likewise `statistics`, by name,
    as far as they were asked for."""
    parts = [_of_stream(stream) for stream in streams]
    first, numbers = 0, []
    for stream, part in zip(streams, parts, strict=True):
        numbers.append(part.sequence + first)
        first += len(stream.documents)
    columns = {
        name: torch.cat([_padded(stream.columns[name], len(stream.documents)) for stream in streams])
        for name in streams[0].columns
    }
    of_targets = {
        name: torch.cat([stream.target_columns[name][part.rows] for stream, part in zip(streams, parts, strict=True)])
        for name in streams[0].target_columns
    }
    return Sequences(
        scores,
        torch.cat([part.weights for part in parts]),
        torch.cat(numbers),
        torch.cat([part.prompt for part in parts]),
        columns,
        of_targets | dict(statistics or {}),
        first,
        totals,
    )


def mismatched_sums(streams: Sequence[MicroBatch], sequences: Sequences) -> Tensor:
    """float64 [streams]: of the answers to other prompts in each, `sequences` of which are given, the log-ratios to the
    reference model added up."""
    counts = [int((stream.columns[SIDE] == MISMATCHED).sum()) for stream in streams]
    ratios = answers(sequences, MISMATCHED).ratios.detach().split(counts)
    return torch.tensor([exact_sum(each.tolist()) for each in ratios], dtype=torch.float64)


def with_divergence(totals: Totals, streams: Sequence[MicroBatch], sums: Tensor) -> Totals:
    """The totals of a step with these streams, of which `sums` are the mismatched sums, in any order."""
    count = sum(int((stream.columns[SIDE] == MISMATCHED).sum()) for stream in streams)
    return totals._replace(divergence=exact_sum(sums.tolist()) / count)


def coefficients(objective: Objective, sequences: Sequences) -> tuple[Tensor, Measured]:
    """float64 [t]: the derivative of the loss with respect to each target's negative log-likelihood; and the loss."""
    with torch.enable_grad():
        scores = sequences.scores.detach().requires_grad_()
        measured = objective.measure(sequences._replace(scores=scores))
        (gradient,) = torch.autograd.grad(measured.losses.sum(), scores)
    return -gradient, measured


class _Parts(NamedTuple):
    rows: Tensor
    weights: Tensor
    sequence: Tensor
    prompt: Tensor


def _of_stream(stream: MicroBatch) -> _Parts:
    """Of the targets of a stream, in order: tokens int64 [t], weights float64 [t], documents int64 [t] and whether of a
    prompt [t]."""
    rows = targets(stream.labels, stream.weights).nonzero().squeeze(-1)
    weights = torch.ones(len(rows), dtype=torch.float64) if stream.weights is None else stream.weights[rows].double()
    sequence = torch.bucketize(rows, torch.tensor(stream.documents), right=True) - 1
    prompt = torch.zeros(len(rows), dtype=torch.bool) if stream.prompts is None else stream.prompts[rows]
    return _Parts(rows, weights, sequence, prompt)


def _padded(column: Tensor, length: int) -> Tensor:
    """A column of all documents of a stream, of which the last may be padding."""
    return torch.cat([column, column.new_full((length - len(column),), -1)])
