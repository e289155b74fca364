"""The batches of steps and validations on their way to the compute device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from penstock.engine.generate.decode import Choose, Row
from penstock.engine.generate.places import Place
from penstock.engine.model.images import Images
from penstock.engine.model.tokens import ChunkTokens, MicroBatch, targets, total_weight
from penstock.engine.objectives.sequences import Found
from penstock.engine.plan.chunks import TILE, Chunk, Streams, own
from penstock.engine.plan.plan import Plan
from penstock.engine.plan.problem import BYTES_PER_TOKEN
from penstock.storage.tier.arena import pinned_empty


@dataclass(slots=True)
class Batch:
    """Tokens that go through the model together."""

    micro_batches: Sequence[MicroBatch]
    """In host memory."""
    streams: Streams
    """Per micro-batch its chunks that hold tokens, as far as they do, whoever computes them."""
    by_ordinal: dict[tuple[int, int], Chunk]
    """(micro-batch, position in it) -> one of them."""
    cut: dict[int, Chunk]
    """Index -> chunk, of those that are computed here."""
    chunks: dict[int, ChunkTokens]
    """The tokens of each, on the compute device."""
    images: dict[int, Images]
    """Those of each that has any, in host memory; pinned where the device is a GPU."""
    num_targets: int
    """Tokens with a loss in all micro-batches."""
    total_weight: float
    """Sum of their weights in the loss."""

    @property
    def num_trained(self) -> int:
        """Targets that carry a loss."""
        return self.num_targets - sum(m.num_compared for m in self.micro_batches)

    @property
    def extent(self) -> dict[str, Any]:
        """What a pass (schedule/passes.py) knows of it: `documents` and `streams`."""
        return {"documents": [m.documents for m in self.micro_batches], "streams": self.streams}


@dataclass(slots=True)
class EvaluationData(Batch):
    of_reference: bool = False
    """Whether the model is the one that the run began with."""
    with_statistics: bool = False
    """Whether the objective's statistics of the targets are found as well."""
    scores: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    """float64 [num_targets], in host memory: the log-probability of each target, in order, nats."""
    statistics: dict[str, Tensor] = field(default_factory=dict)
    """Name -> float64 [num_targets], in host memory, in the same order."""
    right: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    """Bool [num_targets], in host memory: whether the model finds each target, in order, the likeliest token."""

    @property
    def of_chunks(self) -> dict[tuple[int, int], tuple[Tensor, dict[str, Tensor], Tensor]]:
        """Micro-batch and position in it of each chunk computed here -> its scores, statistics, and what is right."""
        counts = [self.chunks[index].labels.shape[0] for index in self.cut]
        statistics = {name: values.split(counts) for name, values in self.statistics.items()}
        return {
            (chunk.micro_batch, chunk.ordinal): (scores, {name: each[i] for name, each in statistics.items()}, right)
            for i, (chunk, scores, right) in enumerate(
                zip(self.cut.values(), self.scores.split(counts), self.right.split(counts), strict=True)
            )
        }

    def take(self, of_chunks: Mapping[tuple[int, int], tuple[Tensor, dict[str, Tensor], Tensor]]) -> None:
        """Know what has been found of all chunks, whoever computed them."""
        scores, statistics, right = zip(*(of_chunks[place] for place in sorted(of_chunks)), strict=True)
        self.scores, self.right = torch.cat(scores), torch.cat(right)
        self.statistics = {name: torch.cat([each[name] for each in statistics]) for name in statistics[0]}

    @property
    def losses(self) -> list[float]:
        """Of each micro-batch the sum of the negative log-likelihood of its targets by their weights, nats; the same
        whatever it is computed with."""
        result, of_each = [], self.scores.split([m.num_targets for m in self.micro_batches])
        for m, scores in zip(self.micro_batches, of_each, strict=True):
            weighted = scores if m.weights is None else scores * m.weights[targets(m.labels, m.weights)].double()
            result.append(-math.fsum(weighted.tolist()))
        return result

    @property
    def total_loss(self) -> float:
        return math.fsum(self.losses)


