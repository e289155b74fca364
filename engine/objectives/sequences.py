"""The targets of whole sequences, of which an objective makes coefficients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.engine.objectives.base import Objective


class Sequences(NamedTuple):
    """The targets of whole sequences, one sequence behind the other."""

    scores: Tensor
    """float64 [t]: the log-probability of each target, nats. A constant: no gradient passes."""
    weights: Tensor
    """float64 [t], above 0: how much each counts, by the data."""
    sequence: Tensor
    """int64 [t]: which sequence it is of, ascending; as they are numbered in the step."""
    num_sequences: int
    """With any target, in the whole step, of which these may be a part."""


def sequence_numbers(rows: Tensor, start: int, documents: Sequence[int], first: int) -> Tensor:
    """int64 [t]: of which sequence the targets in `rows` [t] of a chunk are that begins at `start` of its stream.
    `documents`: sorted starts of the stream's documents, the first of which bears the number `first`."""
    starts = torch.tensor(documents, device=rows.device)
    return torch.bucketize(rows + start, starts, right=True) - 1 + first


def split_coefficients(objective: Objective, chunks: Sequence[Sequences]) -> list[Tensor]:
    """The coefficients of each of `chunks`, which together are whole sequences, in the order of the stream."""
    scores, weights, numbers = (torch.cat(parts) for parts in zip(*(chunk[:3] for chunk in chunks), strict=True))
    whole = Sequences(scores, weights, numbers, chunks[0].num_sequences)
    result: Tensor = objective.coefficients(whole)
    return list(result.split([len(chunk.scores) for chunk in chunks]))
