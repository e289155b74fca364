"""Finding the plan with the shortest simulated step among those that the budgets allow."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.engine.forecast.choices import dimensions, options
from penstock.engine.forecast.costs import Conditions
from penstock.engine.forecast.extrapolate import estimate, num_ops
from penstock.engine.forecast.least import NoPlanError, ProblemAt, frugal, least_lacking
from penstock.engine.forecast.simulate import Simulation
from penstock.engine.plan.plan import Plan
from penstock.engine.plan.planner import make_plan
from penstock.engine.plan.problem import OffloadedGraphs, PlanInput, PlanOptions
from penstock.storage.files.errors import BudgetError

EXHAUSTIVE_OPS = 1_500
"""Steps of about so many ops are cheap to simulate: every combination is tried."""
START_CHUNK = 8192
"""Where the search for the chunk length of a large step begins, or where its stream makes START_CHUNKS chunks."""
START_CHUNKS = 32
WORTH_A_PASS = 0.01
"""What trying every change must have gained for another pass over them."""
WEAR_GAIN = 0.02
"""By how much a plan must be faster to write twice as much to the drives as another, which wear."""
SWITCH_GAIN = 0.03
"""By how much a plan must be faster to replace one of which it is known that it works."""
FIRST_OFFLOADED: tuple[OffloadedGraphs, ...] = ("none", "half")
"""Shares of graphs that leave the GPU with which groups are combined first; the other ones are near them."""
LIKELY_WITH_GROUPS: tuple[dict[str, Any], ...] = (
    {"gpu_first": "graphs", "ram_first": "activations", "recompute": "none"},
    {"gpu_first": "blocks", "ram_first": "activations", "recompute": "none"},
)
"""Choices with which groups are combined, whatever is best without them."""
GROUP_STARTS = 3
"""So many of what groups were combined with are improved: the best ones that differ in group or in what leaves."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan that was tried."""

    chunk_tokens: int
    choice: PlanOptions
    plan: Plan
    simulation: Simulation
    beside_s: float = 0.0
    """Seconds beside the steps for each of them."""

    @property
    def step_s(self) -> float:
        return self.simulation.step_s

    @property
    def whole_s(self) -> float:
        """Of a step with what is done beside it."""
        return self.step_s + self.beside_s


@dataclass(slots=True)
class SearchResult:
    """The best plan and what it was compared with."""

    best: Candidate
    tried: list[Candidate]
    refused: list[tuple[int, PlanOptions, BudgetError]]
    """Combinations that do not fit."""

    @property
    def plan(self) -> Plan:
        return self.best.plan

    def far(self) -> set[tuple[int, PlanOptions]]:
        """Combinations that another is ahead of on every lane: other times of the ops make none of them the best."""
        ahead: list[Candidate] = []
        for candidate in sorted(self.tried, key=lambda c: c.whole_s):
            if not any(_ahead(other, candidate) for other in ahead):
                ahead.append(candidate)
        near = {id(candidate) for candidate in ahead}
        return {(c.chunk_tokens, c.choice) for c in self.tried if id(c) not in near}


def _ahead(one: Candidate, other: Candidate) -> bool:
    """Whether `one`, whose step is no longer, keeps no lane busy for longer than `other`."""
    if one.beside_s > other.beside_s:
        return False
    busy = one.simulation.busy_s
    return all(seconds <= other.simulation.busy_s[lane] * (1 + 1e-9) for lane, seconds in busy.items())


