"""Which ops on groups of experts are skipped, whatever the plan and whatever is sent where: what is needed is there and
up to date, each step is applied once, and a generation says what it holds."""

import random
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import sampled
from small_problems import planned, problem, skipping, some_plan

from penstock.engine.config import TrainConfig
from penstock.engine.plan.plan import Plan
from penstock.engine.plan.problem import PlanOptions
from penstock.engine.runtime import idle as idle_module
from penstock.engine.runtime.idle import Idle
from penstock.engine.runtime.past import KEY, is_record
from penstock.engine.schedule import actions as a
from penstock.engine.schedule import resources as r
from penstock.engine.schedule.builder import ScheduleBuilder
from penstock.engine.schedule.ops import Op
from penstock.engine.schedule.passes import evaluation, training

STEPS = 4
LOADS = (a.LOAD_WEIGHTS, a.LOAD_WEIGHTS_PART, a.READ_WEIGHTS_WHOLE)


def ops_of(plan: Plan, validated: set[int]) -> Iterator[Op]:
    """A run that commits every other step, and ends with a commit."""
    builder = ScheduleBuilder(plan)
    for step in range(1, STEPS + 1):
        yield from builder.ops(training(plan, step), commit_previous=step % 2 == 1 and step > 1)
        if step in validated:
            yield from builder.ops(evaluation(plan, step, 1, documents=plan.row_documents[:1]))
    yield from builder.finish(commit=True)


def in_some_order(ops: Iterable[Op], chance: random.Random) -> Iterator[Op]:
    """Lane by lane in program order, each op behind what it depends on."""
    lanes: dict[str, deque[Op]] = defaultdict(deque)
    for op in ops:
        lanes[op.lane].append(op)
    done: set[int] = set()
    while any(lanes.values()):
        ready = [lane for lane, queue in lanes.items() if queue and done.issuperset(queue[0].deps)]
        op = lanes[chance.choice(ready)].popleft()
        done.add(op.id)
        yield op


