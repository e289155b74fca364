"""Which documents an epoch has, in which order, and which rows they are laid into: pure functions of their lengths.

The same numbers come out in every numpy release: only raw generator words, stable sorts and whole numbers are used.
Packing looks at a window of documents at a time, so a corpus of any size begins at once. Best fit takes n log n steps
for the n documents of a window: a million documents, in about a hundred windows, take one to two seconds on one core.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.engine.config import DataConfig
from penstock.engine.data.corpus.files import TokenCorpus
from penstock.engine.data.corpus.spans import SpanFile
from penstock.storage.files.errors import UserError

Packing = Literal["wrap", "best_fit", "none"]
LongDocuments = Literal["split", "cut", "drop"]
Order = Literal["shuffled", "kept"]
Indices = NDArray[np.int64]

WINDOW_DOCUMENTS = 1 << 13
"""Documents that are packed together, at least: with fewer there is less to choose from."""
WINDOW_ROWS = 256
"""Rows that a window fills, at least: its last one stays partly empty."""
_OPEN_ROWS = 16
"""Rows that are open at once where documents keep their order: as far as one may come before another."""
_LOOKED_AT = 64
"""Windows of a large epoch that `count_rows` packs."""
_ROW_BITS = 32
_COUNTED_TOKENS = 1 << 23
"""Of which weights are read at once."""


class PackingReport(NamedTuple):
    """What became of the documents that are longer than a row, and how full the rows are."""

    split: int = 0
    cut: int = 0
    dropped: int = 0
    untrained: int = 0
    """Parts of such documents that are left out, as none of their tokens is trained."""
    filled: float = 1.0
    """Share of the first epoch's rows that is tokens of documents."""

    def words(self) -> str:
        """Of a sentence about the data; empty where there is nothing to say."""
        counts = (("split", self.split), ("cut to it", self.cut), ("left out", self.dropped))
        said = [f", {count:,} longer than the context and {what}" for what, count in counts if count]
        if self.untrained:
            said.append(f", {self.untrained:,} parts of those without a trained token left out")
        return "".join(said) + (f", rows {self.filled:.1%} filled" if self.filled < 1 else "")


@dataclass(frozen=True, slots=True)
class Pieces:
    """What is laid into rows: documents, and parts of those that are longer than a row, in the corpus' order."""

    starts: Indices
    """[pieces] the first token of each."""
    stops: Indices
    """[pieces] the end of the tokens that may be its targets: a part of a document has a row's length, and the target
    of its last token is the next part's first."""
    first: Indices
    """[documents + 1] each document's first piece."""
    report: PackingReport

    def tokens(self, pieces: Indices, capacity: int) -> Indices:
        """The number of tokens of these pieces."""
        lengths: Indices = self.stops[pieces] - self.starts[pieces]
        return np.minimum(lengths, capacity)


def shuffled(seed: np.random.SeedSequence, count: int) -> Indices:
    """The numbers below `count` in random order, the same in every numpy release: raw generator words are sorted."""
    return np.argsort(np.random.PCG64(seed).random_raw(count), kind="stable")


def count_trained(weights: SpanFile, starts: Indices, stops: Indices) -> Indices:
    """[ranges] tokens that count as targets in the ranges from the ascending `starts` to `stops`."""
    result = np.zeros(len(starts), dtype=np.int64)
    first = 0
    while first < len(starts):
        begin = int(starts[first])
        last = max(first + 1, int(np.searchsorted(starts, begin + _COUNTED_TOKENS)))
        counted = weights[begin : max(begin, int(stops[first:last].max()))] > 0
        sums = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counted)])
        result[first:last] = sums[np.maximum(stops, starts)[first:last] - begin] - sums[starts[first:last] - begin]
        first = last
    return result


