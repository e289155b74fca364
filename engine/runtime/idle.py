"""Groups of experts that nothing is sent to: what is skipped of them, and how they catch up.

A step's gradient of such a group is zero. AdamW with a zero gradient is not applied before the group is needed again:
then it is, step by step, with the scalars that each of these steps had, so that the bits are those of a run that
skipped nothing. A generation records which step each buffer is as of, and these scalars.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.engine.config import TrainConfig
from penstock.engine.optim.base import Optimizer
from penstock.engine.optim.lr import learning_rate
from penstock.engine.plan.plan import Plan
from penstock.engine.runtime.past import SCALARS, Past, scalars_of
from penstock.engine.schedule import actions as a
from penstock.engine.schedule.ops import Op
from penstock.storage.tier.arena import pinned_empty

MOST_BEHIND = 1000
"""Steps that a group may be behind: a generation has their scalars, and whoever reads it replays them."""
_KEPT_CHAINS = 3
"""Of a buffer: an update is decided on once the device is done with the micro-batches before it, and so with the update
before."""


@dataclass(frozen=True, slots=True)
class Chain:
    """What one update of a buffer comes to."""

    runs: bool
    steps: range
    """Those that it applies."""
    gradient: bool
    """Whether there is a gradient, of the last of them; else all of them have zeros."""


class Idle:
    """What has been sent to which group, and the step that each group's state is as of. Any thread may call it."""

    def __init__(
        self, plan: Plan, experts: Mapping[str, tuple[int, int]], train: TrainConfig, device: torch.device
    ) -> None:
        """`experts`: of each group its first expert, and their end."""
        self._train, self._lock = train, threading.Lock()
        self._groups: dict[str, list[str]] = {}
        """Layer -> its groups, in the order of their experts."""
        self._group_of: dict[str, str] = {}
        for block, sender in plan.problem.senders.items():
            name = plan.blocks[block].name
            self._groups.setdefault(plan.blocks[sender].name, []).append(name)
            self._group_of |= dict.fromkeys(plan.blocks[block].buffers, name)
        self._sizes = {layer: experts[own[0]][1] - experts[own[0]][0] for layer, own in self._groups.items()}
        self._marks = {
            layer: torch.zeros(len(own), dtype=torch.bool, device=device) for layer, own in self._groups.items()
        }
        make = pinned_empty if device.type == "cuda" else torch.empty
        self._on_host = {layer: make(len(own), dtype=torch.bool) for layer, own in self._groups.items()}
        self._applied: dict[str, list[tuple[int, int]]] = {name: [(0, 0)] for name in plan.lazy}
        """Buffer -> (number of an update, step up to which it brought it), in order, those since the last commit and
        the one before."""
        self._recording = 0
        """The last update before the commit that is under way."""
        self._committed: dict[str, int] = dict.fromkeys(plan.lazy, 0)
        self._chains: dict[str, dict[int, Chain]] = {name: {} for name in plan.lazy}
        """The latest few of each buffer, by number."""
        self._scalars: dict[int, tuple[float, ...]] = {}
        groups = [group for own in self._groups.values() for group in own]
        self._needed = dict.fromkeys(groups, False)
        """Whether something is sent to a group in the group of micro-batches that its ops are about."""
        self._before = dict.fromkeys(groups, False)
        """Whether anything was in those before it in the step."""
        self._used: dict[str, set[int]] = {group: set() for group in groups}
        """Group -> those of the last steps in which something was sent to it."""
        self._num_used = self._num_steps = 0

    def resume(self, step: int, past: Past) -> None:
        """Go on from the generation of `step`, which lacks `past`."""
        for name, applied in self._applied.items():
            self._committed[name] = past.as_of.get(name, step)
            applied[:] = [(0, self._committed[name])]
        self._scalars = dict(past.scalars)

    # ------------------------------------------------------------------ what is sent

    def note(self, op: Op, chosen: Tensor) -> None:
        """Note that a chunk's tokens have been sent to experts `chosen`, integers of any shape."""
        marks = self._marks.get(op.block)
        if marks is None or op.batch:
            return
        if a.ZERO_ROUTED in op.flags:
            marks.zero_()
        marks.index_fill_(0, (chosen // self._sizes[op.block]).flatten().long(), True)

    def marks(self, layer: str) -> tuple[Tensor, Tensor]:
        """Bool [groups] on the compute device, where `note` sets them, and in host memory, where `take` finds them."""
        return self._marks[layer], self._on_host[layer]

    def take(self, op: Op) -> None:
        """Take what was noted of a layer, once it is on the host."""
        with self._lock:
            for group, needed in zip(self._groups[op.block], self._on_host[op.block].tolist(), strict=True):
                used = self._used[group]
                self._before[group], self._needed[group] = op.step in used, needed
                if needed:
                    self._num_used += op.step not in used
                    used.add(op.step)
                used -= {old for old in used if old < op.step - 1}

    @property
    def share_used(self) -> float | None:
        """Of all groups in all steps so far, the share that something was sent to; None before the first step."""
        with self._lock:
            return self._num_used / (len(self._used) * self._num_steps) if self._num_steps else None

    # ------------------------------------------------------------------ what is skipped

    def skips(self, op: Op) -> bool:
        """Whether an op that may be skipped is."""
        with self._lock:
            group = self._group_of[op.block]
            if op.action.skips == "commit":
                return self._as_of(op.block, op.slots[a.CHAIN]) == self._committed[op.block]
            if a.CHAIN in op.slots:
                return not self._chain(op).runs
            if op.action.skips == "load":
                return not self._needed[group]
            return op.action.skips == "gradient" and op.step not in self._used[group]

    def begun(self, op: Op) -> bool:
        """Whether there is a sum of the group's gradient from the step's earlier micro-batches."""
        with self._lock:
            return self._before[self._group_of[op.block]]

    def chain(self, op: Op) -> Chain:
        """What the update is that an op belongs to."""
        with self._lock:
            return self._chain(op)

    def _chain(self, op: Op) -> Chain:
        number, chains = op.slots[a.CHAIN], self._chains[op.block]
        if number not in chains:
            applied, group = self._applied[op.block], self._group_of[op.block]
            steps = range(applied[-1][1] + 1, op.step + 1)
            gradient = bool(steps) and op.step in self._used[group]
            assert not gradient or len(steps) == 1, f"{op.block} was used at step {op.step}, and {steps} are due"
            wanted = gradient or self._needed[group] or a.FORCED in op.flags or len(steps) >= MOST_BEHIND
            if wanted and steps:
                applied.append((number, op.step))
            chains[number] = Chain(wanted and bool(steps), steps, gradient)
            if len(chains) > _KEPT_CHAINS:
                del chains[min(chains)]
        return chains[number]

    # ------------------------------------------------------------------ what is recorded

    def end_step(self, step: int) -> None:
        """The step's update is known: its scalars may be needed long after it."""
        values = (learning_rate(self._train, step), *(getattr(self._train, name) for name in SCALARS))
        with self._lock:
            self._scalars[step] = values
            self._num_steps += 1

    def scalars(self, optimizer: Optimizer, step: int) -> Any:
        with self._lock:
            values = self._scalars[step]
        return scalars_of(optimizer, self._train, step, values)

    def _as_of(self, buffer: str, update: int) -> int:
        """The step that a buffer is as of behind an update, by number."""
        return max(step for number, step in self._applied[buffer] if number <= update)

    def commits(self, op: Op) -> None:
        """The op that commits a generation is carried out next."""
        self._recording = op.slots.get(a.CHAIN, 0)

    def record(self, step: int) -> dict[str, Any]:
        """What the generation of a step that is being committed has to record."""
        with self._lock:
            as_of = {name: at for name in self._applied if (at := self._as_of(name, self._recording)) < step}
            first = min(as_of.values(), default=step)
            return Past(as_of, {at: self._scalars[at] for at in range(first + 1, step + 1)}).to_json()

    def committed(self) -> None:
        """The generation has been committed; forgets what none to come needs."""
        with self._lock:
            for name, applied in self._applied.items():
                at = self._committed[name] = self._as_of(name, self._recording)
                applied[:] = [(0, at), *(each for each in applied if each[0] > self._recording)]
            first = min(self._committed.values(), default=0)
            for old in [old for old in self._scalars if old <= first]:
                del self._scalars[old]
