"""Groups of experts that each rank computes for all ranks' chunks (Plan.spread).

A chunk goes from one rank to the next through shared memory: its owner computes the layer, the ranks in turn their
groups of experts, and its owner goes on. Whoever hands a chunk on raises the chunk's counter, for which the next one
waits. A counter says up to where in a step blocks have computed the chunk, so that ranks need not count together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock.engine.plan.activations import GRADIENT_OF
from penstock.engine.plan.chunks import Chunk
from penstock.engine.plan.plan import Plan
from penstock.engine.schedule import actions as a
from penstock.engine.schedule.activations import ActivationSchedule
from penstock.engine.schedule.kinds import Mode
from penstock.engine.schedule.ops import Emitter
from penstock.engine.schedule.passes import Pass, Task

_BACKWARD: frozenset[Mode] = frozenset({"backward_top", "backward"})
_AGAIN: frozenset[Mode] = frozenset({"republish", "recompute"})
"""Modes that read what has been saved."""
_HANDS_ON: frozenset[Mode] = frozenset({"forward", "loss", "backward"})
"""Modes behind which a chunk goes on to another block."""


class Spreading:
    """Emits what ranks wait for and tell each other of chunks."""

    def __init__(
        self, plan: Plan, emitter: Emitter, activations: ActivationSchedule, following: Mapping[int, int]
    ) -> None:
        """`following`: block -> the one that takes its output."""
        self._plan, self._emit, self._activations, self._following = plan, emitter.emit, activations, following
        self._spread: Mapping[int, int] = {}
        self._step = 0
        self._received: set[tuple[int, int, bool]] = set()
        """(block, chunk, whether in backward) of what has been waited for."""

    def begin(self, pass_: Pass) -> None:
        self._spread, self._step, self._received = pass_.spread, pass_.step, set()

    def rank_of(self, layer: int, chunk: Chunk) -> int:
        """Who computes a block's chunk."""
        owner = self._spread.get(layer)
        return self._plan.rank_of(chunk.index) if owner is None else owner

    def begins(self, task: Task) -> bool:
        """Whether a backward is of the replica whose gradient is the first one."""
        p = self._plan.problem
        return self._replica(task.chunk) == (p.rounds - 1, p.ranks - 1)

    def ends(self, task: Task) -> bool:
        """Whether it is of the last one."""
        return self._replica(task.chunk) == (0, 0)

    def _replica(self, chunk: Chunk) -> tuple[int, int]:
        return self._plan.replica(chunk), self._plan.rank_of(chunk.index)

    def _giver(self, task: Task) -> tuple[int, int]:
        """The block that makes what the task takes, and the rank that computes it."""
        giver = self._following[task.layer] if task.mode in _BACKWARD else self._plan.blocks[task.layer].inputs[0]
        return giver, self.rank_of(giver, task.chunk)

    def waits(self, task: Task) -> bool:
        """Whether `receive` waits for another rank."""
        if task.mode in _AGAIN or not self._plan.blocks[task.layer].inputs:
            return False
        key = task.layer, task.chunk.index, task.mode in _BACKWARD
        return self._giver(task)[1] != self._plan.rank and key not in self._received

    def receive(self, task: Task) -> int | None:
        """The block by which another rank has made what the task takes; waits for it, unless that has been done."""
        if not self.waits(task):
            return None
        blocks, backward, (giver, rank) = self._plan.blocks, task.mode in _BACKWARD, self._giver(task)
        self._received.add((task.layer, task.chunk.index, backward))
        kinds: Iterable[str] = blocks[task.layer].input_kinds
        if backward:
            kinds = [GRADIENT_OF[kind] for kind in blocks[giver].input_kinds]
        elif blocks[task.layer].sent_to is not None:
            kinds = (a.X,)  # what is sent has been there since the first group
        layer = task.layer if backward or task.layer in self._spread else giver
        slots = self._place(task.chunk, giver, backward) | {a.OF_RANK: rank}
        made = [self._activations.region(kind, layer, task.chunk) for kind in kinds]
        self._emit(a.AWAIT_CHUNK, blocks[task.layer].name, task.chunk.index, writes=made, slots=slots)
        return giver

    def leaves(self, task: Task) -> bool:
        """Whether another rank goes on with the task's chunk."""
        if task.mode not in _HANDS_ON:
            return False
        to = task.following if task.mode == "forward" else next(iter(self._plan.blocks[task.layer].inputs), None)
        return to is not None and self.rank_of(to, task.chunk) != self._plan.rank

    def pass_on(self, task: Task, kinds: Iterable[str], layer: int) -> None:
        """Tell that what the task has made, inputs or gradients `kinds` of block `layer`, is there."""
        made = [self._activations.region(kind, layer, task.chunk) for kind in kinds]
        slots = self._place(task.chunk, task.layer, task.mode != "forward")
        self._emit(a.SIGNAL_CHUNK, self._plan.blocks[task.layer].name, task.chunk.index, reads=made, slots=slots)

    def _place(self, chunk: Chunk, layer: int, backward: bool) -> dict[str, int]:
        """The chunk's counter, and what it is at least once block `layer` has computed it."""
        plan, count, num_blocks = self._plan, len(self._plan.chunks), len(self._plan.blocks)
        done = 2 * num_blocks - layer if backward else layer + 1
        number = plan.rank_of(chunk.index) * count + chunk.index % count
        return {a.PLACE: number, a.SEQUENCE: 2 * num_blocks * self._step + done}
