"""Layers that attend to what other ranks compute, where ranks share every sequence (context parallel).

Each rank publishes keys and values of its chunks in a window in shared memory, and all meet; then each attends to all
earlier chunks. In backward each sums what its queries owe to each chunk of keys, shard by shard; they meet again, each
adds what all have found for its own chunks, in descending order of shards, and ends these chunks' backward. A recurrent
state goes from chunk to chunk, and so from rank to rank.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

from penstock.engine.plan.activations import ACTIVATIONS
from penstock.engine.plan.chunks import FOREIGN, Chunk, Streams
from penstock.engine.plan.plan import Plan
from penstock.engine.plan.windows import SHARED_WINDOWS
from penstock.engine.schedule import actions as a
from penstock.engine.schedule import resources as r
from penstock.engine.schedule.activations import ActivationSchedule
from penstock.engine.schedule.kinds import Mode
from penstock.engine.schedule.ops import Emitter
from penstock.engine.schedule.passes import Documents, Task
from penstock.engine.schedule.resources import Resource
from penstock.engine.schedule.streaming import Operands, Streaming


class SharedActivations(ActivationSchedule):
    """Keys, values and their gradients in windows that ranks share."""

    def __init__(self, plan: Plan, emitter: Emitter) -> None:
        super().__init__(plan, emitter)
        self._length = plan.stream_chunks
        self._summed = [None] * self._length
        self._turn = 0
        """Of the windows for keys and values."""
        self._seen_by: dict[tuple[int | None, int, int], list[Chunk]] = {}
        self._counts: Counter[int] = Counter()
        """Of each rank the states that it has handed on so far."""
        self._handed_on: dict[tuple[int, int], tuple[int, int]] = {}
        """(micro-batch, position of a chunk) -> the rank that hands on to it, and which of its states that is."""
        self._visit: tuple[Mode, int, int, int] | None = None
        self.round = 0
        """Of the shard whose backward is being emitted."""
        self._begun: set[int] = set()
        """Positions of the chunks in the micro-batch for whose keys and values there is a sum of all ranks'."""

    def begin(self, chunks: Sequence[Chunk], documents: Documents | None, streams: Streams) -> None:
        super().begin(chunks, documents, streams)
        self._seen_by = {}

    def keys(self, layer: int, chunk: Chunk) -> list[Chunk]:
        which = self._plan.blocks[layer].sliding_window, chunk.micro_batch, chunk.ordinal
        if which not in self._seen_by:
            self._seen_by[which] = super().keys(layer, chunk)
        return self._seen_by[which]

    def _of(self, layer: int, chunk: Chunk) -> tuple[int, ...]:
        """What a slot with keys and values holds."""
        return layer, chunk.micro_batch, chunk.ordinal, self._emitter.step, self._emitter.batch

    # ------------------------------------------------------------------ keys and values

    def next_window(self) -> None:
        self._turn, self._begun = self._other_turn, set()

    @property
    def _other_turn(self) -> int:
        return (self._turn + 1) % SHARED_WINDOWS

    def _place(self, chunk: Chunk) -> int:
        return self._turn * self._length + chunk.ordinal

    def own_kv(self, layer: int, chunk: Chunk) -> int:
        """Slot for keys and values of a chunk that are about to be computed, pinned."""
        content = self._of(layer, chunk)
        slot = self.kv.find(content)
        return self.kv.take(content) if slot is None else slot

    def publish(self, layer: int, chunk: Chunk, slot: int) -> None:
        place = self._place(chunk)
        there = [r.resource(r.RAM_WINDOW_KV, place)]
        self._move(a.STORE[a.KV], layer, chunk, [r.activation(a.KV, slot)], there, {a.SLOT: slot, a.PLACE: place})

    def load_kv(self, layer: int, chunk: Chunk) -> int:
        content = self._of(layer, chunk)
        slot = self.kv.find(content)
        if slot is None:
            slot, place = self.kv.take(content), self._place(chunk)
            there = [r.resource(r.RAM_WINDOW_KV, place)]
            self._move(a.LOAD[a.KV], layer, chunk, there, [r.activation(a.KV, slot)], {a.SLOT: slot, a.PLACE: place})
        return slot

    def published(self, layer: int, micro_batch: int) -> None:
        """All ranks' keys and values are there from here on. None of them still reads what the other window holds, or
        what this rank has summed, as each has published after it ended the block before; nor does this rank sum
        anything for another one before it has read what that has published here."""
        foreign = [chunk for chunk in self.whole[micro_batch] if chunk.index == FOREIGN]
        reads = [r.resource(r.RAM_WINDOW_KV, self._place(chunk)) for chunk in self.streams[micro_batch]]
        writes = [r.resource(r.RAM_WINDOW_KV, self._place(chunk)) for chunk in foreign]
        # In the other window of any micro-batch: places are the same in all.
        other, own = self._other_turn * self._length, self._plan.chunks[: self._plan.window_chunks]
        writes += [r.resource(r.RAM_WINDOW_KV, other + chunk.ordinal) for chunk in own]
        self._meet(layer, reads, writes)

    def _meet(self, layer: int, reads: Iterable[Resource], writes: Iterable[Resource]) -> None:
        if self._plan.problem.ranks > 1:
            self._emit(a.MEET, self._plan.blocks[layer].name, reads=reads, writes=writes)

    # ------------------------------------------------------------------ recurrent states

    def _pass_on(self, mode: Mode, layer: int) -> None:
        """Number what goes from rank to rank under the visit that begins, as all of them do."""
        visit = (mode, layer, self._emitter.step, self._emitter.batch)
        if visit == self._visit:
            return
        self._visit, self._handed_on = visit, {}
        for stream in self.whole.values() if mode != "backward" else reversed(self.whole.values()):
            for giver, taker in itertools.pairwise(stream if mode != "backward" else stream[::-1]):
                if (rank := self._rank(giver)) != self._rank(taker):
                    self._counts[rank] += 1
                    self._handed_on[taker.micro_batch, taker.ordinal] = rank, self._counts[rank]

    def _rank(self, chunk: Chunk) -> int:
        return chunk.shard % self._plan.problem.ranks

    def _beside(self, chunk: Chunk) -> tuple[Chunk | None, Chunk | None]:
        """The chunks before and behind, whoever computes them."""
        stream = self.whole[chunk.micro_batch]
        at = next(i for i, other in enumerate(stream) if other is chunk)
        return stream[at - 1] if at else None, stream[at + 1] if at + 1 < len(stream) else None

    def begin_state(self, mode: Mode, layer: int, chunk: Chunk, slots: dict[str, int]) -> None:
        self._pass_on(mode, layer)
        before, behind = self._beside(chunk)
        if mode == "backward":
            if behind is not None and behind.index == FOREIGN:
                self._receive(a.DRECURRENT, layer, chunk, r.resource(r.GPU_DRECURRENT), 0)
            return
        pool = self.pool(a.RECURRENT)
        if before is not None and before.index == FOREIGN:
            slots[a.RECURRENT] = slot = pool.take(self.content(layer, chunk))
            self._receive(a.RECURRENT, layer, chunk, r.activation(a.RECURRENT, slot), slot)
            if mode == "forward" and self._plan.blocks[layer].backward:
                self.store_saved(a.RECURRENT, mode, layer, chunk, slot)
        elif self._behind is not None:
            slots[a.RECURRENT] = self._behind
        self._behind = None
        if behind is not None:
            slots[a.BEHIND] = slot = pool.take((*self._of(layer, behind), a.BEHIND))
            self._behind = None if behind.index == FOREIGN else slot

    def end_state(self, mode: Mode, layer: int, chunk: Chunk, slots: dict[str, int], *, saves: bool) -> None:
        before, behind = self._beside(chunk)
        if mode == "backward":
            if before is not None and before.index == FOREIGN:
                self._hand_on(a.DRECURRENT, layer, chunk, before, r.resource(r.GPU_DRECURRENT), 0)
        elif behind is not None and behind.index == FOREIGN:
            slot = slots[a.BEHIND]
            self._hand_on(a.RECURRENT, layer, chunk, behind, r.activation(a.RECURRENT, slot), slot)
            self.pool(a.RECURRENT).release(slot)
        elif behind is not None and saves:
            self.store_saved(a.RECURRENT, mode, layer, behind, slots[a.BEHIND])

    def _receive(self, kind: str, layer: int, chunk: Chunk, target: Resource, slot: int) -> None:
        rank, number = self._handed_on[chunk.micro_batch, chunk.ordinal]
        place = self._state_place(chunk)
        there, slots = [r.resource(r.RAM_HANDED_ON, kind, place)], {a.OF_RANK: rank, a.SEQUENCE: number}
        self._emit(a.AWAIT_STATE, self._plan.blocks[layer].name, chunk.index, writes=there, slots=slots)
        self._move(a.LOAD[kind], layer, chunk, there, [target], {a.SLOT: slot, a.PLACE: place})

    def _hand_on(self, kind: str, layer: int, chunk: Chunk, taker: Chunk, source: Resource, slot: int) -> None:
        _, number = self._handed_on[taker.micro_batch, taker.ordinal]
        place = self._state_place(taker)
        there = [r.resource(r.RAM_HANDED_ON, kind, place)]
        self._move(a.STORE[kind], layer, chunk, [source], there, {a.SLOT: slot, a.PLACE: place})
        name = self._plan.blocks[layer].name
        self._emit(a.SIGNAL_STATE, name, chunk.index, reads=there, slots={a.SEQUENCE: number})

    def _state_place(self, taker: Chunk) -> int:
        return taker.micro_batch * self._length + taker.ordinal

    def end_states(self, layer: int) -> None:
        """All ranks have taken what others have handed on: it may be written over."""
        if self._handed_on:
            kinds, count = (a.RECURRENT, a.DRECURRENT), self._length * self._plan.problem.micro_batches
            places = [r.resource(r.RAM_HANDED_ON, kind, i) for kind in kinds for i in range(count)]
            self._meet(layer, places, places)

    # ------------------------------------------------------------------ their gradients

    def load_dkv(self, layer: int, chunk: Chunk) -> tuple[int, bool]:
        content = (*self._of(layer, chunk), self.round)
        slot, new = self.dkv.find(content), self._summed[chunk.ordinal] != content
        self._summed[chunk.ordinal] = content
        if slot is None:
            slot = self.dkv.take(content)
            if not new:
                self._move_dkv(a.LOAD[a.DKV], layer, chunk, slot)
        return slot, new

    def store_dkv(self, layer: int, chunk: Chunk, slot: int) -> None:
        self._move_dkv(a.STORE[a.DKV], layer, chunk, slot)
        self.dkv.release(slot, keep=True)

    def _move_dkv(self, action: a.Action, layer: int, chunk: Chunk, slot: int) -> None:
        here, there = [r.activation(a.DKV, slot)], [r.resource(r.RAM_WINDOW_DKV, chunk.ordinal)]
        reads, writes = (there, here) if action.lane == "h2d" else (here, there)
        place = self._plan.rank * self._length + chunk.ordinal
        self._move(action, layer, chunk, reads, writes, {a.SLOT: slot, a.PLACE: place})

    def add(self, layer: int, micro_batch: int) -> None:
        """All ranks' shards of this round are summed: add them to the sums of this rank's chunks."""
        own, ranks, block = self.streams[micro_batch], self._plan.problem.ranks, self._plan.blocks[layer]
        mine = [r.resource(r.RAM_WINDOW_DKV, ordinal) for ordinal in range(self._length)]
        self._meet(layer, mine, mine)
        masks = dict.fromkeys((chunk.ordinal for chunk in own), 0)
        for chunk in self.whole[micro_batch]:
            if chunk.shard // ranks == self.round:
                for other in [*self.keys(layer, chunk), chunk]:
                    if other.ordinal in masks:
                        masks[other.ordinal] |= 1 << chunk.shard % ranks
        for chunk in own:
            if masks[chunk.ordinal]:
                self._emit(
                    a.ADD_DKV,
                    block.name,
                    chunk.index,
                    reads=[mine[chunk.ordinal]],
                    writes=[r.resource(r.RAM_WINDOW_DKV, r.SUM, chunk.local)],
                    nbytes=ACTIVATIONS[a.DKV].nbytes(self._plan.problem, block, chunk.end - chunk.start),
                    slots={a.OF_RANKS: masks[chunk.ordinal]},
                    flags=[] if chunk.ordinal in self._begun else [a.FIRST],
                )
                self._begun.add(chunk.ordinal)
        if self.round:
            self._meet(layer, [r.resource(r.RAM_WINDOW_DKV, r.SUM, chunk.local) for chunk in own], mine)

    def load_sum(self, layer: int, chunk: Chunk) -> int:
        """Slot with the complete gradients of a chunk's keys and values, pinned."""
        slot, there = (
            self.dkv.take(("sum", *self._of(layer, chunk))),
            [r.resource(r.RAM_WINDOW_DKV, r.SUM, chunk.local)],
        )
        self._move(a.LOAD[a.DKV], layer, chunk, there, [r.activation(a.DKV, slot)], {a.SLOT: slot})
        return slot

    def store_dq(self, layer: int, chunk: Chunk, slot: int) -> None:
        there = [r.resource(r.RAM_WINDOW_DQ, chunk.local)]
        self._move(a.STORE[a.DQ], layer, chunk, [r.activation(a.DQ, slot)], there, {a.SLOT: slot})
        self.pool(a.DQ).release(slot, keep=True)

    def load_dq(self, layer: int, chunk: Chunk) -> int:
        """Slot with the gradient of a chunk's queries, pinned."""
        content, pool = self.content(layer, chunk), self.pool(a.DQ)
        slot = pool.find(content)
        if slot is None:
            slot, there = pool.take(content), [r.resource(r.RAM_WINDOW_DQ, chunk.local)]
            self._move(a.LOAD[a.DQ], layer, chunk, there, [r.activation(a.DQ, slot)], {a.SLOT: slot})
        return slot


