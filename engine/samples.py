"""Samples: what the model writes behind the recipe's prompts, between two steps.

They use the slots and lanes of the plan and a place of their own for keys and values, and leave nothing behind: a run
that writes samples computes the same bits as one of the same plan that does not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from torch import Tensor

from penstock.engine.events import Sample, SampleMetrics
from penstock.engine.generate.decode import Decoding, Row, decode
from penstock.engine.generate.prompts import Prompts
from penstock.engine.runtime.batch import SampleRow
from penstock.engine.schedule.passes import sampling
from penstock.engine.session import Session


def due(session: Session) -> bool:
    """Whether samples are to be written of the step that has ended, before the next one begins."""
    every, step = session.recipe.samples.every, session.step
    return every is not None and step > 0 and (step % every == 0 or session.is_over)


def write(session: Session) -> SampleMetrics:
    """Write the samples with the weights of the step that has ended.

    Its update is applied block by block under the first pass, as it would be under the next step's forward, and its
    generation is committed then if that is due.
    """
    prompts = session.prompts
    assert prompts is not None
    started, config = time.perf_counter(), prompts.config
    decoding = Decoding(
        new_tokens=config.tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        seed=config.seed,
        stop_ids=prompts.stop_ids,
    )
    found = decode(_Passes(session, prompts), prompts.ids, decoding)
    return SampleMetrics(
        step=session.step,
        samples=[
            Sample(
                prompt=prompt,
                text=prompts.text(number, written.ids),
                tokens=len(written.ids) + written.ended,
                ended=written.ended,
            )
            for number, (prompt, written) in enumerate(zip(config.prompts, found, strict=True))
        ],
        seconds=time.perf_counter() - started,
        time=time.time(),
    )


class _Passes:
    """Finds what may follow tokens (engine/generate/decode.py: Forward), by passes of the session's schedule."""

    def __init__(self, session: Session, prompts: Prompts) -> None:
        self._session, self._recurrent = session, session.spec.recurrent
        self._ids = [list[int]() for _ in prompts.ids]
        """Of each sequence the tokens that have been read."""
        due = session.commit_due(session.step) or session.is_over
        self._commit = due and session.builder.uncommitted
        session.runtime.drop_tokens()

    def __call__(self, rows: Sequence[Row]) -> Tensor:
        logits: Tensor | None = None
        for pieces in self._passes(rows):
            logits = self._run(pieces)
        assert logits is not None
        return logits[[row.sequence for row in rows]]

    def _passes(self, rows: Sequence[Row]) -> Iterator[list[list[SampleRow]]]:
        """The rows in the places of the plan's chunks, as many of them to a pass as a group has; prompts that are
        longer than a chunk are cut."""
        room = [chunk.end - chunk.start for chunk in self._session.plan.places]
        pieces: list[list[SampleRow]] = []
        left = 0
        for row in rows:
            ids, start = list(row.ids), row.start
            if self._recurrent:
                ids, start, left = [*self._ids[row.sequence][: row.start], *ids], 0, 0
            while ids:
                if not left:
                    if len(pieces) == len(room):
                        yield pieces
                        pieces = []
                    pieces.append([])
                    left = room[len(pieces) - 1]
                now = ids[:left]
                assert len(now) == len(ids) or not self._recurrent, "a sequence is one chunk"
                pieces[-1].append(SampleRow(row.sequence, start, now, wanted=len(now) == len(ids)))
                ids, start, left = ids[len(now) :], start + len(now), left - len(now)
        yield pieces

    def _run(self, pieces: list[list[SampleRow]]) -> Tensor:
        """One pass: every block computes all pieces. The logits of all sequences."""
        session = self._session
        number = session.next_samples_pass()
        rows = [row for piece in pieces for row in piece]
        read = {row.sequence: row.start for row in reversed(rows) if row.start and not self._recurrent}
        data = session.fetch_samples(pieces, read)
        session.runtime.begin_samples(number, data)
        ends: dict[str, int] = {}
        pass_ = sampling(
            session.plan,
            session.step,
            number,
            chunks=[one.chunk for one in data.chunks.values()],
            wanted=[i for i, one in data.chunks.items() if i == len(pieces) - 1 or any(row.wanted for row in one.rows)],
            read_tokens=sum(read.values()),
        )
        for ops in session.builder.stream(pass_, commit_previous=self._commit):
            session.executor.submit(ops)
            ends |= {op.lane: op.id for op in ops}
        self._commit = False
        for op in ends.values():
            session.executor.wait(op)
        for row in rows:
            self._ids[row.sequence][row.start :] = row.ids
        return session.runtime.end_samples(number)
