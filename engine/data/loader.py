"""Batches: documents laid end to end into rows of the context's length, in a resumable order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.engine.config import DataConfig, Recipe, TrainConfig
from penstock.engine.data.corpus.files import TokenCorpus
from penstock.engine.data.packing import (
    Rows,
    count_rows,
    cut_pieces,
    epoch_order,
    mixture_parts,
    num_windows,
    pack_rows,
    split_documents,
    window,
)
from penstock.engine.model.spec import ModelSpec
from penstock.engine.model.tokens import IGNORE_LABEL, MicroBatch
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import is_whole, one_line


class DataLoader:
    """An endless stream of optimizer steps' batches from a tokenised corpus, or an end to it.

    What an epoch has, and in which order, is chosen by (data.seed, epoch): documents, and of those that are longer than
    a row what data.long_documents makes of them (engine.data.packing). Split ones become pieces of a row's length, each
    a document of its own: positions restart and attention does not reach back, but no token and no target is lost.

    packing `wrap`: laid end to end into rows of a context's length; one that crosses a row's end goes on in the
    next row as a document of its own. Nothing is padded, except with `one_document_per_row` (models that carry a state
    from token to token, whatever the packing): then a row holds one document or piece, followed by end-of-text padding
    that is not trained on. `best_fit` and `none`: a row is a number of documents that fit into it, whole; the rows of a
    micro-batch lie end to end without anything between them, and the padding that is left is at the stream's end.

    `documents` are the indices of those that it draws from; None: all. Not `endless`: each document of a mixture comes
    once, then rows are filled with padding. `report` says what became of documents that are longer than a row.

    Raises UserError when the corpus holds a token id that is not below `vocab_size`, and when nothing is left of it.
    """

    def __init__(
        self,
        corpus: TokenCorpus,
        data: DataConfig,
        train: TrainConfig,
        *,
        vocab_size: int,
        one_document_per_row: bool = False,
        documents: NDArray[np.int64] | None = None,
        endless: bool = True,
    ) -> None:
        corpus.require_vocabulary(vocab_size)
        self.corpus, self._data = corpus, data
        self._sequence_length = data.sequence_length
        self._rows = train.micro_batch_size
        self._micro_batches = train.global_batch_size // train.micro_batch_size
        self._one_document_per_row = one_document_per_row
        self._endless = endless
        self._packed = data.packing != "wrap" and not one_document_per_row
        documents = np.arange(corpus.info.num_documents) if documents is None else documents
        if corpus.images is not None:
            self._require_whole(corpus.images.documents, documents)
        held_out = corpus.info.num_documents - len(documents)
        self._settings: dict[str, object] = {"seed": data.seed, "validation_documents": held_out}
        self._settings |= {name: getattr(data, name) for name in ("packing", "long_documents", "order")}
        weights = data.part_weights if endless else []
        self._parts = mixture_parts(documents, corpus.info.part_documents, weights)
        starts, stops = corpus.starts[documents], corpus.starts[documents + 1]
        self._pieces = cut_pieces(starts, stops, self._sequence_length, data.long_documents, corpus.weights)
        if not len(self._pieces.starts):
            ways, then = "split or cut", ""
            if data.long_documents != "drop":
                ways, then = "split", " and their trained tokens come later"
            whose = "" if endless else " held out for validation"
            raise UserError(
                f"data.long_documents: {data.long_documents} leaves nothing, because all {len(documents):,} "
                f"documents{whose} are longer than data.sequence_length={data.sequence_length}{then}; raise it, or set "
                f"data.long_documents to {ways}"
            )
        self._start_epoch(0)
        self.report = self._pieces.report._replace(filled=self._share_filled())

    def _require_whole(self, pictured: NDArray[np.int64], documents: NDArray[np.int64]) -> None:
        """UserError unless those of the `documents` that have images come whole."""
        if self._data.packing == "wrap" and not self._one_document_per_row:
            raise UserError(
                "data.packing: wrap cuts documents at the ends of rows, and some have images; set data.packing=best_fit"
            )
        lengths = np.diff(self.corpus.starts)[np.intersect1d(pictured, documents)]
        longer = int((lengths > self._sequence_length).sum())
        if longer and self._data.long_documents != "drop":
            raise UserError(
                f"data.sequence_length: {self._sequence_length:,}, but {longer:,} documents with images are longer (up "
                f"to {int(lengths.max()):,} tokens), and those are never cut; raise it, or set data.long_documents=drop"
            )

    def _share_filled(self) -> float:
        """Share of the first epoch's rows that is tokens; of a large one about so much."""
        if not self._packed and not self._one_document_per_row:
            return 1.0
        lengths = self._pieces.tokens(self._order, self._sequence_length)
        packing = self._data.packing if self._packed else "none"
        rows = count_rows(lengths, self._sequence_length, packing, self._data.order)
        return min(1.0, int(lengths.sum()) / max(1, rows * self._sequence_length))

    def _start_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._order = epoch_order(self._pieces, self._parts, self._data.seed, epoch, self._data.order)
        self._at = (0, 0)
        """Packed: a window of documents that are packed together, and its next row; else a piece of this epoch's order,
        and its tokens that have been given out."""
        self._window_rows: tuple[NDArray[np.int64], Rows] | None = None
        self._length = len(self._order)
        """Windows, or pieces."""
        if self._packed and len(self._order):
            tokens = int(self._pieces.tokens(self._order, self._sequence_length).sum())
            self._length = num_windows(len(self._order), tokens, self._sequence_length)

    @property
    def cursor(self) -> dict[str, Any]:
        """Where the next step begins; JSON. `seek` with it gives exactly the steps that would have followed."""
        position = dict(zip(_POSITION[self._packed], self._at, strict=True))
        return {"corpus": self.corpus.info.content, "epoch": self._epoch, **position, **self._settings}

    def seek(self, cursor: dict[str, Any]) -> None:
        """Continue from a `cursor`. Raises UserError when it belongs to another corpus or order, or is none."""
        if not _is_cursor(cursor) or not self._settings.keys() <= cursor.keys():
            raise self._lost("does not contain the position in the data")
        if cursor["corpus"] != self.corpus.info.content:
            raise UserError(
                f"{self.corpus.folder}: these are not the tokens that the run has trained on so far (content "
                f"{self.corpus.info.content[:12]}, expected {cursor['corpus'][:12]}); restore the data and tokenizer"
            )
        for name, value in self._settings.items():
            if (before := cursor[name]) != value:
                raise UserError(f"data.{name}: {value}, but the run so far used {one_line(before, 40)}; set it back")
        if self._packed != ("row" in cursor):
            raise self._lost("is for rows that are filled differently")
        self._start_epoch(cursor["epoch"])
        self._at = first, second = tuple(cursor[name] for name in _POSITION[self._packed])
        most = 1 if first == self._length else 0
        if first < self._length:
            most = len(self._packed_window()[1]) if self._packed else self._piece_tokens(first)
        if second >= most:
            position = ", ".join(f"{name} {at:,}" for name, at in zip(_POSITION[self._packed], self._at, strict=True))
            raise self._lost(f"is at {position} of {self._length:,}")

    def _lost(self, why: str) -> UserError:
        return UserError(
            f"{self.corpus.folder}: the record of the generation {why}; restore the run's manifest from a copy, or "
            "resume from a checkpoint"
        )

    def _piece_tokens(self, index: int) -> int:
        """Tokens of a piece of this epoch's order."""
        piece = self._order[index]
        return min(self._sequence_length, int(self._pieces.stops[piece] - self._pieces.starts[piece]))

    @property
    def exhausted(self) -> bool:
        return not self._endless and self._epoch_ended

    @property
    def _epoch_ended(self) -> bool:
        return self._at[0] == self._length

    def next_step(self) -> list[MicroBatch]:
        return [self.next_micro_batch() for _ in range(self._micro_batches)]

    def next_micro_batch(self) -> MicroBatch:
        stream, at = _Stream(self._rows * self._sequence_length, self.corpus), 0
        for row in range(1, self._rows + 1):
            for span in self._next_trained_row():
                stream.add(at, span)
                at += span.length
            if not self._packed:
                stream.pad(at, row * self._sequence_length, self._sequence_length)
                at = row * self._sequence_length
        filled = at if at < len(stream.ids) else None
        if filled is not None:  # padding is a document of its own at position 0, and nobody looks at it
            stream.documents.append(at)
        return stream.micro_batch(filled)

    def _next_trained_row(self) -> list[_Span]:
        """The next row, leaving out rows without a target; packed ones have some."""
        row = self._next_row()
        if self.corpus.weights is not None and not self._packed:
            while not self.exhausted and not any(map(self._is_trained, row)):
                row = self._next_row()
        return row

    def _is_trained(self, span: _Span) -> bool:
        """Whether a token of a span has a target."""
        assert self.corpus.weights is not None
        return bool((self.corpus.weights[span.start + 1 : span.start + 1 + span.targets] > 0).any())

    def _next_row(self) -> list[_Span]:
        """The documents of the next row; none behind the end."""
        result: list[_Span] = []
        left = self._sequence_length
        while left and not self.exhausted:
            while self._epoch_ended:  # an epoch of a mixture may be empty
                self._start_epoch(self._epoch + 1)
            if self._packed:
                return [self._span(piece, 0, self._sequence_length) for piece in self._next_packed()]
            index, offset = self._at
            span = self._span(self._order[index], offset, left)
            result.append(span)
            left -= span.length
            done = offset + span.length
            self._at = (index + 1, 0) if done == self._piece_tokens(index) else (index, done)
            if self._one_document_per_row:
                break
        return result

    def _span(self, piece: np.int64, offset: int, most: int) -> _Span:
        """Tokens of a piece from `offset` on, at most so many."""
        begin, stop = int(self._pieces.starts[piece]), int(self._pieces.stops[piece])
        start = begin + offset
        count = min(most, min(begin + self._sequence_length, stop) - start)
        return _Span(start, count, min(count, stop - start - 1))

    def _next_packed(self) -> NDArray[np.int64]:
        """The pieces of the next row of a window."""
        members, rows = self._packed_window()
        index, row = self._at
        self._at = index, row + 1
        if row + 1 == len(rows):
            self._at, self._window_rows = (index + 1, 0), None
        return members[rows.row(row)]

    def _packed_window(self) -> tuple[NDArray[np.int64], Rows]:
        """The pieces of the present window, and the rows that they make."""
        if self._window_rows is None:
            members = self._order[window(self._at[0], self._length, len(self._order))]
            lengths = self._pieces.tokens(members, self._sequence_length)
            seed = np.random.SeedSequence([self._data.seed, self._epoch], spawn_key=(self._at[0],))
            rows = pack_rows(lengths, self._sequence_length, self._data.packing, self._data.order, seed)
            self._window_rows = members, rows
        return self._window_rows