def cut_pieces(
    starts: Indices, stops: Indices, capacity: int, how: LongDocuments, weights: SpanFile | None = None
) -> Pieces:
    """The pieces of documents from `starts` to `stops` [documents], none longer than `capacity` tokens.

    Of a longer document, pieces without a target that counts by `weights` are left out: they train nothing.
    """
    long = stops - starts > capacity
    if how == "cut":
        stops = np.minimum(stops, starts + capacity)
    counts = -((starts - stops) // capacity)
    if how == "drop":
        counts = np.where(long, 0, counts)
    report = PackingReport(**{{"drop": "dropped"}.get(how, how): int(long.sum())})
    first = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
    number = np.arange(first[-1]) - np.repeat(first[:-1], counts)
    begins, ends = np.repeat(starts, counts) + number * capacity, np.repeat(stops, counts)
    if weights is not None and long.any():
        used_pieces = np.ones(len(begins), dtype=bool)
        of_long = np.repeat(long, counts)
        targets = begins[of_long] + 1
        used_pieces[of_long] = count_trained(weights, targets, np.minimum(ends[of_long], targets + capacity)) > 0
        before = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(used_pieces)])
        begins, ends, first = begins[used_pieces], ends[used_pieces], before[first]
        report = report._replace(untrained=int((~used_pieces).sum()))
    return Pieces(begins, ends, first, report)


class Part(NamedTuple):
    """Documents of a mixture that come `weight` times an epoch: those from `first` up to `stop`."""

    first: int
    stop: int
    weight: float


def mixture_parts(documents: Indices, part_documents: Sequence[int], weights: Sequence[float]) -> list[Part]:
    """The parts of a corpus whose `part_documents` follow one another, as places in the ascending `documents` of it."""
    ends = np.searchsorted(documents, np.cumsum([0, *part_documents])).tolist()
    return [Part(ends[i], ends[i + 1], weight) for i, weight in enumerate(weights)]


def _drawn(part: Part, number: int, seed: int, epoch: int) -> Indices:
    """The documents of a part that an epoch has, ascending.

    It is gone through in its own order, `weight` times an epoch: none comes more than once more than another.
    """
    count = part.stop - part.first
    begin, end = (round(Fraction(repr(part.weight)) * count * at) for at in (epoch, epoch + 1))
    if end - begin == count:
        return np.arange(part.first, part.stop)
    order = shuffled(np.random.SeedSequence(seed, spawn_key=(1, number)), count)
    return part.first + np.sort(order[np.arange(begin, end) % max(1, count)])


def epoch_order(pieces: Pieces, parts: Sequence[Part], seed: int, epoch: int, order: Order) -> Indices:
    """The pieces of an epoch in the order in which they are taken. No `parts`: every piece comes once."""
    chosen: Indices | None = None
    if parts:
        documents = np.concatenate([_drawn(part, number, seed, epoch) for number, part in enumerate(parts)])
        counts = np.diff(pieces.first)[documents]
        ends = np.cumsum(counts)
        chosen = np.repeat(pieces.first[documents] - (ends - counts), counts) + np.arange(ends[-1] if len(ends) else 0)
    count = len(pieces.starts) if chosen is None else len(chosen)
    if order == "kept":
        return np.arange(count) if chosen is None else chosen
    positions = shuffled(np.random.SeedSequence([seed, epoch]), count)
    return positions if chosen is None else chosen[positions]


def best_fit(lengths: Indices, capacity: int) -> list[int]:
    """The row of each document: the longest first, each into the row that it leaves the least space in."""
    rows = [0] * len(lengths)
    open_rows: list[int] = []  # ascending: the space left in a row, and behind it in the low bits the row
    count = 0
    order = np.argsort(-lengths, kind="stable")
    for document, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        at = bisect_left(open_rows, length << _ROW_BITS)
        if at == len(open_rows):
            left, row = capacity, count
            count += 1
        else:
            left, row = divmod(open_rows.pop(at), 1 << _ROW_BITS)
        rows[document] = row
        if left > length:
            insort(open_rows, (left - length) << _ROW_BITS | row)
    return rows


def fit_in_order(lengths: Indices, capacity: int) -> list[int]:
    """The row of each document, each into the open row that it leaves least space in; the oldest is closed first."""
    rows: list[int] = []
    open_rows: list[list[int]] = []  # space left and row, the oldest first
    count = 0
    for length in lengths.tolist():
        fitting = [result for result in open_rows if result[0] >= length]
        if fitting:
            result = min(fitting)
        else:
            del open_rows[: len(open_rows) + 1 - _OPEN_ROWS]
            open_rows.append(result := [capacity, count])
            count += 1
        result[0] -= length
        rows.append(result[1])
    return rows


