"""A step's tokens on the compute device, with everything about them that an op would otherwise have to ask it for.

Which rows of a chunk have a target, which token ids occur in it, how far its positions reach: on CUDA each such
question would stop the compute lane. The host knows the answers when the batch is fetched, so they travel with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.data.loader import IGNORE_LABEL, MicroBatch
from engine.optim.adamw import Scalars
from engine.plan.plan import Chunk


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
        """The tensors in the order of the fields."""
        return [getattr(self, f.name) for f in fields(self)]

    def to(self, device: torch.device) -> ChunkTokens:
        """The same on `device`; waits for it."""
        return ChunkTokens(*(tensor.to(device) for tensor in self.tensors()))


@dataclass(slots=True)
class Batch:
    """Tokens that go through the model together."""

    micro_batches: Sequence[MicroBatch]
    """In host memory."""
    chunks: Sequence[ChunkTokens]
    """The tokens of the plan's chunks, on the compute device."""
    num_targets: int
    """Tokens with a loss in all micro-batches."""


@dataclass(slots=True)
class ScoreData(Batch):
    """What the ops of one pass of a validation need besides the weights."""

    total_loss: float = math.nan
    """Sum of the negative log-likelihood of the targets, nats."""


@dataclass(slots=True)
class StepData(Batch):
    """What a step's ops need besides the state; the loss is the mean over its targets."""

    cursor: dict[str, Any]
    """Data position after the step."""
    loss: float = math.nan
    grad_norm: float = math.nan
    scalars: dict[str, Scalars] = field(default_factory=dict)
    """The optimizer's scalars by device type."""


_TENSORS = len(fields(ChunkTokens))

BYTES_PER_TOKEN = _TENSORS * 8
"""Device memory of a token in a fetched step, at most."""


class BatchCarrier:
    """Brings fetched batches to the compute device: on CUDA in one copy per step, beside all lanes.

    The copy goes through one pinned buffer and a stream of its own, for which the caller waits. So no lane waits for
    it, and the tensors are complete before any op can read them. A step's device memory is freed with its last tensor.
    """

    def __init__(self, chunks: Sequence[Chunk], device: torch.device) -> None:
        self._chunks = chunks
        self._device = device
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            # Room for the most that a step can have, whatever its tokens are: equal sizes leave no holes behind.
            self._numel = sum(chunk.end - chunk.start for chunk in chunks) * _TENSORS
            self._pinned = torch.empty(self._numel, dtype=torch.int64, pin_memory=True)

    def carry(self, micro_batches: Sequence[MicroBatch]) -> list[ChunkTokens]:
        """The plan's chunks of a step, by index; of fewer micro-batches than a step has, theirs."""
        chunks = []
        for chunk in self._chunks:
            if chunk.micro_batch == len(micro_batches):
                break
            batch, tokens = micro_batches[chunk.micro_batch], slice(chunk.start, chunk.end)
            chunks.append(ChunkTokens.of(batch.ids[tokens], batch.labels[tokens], batch.positions[tokens]))
        if self._device.type != "cuda":
            return chunks
        tensors = [tensor for chunk in chunks for tensor in chunk.tensors()]
        used = pack(tensors, self._pinned)
        with torch.cuda.stream(self._stream):
            flat = torch.empty(self._numel, dtype=torch.int64, device=self._device)
            flat[:used].copy_(self._pinned[:used], non_blocking=True)
        self._stream.synchronize()
        there = unpack(flat, [tensor.numel() for tensor in tensors])
        return [ChunkTokens(*there[i : i + _TENSORS]) for i in range(0, len(there), _TENSORS)]


def pack(tensors: Sequence[Tensor], flat: Tensor) -> int:
    """Lay 1-D tensors end to end into `flat`; the number of elements."""
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.numel()
        flat[start:end].copy_(tensor)
    return end


def unpack(flat: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Views of the 1-D tensors that `pack` laid into `flat`."""
    return list(flat[: sum(sizes)].split(list(sizes)))
