"""Passes beside the steps of a run: likelihoods of texts and what may follow them, which a run makes between two steps
and an opened model all the time, and the gradients of a self-check."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from penstock.engine.generate.decode import Choose, Row
from penstock.engine.generate.places import distinct, lay_out
from penstock.engine.model.spec import ModelSpec
from penstock.engine.model.tokens import IGNORE_LABEL, MicroBatch
from penstock.engine.plan.plan import Plan
from penstock.engine.runtime.batch import BatchCarrier, EvaluationData, StepData
from penstock.engine.runtime.executor import Executor
from penstock.engine.runtime.runtime import Runtime
from penstock.engine.schedule.builder import ScheduleBuilder
from penstock.engine.schedule.passes import Pass, evaluation, sampling, training


class Computes(Protocol):
    """What carries out passes of a plan: a run's session, or an opened model's memory and lanes."""

    step: int
    """The one whose weights compute."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def plan(self) -> Plan: ...

    @property
    def builder(self) -> ScheduleBuilder: ...

    @property
    def executor(self) -> Executor: ...

    @property
    def runtime(self) -> Runtime: ...

    @property
    def carrier(self) -> BatchCarrier: ...


def _start(on: Computes, pass_: Pass, commit: bool) -> list[int]:
    """Hand a pass over; each lane's last op on its tokens, which are in use until those are done."""
    ends: dict[str, int] = {}
    for ops in on.builder.stream(pass_, commit_previous=commit):
        on.executor.submit(ops)
        ends |= {op.lane: op.id for op in ops if op.batch == pass_.batch}
    return list(ends.values())


def gradients(on: Computes, micro_batches: Sequence[MicroBatch]) -> StepData:
    """Loss and gradient norm of one step, whose gradients wait in memory when this returns."""
    data, step = on.carrier.step(micro_batches, {}), on.step + 1
    on.runtime.begin(step, data)
    for op in _start(on, training(on.plan, step, **data.extent), False):
        on.executor.wait(op)
    return data


def evaluations(
    on: Computes,
    batches: Iterable[Sequence[MicroBatch]],
    *,
    first: int = 1,
    commit: bool = False,
    build: Callable[..., Pass] = evaluation,
    with_statistics: bool = False,
) -> Iterator[EvaluationData]:
    """What the model finds of the labels of `batches`, a pass each, in their order.

    `first`: the number of the first pass, of which no two of a step are the same. `commit`: the first one commits the
    step's generation. `build`: what makes a pass. `with_statistics`: the objective's statistics as well. Tokens of two
    passes are on the compute device.
    """
    under_way: deque[tuple[int, list[int]]] = deque()

    def finished() -> EvaluationData:
        number, ends = under_way.popleft()
        for op in ends:
            on.executor.wait(op)
        return on.runtime.end_evaluation(number)

    on.runtime.drop_tokens()
    for number, micro_batches in enumerate(batches, start=first):
        if len(under_way) == 2:
            yield finished()
        data = on.carrier.evaluation(micro_batches, with_statistics=with_statistics)
        pass_ = build(on.plan, on.step, number, **data.extent)
        data.of_reference = pass_.of_reference
        on.runtime.begin_evaluation(number, data)
        under_way.append((number, _start(on, pass_, commit and number == first)))
    while under_way:
        yield finished()


