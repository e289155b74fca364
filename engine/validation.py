"""Validations: the likelihood of documents that are never trained on, or rewards of what the model answers to prompts
that are not, measured between two steps. They leave nothing behind: a run that is validated computes the same bits as
one that is not."""

from __future__ import annotations

import time

from penstock.engine import rollouts
from penstock.engine.config import SAMPLED
from penstock.engine.data.recall import Tally
from penstock.engine.events import ValidationMetrics
from penstock.engine.model.sequences import sequences_of
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
    total, weight, tokens, right = 0.0, 0.0, 0, 0
    objective, found = session.objective, Found()
    tally = Tally() if session.recipe.data.source == "needles" else None
    committed = session.commit_due(step) or step == session.recipe.train.steps
    passes = map(session.look, session.validation.passes(session.plan.group))
    for data in evaluations(session, passes, commit=committed, with_statistics=True):
        total, weight = total + data.total_loss, weight + data.total_weight
        tokens, right = tokens + data.num_targets, right + int(data.right.sum())
        if objective.compares:
            totals = session.validation.totals
            found.add(objective.measure(sequences_of(data.micro_batches, data.scores, totals, data.statistics)))
        if tally is not None:
            tally.add(data.micro_batches, data.right)
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