class Run:
    """Follows what is where as ops are carried out in their order, or skipped."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.blocks = plan, {block.name: block for block in plan.blocks}
        senders = plan.problem.senders
        self.sender = {plan.blocks[i].name: plan.blocks[layer].name for i, layer in senders.items()}
        self.first: dict[str, int] = {}
        for name, layer in self.sender.items():
            self.first[name] = 2 * sum(self.sender[other] == layer for other in self.first)
        experts = {name: (first, first + 2) for name, first in self.first.items()}
        self.idle = Idle(plan, experts, TrainConfig(steps=STEPS), torch.device("cpu"))
        self.group_of = {buffer: name for name in self.sender for buffer in self.blocks[name].buffers}
        self.chosen: dict[str, set[int]] = defaultdict(set)
        """Layer -> experts that its micro-batches have been sent to."""
        self.version: dict[str, int] = dict.fromkeys(plan.lazy, 0)
        self.written = dict(self.version)
        self.held: dict[r.Resource, tuple[str, int]] = {}
        self.waiting: dict[str, int] = {}
        """Buffer -> step of a gradient that waits."""
        self.summed: dict[str, int] = {}
        """Buffer -> step of a sum that waits for the next group of micro-batches."""
        self.made: dict[tuple[str, int], bool] = {}
        """(buffer, part) of which new weights are in a stage."""
        self.copied = ""
        """Buffer of which there is a dequantised copy."""
        self.skipped = 0

    def needs(self, group: str) -> bool:
        return not self.chosen[self.sender[group]].isdisjoint(range(self.first[group], self.first[group] + 2))

    def perform(self, op: Op, experts: Iterator[set[int]]) -> None:
        if r.resource(r.GPU_ROUTED, op.block) in op.writes:
            if a.ZERO_ROUTED in op.flags:
                self.chosen[op.block] = set()
            few = next(experts)
            self.chosen[op.block] |= few
            self.idle.note(op, torch.tensor(sorted(few)))
        if op.action is a.TAKE_ROUTES:
            marks, there = self.idle.marks(op.block)
            there.copy_(marks)
            self.idle.take(op)
        if a.SKIPS in op.flags and self.idle.skips(op):
            self.skipped += 1
            assert op.block in self.group_of
            return
        if op.action is a.CLIP:
            self.idle.end_step(op.step)
        if op.action is a.COMMIT:
            self.commit(op)
        if op.block in self.group_of:
            self.move(op)
        if op.block in self.sender and op.action.work.matmul:
            self.compute(op)

    def move(self, op: Op) -> None:
        buffer = self.plan.buffers[op.block]
        lazy, last = op.block in self.plan.lazy, op.index == buffer.num_updates - 1
        if op.action is a.UPDATE and lazy and last:
            chain = self.idle.chain(op)
            assert list(chain.steps) == list(range(self.version[op.block] + 1, op.step + 1))
            assert chain.gradient == (self.waiting.pop(op.block, None) is not None)
            self.version[op.block] = op.step
        elif op.action in (a.WRITE_STATE, a.CHECKPOINT_STATE) and lazy and op.index == buffer.num_parts - 1:
            self.written[op.block] = self.version[op.block]
        elif op.action in (a.STORE_GRADIENT, a.WRITE_GRADIENT) and lazy:
            self.waiting[op.block] = op.step
        elif op.action is a.STORE_SUM:
            self.summed[op.block] = op.step
        elif op.action is a.LOAD_SUM and lazy:
            assert self.idle.begun(op) == (self.summed.get(op.block) == op.step)
        elif op.action in LOADS and op.block in op.slots:
            made = self.made.pop((op.block, op.index), False)
            assert made or a.CHAIN not in op.slots
            version = self.version.get(op.block, 0)
            where = op.slots[op.block] if buffer.weights != "gpu" else op.block
            self.held[r.resource(r.GPU_WEIGHTS, buffer.pool, where)] = op.block, version
        if op.action is a.DEQUANTISE:
            self.copied = op.block
            if buffer.weights != "gpu":
                assert self.held[r.resource(r.GPU_WEIGHTS, buffer.pool, op.slots[op.block])] == (op.block, 0)
        if op.action is a.UPDATE and lazy:
            self.made[op.block, op.index] = True

    def compute(self, op: Op) -> None:
        if not op.batch and not self.needs(op.block):
            return
        for name in self.blocks[op.block].buffers:
            buffer = self.plan.buffers[name]
            newest = self.version.get(name, 0)
            assert name not in self.plan.lazy or newest == (op.step if op.batch else op.step - 1)
            where = op.slots[name] if buffer.weights != "gpu" else name
            if buffer.copy_numel:
                assert self.copied == name, op
            elif buffer.weights != "gpu" or (name in self.plan.lazy and newest):
                assert self.held[r.resource(r.GPU_WEIGHTS, buffer.pool, where)] == (name, newest), op

    def commit(self, op: Op) -> None:
        self.idle.commits(op)
        record = self.idle.record(op.step).get(KEY, {"as_of": {}, "scalars": []})
        behind = {name: step for name, step in self.written.items() if step < op.step}
        assert record["as_of"] == behind
        steps = [row[0] for row in record["scalars"]]
        assert steps == (list(range(min(behind.values()) + 1, op.step + 1)) if behind else [])
        self.idle.committed()


@sampled(60, 400)
@given(
    planned(skipping),
    st.booleans(),
    st.randoms(use_true_random=False),
    st.lists(st.sets(st.integers(0, 3), min_size=1, max_size=2), min_size=1, max_size=12),
    st.sets(st.integers(1, STEPS)),
)
def test_what_is_needed_is_there(
    plan: Plan, one_by_one: bool, chance: random.Random, sent: list[set[int]], validated: set[int]
) -> None:
    """In any order of the lanes, with micro-batches together or one by one."""
    if one_by_one:
        plan = some_plan(plan.problem, replace(plan.choice, group=1))
    run = Run(plan)
    turns = iter(sent * 1000)
    for op in in_some_order(ops_of(plan, validated), chance):
        run.perform(op, turns)
    assert not run.waiting, "each gradient has been applied"


ROW = [0.1, 0.9, 0.95, 1e-8, 0.1]


@pytest.mark.parametrize(
    ("record", "good"),
    [
        ({"as_of": {"layers.0.experts.1": 1}, "scalars": [[2, *ROW], [3, *ROW]]}, True),
        ({"as_of": {"layers.0.experts.1": 1}, "scalars": [[3, *ROW]]}, False),
        ({"as_of": {"layers.0.experts.1": 1}, "scalars": [[2, *ROW], [3, *ROW[1:]]]}, False),
        ({"as_of": {"layers.0.experts.1": 1}, "scalars": [[2, *ROW], [3, *ROW[1:], "0"]]}, False),
        ({"as_of": {"layers.0.experts.1": 3}, "scalars": []}, False),
        ({"as_of": {"layers.0.experts.1": -1}, "scalars": [[0, *ROW], [1, *ROW], [2, *ROW], [3, *ROW]]}, False),
        ({"as_of": {}, "scalars": []}, False),
        ({"as_of": ["layers.0.experts.1"], "scalars": []}, False),
        ({"as_of": {"layers.0.experts.1": 2}}, False),
        ([], False),
    ],
)
def test_a_record_is_told_from_what_is_none(record: Any, good: bool) -> None:
    assert is_record({"step": 3, KEY: record}) == good


ONE: dict[str, Any] = {"layers": 1, "experts": frozenset({0}), "groups": 2, "skips": True}
ONE |= {"gpu_budget": 1, "ram_budget": 1, "row_tokens": 32, "chunk_tokens": 32}


@pytest.mark.parametrize("ram", [1, 10**9])
def test_what_only_a_later_micro_batch_needs_is_brought_up_to_date(ram: int) -> None:
    plan = some_plan(problem(**ONE | {"ram_budget": ram}, micro_batches=2), PlanOptions(group=1))
    run = Run(plan)
    turns = iter([{0}, {0}, {0}, {0}, {0}, {2}, {2}, {0}])
    for op in ops_of(plan, set()):
        run.perform(op, turns)
    assert run.version == {"layers.0.experts.0": STEPS, "layers.0.experts.1": STEPS}
    assert run.skipped


def test_nothing_is_far_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that nothing is sent to catches up once it is so many steps behind."""
    monkeypatch.setattr(idle_module, "MOST_BEHIND", 2)
    plan = some_plan(problem(**ONE))
    run = Run(plan)
    for op in ops_of(plan, set()):
        run.perform(op, iter([{0}]))
        assert all(op.step - version <= 3 for version in run.version.values())
    assert run.skipped
