"""The schedule carried out by clocks: the same ops as the executor's, one at a time on each lane, in program order.

An op starts when its lane is free, what it depends on is done and the main thread has handed it over; it runs as fast
as what it shares with the other lanes lets it. The result has the executor's spans. Nothing is computed and no memory
is needed, so any plan can be tried for any machine.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.engine.events import Span
from penstock.engine.forecast.costs import Costs, is_device_local
from penstock.engine.machine.profile import Machine
from penstock.engine.schedule.action import LANES, Lane
from penstock.engine.schedule.builder import ScheduleBuilder
from penstock.engine.schedule.ops import Op, span_of
from penstock.engine.schedule.passes import training

BUILD_S = 1.6e-5
"""The main thread's time to build one op: docs/decisions/host-time.md."""
DISPATCH_S = 1.2e-5
"""A lane's time between two ops."""
BETWEEN_STEPS_S = 1e-3
"""From the end of a step to the first op of the next: metrics, the next batch."""

_CPU_SHARES: dict[Lane, float] = {"compute": 1.0, "optimizer": 1.0, "h2d": 0.5, "d2h": 0.5}
"""Share of all cores that a lane at full speed keeps busy where the compute tier is ordinary memory."""
_TEAMS_SHARE = 0.7
"""What compute and optimizer reach together, on the same cores, of what one of them reaches alone: each is a team of
threads, of which every kernel waits for the last, and that is often one whose core the other team has (measured on two
cores: an update beside a layer's forward takes 3 to 4 times as long as alone, `penstock bench plan`)."""
_CHECK_S_PER_BYTE = 1e-10
"""Of a core, for the checksums of what is read or written (docs/results/storage.md)."""


class Deadlock(Exception):
    """No lane can go on: the schedule's dependencies and its program order contradict each other."""


@dataclass(frozen=True, slots=True)
class Simulation:
    step_s: float
    """From the end of the step before, when its loss is known, to this one's."""
    busy_s: dict[str, float]
    """Lane -> seconds within the step in which it had an op under way."""
    bytes: dict[str, int]
    """Lane -> payload bytes of the step's ops; what is offloaded within the compute device is not counted."""
    spans: list[Span]
    """Of the step, counted from its start. Ops of its update are not done by its end and belong to the next step."""

    @property
    def bound_by(self) -> str:
        return max(self.busy_s, key=lambda lane: self.busy_s[lane])


def simulate(costs: Costs, *, settled: bool = True) -> Simulation:
    """The second step of a run of a plan, as the first has no update to apply. Raises Deadlock.

    Not `settled`: the first step is only taken to have been there, nothing of it being under way any more; this takes
    half the time to find out.
    """
    plan, on = costs.plan, costs.on
    builder, clocks, streams = ScheduleBuilder(plan), Clocks(on.machine), plan.filled_streams(on.filled)
    batch: dict[str, Any] = {"documents": on.documents, "streams": streams, "others": plan.others(on.filled)}
    start = 0.0
    if settled:
        first = builder.ops(training(plan, 1, **batch))
        clocks.run(first, costs)
        start = clocks.done_at[first[-1].id]
    else:
        builder.follow(1)
    second = builder.ops(training(plan, 2, **batch))
    clocks.run(second, costs, from_s=start + BETWEEN_STEPS_S)
    end = clocks.done_at[second[-1].id]
    spans = clocks.spans(start)
    moved: Counter[str] = Counter(dict.fromkeys(LANES, 0))
    for op in second:
        if op.nbytes and not is_device_local(plan, op):
            moved[op.lane] += round(op.nbytes * costs.share(op))
    return Simulation(end - start, busy_seconds(spans, 0.0, end - start), dict(moved), spans)


def busy_seconds(spans: Sequence[Span], start_s: float, end_s: float) -> dict[str, float]:
    """Lane -> seconds between the two times in which it had a span under way; spans of a lane in order of start."""
    busy = dict.fromkeys(LANES, 0.0)
    until = dict.fromkeys(LANES, start_s)
    for span in spans:
        begin, end = max(span.start_s, until[span.lane]), min(span.end_s, end_s)  # type: ignore[index]
        if end > begin:
            busy[span.lane] += end - begin  # type: ignore[index]
            until[span.lane] = end  # type: ignore[index]
    return {str(lane): seconds for lane, seconds in busy.items()}


