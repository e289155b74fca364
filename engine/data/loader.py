"""Batches: documents laid end to end into rows of the context's length, in a resumable order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.engine.config import DataConfig, TrainConfig
from penstock.engine.data.corpus.files import TokenCorpus
from penstock.engine.data.packing import (
    PackingReport,
    Pieces,
    Rows,
    count_rows,
    cut_pieces,
    epoch_order,
    mixture_parts,
    num_windows,
    pack_rows,
    window,
)
from penstock.engine.data.pairs import shared_tokens
from penstock.engine.data.stream import Span, Stream
from penstock.engine.model.reward import last_token
from penstock.engine.model.sequences import totals_of
from penstock.engine.model.tokens import MicroBatch
from penstock.engine.objectives.base import OBJECTIVES, Objective
from penstock.engine.objectives.sequences import CHOSEN, MISMATCHED, REJECTED
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

    Answers that are compared (`corpus.sides`) are never cut. A pair is two documents of the stream, one behind the
    other, in one row. With `share_prompts` the second goes on from the first one's prompt, as far as they agree, and
    does not repeat it (engine/data/pairs.py). An answer with a verdict is followed, where the objective needs that, by
    one to another prompt: this prompt, and the answer of the document before. `reference`, float64 [corpus documents,
    2]: what the reference model finds of each of the two (engine/reference_logps.py); None: not known yet.

    `padding`: the token id that a reward model takes for padding (model/reward.py), which no reward is of.

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
        objective: Objective = OBJECTIVES["next_token"],
        padding: int | None = None,
        share_prompts: bool = False,
    ) -> None:
        corpus.require_vocabulary(vocab_size)
        self.corpus, self._data = corpus, data
        self._sequence_length = data.sequence_length
        self._rows = train.micro_batch_size
        self._micro_batches = train.micro_batches
        self._one_document_per_row = one_document_per_row
        self._endless = endless
        self._packed = data.packing != "wrap" and not one_document_per_row
        documents = np.arange(corpus.info.num_documents) if documents is None else documents
        self.objective, self._documents = objective, documents
        self._target = partial(last_token, padding=padding) if objective.reward_model else None
        self.reference: NDArray[np.float64] | None = None
        self.shares_prompts = share_prompts and objective.compares == "pairs"
        lengths = np.diff(corpus.starts)[documents]
        if corpus.sides is not None:
            if one_document_per_row:
                raise UserError(
                    "train.objective: this model computes one document per row, and comparing answers takes two; use "
                    "another model, or train.objective=next_token"
                )
            if objective.mismatched:
                lengths = lengths + self._mismatched_lengths(corpus.sides[documents, 0], lengths)
            self._shared = np.zeros_like(lengths)
            """[documents] how many tokens of its pair's second side each leaves out."""
            if self.shares_prompts:
                self._shared = shared_tokens(corpus, self._target)[documents]
                lengths = lengths - self._shared
            self._require_whole(lengths, "answers that are compared")
        elif corpus.images is not None:
            pictured = np.isin(documents, corpus.images.documents)
            self._require_whole(lengths[pictured], "documents with images")
        held_out = corpus.info.num_documents - len(documents)
        self._settings: dict[str, object] = {"seed": data.seed, "validation_documents": held_out}
        self._settings |= {name: getattr(data, name) for name in ("packing", "long_documents", "order")}
        weights = data.part_weights if endless else []
        self._parts = mixture_parts(documents, corpus.info.part_documents, weights)
        starts, stops = corpus.starts[documents], corpus.starts[documents + 1]
        if corpus.sides is None:
            self._pieces = cut_pieces(starts, stops, self._sequence_length, data.long_documents, corpus.weights)
        else:
            self._pieces, self._compared = _whole_pieces(starts, stops, lengths, self._sequence_length)
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
        self.num_rows, share_filled = self._count_rows()
        """Of the first epoch; of a large one about so many."""
        self.report = self._pieces.report._replace(filled=share_filled)

    def _require_whole(self, lengths: NDArray[np.int64], what: str) -> None:
        """UserError unless documents of such `lengths` come whole."""
        if self._data.packing == "wrap" and not self._one_document_per_row and len(lengths):
            raise UserError(
                f"data.packing: wrap cuts documents at the ends of rows, and there are {what}; set "
                "data.packing=best_fit"
            )
        longer = int((lengths > self._sequence_length).sum())
        if longer and self._data.long_documents != "drop":
            raise UserError(
                f"data.sequence_length: {self._sequence_length:,}, but {longer:,} {what} are longer (up to "
                f"{int(lengths.max()):,} tokens), and those are never cut; raise it, or set data.long_documents=drop"
            )

    @staticmethod
    def _mismatched_lengths(prompts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens of each document's prompt with the answer of the one before."""
        result: NDArray[np.int64] = prompts + np.roll(lengths - prompts, 1)
        return result

    def _count_rows(self) -> tuple[int, float]:
        """The first epoch's rows, and the share of them that is tokens; of a large one about so many and so much."""
        lengths = self._tokens(self._order)
        packing = self._data.packing if self._packed else "none" if self._one_document_per_row else "wrap"
        rows = count_rows(lengths, self._sequence_length, packing, self._data.order)
        if packing == "wrap":
            return rows, 1.0
        return rows, min(1.0, int(lengths.sum()) / max(1, rows * self._sequence_length))

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
            tokens = int(self._tokens(self._order).sum())
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

    def _tokens(self, pieces: NDArray[np.int64]) -> NDArray[np.int64]:
        """What pieces take of a row."""
        if self.corpus.sides is None:
            return self._pieces.tokens(pieces, self._sequence_length)
        lengths: NDArray[np.int64] = self._compared.lengths[pieces]
        return lengths

    def _piece_tokens(self, index: int) -> int:
        """Tokens of a piece of this epoch's order."""
        piece = self._order[index]
        return min(self._sequence_length, int(self._pieces.stops[piece] - self._pieces.starts[piece]))

    @property
    def ready(self) -> bool:
        """Whether `next_step` may be called now."""
        return True

    @property
    def measured(self) -> Mapping[str, float]:
        """What is known of the batches to come that a step reports, by name."""
        return {}

    def look_ahead(self, count: int) -> list[list[MicroBatch]]:
        """So many steps' batches such as come next; the loader stays where it is."""
        cursor = self.cursor
        batches = [self.next_step() for _ in range(count)]
        self.seek(cursor)
        return batches

    @property
    def exhausted(self) -> bool:
        return not self._endless and self._epoch_ended

    @property
    def _epoch_ended(self) -> bool:
        return self._at[0] == self._length

    def next_step(self) -> list[MicroBatch]:
        return [self.next_micro_batch() for _ in range(self._micro_batches)]

    def next_micro_batch(self) -> MicroBatch:
        stream, at = Stream(self._rows * self._sequence_length, self.corpus), 0
        for row in range(1, self._rows + 1):
            if self.corpus.sides is not None:
                for piece in [] if self.exhausted else self._next_pieces():
                    at = self._compare(stream, at, int(piece))
                continue
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

    def _next_trained_row(self) -> list[Span]:
        """The next row, leaving out rows without a target; packed ones have some."""
        row = self._next_row()
        if self.corpus.weights is not None and not self._packed:
            while not self.exhausted and not any(map(self._is_trained, row)):
                row = self._next_row()
        return row

    def _is_trained(self, span: Span) -> bool:
        """Whether a token of a span has a target."""
        assert self.corpus.weights is not None
        return bool((self.corpus.weights[span.start + 1 : span.start + 1 + span.targets] > 0).any())

    def _next_row(self) -> list[Span]:
        """The documents of the next row; none behind the end."""
        result: list[Span] = []
        left = self._sequence_length
        while left and not self.exhausted:
            if self._packed:
                return [self._span(piece, 0, self._sequence_length) for piece in self._next_pieces()]
            self._begin_epochs()
            index, offset = self._at
            span = self._span(self._order[index], offset, left)
            result.append(span)
            left -= span.length
            done = offset + span.length
            self._at = (index + 1, 0) if done == self._piece_tokens(index) else (index, done)
            if self._one_document_per_row:
                break
        return result

    def _span(self, piece: np.int64, offset: int, most: int) -> Span:
        """Tokens of a piece from `offset` on, at most so many."""
        begin, stop = int(self._pieces.starts[piece]), int(self._pieces.stops[piece])
        start = begin + offset
        count = min(most, min(begin + self._sequence_length, stop) - start)
        return Span(start, count, min(count, stop - start - 1))

    def _begin_epochs(self) -> None:
        """Begin the next epoch where one has ended."""
        while self._epoch_ended:  # an epoch of a mixture may be empty
            self._start_epoch(self._epoch + 1)

    def _next_pieces(self) -> NDArray[np.int64]:
        """The pieces of the next row of a window."""
        self._begin_epochs()
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
            lengths = self._tokens(members)
            seed = np.random.SeedSequence([self._data.seed, self._epoch], spawn_key=(self._at[0],))
            rows = pack_rows(lengths, self._sequence_length, self._data.packing, self._data.order, seed)
            self._window_rows = members, rows
        return self._window_rows

    def _compare(self, stream: Stream, at: int, piece: int) -> int:
        """Lay the answers of a piece at `at`, each a document; where the next one begins."""
        which = int(self._compared.which[piece])
        document, sides = int(self._documents[which]), self.corpus.sides
        assert sides is not None
        prompt, value = sides[document].tolist()
        start, stop = self.corpus.starts[document : document + 2].tolist()
        if self.objective.compares == "pairs":
            parts = [(CHOSEN, [(start, start + value)]), (REJECTED, [(start + value, stop)])]
        else:
            parts = [(CHOSEN if value else REJECTED, [(start, stop)])]
            if self.objective.mismatched:
                other = int(self._documents[which - 1])
                answer = int(self.corpus.starts[other]) + int(sides[other, 0]), int(self.corpus.starts[other + 1])
                parts.append((MISMATCHED, [(start, start + prompt), answer]))
        for number, (side, ranges) in enumerate(parts):
            reference = None if self.reference is None else float(self.reference[document, number])
            prompts = self.objective.prompts and side == CHOSEN
            at += stream.add_answer(
                at,
                ranges,
                side=side,
                reference=reference,
                prompts=prompts,
                target=self._target,
                shared=int(self._shared[which]) if side == REJECTED else 0,
            )
        return at


_POSITION = {True: ("window", "row"), False: ("piece", "offset")}
"""What the two numbers of a place are called in a cursor, of packed rows and of others."""


class _Compared(NamedTuple):
    """Pieces of answers that are compared, a document of the corpus each."""

    which: NDArray[np.int64]
    """[pieces] places in the loader's documents."""
    lengths: NDArray[np.int64]
    """[pieces] tokens that all of its answers take of a row."""


def _whole_pieces(
    starts: NDArray[np.int64], stops: NDArray[np.int64], lengths: NDArray[np.int64], capacity: int
) -> tuple[Pieces, _Compared]:
    """Those of documents [documents] whose `lengths` fit into a row, each a piece."""
    fits = lengths <= capacity
    first = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(fits)])
    report = PackingReport(dropped=int((~fits).sum()))
    return Pieces(starts[fits], stops[fits], first, report), _Compared(np.flatnonzero(fits), lengths[fits])