class Forward:
    """Finds what may follow tokens (engine/generate/decode.py: Forward)."""

    def __init__(
        self, on: Computes, lengths: Sequence[int], *, copies: int = 1, new_tokens: int = 0, commit: bool = False
    ) -> None:
        """`lengths`: tokens that each prompt comes to with what is written behind it. Of each prompt there are `copies`
        side by side, whose last `new_tokens` are their own. `commit`: the first pass commits the step's generation."""
        self._on, self._commit = on, commit
        self.lengths = list(lengths)
        self._copies = copies
        self.ids: list[list[int]] = [[] for _ in lengths for _ in range(copies)]
        """Of each sequence the tokens that have been read."""
        self._tables: list[list[bytes]] = [[] for _ in self.ids]
        """Of models whose rotary tables depend on the length: those that each sequence's keys were turned by."""
        space = on.plan.problem.samples
        self._cached = space is not None and space.tier != "nowhere"
        self._places = lay_out(lengths, copies, new_tokens, share=on.spec.takes_prefixes)
        on.runtime.drop_tokens()
        on.runtime.sample_ops.lay_out(self._places)

    def __call__(self, rows: Sequence[Row], choose: Choose) -> list[int]:
        # Those of a token each are computed together with others that see about as many.
        unread = sorted((self._unread(row) for row in rows), key=lambda row: len(row.ids) == 1 and row.end)
        chosen: list[int] = []
        left = sum(len(row.ids) for row in unread)
        for pieces in self._passes(unread):
            left -= sum(len(row.ids) for piece in pieces for row in piece)
            chosen = self._run(pieces, None if left else choose)
        for row in rows:  # what a broken pass leaves behind does not count as read
            self.ids[row.sequence][row.start :] = row.ids
        return chosen

    def _unread(self, row: Row) -> Row:
        """What has to be read for a row: all of its sequence where its keys and values are not cached."""
        ids, whole = self.ids[row.sequence], not self._cached
        if not ids and row.start:  # a copy begins as the first one of its prompt, which has read it
            ids += self.ids[row.sequence - row.sequence % self._copies][: row.start]
            whole = whole or not self._places[row.sequence].shared
        known = ids[: row.start]
        assert len(known) == row.start, "tokens that were never read"
        if self._on.spec.length_dependent_rotary:
            table = self._on.runtime.runner.table(row.end)
            whole = whole or table != self._tables[row.sequence]
            self._tables[row.sequence] = table
        return Row(row.sequence, 0, [*known, *row.ids]) if whole else row

    def _passes(self, rows: Sequence[Row]) -> Iterator[list[list[Row]]]:
        """The rows in the places of the plan's chunks, as many of them to a pass as a group has; what is longer than a
        chunk is cut."""
        capacity = [chunk.end - chunk.start for chunk in self._on.plan.group_chunks]
        pieces: list[list[Row]] = []
        left = 0
        for row in rows:
            ids, start = list(row.ids), row.start
            if self._on.spec.whole_documents:
                left = 0
            while ids:
                if not left:
                    if len(pieces) == len(capacity):
                        yield pieces
                        pieces = []
                    pieces.append([])
                    left = capacity[len(pieces) - 1]
                now = ids[:left]
                assert len(now) == len(ids) or not self._on.spec.whole_documents, "a sequence is one chunk"
                pieces[-1].append(Row(row.sequence, start, now, wanted=len(now) == len(ids)))
                ids, start, left = ids[len(now) :], start + len(now), left - len(now)
        yield pieces

    def _run(self, pieces: list[list[Row]], choose: Choose | None) -> list[int]:
        """One pass: every block computes all pieces. The tokens that `choose` makes of the logits of all sequences."""
        on, rows = self._on, [row for piece in pieces for row in piece]
        read = distinct(self._places, {row.sequence: row.start for row in reversed(rows) if row.start}.items())
        data = on.carrier.samples(pieces, self._places, read, choose)
        number = on.runtime.begin_samples(data)
        pass_ = sampling(
            on.plan,
            on.step,
            number,
            chunks=[one.chunk for one in data.chunks.values()],
            wanted=[i for i, one in data.chunks.items() if i == len(pieces) - 1 or any(row.wanted for row in one.rows)],
            read_tokens=sum(end - first for first, end in read),
        )
        commit, self._commit = self._commit, False
        for op in _start(on, pass_, commit):
            on.executor.wait(op)
        return on.runtime.end_samples(number)


def scored_stream(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> MicroBatch:
    """Texts end to end, a document each; targets are the tokens of continuations."""
    texts = [[*context, *continuation][:-1] for context, continuation in pairs]
    before = ([IGNORE_LABEL] * (len(text) - len(pair[1])) for text, pair in zip(texts, pairs, strict=True))
    labels = [[*ignored, *continuation] for ignored, (_, continuation) in zip(before, pairs, strict=True)]
    return MicroBatch.of(texts, labels)
