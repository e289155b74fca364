"""The coefficients of a step's targets, where the objective makes them of whole sequences' scores."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.engine.model.tokens import targets
from penstock.engine.objectives.base import Objective
from penstock.engine.objectives.sequences import Sequences, sequence_numbers, split_coefficients
from penstock.engine.runtime.batch import Batch
from penstock.engine.runtime.views import Views
from penstock.engine.schedule.ops import Op


class Coefficients:
    """Made once for each group of a step, when all of its scores are there."""

    def __init__(self, views: Views, objective: Objective, scores: Tensor, starts: Sequence[int]) -> None:
        """`scores`: the log-probabilities of a step's targets, those of chunk i from `starts[i]` on."""
        self._views, self._objective, self._scores, self._starts = views, objective, scores, starts
        self._of_group: tuple[tuple[int, int], dict[int, Tensor]] | None = None
        """((step, group), chunk -> its coefficients) of the group that is being computed."""

    def of(self, op: Op) -> Tensor:
        """float64 [t] of the targets of the op's chunk."""
        size = self._views.plan.group
        group = self._views.chunk(op).micro_batch // size
        if self._of_group is None or self._of_group[0] != (op.step, group):
            batch = self._views.batch(op)
            members = [chunk for _, chunk in sorted(batch.cut.items()) if chunk.micro_batch // size == group]
            firsts, num_sequences = _count(batch)
            result = []
            for chunk in members:
                tokens, first = batch.chunks[chunk.index], firsts[chunk.micro_batch]
                documents = batch.micro_batches[chunk.micro_batch].documents
                start = self._starts[chunk.index]
                scores = self._scores[start : start + tokens.labels.shape[0]]
                numbers = sequence_numbers(tokens.rows, chunk.start, documents, first)
                result.append(Sequences(scores, tokens.weights, numbers, num_sequences))
            made = split_coefficients(self._objective, result)
            of_chunk = {chunk.index: part for chunk, part in zip(members, made, strict=True)}
            self._of_group = (op.step, group), of_chunk
        return self._of_group[1][op.index]


def _count(batch: Batch) -> tuple[list[int], int]:
    """The number that the first sequence of each micro-batch bears, and how many of all have a target."""
    firsts = [0, *itertools.accumulate(len(m.documents) for m in batch.micro_batches)]
    result = 0
    for m in batch.micro_batches:
        rows = targets(m.labels, m.weights).nonzero().squeeze(-1)
        result += len(torch.unique(sequence_numbers(rows, 0, m.documents, 0)))
    return firsts, result
