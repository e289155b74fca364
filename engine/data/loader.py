"""Batches: documents laid end to end into rows of the context's length, in a resumable order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine.data.corpus_files import TokenCorpus
from penstock.engine.model.tokens import IGNORE_LABEL
from penstock.storage.errors import UserError
from penstock.storage.untrusted import is_whole


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one micro-batch laid end to end into one stream of T tokens (rows x sequence length)."""

    ids: Tensor
    """[T] int64 token ids."""
    labels: Tensor
    """[T] int64: the document's next token, or -100 where there is none (a document's last token, padding)."""
    positions: Tensor
    """[T] int64, counted from 0 in every document of the stream."""
    documents: list[int]
    """Sorted stream offsets where a document starts; the first is 0, and every row starts one."""
    num_targets: int
    """Labels that are not -100."""
    lengths: list[int]
    """Tokens of each document, padding excluded."""
    max_position: int
    """The largest of `positions`."""
    weights: Tensor | None = None
    """[T] float32: how much the loss of each label counts, above 0 where there is one; None: 1 for all."""
    filled: int | None = None
    """Tokens of the stream before its padding, all of which is at the end; None: there is none."""


def split_documents(num_documents: int, held_out: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sorted indices of the documents to train on, and of the `held_out` ones for validation, which `seed` chooses.

    Raises UserError when none is left to train on.
    """
    if held_out >= num_documents:
        raise UserError(
            f"data.validation_documents: {held_out}, but the corpus has {num_documents} documents, of which at least "
            "one must be left to train on; hold out fewer"
        )
    order = _shuffled(np.random.SeedSequence(seed, spawn_key=(0,)), num_documents)
    return np.sort(order[held_out:]), np.sort(order[:held_out])


def _shuffled(seed: np.random.SeedSequence, count: int) -> NDArray[np.int64]:
    """The numbers below `count` in random order, the same in every numpy release: raw generator words are sorted."""
    return np.argsort(np.random.PCG64(seed).random_raw(count), kind="stable")


class DataLoader:
    """An endless stream of optimizer steps' batches from a tokenised corpus, or an end to it.

    Documents longer than a row are cut into pieces of a row's length, each a document of its own: positions restart
    and attention does not reach back, but no token and no target is lost. Documents and pieces come in an order
    shuffled by (seed, epoch), so that consecutive steps do not read one long document, and are laid end to end into
    rows of `sequence_length` tokens; one that crosses a row's end goes on in the next row as a document of its own.
    Nothing is padded, except with `one_document_per_row` (models that carry a state from token to token): then a row
    holds one document or piece, followed by end-of-text padding that is not trained on.

    `documents` are the indices of those that it draws from; None: all. Not `endless`: after one epoch rows are filled
    with padding. `num_split_documents` counts the documents that are longer than a row and so cannot be seen whole.

    Raises UserError when the corpus holds a token id that is not below `vocab_size`.
    """

    def __init__(
        self,
        corpus: TokenCorpus,
        *,
        vocab_size: int,
        sequence_length: int,
        global_batch_size: int,
        micro_batch_size: int = 1,
        seed: int = 0,
        one_document_per_row: bool = False,
        documents: NDArray[np.int64] | None = None,
        endless: bool = True,
    ) -> None:
        corpus.require_vocabulary(vocab_size)
        assert global_batch_size % micro_batch_size == 0
        self._corpus = corpus
        self._sequence_length = sequence_length
        self._rows = micro_batch_size
        self._micro_batches = global_batch_size // micro_batch_size
        self._seed = seed
        self._one_document_per_row = one_document_per_row
        self._endless = endless
        starts, stops = corpus.starts[:-1], corpus.starts[1:]
        self._held_out = 0
        if documents is not None:
            self._held_out = len(starts) - len(documents)
            starts, stops = starts[documents], stops[documents]
        lengths = stops - starts
        self.num_split_documents = int((lengths > sequence_length).sum())
        counts = -(-lengths // sequence_length)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        number = np.arange(len(first)) - first
        self._starts = np.repeat(starts, counts) + number * sequence_length
        """First token of each piece."""
        self._document_stops = np.repeat(stops, counts)
        """End of the document that each piece is cut from."""
        self._start_epoch(0)

    def _start_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._index = 0  # of the current piece in this epoch's order
        self._offset = 0  # tokens of it already given out
        self._order = _shuffled(np.random.SeedSequence([self._seed, epoch]), len(self._starts))

    @property
    def cursor(self) -> dict[str, Any]:
        """Where the next step begins; JSON. `seek` with it gives exactly the steps that would have followed."""
        return {
            "corpus": self._corpus.info.content,
            "seed": self._seed,
            "held_out": self._held_out,
            "epoch": self._epoch,
            "piece": self._index,
            "offset": self._offset,
        }

    def seek(self, cursor: dict[str, Any]) -> None:
        """Continue from a `cursor`. Raises UserError when it belongs to another corpus or order, or is none."""
        if not _is_cursor(cursor):
            raise self._lost("does not say where in the data it is")
        if cursor["corpus"] != self._corpus.info.content:
            raise UserError(
                f"{self._corpus.folder}: these are not the tokens that the run was trained on so far (content "
                f"{self._corpus.info.content[:12]}, expected {cursor['corpus'][:12]}); restore the data and tokenizer"
            )
        if cursor["seed"] != self._seed:
            raise UserError(f"data.seed: {self._seed}, but the run so far used {cursor['seed']}; set it back")
        if (held_out := cursor.get("held_out", 0)) != self._held_out:
            raise UserError(
                f"data.validation_documents: {self._held_out}, but the run so far held out {held_out}; set it back"
            )
        self._start_epoch(cursor["epoch"])
        piece, offset = cursor["piece"], cursor["offset"]
        left = 1 if piece == len(self._order) else self._piece_tokens(piece) if piece < len(self._order) else 0
        if offset >= left:
            raise self._lost(f"is at token {offset:,} of piece {piece:,}, and there are {len(self._order):,} pieces")
        self._index, self._offset = piece, offset

    def _lost(self, why: str) -> UserError:
        return UserError(
            f"{self._corpus.folder}: the record of the generation {why}; restore the run's manifest from a copy, or "
            "go on from a checkpoint"
        )

    def _piece_tokens(self, index: int) -> int:
        """Tokens of a piece of this epoch's order."""
        piece = self._order[index]
        return min(self._sequence_length, int(self._document_stops[piece]) - int(self._starts[piece]))

    @property
    def exhausted(self) -> bool:
        return not self._endless and self._index == len(self._order)

    def next_step(self) -> list[MicroBatch]:
        return [self.next_micro_batch() for _ in range(self._micro_batches)]

    def next_micro_batch(self) -> MicroBatch:
        length = self._sequence_length
        ids = np.full(self._rows * length, self._corpus.info.eos_id, dtype=np.int64)
        labels = np.full(self._rows * length, IGNORE_LABEL, dtype=np.int64)
        positions = np.zeros(self._rows * length, dtype=np.int64)
        documents: list[int] = []
        lengths: list[int] = []
        for row_start in range(0, self._rows * length, length):
            row = slice(row_start, row_start + length)
            starts, filled = self._fill_row(ids[row], labels[row], positions[row])
            documents += [row_start + start for start in starts]
            lengths += [stop - start for start, stop in itertools.pairwise([*starts, filled]) if stop > start]
        return MicroBatch(
            ids=torch.from_numpy(ids),
            labels=torch.from_numpy(labels),
            positions=torch.from_numpy(positions),
            documents=documents,
            num_targets=int((labels != IGNORE_LABEL).sum()),
            lengths=lengths,
            max_position=int(positions.max()),
        )

    def _fill_row(
        self, ids: NDArray[np.int64], labels: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> tuple[list[int], int]:
        """Fill one row's views in place; returns its documents' starts and the number of tokens put in."""
        length = len(ids)
        documents: list[int] = []
        filled = 0
        while filled < length:
            if self.exhausted:
                break
            if self._index == len(self._order):
                self._start_epoch(self._epoch + 1)
            piece = self._order[self._index]
            document_stop = int(self._document_stops[piece])
            stop = min(int(self._starts[piece]) + self._sequence_length, document_stop)
            start = int(self._starts[piece]) + self._offset
            count = min(length - filled, stop - start)
            targets = min(count, document_stop - start - 1)
            tokens = self._corpus.tokens[start : start + max(count, targets + 1)]
            ids[filled : filled + count] = tokens[:count]
            labels[filled : filled + targets] = tokens[1 : 1 + targets]
            positions[filled:] = np.arange(length - filled)
            documents.append(filled)
            filled += count
            if start + count == stop:
                self._index += 1
                self._offset = 0
            else:
                self._offset += count
            if self._one_document_per_row:
                break
        if not documents:
            documents.append(0)
            positions[:] = np.arange(length)
        return documents, filled


def _is_cursor(cursor: object) -> bool:
    if not isinstance(cursor, dict) or not isinstance(cursor.get("corpus"), str) or "seed" not in cursor:
        return False
    places = [cursor.get(name) for name in ("epoch", "piece", "offset")]
    return all(isinstance(place, int) and is_whole(place) and place >= 0 for place in places)


class ValidationSet:
    """The rows on which the validation loss is measured: the same ones every time, from documents held out.

    The documents are laid end to end as in training, each once: `most` micro-batches of them, or what they fill.
    """

    def __init__(self, loader: DataLoader, *, num_documents: int, most: int, per_pass: int) -> None:
        """`loader` is not endless; `per_pass` of its micro-batches are looked at together.

        Raises UserError when there is no token whose likelihood could be measured.
        """
        self._loader = loader
        self._start = loader.cursor
        self._most, self._per_pass = most, per_pass
        self.num_documents = num_documents
        self.num_micro_batches = self.num_targets = 0
        for micro_batches_of_pass in self.passes():
            self.num_micro_batches += len(micro_batches_of_pass)
            self.num_targets += sum(m.num_targets for m in micro_batches_of_pass)
        if not self.num_targets:
            raise UserError(
                f"data.validation_documents: the {num_documents} documents held out have no token that follows "
                "another; hold out more"
            )

    def passes(self) -> Iterator[list[MicroBatch]]:
        """The micro-batches of a validation, as many at a time as a step has; the last time there may be fewer."""
        self._loader.seek(self._start)
        left = self._most
        while left and not self._loader.exhausted:
            found: list[MicroBatch] = []
            while left and len(found) < self._per_pass and not self._loader.exhausted:
                found.append(self._loader.next_micro_batch())
                left -= 1
            yield found
