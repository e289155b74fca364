"""Validations: the likelihood of documents that are never trained on, or rewards of what the model answers to prompts
that are not, measured between two steps. They leave nothing behind: a run that is validated computes the same bits as
one that is not."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.engine import rollouts
from penstock.engine.config import SAMPLED
from penstock.engine.data.loader import ValidationSet
from penstock.engine.data.recall import Tally
from penstock.engine.events import ValidationMetrics
from penstock.engine.model.sequences import sequences_of
from penstock.engine.model.tokens import MicroBatch, total_weight
from penstock.engine.objectives.sequences import Found
from penstock.engine.passes import evaluations
from penstock.engine.session import Session


def due(session: Session) -> bool:
    """Whether a validation is to be made of the step that has ended, before the next one begins."""
    train, step = session.recipe.train, session.step
    every = train.validate_every
    if every is None:
        return False
    if session.remeasures:
        return True
    return train.validate_first if step == 0 else step % every == 0 or step == train.steps


def validate(session: Session) -> ValidationMetrics:
    """Measure with the weights of the step that has ended, whose update is applied and, if due, committed under the
    first pass, as under the next step's forward."""
    if session.recipe.train.objective in SAMPLED:
        return rollouts.validate(session)
    assert session.validation is not None
    started, step = time.perf_counter(), session.step
    objective, found = session.objective, Found()
    tally = Tally() if session.recipe.data.source == "needles" else None
    committed = session.commit_due(step) or step == session.recipe.train.steps
    weight, tokens = 0.0, 0
    losses: list[float] = []
    right = 0
    together: list[tuple[Sequence[MicroBatch], _Result]] = []
    for micro_batches, result in _evaluated(session, session.validation, committed):
        losses += result.losses
        weight += sum(total_weight(m.labels, m.weights) for m in micro_batches)
        tokens += sum(m.num_targets for m in micro_batches)
        right += int(result.right.sum())
        if objective.compares:
            together.append((micro_batches, result))
            if not objective.mismatched:  # else each answer is compared with all of the others
                _measure(session, together, found)
        if tally is not None:
            tally.add(micro_batches, result.right)
    if together:
        _measure(session, together, found)
    total = math.fsum(losses)
    return ValidationMetrics(
        step=step,
        loss=found.loss if objective.compares else total / weight,
        tokens=tokens,
        seconds=time.perf_counter() - started,
        time=time.time(),
        accuracy=found.metrics["accuracy"] if objective.reward_model else right / tokens,
        recall=None if tally is None else tally.recall(),
        measured=found.metrics,
    )


def _measure(session: Session, passes: list[tuple[Sequence[MicroBatch], _Result]], found: Found) -> None:
    """Add what the objective finds of the answers in some passes, and forget these."""
    assert session.validation is not None
    micro_batches = [m for some, _ in passes for m in some]
    results = [result for _, result in passes]
    scores = torch.cat([result.scores for result in results])
    statistics = {name: torch.cat([each.statistics[name] for each in results]) for name in results[0].statistics}
    found.add(session.objective.measure(sequences_of(micro_batches, scores, session.validation.totals, statistics)))
    passes.clear()


class _Result(NamedTuple):
    """What a pass finds: see EvaluationData."""

    losses: list[float]
    right: Tensor
    scores: Tensor
    statistics: dict[str, Tensor]


def _evaluated(
    session: Session, validation: ValidationSet, commit: bool
) -> Iterator[tuple[Sequence[MicroBatch], _Result]]:
    """The micro-batches of each pass, and what it finds, in order. The ranks take them in turns, and each carries out
    one at least, under which the step's update is applied; or they share each."""
    ranks, group = session.ranks, session.plan.group

    def found(passes: Iterable[Sequence[MicroBatch]]) -> Iterator[tuple[Sequence[MicroBatch], _Result]]:
        for data in evaluations(session, map(session.look, passes), commit=commit, with_statistics=True):
            if session.plan.problem.sharded:
                found_by_all = ranks.all_of(data.of_chunks)
                data.take(dict(itertools.chain.from_iterable(each.items() for each in found_by_all)))
            yield data.micro_batches, _Result(data.losses, data.right, data.scores, data.statistics)

    if ranks.count == 1 or session.plan.problem.sharded:
        yield from found(validation.passes(group))
        return
    own = [*itertools.islice(validation.passes(group), ranks.rank, None, ranks.count)]
    own = own or [*itertools.islice(validation.passes(group), 1)]
    # Where there are fewer passes than ranks, what others have found once more comes last.
    yield from zip(validation.passes(group), ranks.in_turns([result for _, result in found(own)]), strict=False)
