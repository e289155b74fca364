"""Batches: documents laid end to end into rows of the context's length, in a resumable order."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.corpus import TokenCorpus
from storage.errors import UserError

IGNORE_LABEL = -100
"""Label of a token that is not trained on."""


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


class DataLoader:
    """An endless stream of optimizer steps' batches from a tokenised corpus.

    Documents longer than a row are cut into pieces of a row's length, each a document of its own: positions restart
    and attention does not reach back, but no token and no target is lost. Documents and pieces come in an order
    shuffled by (seed, epoch), so that consecutive steps do not read one long document, and are laid end to end into
    rows of `sequence_length` tokens; one that crosses a row's end goes on in the next row as a document of its own.
    Nothing is padded, except with `one_document_per_row` (models that carry a state from token to token): then a row
    holds one document or piece, followed by end-of-text padding that is not trained on.

    `num_split_documents` counts the corpus's documents that are longer than a row and so cannot be seen whole.

    Raises UserError when the corpus holds a token id that is not below `vocab_size`.
    """

    def __init__(
        self,
        corpus: TokenCorpus,
        *,
        vocab_size: int,
        sequence_length: int,
        sequences_per_step: int,
        sequences_per_micro_batch: int = 1,
        seed: int = 0,
        one_document_per_row: bool = False,
    ) -> None:
        corpus.require_vocabulary(vocab_size)
        assert sequences_per_step % sequences_per_micro_batch == 0
        self._corpus = corpus
        self._sequence_length = sequence_length
        self._rows = sequences_per_micro_batch
        self._micro_batches = sequences_per_step // sequences_per_micro_batch
        self._seed = seed
        self._one_document_per_row = one_document_per_row
        lengths = np.diff(corpus.starts)
        self.num_split_documents = int((lengths > sequence_length).sum())
        counts = -(-lengths // sequence_length)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        number = np.arange(len(first)) - first
        self._starts = np.repeat(corpus.starts[:-1], counts) + number * sequence_length
        """First token of each piece."""
        self._document_stops = np.repeat(corpus.starts[1:], counts)
        """End of the document that each piece is cut from."""
        self._start_epoch(0)

    def _start_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._index = 0  # of the current piece in this epoch's order
        self._offset = 0  # tokens of it already given out
        # Sorting raw generator words keeps the order the same in every numpy release.
        seed = np.random.SeedSequence([self._seed, epoch])
        words = np.random.PCG64(seed).random_raw(len(self._starts))
        self._order = np.argsort(words, kind="stable")

    @property
    def cursor(self) -> dict[str, Any]:
        """Where the next step begins; JSON. `seek` with it gives exactly the steps that would have followed."""
        return {
            "corpus": self._corpus.info.content,
            "seed": self._seed,
            "epoch": self._epoch,
            "piece": self._index,
            "offset": self._offset,
        }

    def seek(self, cursor: dict[str, Any]) -> None:
        """Continue from a `cursor`. Raises UserError when it belongs to another corpus or order."""
        if cursor["corpus"] != self._corpus.info.content:
            raise UserError(
                f"{self._corpus.folder}: these are not the tokens that the run was trained on so far (content "
                f"{self._corpus.info.content[:12]}, expected {cursor['corpus'][:12]}); restore the data and tokenizer"
            )
        if cursor["seed"] != self._seed:
            raise UserError(f"data.seed: {self._seed}, but the run so far used {cursor['seed']}; set it back")
        self._start_epoch(cursor["epoch"])
        self._index = cursor["piece"]
        self._offset = cursor["offset"]

    def next_step(self) -> list[MicroBatch]:
        """The micro-batches of one optimizer step."""
        return [self._next_micro_batch() for _ in range(self._micro_batches)]

    def _next_micro_batch(self) -> MicroBatch:
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
            lengths += [stop - start for start, stop in itertools.pairwise([*starts, filled])]
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
            if self._index == len(self._order):
                self._start_epoch(self._epoch + 1)
            piece = self._order[self._index]
            document_stop = int(self._document_stops[piece])
            stop = min(int(self._starts[piece]) + self._sequence_length, document_stop)
            start = int(self._starts[piece]) + self._offset
            count = min(length - filled, stop - start)
            targets = min(count, document_stop - start - 1)
            ids[filled : filled + count] = self._corpus.tokens[start : start + count]
            labels[filled : filled + targets] = self._corpus.tokens[start + 1 : start + 1 + targets]
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
        return documents, filled
