"""A step as passes of blocks over chunks: what a schedule is built from."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.engine.plan.plan import Chunk
from penstock.engine.schedule.kinds import Mode
from penstock.engine.schedule.resources import Resource
from penstock.engine.schedule.state import Load

Visit = tuple[Mode, int, list[Chunk]]
"""A pass of a block over chunks, in their order."""


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Chunks that go forward and backward before those of the next group do."""

    chunks: list[Chunk]
    last: bool
    """Whether gradients are complete behind it."""


@dataclass(frozen=True, slots=True)
class Task:
    """A block computing one chunk."""

    group: Group
    visit: int
    """Number of the pass over chunks that it belongs to."""
    mode: Mode
    layer: int
    """Index of the block in the plan."""
    chunk: Chunk
    first: bool
    last: bool


@dataclass(slots=True)
class Operands:
    """What a block's compute ops read and write, whichever of them it is."""

    weights: list[Resource]
    weight_slots: dict[str, int]
    gradients: list[Resource]
    gradient_slots: dict[str, int]
    zero: list[str]
    """Flags of the gradients that begin with this chunk."""


def in_order(visits: Sequence[Visit], group: Group, first: int = 0) -> list[Task]:
    """The tasks of a group's passes, which are numbered from `first` on."""
    return [
        Task(group, visit, mode, layer, chunk, chunk is order[0], chunk is order[-1])
        for visit, (mode, layer, order) in enumerate(visits, start=first)
        for chunk in order
    ]


def emit_share(loads: deque[Load], turns: int) -> None:
    """Emit what falls to the next of `turns` turns."""
    for _ in range(-(-len(loads) // max(1, turns))):
        loads.popleft()()
