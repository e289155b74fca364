"""Schedules of ranks that compute experts of all ranks' chunks, carried out together in random order: every chunk goes
through all blocks and back, whoever is slow, and gradients are added as if each rank had computed all experts."""

import random
from collections import Counter
from typing import Any

import ranks_replay
from hypothesis import given
from hypothesis import strategies as st
from ranks_replay import carry_out
from samples import sampled
from small_problems import problem, some_plan

from penstock.engine.plan.chunks import Chunk
from penstock.engine.plan.plan import Plan
from penstock.engine.plan.problem import PlanOptions
from penstock.engine.schedule import actions as a
from penstock.engine.schedule import resources as r
from penstock.engine.schedule.builder import ScheduleBuilder
from penstock.engine.schedule.ops import Op
from penstock.engine.schedule.passes import evaluation, training

STEPS = 3
"""A validation behind the first one updates what the second one uses; under the third one all is updated."""
HIDDEN = (a.X, a.DY, a.SENT, a.DSENT)
shapes = st.fixed_dictionaries(
    {"experts": st.sampled_from([frozenset({0, 1, 2}), frozenset({1}), frozenset({0, 2})])},
    optional={
        "gpu_budget": st.just(1),
        "ram_budget": st.just(1),
        "frozen": st.sampled_from([frozenset({0}), frozenset({2, 3}), frozenset({0, 1, 2})]),
        "halves": st.just(frozenset({2})),
        "recurrent": st.just(frozenset({0})),
        "chunk_tokens": st.just(200),
    },
)


def plan_of(shape: dict[str, Any], ranks: int, rounds: int, each: int, sharded: bool) -> Plan:
    more = {"micro_batches": each if sharded else rounds * each, "row_tokens": 128 if sharded else 64}
    more |= {"replicas": ranks * rounds, "ranks": ranks, "sharded": sharded, "chunk_tokens": 32, "kv_window": "auto"}
    return some_plan(problem(**more | {"spread_experts": True} | shape), PlanOptions(spread=True))


