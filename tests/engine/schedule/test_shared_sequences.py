"""Sequences that ranks share: the cut is even and whole; and whoever is slow, attention finds the keys and values that
their ranks have published, and every chunk's gradients of them are added from all shards that look at it, once and in
one order."""

import itertools
import random
from collections import defaultdict
from dataclasses import replace
from typing import Any

import ranks_replay
from hypothesis import assume, given
from hypothesis import strategies as st
from ranks_replay import carry_out
from samples import sampled
from small_problems import problem, some_plan

from penstock.engine.plan.chunks import Streams, filled_streams, own, streams
from penstock.engine.plan.plan import Plan
from penstock.engine.plan.problem import PlanOptions
from penstock.engine.plan.windows import attention_regions, shared_regions
from penstock.engine.schedule import actions as a
from penstock.engine.schedule.builder import ScheduleBuilder
from penstock.engine.schedule.ops import Op
from penstock.engine.schedule.passes import evaluation, training

SCARCE = {"gpu_budget": 1, "ram_budget": 1}


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(1, 5000), st.integers(1, 900))
def test_shards_cover_every_sequence_in_zigzag_order(
    micro_batches: int, ranks: int, rounds: int, tokens: int, chunk_tokens: int
) -> None:
    shards = ranks * rounds
    assume(shards > 1)
    assume(tokens >= 2 * shards * -(-tokens // (2 * shards * min(tokens, chunk_tokens))))
    shape = {"micro_batches": micro_batches, "row_tokens": tokens, "chunk_tokens": chunk_tokens}
    p = problem(**shape, ranks=ranks, replicas=shards, sharded=True)
    of_ranks = [streams(p, rank) for rank in range(ranks)]
    assert sum(map(len, of_ranks[0])) == p.num_chunks
    for m in range(micro_batches):
        whole = [replace(chunk, index=0, local=0) for chunk in of_ranks[0][m]]
        assert all([replace(c, index=0, local=0) for c in seen[m]] == whole for seen in of_ranks)
        assert [t for chunk in whole for t in range(chunk.start, chunk.end)] == list(range(tokens))
        assert [chunk.ordinal for chunk in whole] == list(range(len(whole)))
        lengths = [chunk.end - chunk.start for chunk in whole]
        assert max(lengths) - min(lengths) <= (128 if min(lengths) >= 128 else 1)
        assert max(lengths) <= chunk_tokens + 128
        pieces = [chunk.shard for chunk in whole[:: len(whole) // (2 * shards)]]
        assert pieces == [*range(shards), *reversed(range(shards))]
        computed = [[chunk.ordinal for chunk in seen[m] if chunk.index >= 0] for seen in of_ranks]
        assert sorted(itertools.chain.from_iterable(computed)) == list(range(len(whole))), "each by one rank"
        assert len(set(map(len, computed))) == 1
    for seen in of_ranks:
        mine = list(own(seen))
        assert [chunk.index for chunk in mine] == list(range(len(mine)))
        assert [chunk.local for chunk in mine] == list(range(len(mine) // micro_batches)) * micro_batches


@given(st.integers(1, 4), st.integers(2, 3), st.lists(st.none() | st.integers(0, 400), min_size=2, max_size=2))
def test_every_shard_has_a_chunk_of_every_batch(rounds: int, ranks: int, filled: list[int | None]) -> None:
    """Or its rank would not go through the blocks with the others."""
    shards = ranks * rounds
    p = problem(row_tokens=400, chunk_tokens=20, ranks=ranks, replicas=shards, sharded=True)
    found = [filled_streams(streams(p, rank), filled, every=1) for rank in range(ranks)]
    for m, end in enumerate(filled):
        assert {chunk.shard for chunk in found[0][m]} == set(range(shards))
        real = set(range(400 if end is None else end))
        assert real <= {t for chunk in found[0][m] for t in range(chunk.start, chunk.end)}
        seen = [[(c.ordinal, c.start, c.end) for c in of_rank[m]] for of_rank in found]
        assert all(each == seen[0] for each in seen), "all ranks know of the same chunks"


shapes = st.fixed_dictionaries(
    {"layers": st.integers(1, 3), "tied": st.booleans(), "micro_batches": st.integers(1, 2)},
    optional={
        "gpu_budget": st.just(1),
        "ram_budget": st.just(1),
        "frozen": st.just(frozenset({0})),
        "experts": st.just(frozenset({1})),
        "sliding": st.just(frozenset({0})),
        "without_attention": st.just(frozenset({1})),
        "recurrent": st.just(frozenset({0, 1})),
        "activation_checkpointing": st.just("full"),
    },
)


def plan_of(shape: dict[str, Any], ranks: int, rounds: int, chunk_tokens: int) -> Plan:
    more = {"row_tokens": 96, "chunk_tokens": chunk_tokens, "ranks": ranks, "replicas": ranks * rounds, "sharded": True}
    recompute = "all" if "activation_checkpointing" in shape else "none"
    return some_plan(problem(**more | {"kv_window": "auto"} | shape), PlanOptions(recompute=recompute))


class Rank(ranks_replay.Rank):
    """One that shares sequences with others. A place holds what was written there last."""

    def __init__(
        self, plan: Plan, ops: list[Op], everyone: "list[Rank]", common: tuple[Any, Any], cut: Streams
    ) -> None:
        super().__init__(plan.rank, ops, everyone)
        self.everyone, self.plan, self.streams, self.taken = everyone, plan, cut, 0
        self.windows, self.handed_on = common
        self.kv: dict[int, Any] = {}
        """Slot -> (layer, micro-batch, position, step, batch)."""
        self.dkv: dict[int, dict[int, list[int]]] = {}
        """Slot -> position of a chunk of keys -> those of the queries that have added to its gradients."""
        self.partial: dict[int, dict[int, list[int]]] = {}
        """The same as it is in the window that others read."""
        self.sums: dict[int, list[Any]] = {}
        """Local number of a chunk -> what has been added of its gradients, by rank."""
        self.ended: list[Any] = []
        self.attended: dict[Any, list[int]] = defaultdict(list)

    def _of(self, op: Op, ordinal: int) -> tuple[Any, ...]:
        return op.block, self.plan.chunks[op.index].micro_batch, ordinal, op.step, op.batch

    def perform(self, op: Op) -> None:
        super().perform(op)
        chunk = self.plan.chunks[op.index] if 0 <= op.index < len(self.plan.chunks) else None
        slot = op.slots.get(a.SLOT, -1)
        if op.action in (a.STORE[a.RECURRENT], a.STORE[a.DRECURRENT]) and a.PLACE in op.slots:
            assert chunk is not None
            self.handed_on[op.action.kind, op.slots[a.PLACE]] = self._of(op, chunk.ordinal)
        elif op.action in (a.LOAD[a.RECURRENT], a.LOAD[a.DRECURRENT]) and a.PLACE in op.slots:
            assert chunk is not None
            ordinals = [each.ordinal for each in self.streams[chunk.micro_batch]]
            at = ordinals.index(chunk.ordinal) + (1 if op.action.kind == a.DRECURRENT else -1)
            beside = self._of(op, ordinals[at])
            assert self.handed_on[op.action.kind, op.slots[a.PLACE]] == beside, "that of the chunk beside it"
            self.taken += 1
        elif op.action is a.LAYER_PUBLISH:
            assert chunk is not None
            self.kv[op.slots[a.KV]] = self._of(op, chunk.ordinal)
        elif op.action is a.STORE[a.KV]:
            self.windows[op.slots[a.PLACE]] = self.kv[slot]
        elif op.action is a.LOAD[a.KV]:
            self.kv[slot] = self.windows[op.slots[a.PLACE]]
        elif op.action in (a.ATTEND, a.ATTEND_BACKWARD):
            assert chunk is not None
            assert self.kv[op.slots[a.KV]] == self._of(op, op.slots[a.KEYS]), (
                "its keys and values are those of the chunk"
            )
            if op.action is a.ATTEND_BACKWARD:
                begun = {} if a.ZERO_DKV in op.flags else self.dkv[op.slots[a.DKV]]
                self.dkv[op.slots[a.DKV]] = {op.slots[a.KEYS]: [*begun.get(op.slots[a.KEYS], []), chunk.ordinal]}
                self.attended[self._of(op, chunk.ordinal)].append(op.slots[a.KEYS])
        elif op.action is a.STORE[a.DKV]:
            self.partial[op.slots[a.PLACE] % self.plan.stream_chunks] = self.dkv[slot]
        elif op.action is a.LOAD[a.DKV] and a.PLACE in op.slots:
            self.dkv[slot] = self.partial[op.slots[a.PLACE] % self.plan.stream_chunks]
        elif op.action is a.ADD_DKV:
            assert chunk is not None
            added = [] if a.FIRST in op.flags else self.sums[chunk.local]
            for rank in reversed(range(len(self.everyone))):
                if op.slots[a.OF_RANKS] >> rank & 1:
                    added = [*added, tuple(self.everyone[rank].partial[chunk.ordinal][chunk.ordinal])]
            self.sums[chunk.local] = added
        elif op.action is a.LOAD[a.DKV]:
            assert chunk is not None
            self.dkv[slot] = {chunk.ordinal: self.sums[chunk.local]}
        elif op.action is a.LAYER_BACKWARD_BOTTOM:
            assert chunk is not None
            self.ended.append((self._of(op, chunk.ordinal), self.dkv[op.slots[a.DKV]][chunk.ordinal]))


def carried_out(plan: Plan, chance: random.Random, filled: list[int | None]) -> list[Rank]:
    everyone: list[Rank] = []
    common: tuple[dict[int, Any], dict[Any, Any]] = {}, {}
    for number in range(plan.problem.ranks):
        mine = plan.of_rank(number)
        builder, ops = ScheduleBuilder(mine), []
        cut = mine.filled_streams(filled)
        for step in (1, 2):
            ops += builder.ops(training(mine, step, streams=cut), commit_previous=step == 2)
            documents = mine.row_documents[: len(cut)]
            ops += builder.ops(evaluation(mine, step, 1, documents=documents, streams=cut))
        ops += builder.finish(commit=True)
        everyone.append(Rank(mine, ops, everyone, common, cut))
    carry_out(everyone, chance)
    return everyone


@sampled(20, 150)
@given(
    shapes,
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([6, 20]),
    st.lists(st.none() | st.integers(1, 96), min_size=2, max_size=2),
    st.randoms(use_true_random=False),
)
def test_every_chunk_ends_with_what_all_shards_owe_to_it(
    shape: dict[str, Any], ranks: int, rounds: int, chunk_tokens: int, filled: list[int | None], chance: random.Random
) -> None:
    """With the same sums in the same order on any number of ranks."""
    if ranks * rounds == 1:
        return
    found = []
    for count in {ranks, 1}:
        plan = plan_of(shape, count, ranks * rounds // count, chunk_tokens)
        everyone = carried_out(plan, chance, filled[: shape["micro_batches"]])
        borders = sum(
            x.shard % count != y.shard % count for each in everyone[0].streams for x, y in itertools.pairwise(each)
        )
        recurrent = sum(block.recurrent for block in plan.blocks)
        back = sum(block.recurrent and block.backward for block in plan.blocks)
        # Forward and back in each of two steps, forward in their validations.
        assert sum(rank.taken for rank in everyone) == borders * (4 * recurrent + 2 * back)
        ended = dict(pair for rank in everyone for pair in rank.ended)
        assert len(ended) == sum(len(rank.ended) for rank in everyone)
        attended = {of: seen for rank in everyone for of, seen in rank.attended.items()}
        assert ended.keys() == attended.keys()
        owed: dict[Any, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        shard_of = {chunk.ordinal: chunk.shard for chunk in plan.streams[0]}
        for (layer, m, query, step, batch), seen in attended.items():
            assert query in seen
            assert len(seen) == len(set(seen))
            for key in seen:
                owed[layer, m, key, step, batch][shard_of[query]].append(query)
        for of, sums in ended.items():
            by_shard = [tuple(sorted(owed[of][shard], reverse=True)) for shard in sorted(owed[of], reverse=True)]
            assert sums == by_shard
        found.append(ended)
    assert all(each == found[0] for each in found)


def test_what_ranks_share_is_there_once() -> None:
    """Keys and values of the whole stream for two layers, and of each rank the sums for all of it."""
    for ranks in (1, 2, 4):
        plan = plan_of(SCARCE, ranks, 4 // ranks, 20)
        shared = shared_regions(plan.problem)
        assert len(shared["kv"]) == 2 * plan.stream_chunks
        assert len(shared["dkv"]) == ranks * plan.stream_chunks
        regions = attention_regions(plan.problem, plan.group_chunks, True, True, True)
        assert [len(regions[name]) for name in ("kv", "dkv", "dq")] == [0, plan.window_chunks, plan.window_chunks]
