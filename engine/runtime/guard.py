"""Stops a run before the kernel does: asked before every op whether memory is nearly used up."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from penstock.engine.machine.limits import GIB, FreeMemory, free_memory, memory_groups
from penstock.engine.plan.plan import Plan
from penstock.engine.runtime.failures import describe
from penstock.engine.schedule.ops import Op
from penstock.storage.files.errors import UserError

INTERVAL_S = 0.05
"""Between two looks at free memory, over all threads."""


def hard_reserve(total_bytes: int) -> int:
    """Free memory below which a run stops, before the kernel kills: a hundredth of it all, between 512 MiB, which lanes
    can touch between two looks, and 4 GiB; in small containers an eighth."""
    return min(max(GIB // 2, total_bytes // 100), 4 * GIB, total_bytes // 8)


class MemoryGuard:
    """Raises a UserError when free memory falls below a hard reserve. Use from any thread."""

    def __init__(
        self,
        plan: Plan,
        planned_bytes: int,
        *,
        read: Callable[[], FreeMemory] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`planned_bytes`: RAM that the plan says the run takes at most; `read` gives free memory."""
        self._plan = plan
        self._planned_bytes = planned_bytes
        self._read = read or partial(free_memory, groups=memory_groups(), enough_bytes=4 * GIB)
        self._clock = clock
        self._lock = threading.Lock()
        self._next = clock()

    def check(self, op: Op) -> None:
        """Raise UserError naming `op` if memory is nearly used up; costs nothing but once in INTERVAL_S."""
        now = self._clock()
        if now < self._next or not self._lock.acquire(blocking=False):
            return
        try:
            if now < self._next:
                return
            self._next = now + INTERVAL_S
            memory = self._read()
        finally:
            self._lock.release()
        reserve = hard_reserve(memory.total_bytes)
        if memory.free_bytes >= reserve:
            return
        own = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        raise UserError(
            f"budgets.ram: memory is almost exhausted before op {describe(op, self._plan)}: {memory.free_bytes:,} "
            f"bytes are free of {memory.total_bytes:,} ({memory.where}), and a run stops below {reserve:,}, before it "
            f"is killed. The plan takes {self._planned_bytes:,} bytes of RAM at most; this process holds {own:,}, "
            "libraries included. Lower budgets.ram, or end what else uses memory, and resume: the last committed "
            "generation is untouched"
        )
