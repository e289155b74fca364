"""The coefficients of a step's targets, where the objective makes them of whole sequences' scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from penstock.engine.model.sequences import coefficients, mismatched_sums, sequences_of, totals_of, with_divergence
from penstock.engine.objectives.base import Objective
from penstock.engine.objectives.sequences import Sequences, Totals
from penstock.engine.runtime.batch import StepData
from penstock.engine.runtime.exchange import Exchange
from penstock.engine.runtime.views import Views
from penstock.engine.schedule.ops import Op


class Coefficients:
    """Made once for each group of a step, or each replica, when all of its scores are there."""

    def __init__(
        self,
        views: Views,
        objective: Objective,
        exchange: Exchange,
        scores: Tensor,
        starts: Sequence[int],
        fetch: Callable[[], None],
    ) -> None:
        """`scores`, [1 + the objective's statistics, tokens] in host memory: where `fetch` brings the log-probabilities
        of a step's targets and their statistics, those of chunk i from `starts[i]` on. Coefficients take the places of
        log-probabilities."""
        self._views, self._objective, self._starts, self._fetch = views, objective, starts, fetch
        self._exchange = exchange
        self._scores, self._statistics = scores[0], dict(zip(objective.statistics, scores[1:], strict=True))
        plan = views.plan
        self._size = plan.problem.apart or plan.group
        """Micro-batches at a time: a group's, or where replicas are added those of one, whoever computes the others."""
        self._here = torch.zeros(scores.shape[1], dtype=scores.dtype, device=views.device)
        self._group: tuple[int, int] | None = None
        """(step, group) whose coefficients there are."""
        self._totals: tuple[int, Totals] | None = None
        """Step, and what there is in it."""

    def of(self, op: Op) -> Tensor:
        """float64 [t] of the targets of the op's chunk, on the compute device."""
        group = op.step, self._views.chunk(op).micro_batch // self._size
        if self._group != group:
            self._make(op, group[1])
            self._group = group
        start = self._starts[op.index]
        return self._here[start : start + self._views.tokens(op).labels.shape[0]]

    def _make(self, op: Op, group: int) -> None:
        step, size = self._views.steps[op.step], self._size
        members = range(group * size, min((group + 1) * size, len(step.micro_batches)))
        self._fetch()
        if self._totals is None or self._totals[0] != op.step:
            self._totals = op.step, self._totals_of(step)
        sequences, places = self._sequences(step, members, self._totals[1])
        made, measured = coefficients(self._objective, sequences)
        step.found.add(measured)
        for place, part in zip(places, made.split([place.stop - place.start for place in places]), strict=True):
            self._scores[place] = part
        self._here.copy_(self._scores, non_blocking=True)

    def _sequences(self, step: StepData, members: Sequence[int], totals: Totals) -> tuple[Sequences, list[slice]]:
        """Those of some micro-batches, whose scores have been fetched, and where the scores of each chunk are."""
        chunks = [index for index, chunk in sorted(step.cut.items()) if chunk.micro_batch in members]
        places = [slice(at := self._starts[i], at + step.chunks[i].labels.shape[0]) for i in chunks]
        scores = torch.cat([self._scores[place] for place in places])
        statistics = {name: torch.cat([all_[place] for place in places]) for name, all_ in self._statistics.items()}
        return sequences_of([step.micro_batches[i] for i in members], scores, totals, statistics), places

    def _totals_of(self, step: StepData) -> Totals:
        """Of the whole step: what all ranks have scored, micro-batch by micro-batch, so that it is the same however
        many there are."""
        totals = totals_of(step.whole, self._objective)
        if not self._objective.mismatched:
            return totals
        sequences, _ = self._sequences(step, range(len(step.micro_batches)), totals)
        of_all = self._exchange.of_all("ratios", mismatched_sums(step.micro_batches, sequences))
        return with_divergence(totals, step.whole, of_all.flatten())
