"""The tokens of a chunk, with everything about them that an op would otherwise have to ask the device for.

Which rows have a target, which token ids occur: on CUDA each such question would stop the compute lane. The host knows
the answers when the batch is fetched, so they travel with it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

IGNORE_LABEL = -100
"""A label that is no target, as in transformers and torch.nn.functional.cross_entropy."""


@dataclass(frozen=True, slots=True)
class ChunkTokens:
    """The n tokens of one chunk; int64 tensors."""

    ids: Tensor
    """[n] token ids."""
    positions: Tensor
    """[n] positions, counted from the start of each token's document."""
    rows: Tensor
    """[t] the tokens that have a target, ascending."""
    labels: Tensor
    """[t] their targets."""
    distinct: Tensor
    """[u] the token ids that occur, ascending."""
    places: Tensor
    """[n] where each token's id is in `distinct`."""

    @staticmethod
    def of(ids: Tensor, labels: Tensor, positions: Tensor) -> ChunkTokens:
        """From tensors [n] in host memory; a label of -100 is no target."""
        distinct, places = np.unique(ids.numpy(), return_inverse=True)
        rows = (labels != IGNORE_LABEL).nonzero().squeeze(-1)
        return ChunkTokens(
            ids=ids,
            positions=positions,
            rows=rows,
            labels=labels[rows],
            distinct=torch.from_numpy(distinct),
            places=torch.from_numpy(places),
        )

    def tensors(self) -> list[Tensor]:
        return [getattr(self, f.name) for f in fields(self)]

    def to(self, device: torch.device) -> ChunkTokens:
        """The same on `device`; waits for it."""
        return ChunkTokens(*(tensor.to(device) for tensor in self.tensors()))


class Stream(Protocol):
    """One micro-batch: T tokens of whole documents laid end to end (engine.data.loader.MicroBatch is one)."""

    @property
    def ids(self) -> Tensor:
        """Int64 [T]."""
        ...

    @property
    def labels(self) -> Tensor:
        """Int64 [T]; -100 has no loss."""
        ...

    @property
    def positions(self) -> Tensor:
        """Int64 [T], from the start of the document."""
        ...

    @property
    def documents(self) -> list[int]:
        """Sorted starts of the documents; the first is 0."""
        ...


def chunk_ranges(stream: Stream, chunk_tokens: int | None) -> list[tuple[int, int]]:
    """Token ranges of the chunks of `stream`: of so many tokens, the last maybe of fewer; None: of a document each."""
    total = stream.ids.shape[0]
    starts = stream.documents if chunk_tokens is None else range(0, total, chunk_tokens)
    return list(zip(starts, [*starts[1:], total], strict=True))
