"""What a plan needs at least of a tier: for a budget of "least", and for a refusal that says how much would do.

Whether any plan fits is decided by a few choices that need least (choices.frugal_choices) with every chunk length that
there is; so is what is needed at least.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

from penstock.engine.forecast.choices import frugal_choices
from penstock.engine.plan.plan import Plan
from penstock.engine.plan.planner import make_plan
from penstock.engine.plan.problem import PlanInput, PlanOptions
from penstock.storage.files.errors import BudgetError
from penstock.storage.files.units import whole_kib

KIB = 1024
"""Budgets of "least" are whole KiB, and so is what a refusal asks for."""
GRAPHS_MARGIN = 8
"""Where all graphs are saved, "least" has room for ones larger by one part in so many: their sizes are estimates."""

ProblemAt = Callable[[int], PlanInput]
"""Tokens of a chunk -> the problem with chunks of that length."""
MemoryTier = Literal["gpu", "ram"]


class NoPlanError(BudgetError):
    """No plan fits; of the combination that lacks least, with its chunk length and choice."""

    def __init__(self, error: BudgetError, chunk_tokens: int, choice: PlanOptions) -> None:
        super().__init__(str(error), tier=error.tier, need_bytes=error.need_bytes, budget_bytes=error.budget_bytes)
        self.chunk_tokens, self.choice = chunk_tokens, choice


def frugal(problem: PlanInput) -> Plan | list[NoPlanError]:
    """A plan that needs little of each tier, or why there is none."""
    refusals = []
    for choice in frugal_choices(problem):
        try:
            return make_plan(problem, choice)
        except BudgetError as error:
            refusals.append(NoPlanError(error, problem.chunk_tokens, choice))
    return refusals


def why_not(problem_at: ProblemAt, chunks: Iterable[int]) -> NoPlanError | None:
    """The refusal of the combination that lacks least; None as soon as one fits."""
    refusals: list[NoPlanError] = []
    for chunk in chunks:
        result = frugal(problem_at(chunk))
        if isinstance(result, Plan):
            return None
        refusals += result
    return least_lacking(refusals)


def least_lacking(refusals: Sequence[NoPlanError]) -> NoPlanError:
    """The refusal that is worth most: of the last tier that is placed, then what is missing least."""
    order = ["nvme", "ram", "gpu"]

    def lack(error: BudgetError) -> tuple[int, int]:
        return order.index(error.tier) if error.tier in order else len(order), error.need_bytes

    return min(refusals, key=lack)


def need(problem: PlanInput, choice: PlanOptions, tier: str) -> int | None:
    """Bytes of a tier with which a choice fits, in whole KiB; None where another tier is too small."""
    size = 1
    while True:
        changed: Mapping[str, Any] = {f"{tier}_budget": size}
        try:
            make_plan(replace(problem, **changed), choice)
            return size
        except BudgetError as error:
            if error.tier != tier or error.need_bytes <= size:
                return None
            size = whole_kib(error.need_bytes)


def least(problem_at: ProblemAt, chunks: Sequence[int], tier: MemoryTier) -> tuple[int, int]:
    """The smallest budget of a tier with which a plan fits, all else as it is, in whole KiB; what calibration may add.
    Raises NoPlanError where none fits within the budget that the problem has."""
    size, margin = _smallest(problem_at, chunks, tier), 0
    if problem_at(chunks[0]).activation_checkpointing == "none":
        with suppress(NoPlanError):
            margin = _smallest(lambda chunk: _with_margin(problem_at(chunk)), chunks, tier) - size
    return size, margin


def _with_margin(problem: PlanInput) -> PlanInput:
    """The problem with graphs that are larger by one part in GRAPHS_MARGIN."""
    sizes = [block.graph_bytes_per_token for block in problem.blocks]
    larger = [None if size is None else size + -(-size // GRAPHS_MARGIN) for size in sizes]
    blocks = (replace(b, graph_bytes_per_token=size) for b, size in zip(problem.blocks, larger, strict=True))
    return replace(problem, blocks=tuple(blocks))


def _smallest(problem_at: ProblemAt, chunks: Sequence[int], tier: MemoryTier) -> int:
    result: list[int] = []
    most = 0
    for chunk in chunks:
        problem = problem_at(chunk)
        most = problem.gpu_budget if tier == "gpu" else problem.ram_budget
        result += [size for choice in frugal_choices(problem) if (size := need(problem, choice, tier)) is not None]
    if result and min(result) <= most:
        return min(result)
    return _bisected(problem_at, chunks, tier, most)


def _bisected(problem_at: ProblemAt, chunks: Sequence[int], tier: MemoryTier, most: int) -> int:
    """What is needed at least where another tier's lack is made good by more of this one."""

    def refusal(size: int) -> NoPlanError | None:
        changed: Mapping[str, Any] = {f"{tier}_budget": size}
        return why_not(lambda chunk: replace(problem_at(chunk), **changed), chunks)

    if (error := refusal(most)) is not None:
        raise error
    too_little, enough = 0, most // KIB
    while enough - too_little > 1:
        middle = (too_little + enough) // 2
        if refusal(middle * KIB) is None:
            enough = middle
        else:
            too_little = middle
    return enough * KIB


def helps(problem_at: ProblemAt, chunks: Sequence[int], refusal: NoPlanError) -> bool:
    """Whether a changed problem needs less of the tier that was too small."""
    assert refusal.tier is not None
    chunk = max((n for n in chunks if n <= refusal.chunk_tokens), default=chunks[0])
    problem = problem_at(chunk)
    choices = list(frugal_choices(problem))
    if refusal.choice in choices:  # else the change leaves another choice, say keys and values that must stream
        choices = [refusal.choice]
    needs = (need(problem, choice, refusal.tier) for choice in choices)
    return any(size is not None and size < refusal.need_bytes for size in needs)
