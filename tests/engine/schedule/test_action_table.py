"""The table of actions against who emits them and who carries them out."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from samples import sampled
from small_problems import planned, problem, some_plan

from engine.plan.plan import Plan
from engine.plan.problem import PlanOptions
from engine.runtime.block_ops import BlockOps
from engine.runtime.handlers import handlers_of, handles
from engine.runtime.layer_ops import LayerOps
from engine.runtime.state_ops import StateOps
from engine.schedule import actions as a
from engine.schedule.builder import ScheduleBuilder
from engine.schedule.ops import Op

SCARCE = {"gpu_budget": 1, "ram_budget": 1}
LONG = {"micro_batches": 1, "row_tokens": 512}
PLANS: dict[str, tuple[dict[str, Any], PlanOptions]] = {
    "on the GPU": ({}, PlanOptions()),
    "in RAM": ({"gpu_budget": 1}, PlanOptions()),
    "on NVMe": (SCARCE, PlanOptions()),
    "on NVMe, read through RAM": (SCARCE | {"device_reads": False}, PlanOptions()),
    "on NVMe, recomputed": (SCARCE | {"activation_checkpointing": "full"}, PlanOptions(recompute="all")),
    "on NVMe, one chunk": (SCARCE | {"row_tokens": 64, "micro_batches": 1}, PlanOptions()),
    "on NVMe, streamed": (SCARCE | LONG, PlanOptions(streamed=True)),
}
"""Problems and choices in which every action has its place."""


def run_of(plan: Plan) -> list[Op]:
    """Ops of two steps and a validation, committed in the middle and at the end."""
    builder = ScheduleBuilder(plan)
    ops = builder.step(1)
    for some in builder.evaluate(1, 1, documents=plan.row_documents):
        ops += some
    return ops + builder.step(2, commit_previous=True) + builder.finish(commit=True)


def test_every_action_has_one_handler() -> None:
    owners = [object.__new__(owner) for owner in (BlockOps, LayerOps, StateOps)]
    assert handlers_of(*owners).keys() == set(a.ACTIONS.values())
    assert all(name == action.name and action.lane in a.LANES for name, action in a.ACTIONS.items())


def test_two_handlers_of_an_action_are_refused() -> None:
    class Owner:
        @handles(a.NORM, a.CLIP)
        def both(self, op: Op) -> None: ...

        @handles(a.CLIP)
        def again(self, op: Op) -> None: ...

    with pytest.raises(AssertionError, match="two handlers of clip"):
        handlers_of(Owner())


def test_every_action_is_emitted_by_some_plan() -> None:
    emitted = {op.action for shape, choice in PLANS.values() for op in run_of(some_plan(problem(**shape), choice))}
    assert emitted == set(a.ACTIONS.values())


@sampled(25, 100)
@given(planned())
def test_an_op_touches_what_its_action_says(plan: Plan) -> None:
    for op in run_of(plan):
        assert {place[0] for place in op.reads} <= {*op.action.reads, *op.action.adds}, op
        assert {place[0] for place in op.writes} <= {*op.action.writes, *op.action.adds}, op


def test_what_is_measured_as_another_is_of_the_table_and_on_its_lane() -> None:
    for action in a.ACTIONS.values():
        if action.measured_as is not None:
            assert a.ACTIONS[action.measured_as].lane == action.lane
