"""The validation loss: the likelihood of documents that are never trained on, measured between two steps.

It uses the slots, records and lanes of the plan, and leaves nothing behind: a run that is validated computes the same
bits as one that is not.
"""

from __future__ import annotations

import time
from collections import deque

from penstock.engine.data.recall import Tally
from penstock.engine.events import ValidationMetrics
from penstock.engine.schedule.passes import evaluation
from penstock.engine.session import Session


def due(session: Session) -> bool:
    """Whether the validation loss is to be measured of the step that has ended, before the next one begins."""
    train, step = session.recipe.train, session.step
    every = train.validate_every
    if every is None:
        return False
    if session.remeasures:
        return True
    return train.validate_first if step == 0 else step % every == 0 or step == train.steps


def validate(session: Session) -> ValidationMetrics:
    """Measure the loss with the weights of the step that has ended.

    Its update is applied block by block under the first pass, as it would be under the next step's forward, and its
    generation is committed then if that is due.
    """
    assert session.validation is not None
    started, step, runtime = time.perf_counter(), session.step, session.runtime
    commit = session.commit_due(step) or step == session.recipe.train.steps
    total, weight, tokens, right = 0.0, 0.0, 0, 0
    tally = Tally() if session.recipe.data.source == "needles" else None
    under_way: deque[tuple[int, list[int]]] = deque()
    """(number, each lane's last op on its tokens) of the passes that have been handed over: a copy that nobody waits
    for looks at them too. Tokens of two passes are on the compute device."""

    def finish_pass() -> None:
        nonlocal total, weight, tokens, right
        number, last = under_way.popleft()
        for op in last:
            session.executor.wait(op)
        data = runtime.end_evaluation(number)
        total, weight = total + data.total_loss, weight + data.total_weight
        tokens, right = tokens + data.num_targets, right + int(data.right.sum())
        if tally is not None:
            tally.add(data.micro_batches, data.right)

    runtime.drop_tokens()
    for number, micro_batches in enumerate(session.validation.passes(session.plan.group), start=1):
        if len(under_way) == 2:
            finish_pass()
        data = session.fetch_evaluation(micro_batches)
        runtime.begin_evaluation(number, data)
        documents, cut = [m.documents for m in micro_batches], list(data.cut.values())
        ends: dict[str, int] = {}
        due_now = commit and number == 1
        pass_ = evaluation(session.plan, step, number, documents=documents, chunks=cut)
        for ops in session.builder.stream(pass_, commit_previous=due_now):
            session.executor.submit(ops)
            ends |= {op.lane: op.id for op in ops if op.batch == number}
        under_way.append((number, list(ends.values())))
    while under_way:
        finish_pass()
    return ValidationMetrics(
        step=step,
        loss=total / weight,
        tokens=tokens,
        seconds=time.perf_counter() - started,
        time=time.time(),
        accuracy=right / tokens,
        recall=None if tally is None else tally.recall(),
    )