class Rows(NamedTuple):
    """Rows of documents: row i has those of `members` from `starts[i]` up to `starts[i + 1]`."""

    members: Indices
    """[documents] places in the lengths that were packed."""
    starts: Indices
    """[rows + 1]"""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def row(self, index: int) -> Indices:
        return self.members[self.starts[index] : self.starts[index + 1]]


def pack_rows(
    lengths: Indices, capacity: int, packing: Packing, order: Order, seed: np.random.SeedSequence | None
) -> Rows:
    """The rows of a window of documents, in the order in which they are trained: shuffled by `seed` unless kept."""
    if packing == "none":
        return Rows(np.arange(len(lengths)), np.arange(len(lengths) + 1))
    result = np.asarray((fit_in_order if order == "kept" else best_fit)(lengths, capacity), dtype=np.int64)
    count = int(result.max()) + 1 if len(result) else 0
    if order == "shuffled" and seed is not None:
        result = np.argsort(shuffled(seed, count), kind="stable")[result]
    sizes = np.bincount(result, minlength=count)
    return Rows(np.argsort(result, kind="stable"), np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)]))


def num_windows(num_pieces: int, num_tokens: int, capacity: int) -> int:
    """Windows of an epoch, of equal numbers of pieces."""
    return max(1, min(num_pieces // WINDOW_DOCUMENTS, num_tokens // (WINDOW_ROWS * capacity)))


def window(index: int, windows: int, num_pieces: int) -> slice:
    """The places of a window in the epoch's order."""
    return slice(index * num_pieces // windows, (index + 1) * num_pieces // windows)


def count_rows(lengths: Indices, capacity: int, packing: Packing, order: Order) -> int:
    """Rows of an epoch whose documents, in its order, have these lengths; of a large one about so many."""
    tokens = int(lengths.sum())
    if packing == "wrap":
        return -(-tokens // capacity)
    if packing == "none":
        return len(lengths)
    windows = num_windows(len(lengths), tokens, capacity)
    looked_at = min(windows, _LOOKED_AT)
    result = 0
    for number in range(looked_at):
        positions = window(number * windows // looked_at, windows, len(lengths))
        result += len(pack_rows(lengths[positions], capacity, packing, order, None))
    return -(-result * windows // looked_at)


def split_documents(num_documents: int, held_out: int, seed: int, order: Order = "shuffled") -> tuple[Indices, Indices]:
    """Sorted indices of the documents to train on, and of the `held_out` ones for validation.

    `seed` chooses these; where the order is kept they are the last ones.

    Raises UserError when none is left to train on.
    """
    if held_out >= num_documents:
        raise UserError(
            f"data.validation_documents: {held_out}, but the corpus has {num_documents} documents and at least one "
            "must be left to train on; hold out fewer"
        )
    if order == "kept":
        return np.arange(num_documents - held_out), np.arange(num_documents - held_out, num_documents)
    chosen = shuffled(np.random.SeedSequence(seed, spawn_key=(0,)), num_documents)
    return np.sort(chosen[held_out:]), np.sort(chosen[:held_out])


def rows_per_epoch(
    corpus: TokenCorpus, config: DataConfig, sequence_length: int, *, one_document_per_row: bool = False
) -> int:
    """Rows that the first epoch of training fills; of a large packed corpus about so many, of a wrapped one at most."""
    starts, stops = corpus.starts[:-1], corpus.starts[1:]
    documents = np.arange(len(starts))
    if config.validation_documents is not None:
        documents = split_documents(len(starts), config.validation_documents, config.seed, config.order)[0]
    pieces = cut_pieces(starts[documents], stops[documents], sequence_length, config.long_documents, corpus.weights)
    parts = mixture_parts(documents, corpus.info.part_documents, config.part_weights)
    order = epoch_order(pieces, parts, config.seed, 0, config.order)
    packing: Packing = "none" if one_document_per_row else config.packing
    return count_rows(pieces.tokens(order, sequence_length), sequence_length, packing, config.order)