@dataclass(slots=True)
class StepData(Batch):
    """What a step's ops need besides the state; the loss is the mean over its targets by their weights."""

    cursor: dict[str, Any]
    """Data position after the step."""
    whole: Sequence[MicroBatch]
    """All micro-batches of the step, of which `micro_batches` are those of this rank; loss, targets and weights are of
    all of them."""
    others: dict[int, Chunk]
    """Other ranks' chunks, of which this one computes experts, by number (Plan.others)."""

    loss: float = math.nan
    grad_norm: float = math.nan
    chunk_losses: dict[int, float] = field(default_factory=dict)
    """Index of a chunk -> sum of its targets' negative log-likelihood by their weights, nats; empty where an objective
    over whole sequences has no loss of a chunk."""
    known: dict[str, float] = field(default_factory=dict)
    """What is known of the batch beforehand that the step reports, by name."""
    found: Found = field(default_factory=Found)
    """What such an objective finds of its sequences."""
    scalars: dict[str, Any] = field(default_factory=dict)
    """The optimizer's scalars by device type."""

    @property
    def num_trained(self) -> int:
        return self.num_targets - sum(m.num_compared for m in self.whole)

    @property
    def extent(self) -> dict[str, Any]:
        documents = [m.documents for m in self.micro_batches]
        return {"documents": documents, "streams": self.streams, "others": list(self.others.values())}


@dataclass(slots=True)
class SampleChunk:
    """Rows laid end to end; int64 tensors on the compute device: `ids`, `positions` and `written` [n], `last` and
    `sequences` [w], `single` [6, s]."""

    chunk: Chunk
    """From 0 to n, in the place of one of the plan's chunks."""
    rows: list[Row]
    ids: Tensor
    positions: Tensor
    last: Tensor
    """Places of the tokens behind which logits are wanted."""
    sequences: Tensor
    """Whose they are."""
    written: Tensor
    """Rows where keys and values go."""
    single: Tensor
    """Of rows of one token: its place in the chunk, its position, and Place of the sequence."""


@dataclass(slots=True)
class SampleData:
    """A pass over new tokens of samples."""

    chunks: dict[int, SampleChunk]
    """By the plan's chunks whose places they have."""
    read: Sequence[tuple[int, int]]
    """Ranges of the rows of keys and values that are kept."""
    longest: dict[int, int]
    """Sequence -> its highest position in the pass."""
    choose: Choose | None
    """What chooses the next tokens by the logits; None: a further pass reads the rest."""
    chosen: list[int] = field(default_factory=list)


_SINGLE = 2 + len(Place._fields)
_TENSORS = len(fields(ChunkTokens))
assert _TENSORS * 8 == BYTES_PER_TOKEN, "the plan counts other bytes per token"


def _counts(micro_batches: Sequence[MicroBatch]) -> dict[str, Any]:
    return {
        "num_targets": sum(m.num_targets for m in micro_batches),
        "total_weight": sum(total_weight(m.labels, m.weights) for m in micro_batches),
    }