class Clocks:
    """One clock per lane, and one for the main thread."""

    def __init__(self, machine: Machine) -> None:
        self.done_at: dict[int, float] = {}
        """Op -> when it ended."""
        self.times: list[tuple[Op, float, float]] = []
        """(op, start, end) in order of end."""
        self._speeds = [_speeds(machine, mask) for mask in range(1 << len(LANES))]
        self._lanes = [[i for i in range(len(LANES)) if mask >> i & 1] for mask in range(1 << len(LANES))]
        """Mask of lanes -> their numbers; counted from the end, by ~mask, the numbers of all others."""
        self._free_at = [0.0] * len(LANES)

    def run(self, ops: Sequence[Op], costs: Costs, from_s: float = 0.0) -> None:
        """Carry out `ops`, of consecutive numbers, handed over one by one from `from_s` on. Raises Deadlock."""
        if not ops:
            return
        queues, earliest, missing, followers = self._handed_over(ops, from_s)
        lanes_of, all_speeds, free_at = self._lanes, self._speeds, self._free_at
        nothing = len(ops)
        heads = [0] * len(LANES)
        ahead = [queue[0] for queue in queues]
        """The op that each lane has or comes to next, by its place; `nothing` where there is none."""
        ready = [math.inf if missing[at] else max(earliest[at], free_at[lane]) for lane, at in enumerate(ahead)]
        """When an idle lane's next op may start; infinite where that waits for another."""
        left, began = [0.0] * len(LANES), [0.0] * len(LANES)
        now, mask, todo = 0.0, 0, len(ops)
        while todo:
            coming = math.inf
            for lane in lanes_of[~mask]:
                if (start := ready[lane]) > now:
                    if start < coming:
                        coming = start
                    continue
                mask |= 1 << lane
                began[lane], left[lane] = now, costs.seconds(ops[ahead[lane]])
            speeds, under_way = all_speeds[mask], lanes_of[mask]
            pace, first = coming - now, -1
            for lane in under_way:
                takes = left[lane] / speeds[lane]
                if takes <= pace:
                    pace, first = takes, lane
            if pace == math.inf:
                stuck = ", ".join(f"{ops[at].action.name} of {ops[at].block}" for at in ahead if at != nothing)
                raise Deadlock(f"the lanes wait for each other at {stuck}")
            for lane in under_way:
                left[lane] -= pace * speeds[lane]
            now += pace
            if first < 0:
                continue
            at = ahead[first]
            mask &= ~(1 << first)
            op = ops[at]
            self.done_at[op.id] = now
            self.times.append((op, began[first], now))
            heads[first] += 1
            ahead[first] = following = queues[first][heads[first]]
            free_at[first] = now + DISPATCH_S
            for follower in followers[at]:
                missing[follower] -= 1
                if earliest[follower] < now:
                    earliest[follower] = now
                if not missing[follower] and follower in ahead:
                    lane = ahead.index(follower)
                    ready[lane] = max(earliest[follower], free_at[lane])
            ready[first] = math.inf if missing[following] else max(earliest[following], free_at[first])
            todo -= 1

    def _handed_over(
        self, ops: Sequence[Op], from_s: float
    ) -> tuple[list[list[int]], list[float], list[int], list[list[int]]]:
        """Of ops by their place in `ops`: those of each lane; and of each op when it may start at the earliest, how
        many others of `ops` it waits for, and which ones wait for it. Behind all is one that never may start."""
        numbers = {lane: i for i, lane in enumerate(LANES)}
        base, end = ops[0].id, ops[0].id + len(ops)
        assert ops[-1].id == end - 1
        queues: list[list[int]] = [[] for _ in LANES]
        earliest, missing = [math.inf] * (len(ops) + 1), [0] * (len(ops) + 1)
        followers: list[list[int]] = [[] for _ in ops]
        for at, op in enumerate(ops):
            queues[numbers[op.action.lane]].append(at)
            start = from_s + at * BUILD_S
            for dep in op.deps:
                if base <= dep < end:
                    missing[at] += 1
                    followers[dep - base].append(at)
                elif (done := self.done_at.get(dep, math.inf)) > start:
                    start = done
            earliest[at] = start
        for queue in queues:
            queue.append(len(ops))
        return queues, earliest, missing, followers

    def spans(self, start: float) -> list[Span]:
        """What ended after `start`, counted from there, in order of end."""
        lane_end: dict[Lane, float] = dict.fromkeys(LANES, 0.0)
        result, done_at = [], self.done_at
        for op, begin, end in self.times:
            lane = op.action.lane
            if end > start:
                waited: tuple[int, ...] = ()
                if begin > (idle_from := lane_end[lane]) + DISPATCH_S:
                    waited = tuple([dep for dep in op.deps if done_at[dep] > idle_from])
                result.append(span_of(op, begin - start, end - start, waited))
            lane_end[lane] = end
        return result


def _speeds(machine: Machine, mask: int) -> list[float]:
    """Share of its own rate at which each lane goes while the lanes of `mask` are busy."""
    busy = {lane for i, lane in enumerate(LANES) if mask >> i & 1}
    disks: dict[Lane, float] = {
        "nvme_read": machine.nvme_read_bytes_per_s,
        "nvme_write": machine.nvme_write_bytes_per_s,
    }
    disks = {lane: rate for lane, rate in disks.items() if lane in busy}
    duplex = machine.drive_duplex_share if len(disks) == 2 else 1.0
    teams = {lane: share for lane, share in _CPU_SHARES.items() if lane in busy} if machine.gpu is None else {}
    # A core that a checksum takes is lost to a team as a whole, which waits for the thread that it takes it from.
    checks = {lane: min(1.0, rate * duplex * _CHECK_S_PER_BYTE) for lane, rate in disks.items()} if teams else {}
    crowd = max(1.0, sum(teams.values()) + sum(checks.values()))
    speeds = []
    for lane in LANES:
        speed = 1.0 / crowd if lane in teams or lane in checks else 1.0
        if lane in ("compute", "optimizer") and {"compute", "optimizer"} <= teams.keys():
            speed *= _TEAMS_SHARE
        if lane in disks:
            speed *= duplex
        if machine.gpu is not None and lane in ("h2d", "d2h") and {"h2d", "d2h"} <= busy:
            speed *= machine.duplex_share
        speeds.append(speed)
    return speeds