class SharedStreaming(Streaming):
    """Emits the ops of a chunk of such a layer."""

    activations: SharedActivations

    def compute(self, task: Task, operands: Operands, slots: dict[str, int]) -> None:
        ways = {
            "publish": self._publish,
            "republish": self._publish,
            "backward_top": self._backward_top,
            "backward": self._backward_bottom,
        }
        ways.get(task.mode, self.forward)(task, operands, slots)

    def _publish(self, task: Task, operands: Operands, slots: dict[str, int]) -> None:
        layer, chunk, activations = task.layer, task.chunk, self.activations
        if task.first:
            activations.next_window()
        own = activations.own_kv(layer, chunk)
        self.emitting(task)(
            a.LAYER_PUBLISH,
            reads=[*operands.weights, r.activation(a.X, slots[a.X])],
            writes=[r.activation(a.KV, own)],
            slots=operands.slots | {a.X: slots[a.X], a.KV: own},
        )
        activations.publish(layer, chunk, own)
        activations.kv.release(own, keep=True)
        if task.last:
            activations.published(layer, chunk.micro_batch)

    def project(self, task: Task, operands: Operands, slots: dict[str, int]) -> None:
        """Queries of the task's chunk."""
        self.emitting(task)(
            a.LAYER_PROJECT,
            reads=[*operands.weights, r.activation(a.X, slots[a.X])],
            writes=[r.resource(r.GPU_QUERIES)],
            slots=operands.slots | {a.X: slots[a.X]},
        )

    def _backward_top(self, task: Task, operands: Operands, slots: dict[str, int]) -> None:
        layer, chunk, activations = task.layer, task.chunk, self.activations
        activations.round = self.plan.replica(chunk)
        slots[a.DQ] = activations.pool(a.DQ).take(activations.content(layer, chunk))
        handed_down = [r.activation(a.DY, slots[a.OUT])] if a.OUT in slots else []
        self.top(task, operands, slots, *handed_down)
        for other, dkv in self.attended(task, slots, r.activation(a.DQ, slots[a.DQ])):
            activations.store_dkv(layer, other, dkv)
        activations.store_dq(layer, chunk, slots[a.DQ])
        if task.last:
            activations.add(layer, chunk.micro_batch)

    def _backward_bottom(self, task: Task, operands: Operands, slots: dict[str, int]) -> None:
        slots[a.DKV] = self.activations.load_sum(task.layer, task.chunk)
        operands.zero = []
        dq, dkv = (r.activation(kind, slots[kind]) for kind in (a.DQ, a.DKV))
        graph = r.resource(r.GPU_GRAPH)
        self.emit_block(task, operands, slots, a.LAYER_BACKWARD_BOTTOM, reads=[dq, dkv], writes=[graph])
        self.activations.dkv.release(slots[a.DKV])
        self.activations.pool(a.DQ).release(slots[a.DQ])