class BatchCarrier:
    """Brings fetched batches to the compute device: on CUDA in one copy per step, through one pinned buffer and a
    stream of its own, for which the caller waits, and no lane. A step's device memory is freed with its last tensor."""

    def __init__(self, plan: Plan, device: torch.device, *, compiled: bool = False) -> None:
        self._plan, self._chunks, self._device, self._multiple = plan, plan.chunks, device, 1
        """The last chunk of a stream is rounded up to a multiple of so many tokens."""
        if compiled:
            # Each length of a chunk is a graph of its own. So chunks end at quarters of their length only, in tiles.
            self._multiple = TILE * max(1, math.ceil(plan.max_chunk_tokens / 4 / TILE))
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            # Room for the most that a step can have, whatever its tokens are: equal sizes leave no holes behind.
            # A token of samples has five numbers in other tensors, one alone in its row more.
            more = max(0, 5 + _SINGLE - _TENSORS) * plan.problem.sequences
            self._numel = sum(chunk.end - chunk.start for chunk in plan.chunks) * _TENSORS + more
            self._pinned = pinned_empty(self._numel, torch.int64)

    def step(
        self,
        micro_batches: Sequence[MicroBatch],
        cursor: dict[str, Any],
        known: dict[str, float] | None = None,
        whole: Sequence[MicroBatch] | None = None,
    ) -> StepData:
        """`whole`: all of the step's, where these are those of one rank."""
        batch = self._batch(micro_batches)
        whole = batch["micro_batches"] if whole is None else whole
        others = {chunk.index: chunk for chunk in self._plan.others([m.filled for m in whole], self._multiple)}
        return StepData(**batch | _counts(whole), cursor=cursor, known=known or {}, whole=whole, others=others)

    def evaluation(self, micro_batches: Sequence[MicroBatch], *, with_statistics: bool = False) -> EvaluationData:
        """Of as many micro-batches as a step has, or fewer."""
        return EvaluationData(**self._batch(micro_batches), with_statistics=with_statistics)

    def samples(
        self,
        pieces: Sequence[Sequence[Row]],
        places: Sequence[Place],
        read: Sequence[tuple[int, int]],
        choose: Choose | None = None,
    ) -> SampleData:
        """A pass over rows of samples, `pieces[i]` of them in the place of chunk i, which has room for their tokens.
        `places`: of each sequence; `read`: rows of keys and values that are kept."""
        result: list[SampleChunk] = []
        tensors: list[Tensor] = []
        for chunk, rows in zip(self._chunks, pieces, strict=False):
            ends = list(itertools.accumulate(len(row.ids) for row in rows))
            assert ends[-1] <= chunk.end - chunk.start, "more tokens than the place has room for"
            lists = (
                [token for row in rows for token in row.ids],
                [position for row in rows for position in range(row.start, row.end)],
                [end - 1 for end, row in zip(ends, rows, strict=True) if row.wanted],
                [row.sequence for row in rows if row.wanted],
                [at for row in rows for kept in places[row.sequence].ranges(row.start, row.end) for at in range(*kept)],
            )
            own = [torch.tensor(values, dtype=torch.int64) for values in lists]
            pairs = zip(ends, rows, strict=True)
            singles = [(end - 1, row.start, *places[row.sequence]) for end, row in pairs if len(row.ids) == 1]
            own.append(torch.tensor(singles, dtype=torch.int64).view(-1, _SINGLE).t().contiguous())
            result.append(SampleChunk(replace(chunk, start=0, end=ends[-1]), list(rows), *own))
            tensors += own
        if self._device.type == "cuda":
            there = iter(self._to_device(tensors))
            result = [SampleChunk(one.chunk, one.rows, *itertools.islice(there, len(own))) for one in result]
        longest: dict[int, int] = {}
        for row in itertools.chain.from_iterable(pieces):
            longest[row.sequence] = max(longest.get(row.sequence, 0), row.end - 1)
        return SampleData({one.chunk.index: one for one in result}, read, longest, choose)

    def _batch(self, micro_batches: Sequence[MicroBatch]) -> dict[str, Any]:
        streams = self._plan.filled_streams([m.filled for m in micro_batches], self._multiple)
        cut = list(own(streams))
        tokens = self._carry(micro_batches, cut)
        pinned = self._device.type == "cuda"
        of_streams = [m.images.pin() if m.images is not None and pinned else m.images for m in micro_batches]
        parts = {c.index: i.part(c.start, c.end) for c in cut if (i := of_streams[c.micro_batch]) is not None}
        return {
            "micro_batches": [replace(m, images=i) for m, i in zip(micro_batches, of_streams, strict=True)],
            "streams": streams,
            "by_ordinal": {(chunk.micro_batch, chunk.ordinal): chunk for stream in streams for chunk in stream},
            "cut": {chunk.index: chunk for chunk in cut},
            "chunks": {chunk.index: of_chunk for chunk, of_chunk in zip(cut, tokens, strict=True)},
            "images": {index: part for index, part in parts.items() if part is not None},
            **_counts(micro_batches),
        }

    def _carry(self, micro_batches: Sequence[MicroBatch], cut: Sequence[Chunk]) -> list[ChunkTokens]:
        chunks = []
        for chunk in cut:
            batch, tokens = micro_batches[chunk.micro_batch], slice(chunk.start, chunk.end)
            weights = None if batch.weights is None else batch.weights[tokens]
            chunks.append(ChunkTokens.of(batch.ids[tokens], batch.labels[tokens], batch.positions[tokens], weights))
        if self._device.type != "cuda":
            return chunks
        there = self._to_device([tensor for of_chunk in chunks for tensor in of_chunk.tensors()])
        return [ChunkTokens.of_tensors(there[i : i + _TENSORS]) for i in range(0, len(there), _TENSORS)]

    def _to_device(self, tensors: list[Tensor]) -> list[Tensor]:
        """int64 tensors of the host on CUDA, in one copy."""
        sizes = [tensor.numel() for tensor in tensors]
        used = sum(sizes)
        torch.cat([tensor.flatten() for tensor in tensors], out=self._pinned[:used])
        with torch.cuda.stream(self._stream):
            flat = torch.empty(self._numel, dtype=torch.int64, device=self._device)
            flat[:used].copy_(self._pinned[:used], non_blocking=True)
        self._stream.synchronize()
        parts = flat[:used].split(sizes)
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
