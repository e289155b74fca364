"""The batches of steps and validations on their way to the compute device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from penstock.engine.data.loader import MicroBatch
from penstock.engine.model.tokens import ChunkTokens
from penstock.engine.plan.plan import Chunk
from penstock.engine.plan.problem import BYTES_PER_TOKEN


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
class EvaluationData(Batch):
    total_loss: float = math.nan
    """Sum of the negative log-likelihood of the targets, nats."""


@dataclass(slots=True)
class StepData(Batch):
    """What a step's ops need besides the state; the loss is the mean over its targets."""

    cursor: dict[str, Any]
    """Data position after the step."""
    loss: float = math.nan
    grad_norm: float = math.nan
    scalars: dict[str, Any] = field(default_factory=dict)
    """The optimizer's scalars by device type."""


_TENSORS = len(fields(ChunkTokens))
assert _TENSORS * 8 == BYTES_PER_TOKEN, "the plan counts other bytes per token"


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
