"""Schedules of several ranks: whoever is slow, no rank waits in vain, and each part of every replica's gradient is
added once, by its owner, in one order."""

import random
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranks_replay import Rank, carry_out
from samples import sampled
from small_problems import problem, some_plan

from penstock.engine.plan.plan import Plan
from penstock.engine.plan.problem import PlanOptions
from penstock.engine.schedule import actions as a
from penstock.engine.schedule.builder import ScheduleBuilder
from penstock.engine.schedule.ops import Op
from penstock.engine.schedule.passes import training

STEPS = 2
SCARCE = {"gpu_budget": 1, "ram_budget": 1}
shapes = st.fixed_dictionaries(
    {"layers": st.integers(1, 3), "tied": st.booleans(), "edge": st.integers(1, 30)},
    optional={"gpu_budget": st.just(1), "ram_budget": st.just(1), "frozen": st.just(frozenset({0}))},
)


def plan_of(shape: dict[str, Any], ranks: int, rounds: int, each: int, group: int) -> Plan:
    """`rounds` replicas of `each` micro-batches on each rank; parts of a page or two."""
    shape = {"micro_batches": rounds * each, "replicas": ranks * rounds, "ranks": ranks, "row_tokens": 64} | shape
    return some_plan(problem(**shape), PlanOptions(group=group))


def ops_of(plan: Plan, rank: int) -> list[Op]:
    builder, ops = ScheduleBuilder(plan.of_rank(rank)), []
    for step in range(1, STEPS + 1):
        ops += builder.ops(training(plan, step), commit_previous=step == 2)
    return ops + builder.finish(commit=True)


@sampled(20, 100)
@given(
    shapes,
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(0, 3),
    st.randoms(use_true_random=False),
)
def test_every_part_is_added_once_and_nobody_waits_in_vain(
    shape: dict[str, Any], ranks: int, rounds: int, each: int, group: int, chance: random.Random
) -> None:
    if ranks * rounds == 1:
        return
    plan = plan_of(shape, ranks, rounds, each, group)
    everyone: list[Rank] = []
    everyone += [Rank(number, ops_of(plan, number), everyone) for number in range(ranks)]
    carry_out(everyone, chance)
    trained = {name: buffer for name, buffer in plan.buffers.items() if not buffer.frozen}
    users = {name: sum(name in block.buffers for block in plan.blocks) for name in trained}
    for rank in everyone:
        owned = {(name, part): STEPS * rounds * users[name]
                 for name, buffer in trained.items() for part in buffer.owned(rank.number)}  # fmt: skip
        assert {part: rank.added.count(part) for part in rank.added} == owned
    owners = [{part for part in rank.added} for rank in everyone]
    assert sum(map(len, owners)) == sum(buffer.num_parts for buffer in trained.values())


def test_a_replicas_gradient_is_of_its_own_chunks() -> None:
    """What is summed between two gradients that are handed over is of one replica, the last chunks first."""
    plan = plan_of(SCARCE, 2, 3, 2, 0)
    chunks: dict[str, list[int]] = defaultdict(list)
    found: dict[str, list[list[int]]] = defaultdict(list)
    for op in ops_of(plan, 1):
        if op.step != 1:
            continue
        if any(role.startswith("gradient:") for role in op.slots) and op.lane == "compute":
            chunks[op.block].append(op.index)
        if op.action is a.HAND_OVER and op.index == 0:
            found[op.block].append(chunks.pop(op.block))
    size = 2 * plan.window_chunks
    for of_block in found.values():
        assert of_block == [[*range(size * i, size * (i + 1))][::-1] for i in (2, 1, 0)]


@pytest.mark.parametrize("owner", [0, 1, 2])
def test_owned_parts_are_kept_one_behind_the_other(owner: int) -> None:
    plan = plan_of({"edge": 29}, 3, 1, 1, 0)
    for buffer in plan.buffers.values():
        places = [buffer.kept(*buffer.part(part)) for part in buffer.owned(owner)]
        assert [place.start for place in places] == [0, *(place.stop for place in places)][: len(places)]
        assert sum(place.stop - place.start for place in places) == buffer.owned_numel(owner)
