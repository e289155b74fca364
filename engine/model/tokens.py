"""The tokens of a chunk, with what an op would otherwise have to ask the device for, which would stop the compute lane:
which rows have a target, which token ids occur."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch
from torch import Tensor

from penstock.engine.attention.spans import prefixes_of
from penstock.engine.model.images import Images

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


Tokens = Sequence[int] | Tensor
"""int64 [length]."""


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one micro-batch laid end to end into one stream of T tokens (rows x sequence length)."""

    ids: Tensor
    """[T] int64 token ids."""
    labels: Tensor
    """[T] int64: the document's next token, or -100 where there is none (a document's last token, padding)."""
    positions: Tensor
    """[T] int64, counted from 0 in every document of the stream, or from the end of its prefix."""
    documents: list[int]
    """Sorted stream offsets where a document starts; the first is 0. Padding at the stream's end is one as well. As
    `Documents` with the prefixes of those that go on from an earlier one's beginning, which they do not repeat."""
    num_targets: int
    """Labels that are not -100."""
    lengths: list[int]
    """Tokens of each document, padding and prefix excluded."""
    weights: Tensor | None = None
    """[T] float32: how much the loss of each label counts, above 0 where there is one; None: 1 for all."""
    filled: int | None = None
    """Tokens of the stream before its padding, all of which is at the end; None: there is none."""
    sources: list[int] = field(default_factory=list)
    """Where in the corpus each document's first token is, as many as `lengths`; none where they are of no corpus."""
    pictured: list[tuple[int, int, range]] = field(default_factory=list)
    """(start, end, numbers of its images in the corpus) of each document that has some."""
    images: Images | None = None
    """What the text model is given of them; None: they have not been looked at, or there are none."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """Name -> float64 [documents without padding]: what an objective knows of each (objectives/sequences.py)."""
    target_columns: Mapping[str, Tensor] = field(default_factory=dict)
    """Name -> float64 [T]: what an objective knows of each label."""
    num_compared: int = 0
    """Of the targets, those that no loss falls on: their likelihood alone is needed."""
    prompts: Tensor | None = None
    """[T] bool: labels that are tokens of prompts, for objectives that train these too; None: there are none."""

    @property
    def num_filled(self) -> int:
        """Tokens of the stream before its padding."""
        return len(self.ids) if self.filled is None else self.filled

    @property
    def continued(self) -> list[tuple[int, int]]:
        """Tokens of the prefix, and of the document, of each that has one."""
        lengths = dict(zip(self.documents, self.lengths, strict=False))
        return [(prefix.end - prefix.first, lengths[prefix.document]) for prefix in prefixes_of(self.documents)]

    @staticmethod
    def of(documents: Sequence[Tokens], labels: Sequence[Tokens] | None = None) -> MicroBatch:
        """Token ids of `documents` laid end to end. `labels`: of each of them, as many; None: its next tokens."""
        if labels is None:
            labels = [[*document[1:], IGNORE_LABEL] for document in documents]
        lengths = [len(document) for document in documents]
        ids, joined = (torch.cat([torch.as_tensor(each) for each in some]) for some in (documents, labels))
        return MicroBatch(
            ids=ids,
            labels=joined,
            positions=torch.cat([torch.arange(length) for length in lengths]),
            documents=[0, *itertools.accumulate(lengths[:-1])],
            num_targets=int((joined != IGNORE_LABEL).sum()),
            lengths=lengths,
            filled=sum(lengths),
        )


def last_positions(positions: Tensor, documents: Sequence[int]) -> Tensor:
    """For each token of a stream the last position of its document, int64 [T]; of its positions [T] and `documents`."""
    bounds = torch.tensor([*documents, len(positions)])
    return positions[bounds[1:] - 1].repeat_interleave(bounds.diff())


def chunk_ranges(stream: MicroBatch, chunk_tokens: int | None) -> list[tuple[int, int]]:
    """Token ranges of the chunks of `stream`: of so many tokens, the last maybe of fewer; None: of a document each."""
    total = stream.ids.shape[0]
    starts = stream.documents if chunk_tokens is None else range(0, total, chunk_tokens)
    return list(zip(starts, [*starts[1:], total], strict=True))