def require_kind(corpus: TokenCorpus, train: TrainConfig, objective: Objective) -> None:
    """UserError where the data are not what the objective takes."""
    given, wanted = corpus.comparison, objective.compares
    if given == wanted:
        return
    what = {"": "texts", "pairs": "pairs of answers", "unpaired": "answers with a verdict each"}
    what["prompts"] = "prompts alone"
    takes = [name for name, other in OBJECTIVES.items() if other.compares == given]
    apart = (given, wanted) == ("pairs", "unpaired")
    raise UserError(
        f"train.objective: {train.objective} takes {what[wanted]}, and the data are {what[given]}; set it to one of "
        f"{', '.join(takes)}, or "
        + ("set data.source=unpaired_preference, which takes them apart" if apart else "give other data")
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
        batches = [batch for some in self.passes(1) for batch in some]
        self.num_targets = sum(batch.num_targets for batch in batches)
        self.totals, self.num_rows = totals_of(batches, loader.objective), loader.num_rows
        if not self.num_targets:
            raise UserError(
                f"data.validation_documents: the {num_documents} held-out documents have no token to predict; hold "
                "out more"
            )

    def set_reference(self, values: NDArray[np.float64]) -> None:
        """Give what the reference model finds of the corpus' answers, as to a `DataLoader`."""
        self._loader.reference = values

    def passes(self, per_pass: int) -> Iterator[list[MicroBatch]]:
        """The micro-batches of a validation, `per_pass` of them at a time; the last time there may be fewer."""
        self._loader.seek(self._start)
        batches = (self._loader.next_micro_batch() for _ in range(self._most) if not self._loader.exhausted)
        while result := list(itertools.islice(batches, per_pass)):
            yield result