_POSITION = {True: ("window", "row"), False: ("piece", "offset")}
"""What the two numbers of a place are called in a cursor, of packed rows and of others."""


class _Span(NamedTuple):
    """Tokens of the corpus that are a document of a row."""

    start: int
    length: int
    targets: int
    """Of them, from the first on, that have a next token to predict."""


class _Stream:
    """A micro-batch of so many tokens that is being filled: arrays of its fields, end-of-text padding where nothing is
    put in (the largest token of the corpus where that is less: any token that every model of the corpus has)."""

    def __init__(self, tokens: int, corpus: TokenCorpus) -> None:
        self.corpus = corpus
        self.ids = np.full(tokens, min(corpus.info.eos_id, corpus.info.max_token_id), dtype=np.int64)
        self.labels = np.full(tokens, IGNORE_LABEL, dtype=np.int64)
        self.positions = np.zeros(tokens, dtype=np.int64)
        self.weights = None if corpus.weights is None else np.ones(tokens, dtype=np.float32)
        """Those of the labels; 1 where there is none."""
        self.documents: list[int] = []
        self.lengths: list[int] = []
        self.sources: list[int] = []
        self.pictured: list[tuple[int, int, range]] = []

    def add(self, at: int, span: _Span) -> None:
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
        )


def _is_cursor(cursor: object) -> bool:
    if not isinstance(cursor, dict) or not isinstance(cursor.get("corpus"), str):
        return False
    positions = [cursor.get(name) for name in ("epoch", *_POSITION["row" in cursor])]
    return all(is_whole(position) and position >= 0 for position in positions)


