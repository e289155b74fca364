"""A micro-batch that is being filled: documents laid end to end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.engine.attention.spans import Documents, Prefix
from penstock.engine.data.corpus.files import TokenCorpus
from penstock.engine.model.tokens import IGNORE_LABEL, MicroBatch
from penstock.engine.objectives.sequences import MISMATCHED, REFERENCE, SIDE


class Span(NamedTuple):
    """Tokens of the corpus that are a document of a row."""

    start: int
    length: int
    targets: int
    """Of them, from the first on, that have a next token to predict."""


class Stream:
    """A micro-batch of so many tokens that is being filled: arrays of its fields, end-of-text padding where nothing is
    put in (the largest token of the corpus where that is less: any token that every model of the corpus has)."""

    def __init__(self, tokens: int, corpus: TokenCorpus) -> None:
        self.corpus = corpus
        self.ids = np.full(tokens, min(corpus.info.eos_id, corpus.info.max_token_id), dtype=np.int64)
        self.labels = np.full(tokens, IGNORE_LABEL, dtype=np.int64)
        self.positions = np.zeros(tokens, dtype=np.int64)
        self.weights = None if corpus.weights is None else np.ones(tokens, dtype=np.float32)
        """Those of the labels; 1 where there is none."""
        self.documents = Documents()
        self.lengths: list[int] = []
        self.sources: list[int] = []
        self.pictured: list[tuple[int, int, range]] = []
        self.prompts = np.zeros(tokens, dtype=np.bool_)
        self.columns: dict[str, list[float]] = {}
        self.compared = 0
        self.target_columns: dict[str, NDArray[np.float64]] = {}

    def add(self, at: int, span: Span) -> None:
        """Lay tokens of the corpus at `at`: a document."""
        start, count, targets = span
        tokens = self.corpus.tokens[start : start + max(count, targets + 1)]
        self.ids[at : at + count] = tokens[:count]
        self.positions[at : at + count] = np.arange(count)
        labels = self.labels[at : at + targets]
        labels[:] = tokens[1 : 1 + targets]
        if self.corpus.weights is not None and self.weights is not None:
            weights = self.corpus.weights[start + 1 : start + 1 + targets]
            labels[weights == 0] = IGNORE_LABEL
            self.weights[at : at + targets] = np.where(weights == 0, 1, weights)
        self.documents.append(at)
        self.lengths.append(count)
        self.sources.append(start)
        images = self.corpus.images
        if images is not None and (numbers := images.of_document(self.corpus.document_at(start))):
            self.pictured.append((at, at + count, numbers))

    def add_answer(
        self,
        at: int,
        ranges: list[tuple[int, int]],
        *,
        side: int,
        reference: float | None,
        prompts: bool,
        target: Callable[[NDArray[np.int64]], int] | None,
        shared: int = 0,
    ) -> int:
        """Lay tokens of some ranges of the corpus at `at`, a document; how many they are. `prompts`: those of weight 0
        are targets too, told apart. With a `target` the one token that it says is all that has one: itself. The first
        `shared` tokens, none of which has a target, are left out: it goes on from those of the document before."""
        assert self.corpus.weights is not None
        assert self.weights is not None
        ids = np.concatenate([self.corpus.tokens[start:stop] for start, stop in ranges]).astype(np.int64)
        weights = np.concatenate([self.corpus.weights[start:stop] for start, stop in ranges])[1:]
        count, targets = len(ids) - shared, slice(at, at + len(ids) - shared - 1)
        self.ids[at : at + count] = ids[shared:]
        self.positions[at : at + count] = np.arange(shared, len(ids))
        if target is not None:
            place = target(ids)
            self.labels[at + place - shared] = ids[place]
        else:
            self.labels[targets] = np.where((weights > 0) | prompts, ids[1:], IGNORE_LABEL)[shared:]
            self.weights[targets] = np.where(weights == 0, 1, weights)[shared:]
            self.prompts[targets] = ((weights == 0) & prompts)[shared:]
        if shared:
            first = self.documents[-1]
            self.documents.prefixes.append(Prefix(at, first, first + shared))
        self.documents.append(at)
        self.lengths.append(count)
        self.sources.append(ranges[0][0] + shared)
        self.columns.setdefault(SIDE, []).append(side)
        self.compared += (side == MISMATCHED) * int((self.labels[targets] != IGNORE_LABEL).sum())
        if reference is not None:
            self.columns.setdefault(REFERENCE, []).append(reference)
        return count

    def add_tokens(
        self,
        at: int,
        ids: NDArray[np.int64],
        labels: NDArray[np.int64],
        source: int,
        columns: Mapping[str, float],
        of_targets: Mapping[str, tuple[int, Sequence[float]]],
        begins: tuple[int, int] | None = None,
    ) -> int:
        """Lay tokens at `at`, a document that begins with those of the corpus at `source`; how many they are.
        `of_targets`: name -> where the values of its labels begin, and these. `begins`: (start of a document that is
        laid, number) of the tokens from which it goes on; they are left out, and none has a target."""
        beside, shared = begins or (0, 0)
        count = len(ids) - shared
        self.ids[at : at + count], self.labels[at : at + count] = ids[shared:], labels[shared:]
        self.positions[at : at + count] = np.arange(shared, len(ids))
        if shared:
            self.documents.prefixes.append(Prefix(at, beside, beside + shared))
        self.documents.append(at)
        self.lengths.append(count)
        self.sources.append(source + shared)
        for name, value in columns.items():
            self.columns.setdefault(name, []).append(value)
        for name, (first, values) in of_targets.items():
            column = self.target_columns.setdefault(name, np.zeros(len(self.ids)))
            column[at + first - shared : at + first - shared + len(values)] = values
        return count

    def pad(self, at: int, end: int, length: int) -> None:
        """Let the padding from `at` to the `end` of a row of that `length` belong to its last document, or be one."""
        if at == end - length:
            self.documents.append(at)
        begin = self.documents[-1]
        self.positions[begin:end] = np.arange(end - begin)

    def micro_batch(self, filled: int | None) -> MicroBatch:
        weighted = self.weights is not None and bool((self.weights != 1).any())
        return MicroBatch(
            ids=torch.from_numpy(self.ids),
            labels=torch.from_numpy(self.labels),
            positions=torch.from_numpy(self.positions),
            documents=self.documents,
            num_targets=int((self.labels != IGNORE_LABEL).sum()),
            lengths=self.lengths,
            weights=torch.from_numpy(self.weights) if weighted else None,
            filled=filled,
            sources=self.sources,
            pictured=self.pictured,
            columns={name: torch.tensor(values, dtype=torch.float64) for name, values in self.columns.items()},
            target_columns={name: torch.from_numpy(values) for name, values in self.target_columns.items()},
            num_compared=self.compared,
            prompts=torch.from_numpy(self.prompts) if self.prompts.any() else None,
        )
