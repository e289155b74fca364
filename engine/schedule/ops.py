"""Ops, the resources they touch, and the dependencies that follow: pure data, no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct, field

from penstock.engine.events import Span
from penstock.engine.schedule.action import Action, Lane
from penstock.engine.schedule.resources import Resource

WHOLE = -1
"""Index of an op that concerns a whole block; slot number of a buffer that is resident and needs none."""


class Op(Struct, frozen=True, kw_only=True, gc=False):
    """One piece of work on a lane; of parts that hold no circle, so that nobody looks for one (`gc`)."""

    id: int
    action: Action
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
    """Slot of each operand by role (engine/schedule/actions.py), or by the name of a flat buffer for its weights."""
    flags: frozenset[str] = frozenset()
    batch: int = 0
    """Whose tokens it is about: 0 the step's own, else those of a pass of the validation after the step."""

    @property
    def lane(self) -> Lane:
        return self.action.lane


def span_of(
    op: Op, start_s: float, end_s: float, waited: tuple[int, ...], awaited: tuple[tuple[int, float], ...] = ()
) -> Span:
    """What is reported of an op that was carried out."""
    what = op.action.shown_on, op.action.name, op.block, op.index
    return Span(*what, start_s, end_s, op.nbytes, op.step, op.id, waited, awaited)


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
        action: Action,
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
        writer, readers, own = self._writer, self._readers, self._next_id
        deps: set[int] = set()
        for resource in reads:
            if (before := writer.get(resource)) is not None:
                deps.add(before)
            if (others := readers.get(resource)) is None:
                readers[resource] = [own]
            else:
                others.append(own)
        for resource in writes:
            if (before := writer.get(resource)) is not None:
                deps.add(before)
            if others := readers.get(resource):
                deps.update(others)
            writer[resource] = own
            readers[resource] = []
        deps.discard(own)  # where it reads what it writes
        op = Op(
            id=own,
            action=action,
            block=block,
            index=index,
            step=self.step if step is None else step,
            reads=reads,
            writes=writes,
            deps=tuple(sorted(deps)),
            nbytes=nbytes,
            slots=dict(slots) if slots else {},
            flags=frozenset(flags),
            batch=self.batch,
        )
        self._next_id += 1
        self._ops.append(op)

    def take(self) -> list[Op]:
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
        slot, best = None, (True, self._clock + 1)
        for i, pins in enumerate(self._pinned):
            if not pins and (rank := (self._content[i] is not None, self._used[i])) < best:
                slot, best = i, rank
        assert slot is not None, f"{self.name}: all {len(self._content)} slots are in use"
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