class ValidationSet:
    """The rows on which the validation loss is measured: the same ones every time, from documents held out.

    The documents are laid end to end as in training, each once: `most` micro-batches of them, or what they fill.
    """

    def __init__(self, loader: DataLoader, *, num_documents: int, most: int) -> None:
        """`loader` is not endless.

        Raises UserError when there is no token whose likelihood could be measured.
        """
        self._loader = loader
        self._start = loader.cursor
        self._most = most
        self.num_documents = num_documents
        self.num_targets = sum(m.num_targets for micro_batches in self.passes(1) for m in micro_batches)
        if not self.num_targets:
            raise UserError(
                f"data.validation_documents: the {num_documents} held-out documents have no token to predict; hold "
                "out more"
            )

    def passes(self, per_pass: int) -> Iterator[list[MicroBatch]]:
        """The micro-batches of a validation, `per_pass` of them at a time; the last time there may be fewer."""
        self._loader.seek(self._start)
        batches = (self._loader.next_micro_batch() for _ in range(self._most) if not self._loader.exhausted)
        while result := list(itertools.islice(batches, per_pass)):
            yield result


def make_loader(corpus: TokenCorpus, spec: ModelSpec, recipe: Recipe, *, validation: bool = False) -> DataLoader:
    """The batches of a run, or of its `validation`, which end.

    Raises UserError when the corpus holds an id beyond the vocabulary, or fewer documents than are held out.
    """
    data, train, documents = recipe.data, recipe.train, None
    if data.validation_documents is not None:
        split = split_documents(corpus.info.num_documents, data.validation_documents, data.seed, data.order)
        documents = split[int(validation)]
    return DataLoader(
        corpus,
        data,
        train,
        vocab_size=spec.vocab_size,
        one_document_per_row=spec.whole_documents,
        documents=documents,
        endless=not validation,
    )


def make_validation(corpus: TokenCorpus, spec: ModelSpec, recipe: Recipe) -> ValidationSet | None:
    """What the validation loss is measured on; None where the recipe asks for none.

    Raises UserError when there is nothing to measure it on.
    """
    data, train = recipe.data, recipe.train
    if train.validate_every is None or data.validation_documents is None:
        return None
    rows = train.micro_batch_size
    return ValidationSet(
        make_loader(corpus, spec, recipe, validation=True),
        num_documents=data.validation_documents,
        most=(train.validation_sequences or train.global_batch_size) // rows,
    )