class Rank(ranks_replay.Rank):
    """One that computes experts of all ranks' chunks; what memory holds is what has been computed of it."""

    def __init__(self, plan: Plan, ops: list[Op], everyone: "list[Rank]", common: dict[Any, Any]) -> None:
        super().__init__(plan.rank, ops, everyone)
        self.plan, self.everyone, self._common = plan, everyone, common
        self._own: dict[Any, Any] = {}
        self.layer_of = {block.name: i for i, block in enumerate(plan.blocks)}
        self.sums: dict[Any, list[Any]] = {}
        """Buffer and slot on the compute device -> what has been added there."""
        self.found: list[tuple[str, list[Any]]] = []
        """Gradients of experts that have been handed over."""
        self.clips = [*(op.id for op in ops if op.action is a.CLIP), ops[-1].id]
        """Ends of steps that are still to come: only then the ops behind one are handed over."""
        self.ended: set[int] = set()

    def ready(self, op: Op) -> bool:
        if not super().ready(op) or op.id > self.clips[0]:
            return False
        if op.action is a.CLIP:
            self.ended.add(op.step)
            return all(op.step in other.ended for other in self.everyone)
        if op.action is a.AWAIT_CHUNK:
            return bool(self._common.get(("counter", op.slots[a.PLACE]), 0) >= op.slots[a.SEQUENCE])
        return True

    def chunk(self, index: int) -> tuple[int, int]:
        """Its rank, and its number there."""
        return self.plan.rank_of(index), index % len(self.plan.chunks)

    def _memory(self, resource: tuple[Any, ...]) -> tuple[dict[Any, Any], Any]:
        if resource[0] in ("ram.boundary", "ram.sent", "saved.sent"):
            return self._common, (*resource[:-1], *self.chunk(resource[-1]))
        return self._own, resource

    def _get(self, resource: tuple[Any, ...]) -> Any:
        memory, key = self._memory(resource)
        return memory[key]

    def _put(self, resource: tuple[Any, ...], value: Any) -> None:
        memory, key = self._memory(resource)
        memory[key] = value

    def perform(self, op: Op) -> None:
        super().perform(op)
        if op.action is a.CLIP:
            del self.clips[0]
        if op.action is a.SIGNAL_CHUNK:
            key = "counter", op.slots[a.PLACE]
            assert self._common.get(key, 0) < op.slots[a.SEQUENCE]
            self._common[key] = op.slots[a.SEQUENCE]
        elif op.action.kind in HIDDEN:
            files = [each for each in (*op.writes, *op.reads) if each[0].startswith("nvme.")]
            source = op.reads[0] if op.reads else files[0]
            targets = [each for each in op.writes if op.action.lane == "nvme_write" or each not in files]
            for target in targets if op.action not in a.DISCARD.values() else ():
                self._put(target, "of a validation" if op.batch else self._get(source))
        elif op.lane == "compute" and op.index >= 0 and op.batch == 0:
            self._compute(op, self.layer_of[op.block], (*self.chunk(op.index), op.step))
        if op.action is a.ADD_REPLICA:
            self.sums[op.block, op.slots[op.block]] += self.sums.pop((op.block, op.slots[a.gradient_of(op.block)]))
        if op.action is a.HAND_OVER and a.OF_RANK in op.slots and op.index == self.plan.buffers[op.block].num_parts - 1:
            self.found.append((op.block, self.sums.pop((op.block, op.slots[op.block]))))

    def _compute(self, op: Op, layer: int, chunk: Any) -> None:
        block = self.plan.blocks[layer]
        for name in block.buffers:
            if a.gradient_of(name) in op.slots and self.plan.spread.get(layer) is not None:
                key = name, op.slots[a.gradient_of(name)]
                if a.zero(name) in op.flags:
                    self.sums[key] = [[]]
                self.sums[key][-1].append(chunk)

        def hidden(role: str) -> tuple[str, int]:
            return r.GPU_HIDDEN, op.slots[role]

        def sent(role: str) -> tuple[str, int]:
            return r.GPU_SENT, op.slots[role]

        last, backward = len(self.plan.blocks) - 1, op.action.phase == "backward"
        if block.kind == "head":
            assert self._get(hidden(a.X)) == [("up", i, chunk) for i in range(last)], "all blocks in order"
            if a.OUT in op.slots:
                self._put(hidden(a.OUT), [("down", last, chunk)])
        elif not backward:
            before = [("up", i, chunk) for i in range(layer)]
            if a.X in op.slots:
                assert self._get(hidden(a.X)) == before
            if block.kind == "experts":
                assert self._get(sent(a.SENT)) == ("sent", self._sender(layer), chunk)
            if a.OUT in op.slots and op.action.name.endswith(("forward", "forward_bottom")):
                self._put(hidden(a.OUT), [*before, ("up", layer, chunk)])
                if a.SENT in op.slots and block.kind == "layer":
                    self._put(sent(a.SENT), ("sent", layer, chunk))
        else:
            behind = [("down", i, chunk) for i in range(last, layer, -1)]
            if a.DY in op.slots and op.action is not a.LAYER_BACKWARD_BOTTOM:
                assert self._get(hidden(a.DY)) == behind
            groups = [i for i in self.plan.spread if self._sender(i) == self._sender(layer) and i > layer]
            if a.DSENT in op.slots and op.action is not a.LAYER_BACKWARD_BOTTOM:
                assert self._get(sent(a.DSENT)) == [(i, chunk) for i in reversed(groups)]
            if block.kind == "experts":
                assert self._get(sent(a.SENT)) == ("sent", self._sender(layer), chunk)
            if a.X in op.slots and a.OUT in op.slots and block.kind == "layer":
                assert self._get(hidden(a.X)) == [("up", i, chunk) for i in range(layer)]
            if a.OUT in op.slots:
                if op.action is a.LAYER_BACKWARD_BOTTOM:
                    assert self._get(hidden(a.OUT)) == [*behind, ("down", layer, chunk)]
                self._put(hidden(a.OUT), [*behind, ("down", layer, chunk)])
            if a.DSENT_OUT in op.slots:
                self._put(sent(a.DSENT_OUT), [(i, chunk) for i in reversed([layer, *groups])])

    def _sender(self, layer: int) -> int:
        """The layer of a group of experts; of a layer itself."""
        while layer in self.plan.spread:
            layer -= 1
        return layer