@dataclass(slots=True)
class _Search:
    problem_at: ProblemAt
    on: Conditions
    rough: bool
    beside: Callable[[Plan], float]
    tried: list[Candidate] = field(default_factory=list)
    refused: list[tuple[int, PlanOptions, BudgetError]] = field(default_factory=list)
    problems: dict[int, PlanInput] = field(default_factory=dict)
    seen: dict[tuple[int, PlanOptions], Candidate | None] = field(default_factory=dict)
    simulated: dict[tuple[Any, ...], tuple[Simulation, float]] = field(default_factory=dict)

    def problem(self, chunk: int) -> PlanInput:
        if chunk not in self.problems:
            self.problems[chunk] = self.problem_at(chunk)
        return self.problems[chunk]

    def plan(self, chunk: int, choice: PlanOptions) -> Plan | None:
        """None where it does not fit."""
        try:
            return make_plan(self.problem(chunk), choice)
        except BudgetError as error:
            self.refused.append((chunk, choice, error))
            return None

    def attempt(self, chunk: int, choice: PlanOptions) -> Candidate | None:
        """Simulate a combination, unless it or one that comes to the same plan has been."""
        if (chunk, choice) not in self.seen:
            plan = self.plan(chunk, choice)
            self.seen[chunk, choice] = None if plan is None else self.candidate(chunk, plan)
        return self.seen[chunk, choice]

    def candidate(self, chunk: int, plan: Plan) -> Candidate:
        """Simulate a plan, unless one that runs the same schedule has been."""
        key = decisions(plan)
        if key not in self.simulated:
            self.simulated[key] = estimate(plan, self.on, settled=not self.rough), self.beside(plan)
        self.tried.append(candidate := Candidate(chunk, plan.choice, plan, *self.simulated[key]))
        return candidate

    def everything(self, chunk: int, values: dict[str, list[Any]], before: SearchResult | None) -> None:
        """Every combination, of those in which some graphs leave the GPU or a step has groups the likely ones."""
        far = set() if before is None else before.far()
        fixed = values | {name: values[name][:1] for name in ("group", "offloaded_graphs")}
        for combination in itertools.product(*fixed.values()):
            choice = PlanOptions(**dict(zip(values, combination, strict=True)))
            if (chunk, choice) not in far:
                self.attempt(chunk, choice)

    def by_groups(self, best: Candidate, chunks: list[int]) -> None:
        """Groups, and what leaves the GPU of their graphs: neither pays without the other, nor with all that is best
        without them. They are combined with `best`, with graphs on the GPU and with blocks there, and with chunks of
        the next shorter length as well; several of what is found are then improved."""
        where = chunks.index(best.chunk_tokens)
        result: list[Candidate] = []
        for chunk in chunks[max(0, where - 1) : where + 1]:
            values = options(self.problem(chunk))
            likely = [best.choice]
            for changes in LIKELY_WITH_GROUPS:
                allowed = {name: value for name, value in changes.items() if value in values[name]}
                likely.append(replace(best.choice, **allowed))
            offloaded = [v for v in values["offloaded_graphs"] if v in (*FIRST_OFFLOADED, best.choice.offloaded_graphs)]
            for group, graphs, choice in itertools.product(values["group"], offloaded, likely):
                if (one := self.attempt(chunk, replace(choice, group=group, offloaded_graphs=graphs))) is not None:
                    result.append(one)
        starts: dict[tuple[int, OffloadedGraphs], Candidate] = {}
        for one in sorted(result, key=rank):
            starts.setdefault((one.choice.group, one.choice.offloaded_graphs), one)
        for start in list(starts.values())[:GROUP_STARTS]:
            self.descend(start, chunks)

    def descend(self, start: Candidate, chunks: list[int]) -> None:
        """Change one thing at a time, as long as that helps."""
        best, improved = start, True
        while improved:
            before = promised_s(best.whole_s)
            for name, value in self._moves(best, chunks):
                chunk = value if name == "chunk_tokens" else best.chunk_tokens
                choice = best.choice if name == "chunk_tokens" else replace(best.choice, **{name: value})
                other = self.attempt(chunk, choice)
                if other is not None and rank(other) < rank(best):
                    best = other
            improved = promised_s(best.whole_s) < before * (1 - WORTH_A_PASS)

    def _moves(self, best: Candidate, chunks: list[int]) -> list[tuple[str, Any]]:
        values = dimensions(best.plan.problem, best.plan.window_chunks)
        moves = [(name, value) for name in values for value in values[name]]
        where = chunks.index(best.chunk_tokens)
        return moves + [("chunk_tokens", n) for n in chunks[max(0, where - 1) : where + 2]]


