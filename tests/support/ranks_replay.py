"""Schedules of several ranks, carried out together op by op in random order."""

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import TypeVar

from schedule_replay import races

from penstock.engine.plan.problem import RING_PARTS
from penstock.engine.schedule import actions as a
from penstock.engine.schedule.ops import Op


class Rank:
    """Carries out its ops one lane as far as it gets, and another; what it waits for is as the runtime has it."""

    def __init__(self, number: int, ops: list[Op], everyone: "Sequence[Rank]") -> None:
        assert list(races(ops)) == []
        self.number, self._all = number, everyone
        self.queues: dict[str, list[Op]] = defaultdict(list)
        for op in reversed(ops):
            self.queues[op.lane].append(op)
        self.left = {op.id for op in ops}
        self.handed_over = self.freed = self.updated = self.met = self.told = 0
        self._posted: set[int] = set()
        self.ring: dict[int, tuple[str, int, int]] = {}
        self.added: list[tuple[str, int]] = []

    def ready(self, op: Op) -> bool:
        if any(dep in self.left for dep in op.deps):
            return False
        if op.action is a.HAND_OVER and a.FREED_BY in op.slots:
            return self._all[op.slots[a.FREED_BY]].freed >= op.slots[a.SEQUENCE] + 1 - RING_PARTS
        if op.action is a.ADD_GRADIENT:
            return all(r is self or r.handed_over > op.slots[a.SEQUENCE] for r in self._givers(op))
        if op.action is a.AWAIT_WEIGHTS:
            self.updated = op.slots[a.SEQUENCE]
            return all(r.updated >= op.slots[a.SEQUENCE] for r in self._all)
        if op.action is a.MEET:
            self.met += op.id not in self._posted
            self._posted.add(op.id)
            return all(r.met >= self.met for r in self._all)
        if op.action is a.AWAIT_STATE:
            return self._all[op.slots[a.OF_RANK]].told >= op.slots[a.SEQUENCE]
        return True

    def _givers(self, op: Op) -> "Sequence[Rank]":
        """Whose gradients an op adds."""
        return [self._all[op.slots[a.OF_RANK]]] if a.OF_RANK in op.slots else self._all

    def perform(self, op: Op) -> None:
        self.left.discard(op.id)
        part = (op.block, op.index, op.slots.get(a.SEQUENCE, -1))
        if op.action is a.HAND_OVER:
            self.ring[op.slots[a.RING]] = part
        elif op.action is a.SIGNAL_GRADIENT:
            self.handed_over = op.slots[a.SEQUENCE] + 1
        elif op.action is a.SIGNAL_STATE:
            assert op.slots[a.SEQUENCE] == self.told + 1
            self.told += 1
        elif op.action is a.ADD_GRADIENT:
            assert all(rank.ring[op.slots[a.RING]] == part for rank in self._givers(op)), (
                "all ranks' same part is there"
            )
            self.freed = op.slots[a.SEQUENCE] + 1
            self.added.append((op.block, op.index))


R = TypeVar("R", bound=Rank)


def carry_out(everyone: Sequence[R], chance: random.Random) -> None:
    """All of their ops, by one of them or another; for a while one gets as far as it can."""
    ahead, burst = everyone[0], 0
    while lanes := [(rank, queue) for rank in everyone for queue in rank.queues.values() if queue]:
        able = [(rank, queue) for rank, queue in lanes if rank.ready(queue[-1])]
        assert able, "every rank waits for another one"
        if not burst:
            ahead, burst = chance.choice(everyone), chance.choice([1, 30, 300])
        burst -= 1
        rank, queue = chance.choice([one for one in able if one[0] is ahead] or able)
        rank.perform(queue.pop())
