"""The guard stops a run in time, names the op, and costs nothing between two looks."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from some_ops import an_op

from penstock.engine.machine.limits import GIB, FreeMemory
from penstock.engine.plan.plan import Plan
from penstock.engine.runtime.guard import INTERVAL_S, MemoryGuard, hard_reserve
from penstock.engine.schedule.actions import LAYER_FORWARD
from penstock.storage.errors import UserError

OP = an_op(7, LAYER_FORWARD, block="layers.3", index=1, step=5)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    with tiny.session(tmp_path_factory.mktemp("run")) as session:
        return session.plan


class Memory:
    def __init__(self, free_bytes: int = 8 * GIB) -> None:
        self.free_bytes = free_bytes
        self.now = 100.0
        self.reads = 0

    def read(self) -> FreeMemory:
        self.reads += 1
        return FreeMemory(self.free_bytes, 16 * GIB, "this machine's memory")

    def guard(self, plan: Plan) -> MemoryGuard:
        return MemoryGuard(plan, 3 * GIB, read=self.read, clock=lambda: self.now)


def test_stops_below_the_reserve(plan: Plan) -> None:
    memory = Memory()
    guard = memory.guard(plan)
    guard.check(OP)
    memory.free_bytes = hard_reserve(16 * GIB) - 1
    guard.check(OP)  # too soon to look again
    memory.now += INTERVAL_S
    with pytest.raises(UserError) as caught:
        guard.check(OP)
    free, takes = f"{memory.free_bytes:,} bytes are free", f"The plan takes {3 * GIB:,} bytes"
    for part in ("op layer_forward layers.3[1]", "of step 5", free, takes, "this machine's memory"):
        assert part in str(caught.value)


@given(st.lists(st.floats(0, 0.2), max_size=50))
def test_looks_once_in_an_interval(plan: Plan, waits: list[float]) -> None:
    memory = Memory()
    guard = memory.guard(plan)
    for wait in waits:
        memory.now += wait
        guard.check(OP)
    assert memory.reads <= sum(waits) / INTERVAL_S + 1


def test_many_threads_look_once(plan: Plan) -> None:
    memory = Memory()
    guard = memory.guard(plan)
    start = threading.Barrier(8)

    def lane(_: int) -> None:
        start.wait()
        for _ in range(100):
            guard.check(OP)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lane, range(8)))
    assert memory.reads == 1


def test_reads_this_machine(plan: Plan, tmp_path: Path) -> None:
    MemoryGuard(plan, GIB).check(OP)


@pytest.mark.parametrize(
    ("total", "reserve"), [(GIB, GIB // 8), (16 * GIB, GIB // 2), (128 * GIB, int(1.28 * GIB)), (1536 * GIB, 4 * GIB)]
)
def test_reserves_by_hand(total: int, reserve: int) -> None:
    assert hard_reserve(total) == pytest.approx(reserve, abs=1)