def promised_s(step_s: float) -> float:
    """A simulated time rounded up to three digits: what is promised, and beyond which plans count as equally fast."""
    unit = 10.0 ** (math.floor(math.log10(step_s)) - 2)
    return math.ceil(step_s / unit * (1 - 1e-12)) * unit


def rank(candidate: Candidate) -> tuple[float, int, float]:
    """Faster first; of equals the one that writes less to the drives, which wear."""
    return promised_s(candidate.whole_s), candidate.simulation.bytes["nvme_write"], candidate.whole_s


def sparing(tried: Sequence[Candidate]) -> Candidate:
    """The fastest of `tried`, or one nearly as fast that writes half as much to the drives or less."""
    fastest = best = min(tried, key=rank)
    while True:
        written = best.simulation.bytes["nvme_write"]
        near = [
            c
            for c in tried
            if c.whole_s <= fastest.whole_s * (1 + WEAR_GAIN) and 2 * c.simulation.bytes["nvme_write"] <= written
        ]
        if not written or not near:
            return best
        best = min(near, key=rank)


def decisions(plan: Plan) -> tuple[Any, ...]:
    """Equal for plans that run the same schedule."""
    buffers = tuple((b.weights, b.state, b.gradient, b.sums) for b in plan.buffers.values())
    sets = (plan.spilled, plan.recomputed, plan.saved_on_gpu, plan.saved_graphs, plan.offloaded_graphs)
    slots = (plan.state_stages, plan.part_stages, plan.activation_stages, *plan.weight_slots.values())
    return plan.max_chunk_tokens, plan.group, buffers, sets, slots, plan.streamed, plan.choice.spread


def search(
    problem_at: ProblemAt,
    chunks: Sequence[int],
    on: Conditions,
    *,
    known: tuple[int, PlanOptions] | None = None,
    only: tuple[int, PlanOptions] | None = None,
    before: SearchResult | None = None,
    rough: bool = False,
    beside: Callable[[Plan], float] = lambda plan: 0.0,
) -> SearchResult:
    """The plan with the shortest step, where that counts with the seconds `beside` it. Raises NoPlanError, that of the
    combination which lacks least, where none fits.

    Small steps are searched exhaustively, large ones by changing one choice at a time from the best chunk length.
    `known`: a combination that is kept unless another is faster by SWITCH_GAIN; `only`: one that is taken if it fits,
    whatever its speed; `before`: a search with other times, which says what need not be tried again (SearchResult.far);
    `rough`: in half the time, as another search with measured times follows (simulate's `settled`).
    """
    hunt = _Search(problem_at, on, rough, beside)
    lengths = list(chunks)
    if only is not None and (taken := hunt.attempt(*only)) is not None:
        return SearchResult(taken, hunt.tried, hunt.refused)
    fitting: dict[int, Plan] = {}
    refusals: list[NoPlanError] = []
    for chunk in lengths:
        problem = hunt.problem(chunk)
        first = frugal(problem)
        if not isinstance(first, Plan):
            refusals += first
            hunt.refused += [(chunk, PlanOptions(), error) for error in first[:1]]
            continue
        if num_ops(first) <= EXHAUSTIVE_OPS:
            hunt.everything(chunk, options(problem), before)
            if not hunt.tried:
                hunt.attempt(chunk, first.choice)  # it may need groups, or graphs that leave
        else:
            fitting[chunk] = first
    if fitting:
        problem = hunt.problem(lengths[0])
        middling = max(START_CHUNK, problem.rows * problem.row_tokens // START_CHUNKS)
        start = min(fitting, key=lambda chunk: abs(chunk - middling))
        hunt.descend(hunt.candidate(start, fitting[start]), lengths)
    if hunt.tried:
        hunt.by_groups(min(hunt.tried, key=rank), lengths)
    else:
        raise least_lacking(refusals)
    best = sparing(hunt.tried)
    if known is not None and known[0] in lengths:
        cached = hunt.attempt(*known)
        if cached is not None and best.whole_s > cached.whole_s * (1 - SWITCH_GAIN):
            best = cached
    return SearchResult(best, hunt.tried, hunt.refused)
