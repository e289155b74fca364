"""The tokens of a chunk, with what an op would otherwise have to ask the device for, which would stop the compute lane:
which rows have a target, which token ids occur."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

IGNORE_LABEL = -100
"""A label that is no target, as in transformers and torch.nn.functional.cross_entropy."""


@dataclass(frozen=True, slots=True)
class ChunkTokens:
    """The n tokens of one chunk; int64 tensors, but for the weights."""

    ids: Tensor
    """[n] token ids."""
    positions: Tensor
    """[n] positions, counted from the start of each token's document."""
    rows: Tensor
    """[t] the tokens that have a target, ascending."""
    labels: Tensor
    """[t] their targets."""
    weights: Tensor
    """[t] float64, above 0: how much the loss of each target counts."""
    distinct: Tensor
    """[u] the token ids that occur, ascending."""
    row_of: Tensor
    """[n] where each token's id is in `distinct`."""

    @staticmethod
    def of(ids: Tensor, labels: Tensor, positions: Tensor, weights: Tensor | None = None) -> ChunkTokens:
        """From tensors [n] in host memory; a label of -100 or of weight 0 is no target. No weights: 1 for all."""
        distinct, row_of = np.unique(ids.numpy(), return_inverse=True)
        rows = targets(labels, weights).nonzero().squeeze(-1)
        ones = torch.ones(rows.numel(), dtype=torch.float64)
        return ChunkTokens(
            ids=ids,
            positions=positions,
            rows=rows,
            labels=labels[rows],
            weights=ones if weights is None else weights[rows].double(),
            distinct=torch.from_numpy(distinct),
            row_of=torch.from_numpy(row_of),
        )

    def tensors(self) -> list[Tensor]:
        """All of them in 8 bytes an element, as int64: what travels together."""
        return [getattr(self, f.name).view(torch.int64) for f in fields(self)]

    @staticmethod
    def of_tensors(tensors: Sequence[Tensor]) -> ChunkTokens:
        """What `tensors` were made of."""
        whole = ChunkTokens(*tensors)
        return replace(whole, weights=whole.weights.view(torch.float64))

    def to(self, device: torch.device) -> ChunkTokens:
        """The same on `device`; waits for it."""
        return ChunkTokens.of_tensors([tensor.to(device) for tensor in self.tensors()])


def targets(labels: Tensor, weights: Tensor | None) -> Tensor:
    """Which tokens [n] have a target, of labels [n] and their weights."""
    result = labels != IGNORE_LABEL
    return result if weights is None else result & (weights > 0)


def total_weight(labels: Tensor, weights: Tensor | None) -> float:
    """Sum of the weights of all targets, their number where each counts as much as the others."""
    result = targets(labels, weights)
    return float(result.sum()) if weights is None else float(weights[result].sum(dtype=torch.float64))


def mean_by_weight(weighted_sum: float, total: float) -> float:
    """The mean of what adds up to `weighted_sum`, with weights that add up to `total`; 0 where there is nothing."""
    return weighted_sum / total if total else 0.0


class Stream(Protocol):
    """One micro-batch: T tokens of whole documents laid end to end (engine.data.loader.MicroBatch is one)."""

    @property
    def ids(self) -> Tensor:
        """Int64 [T]."""

    @property
    def labels(self) -> Tensor:
        """Int64 [T]; -100 has no loss."""

    @property
    def weights(self) -> Tensor | None:
        """Float32 [T]: how much the loss of each label counts; None: 1 for all."""

    @property
    def positions(self) -> Tensor:
        """Int64 [T], from the start of the document."""

    @property
    def documents(self) -> list[int]:
        """Sorted starts of the documents; the first is 0."""


def last_positions(positions: Tensor, documents: Sequence[int]) -> Tensor:
    """For each token of a stream the last position of its document, int64 [T]; of its positions [T] and `documents`."""
    bounds = torch.tensor([*documents, len(positions)])
    return positions[bounds[1:] - 1].repeat_interleave(bounds.diff())


def chunk_ranges(stream: Stream, chunk_tokens: int | None) -> list[tuple[int, int]]:
    """Token ranges of the chunks of `stream`: of so many tokens, the last maybe of fewer; None: of a document each."""
    total = stream.ids.shape[0]
    starts = stream.documents if chunk_tokens is None else range(0, total, chunk_tokens)
    return list(zip(starts, [*starts[1:], total], strict=True))