def carried_out(plan: Plan, filled: list[int | None], chance: random.Random) -> list[Rank]:
    everyone: list[Rank] = []
    common: dict[Any, Any] = {}
    for number in range(plan.problem.ranks):
        mine = plan.of_rank(number)
        own = [filled[mine.in_step(i)] for i in range(plan.problem.micro_batches)]
        batch = {"streams": mine.filled_streams(own), "others": mine.others(filled)}
        builder, ops = ScheduleBuilder(mine), []
        for step in range(1, STEPS + 1):
            ops += builder.ops(training(mine, step, **batch), commit_previous=step == 2)  # type: ignore[arg-type]
            documents = mine.row_documents[: plan.problem.micro_batches if step == 1 else 0]
            if documents:
                ops += builder.ops(evaluation(mine, step, 1, documents=documents, streams=batch["streams"]))  # type: ignore[arg-type]
        everyone.append(Rank(mine, ops + builder.finish(commit=True), everyone, common))
    carry_out(everyone, chance)
    return everyone


@sampled(30, 150)
@given(
    shapes,
    st.integers(2, 3),
    st.integers(1, 2),
    st.integers(1, 2),
    st.integers(0, 2),
    st.booleans(),
    st.lists(st.sampled_from([None, 1, 40]), min_size=12, max_size=12),
    st.integers(0, 10**6),
)
def test_chunks_go_through_all_blocks_and_gradients_are_added_in_order(
    shape: dict[str, Any],
    ranks: int,
    rounds: int,
    each: int,
    more: int,
    sharded: bool,
    filled: list[int | None],
    seed: int,
) -> None:
    plan = plan_of(shape | {"groups": ranks + more}, ranks, rounds, each, sharded)
    of_step = filled[: each if sharded else ranks * rounds * each]
    everyone = carried_out(plan, of_step, random.Random(seed))
    chunks: dict[tuple[int, int], list[Chunk]] = {}
    for rank in everyone:
        own = [of_step[rank.plan.in_step(i)] for i in range(plan.problem.micro_batches)]
        for chunk in rank.plan.filled_chunks(own):
            chunks.setdefault((plan.replica(chunk), rank.plan.rank), []).append(chunk)
    computed = [
        [(rank, c.index) for c in sorted(chunks[round_, rank], key=lambda c: -c.index)]
        for round_ in reversed(range(rounds))
        for rank in reversed(range(ranks))
    ]
    for rank in everyone:
        for name, replicas in rank.found:
            steps = {step for replica in replicas for *_, step in replica}
            assert len(steps) == 1
            assert [[(owner, index) for owner, index, _ in replica] for replica in replicas] == computed, name
        trained = [n for i, owner in plan.spread.items() if owner == rank.plan.rank and plan.blocks[i].backward
                   for n in plan.blocks[i].buffers if not plan.buffers[n].frozen]  # fmt: skip
        assert Counter(name for name, _ in rank.found) == dict.fromkeys(trained, STEPS)
    for name, buffer in plan.buffers.items():
        for part in range(0 if buffer.frozen else buffer.num_parts):
            added = [rank.plan.rank for rank in everyone for each_part in rank.added if each_part == (name, part)]
            assert set(added) == {buffer.owner(part)}
