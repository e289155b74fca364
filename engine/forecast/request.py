"""From a recipe to the best plan for a machine: this one, or one of which only the profile is here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.config import Recipe
from engine.forecast.costs import Calibration
from engine.forecast.problem import make_problem
from engine.forecast.search import SearchResult, chunk_options, search, why_not
from engine.machine.budgets import Budgets
from engine.machine.profile import Machine
from engine.model.spec import ModelSpec
from engine.plan.plan import Plan
from engine.plan.planner import make_plan
from engine.plan.problem import PlanInput, PlanOptions
from storage.errors import BudgetError


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """What a plan is made for: a model, a batch and a machine."""

    spec: ModelSpec
    recipe: Recipe
    budgets: Budgets
    device_type: str
    """cuda or cpu."""
    device_reads: bool = True
    """NVMe reads reach the compute device's memory without a stage in RAM."""
    reader_bytes: int = 0
    """Pinned RAM that the reader takes for itself."""
    graph_bytes: Mapping[str, int] | None = None
    """Calibration.graph_bytes_per_token, once there is one."""

    def problem(self, chunk_tokens: int) -> PlanInput:
        return make_problem(self, chunk_tokens)

    @property
    def chunks(self) -> list[int]:
        data, train = self.recipe.data, self.recipe.train
        if self.spec.recurrent:
            return [data.sequence_length]
        if train.chunk_tokens is not None:
            return [train.chunk_tokens]
        return chunk_options(train.micro_batch_size * data.sequence_length)

    def plan(self, choice: PlanOptions) -> Plan:
        """The plan of one choice, with the longest chunk there is. Raises BudgetError."""
        return make_plan(self.problem(self.chunks[-1]), choice)

    def refusal(self) -> BudgetError | None:
        """Why no plan fits, of the combination that needs least; None where one does."""
        return why_not(self.problem, self.chunks)

    def search(
        self,
        machine: Machine,
        calibration: Calibration | None = None,
        documents: Sequence[Sequence[int]] | None = None,
        **options: Any,
    ) -> SearchResult:
        """The best plan, with `options` of engine.forecast.search.search. Raises BudgetError where none fits."""
        return search(self.problem, self.chunks, machine, calibration, documents, **options)
