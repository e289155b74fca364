"""Ops, the resources they touch, and the dependencies that follow: pure data, no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Lane = Literal["nvme_read", "h2d", "compute", "d2h", "optimizer", "nvme_write"]
LANES: tuple[Lane, ...] = ("nvme_read", "h2d", "compute", "d2h", "optimizer", "nvme_write")

Resource = tuple[str | int, ...]
"""Name of a piece of memory or disk, for example ("gpu.hidden", 2) or ("nvme.state", "layers.3", 0)."""

WHOLE = -1
"""Index of an op that concerns a whole block; slot number of a buffer that is resident and needs none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One piece of work on a lane."""

    id: int
    lane: Lane
    action: str
    """What the runtime does; each action is one method there."""
    block: str
    """Block, or buffer for ops on state."""
    index: int
    """Chunk within the step, or part within the buffer, or WHOLE."""
    step: int
    reads: tuple[Resource, ...]
    writes: tuple[Resource, ...]
    deps: tuple[int, ...]
    nbytes: int = 0
    slots: Mapping[str, int] = field(default_factory=dict)
    """Slot of each operand by role: x, dy, out, saved, stage, weights, gradient:NAME, or the name of a flat buffer."""
    flags: frozenset[str] = frozenset()
    """zero:NAME where the op is the first to add to that gradient, zero:dkv likewise."""
    batch: int = 0
    """Whose tokens it is about: 0 the step's own, else those of a pass of the validation after the step."""


class Emitter:
    """Numbers ops in program order and derives their dependencies from the resources they read and write.

    An op comes after the last writer of what it reads, and after the last writer and all later readers of what it
    writes. The tables live on from step to step.
    """

    def __init__(self) -> None:
        self.step = 0
        """Step of the ops being emitted."""
        self.batch = 0
        """Batch of the ops being emitted."""
        self._next_id = 0
        self._writer: dict[Resource, int] = {}
        self._readers: dict[Resource, list[int]] = {}
        self._ops: list[Op] = []

    def emit(
        self,
        lane: Lane,
        action: str,
        block: str,
        index: int = WHOLE,
        *,
        reads: Iterable[Resource] = (),
        writes: Iterable[Resource] = (),
        nbytes: int = 0,
        slots: Mapping[str, int] | None = None,
        flags: Iterable[str] = (),
        step: int | None = None,
    ) -> None:
        """Append an op; `step` where it is not the current one."""
        reads, writes = tuple(reads), tuple(writes)
        deps = {self._writer[resource] for resource in (*reads, *writes) if resource in self._writer}
        for resource in writes:
            deps.update(self._readers.get(resource, ()))
        op = Op(
            id=self._next_id,
            lane=lane,
            action=action,
            block=block,
            index=index,
            step=self.step if step is None else step,
            reads=reads,
            writes=writes,
            deps=tuple(sorted(deps)),
            nbytes=nbytes,
            slots=dict(slots or {}),
            flags=frozenset(flags),
            batch=self.batch,
        )
        for resource in reads:
            self._readers.setdefault(resource, []).append(op.id)
        for resource in writes:
            self._writer[resource] = op.id
            self._readers[resource] = []
        self._next_id += 1
        self._ops.append(op)

    def take(self) -> list[Op]:
        """The ops emitted since the last call."""
        ops, self._ops = self._ops, []
        return ops


class Slots:
    """A pool of slots with statically known contents; the least recently used free one is given out."""

    def __init__(self, name: str, count: int) -> None:
        self.name = name
        self._content: list[Any] = [None] * count
        self._used = [0] * count
        self._pinned = [0] * count
        self._clock = 0

    def find(self, content: Any) -> int | None:
        """The slot that holds `content`, pinned; None where no slot does."""
        if content not in self._content:
            return None
        slot = self._content.index(content)
        self._pin(slot)
        return slot

    def take(self, content: Any) -> int:
        """A slot, pinned until `release`, that is to hold `content`."""
        free = [i for i, pins in enumerate(self._pinned) if not pins]
        assert free, f"{self.name}: all {len(self._content)} slots are in use"
        slot = min(free, key=lambda i: (self._content[i] is not None, self._used[i]))
        self._content[slot] = content
        self._pin(slot)
        return slot

    def release(self, slot: int, *, keep: bool = False) -> None:
        """Unpin; `keep` leaves the content to be found again."""
        self._pinned[slot] -= 1
        assert self._pinned[slot] >= 0
        if not keep and not self._pinned[slot]:
            self._content[slot] = None

    def _pin(self, slot: int) -> None:
        self._clock += 1
        self._used[slot] = self._clock
        self._pinned[slot] += 1
