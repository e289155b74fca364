"""The part of the schedule that moves activations: hidden states, attention's output, keys and values.

What backward needs of a layer's chunk (plan/plan.py: saved_activations) is offloaded as forward makes it, to RAM, NVMe
or elsewhere on the compute device, and restored just in time. A layer's keys and values are either in a window over the
whole micro-batch, or, streamed, in a few slots of one chunk each.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from penstock.engine.attention.spans import prefix_spans
from penstock.engine.plan.activations import ACTIVATIONS
from penstock.engine.plan.chunks import Chunk, Streams
from penstock.engine.plan.plan import Plan, offloaded_graph_bytes, stay_in_slots
from penstock.engine.plan.problem import DKV_SLOTS, KV_SLOTS, BlockShape
from penstock.engine.schedule import actions as a
from penstock.engine.schedule import resources as r
from penstock.engine.schedule.kinds import Mode
from penstock.engine.schedule.ops import Emitter, Slots
from penstock.engine.schedule.passes import Documents
from penstock.engine.schedule.resources import Resource

_READS_SAVED: frozenset[Mode] = frozenset({"republish", "recompute", "backward_top", "backward"})
"""Modes that read what forward has saved of a layer's input."""


class ActivationSchedule:
    """Emits the ops on activations and says which slots they are in."""

    def __init__(self, plan: Plan, emitter: Emitter) -> None:
        self._plan = plan
        self._emitter = emitter
        self._emit = emitter.emit
        self._pools = {row.gpu: Slots(row.gpu, row.slots) for row in ACTIVATIONS.values() if row.slots}
        self._num_chunks, self._num_group_chunks = len(plan.chunks), plan.num_group_chunks
        self._stages = Slots("ram.activation_stage", plan.activation_stages)
        without = {i for i, block in enumerate(plan.blocks) if not (block.backward and block.attends)}
        self._unsaved = plan.recomputed | without
        """Layers whose attention is not saved: backward makes it again, or there is none."""
        self._on_nvme: set[tuple[str, int, int]] = set()
        """(kind, block, chunk) of the activations on NVMe."""
        self._window_chunks = plan.window_chunks
        self._window: list[Any] = [None] * (plan.windows * plan.window_chunks)
        """Which (layer, chunk, step) each chunk's part of the windows holds: on the compute device, or in RAM where
        keys and values are streamed."""
        self._widths: list[Any] = [None] * plan.windows
        """Of the layer that the parts of each window are laid out for."""
        self.streams: dict[int, list[Chunk]] = {}
        """Micro-batch -> its chunks, of the group being emitted; one without any is not there."""
        self.whole: dict[int, list[Chunk]] = {}
        """The same with the chunks that other ranks compute."""
        self._behind: int | None = None
        """Slot of the recurrent state behind the chunk that went forward last; None where nothing follows."""
        self._stay = False
        """Whether hidden states of a forward without a backward stay in their slots."""
        self._documents: Documents | None = None
        """Per micro-batch of the batch being emitted its documents, where they are known."""
        self.kv = Slots("gpu.kv", KV_SLOTS)
        self.dkv = Slots("gpu.dkv", DKV_SLOTS)
        self._summed: list[Any] = [None] * plan.window_chunks
        """Streamed: whose gradients of keys and values each chunk's part of the window holds, or a slot."""

    def begin(self, chunks: Sequence[Chunk], documents: Documents | None, streams: Streams) -> None:
        """What is emitted from now on is about these chunks, of each micro-batch the first ones; `streams`: of all
        ranks."""
        self.streams, self._documents, self._stay = {}, documents, stay_in_slots(self._plan.problem, len(chunks))
        for chunk in chunks:
            self.streams.setdefault(chunk.micro_batch, []).append(chunk)
        self.whole = {stream[0].micro_batch: list(stream) for stream in streams if stream}

    def ends_stream(self, chunk: Chunk) -> bool:
        """Whether no chunk of its micro-batch comes after it."""
        return chunk is self.streams[chunk.micro_batch][-1]

    def key(self, layer: int, chunk: Chunk) -> tuple[int, int]:
        """A layer's chunk as the plan's sets name it (Plan.index_in_group)."""
        return layer, chunk.index if chunk.index >= self._num_chunks else chunk.index % self._num_group_chunks

    def content(self, layer: int, chunk: Chunk) -> tuple[int, int, int, int]:
        """What a slot holds that belongs to a layer's chunk in the step being emitted."""
        return (layer, chunk.index, self._emitter.step, self._emitter.batch)

    def _move(
        self,
        action: a.Action,
        layer: int,
        chunk: Chunk,
        reads: list[Resource],
        writes: list[Resource],
        slots: dict[str, int],
    ) -> None:
        """Emit what brings an activation of a layer's chunk from one resource to another."""
        block, tokens = self._plan.blocks[layer], chunk.end - chunk.start
        if action.kind == a.GRAPH:
            nbytes = offloaded_graph_bytes(block, tokens)
        else:
            nbytes = ACTIVATIONS[action.kind].nbytes(self._plan.problem, block, tokens)
        self._emit(action, block.name, chunk.index, reads=reads, writes=writes, nbytes=nbytes, slots=slots)

    def following(self, chunk: Chunk) -> Chunk | None:
        """The next chunk of its micro-batch."""
        return None if self.ends_stream(chunk) else self.streams[chunk.micro_batch][chunk.local + 1]

    # ------------------------------------------------------------------ recurrent states

    def begin_state(self, mode: Mode, layer: int, chunk: Chunk, slots: dict[str, int]) -> None:
        """Add to `slots` those of the recurrent state that a chunk begins with, which the one before has left in its
        own, and of the one behind it."""
        if mode not in ("forward", "evaluate"):
            return
        if self._behind is not None:
            slots[a.RECURRENT] = self._behind
        self._behind = None
        if (following := self.following(chunk)) is not None:
            slots[a.BEHIND] = self._behind = self.pool(a.RECURRENT).take(self.content(layer, following))

    def end_state(self, mode: Mode, layer: int, chunk: Chunk, slots: dict[str, int], *, saves: bool) -> None:
        """The chunk has been computed; `saves`: for a backward."""
        if saves and (following := self.following(chunk)) is not None and a.BEHIND in slots:
            self.store_saved(a.RECURRENT, mode, layer, following, slots[a.BEHIND])

    def end_states(self, layer: int) -> None:
        """The layer has computed all chunks of a visit."""

    # ------------------------------------------------------------------ between two blocks

    def pool(self, kind: str) -> Slots:
        """The slots on the compute device of activations of that kind."""
        return self._pools[ACTIVATIONS[kind].gpu]

    def load(self, kind: str, mode: Mode, layer: int, chunk: Chunk) -> int:
        """Slot with input `kind` of a block's chunk, or the gradient of its output, loaded unless it is still there."""
        last_use, sent_to = mode == "backward", self._plan.blocks[layer].sent_to
        if kind == a.SENT and sent_to is not None:
            layer, last_use = sent_to, False
        content, pool = (kind, *self.content(layer, chunk)), self.pool(kind)
        slot = pool.find(content)
        if slot is None:
            slot = pool.take(content)
            slots = {a.SLOT: slot}
            saved = kind in self._plan.blocks[layer].saved_inputs and mode in _READS_SAVED
            if saved and self.key(layer, chunk) in self._plan.spilled:
                slots[a.STAGE] = self._unspill(kind, layer, chunk, keep=not last_use)
                source: Resource = r.resource(r.RAM_ACTIVATION_STAGE, slots[a.STAGE])
            else:
                source = self.region(kind, layer, chunk)
            self._move(a.LOAD[kind], layer, chunk, [source], [r.activation(kind, slot)], slots)
        elif last_use:
            self._discard(kind, layer, chunk)
        return slot

    def store(self, kind: str, mode: Mode, layer: int, chunk: Chunk, slot: int) -> None:
        """What a block has made leaves for where its next reader finds it, unless that finds it in its slot."""
        self.pool(kind).release(slot, keep=True)
        if mode in ("evaluate", "generate") and self._stay:
            return
        self._store(kind, layer, chunk, slot)
        if mode == "forward":
            self._spill_input(kind, layer, chunk)

    def _store(self, kind: str, layer: int, chunk: Chunk, slot: int) -> None:
        there = [self.region(kind, layer, chunk)]
        self._move(a.STORE[kind], layer, chunk, [r.activation(kind, slot)], there, {a.SLOT: slot})

    def _spill_input(self, kind: str, layer: int, chunk: Chunk) -> None:
        """Of an input that backward needs and that is to be on NVMe."""
        key, plan = self.key(layer, chunk), self._plan
        if kind in plan.blocks[layer].saved_inputs and key in plan.spilled and key not in plan.saved_graphs:
            self._spill(kind, layer, chunk, self.region(kind, layer, chunk), {})

    def take_home(self, kind: str, layer: int, giver: int, chunk: Chunk) -> int:
        """Slot with a block's input that another rank has made, computing block `giver`. It is saved as one made
        here is."""
        slot = self.pool(kind).take((kind, *self.content(layer, chunk)))
        there = self.region(kind, giver, chunk)
        self._move(a.LOAD[kind], giver, chunk, [there], [r.activation(kind, slot)], {a.SLOT: slot})
        if self.region(kind, layer, chunk) != there:
            self._store(kind, layer, chunk, slot)
        self._spill_input(kind, layer, chunk)
        return slot

    def region(self, kind: str, layer: int, chunk: Chunk) -> Resource:
        """Where it waits: an input that is saved with what else is saved of the chunk, all else by the chunk."""
        key, block = self.key(layer, chunk), self._plan.blocks[layer]
        saved = kind in block.saved_inputs and block.backward
        if saved and key not in self._plan.spilled and key not in self._plan.saved_graphs:
            return r.saved_activation(kind, *key)
        space = ACTIVATIONS[kind].ram
        assert space is not None
        return r.resource(space, key[1])

    # ------------------------------------------------------------------ NVMe

    def _spill(self, kind: str, layer: int, chunk: Chunk, source: Resource, slots: dict[str, int]) -> None:
        """Write a saved activation to NVMe from where it waits in RAM."""
        key = self.key(layer, chunk)
        self._on_nvme.add((kind, *key))
        self._move(a.SPILL[kind], layer, chunk, [source], [r.spilled(kind, *key)], slots)

    def _unspill(self, kind: str, layer: int, chunk: Chunk, *, keep: bool = False) -> int:
        """Read a saved activation back; the stage that it is in, free for others once the next op has emptied it. The
        read lane runs ahead of the computation by as many stages as there are. The file goes unless `keep`."""
        stage = self._stages.take((kind, layer, chunk.index))
        self._stages.release(stage)
        self._read_back(kind, layer, chunk, r.resource(r.RAM_ACTIVATION_STAGE, stage), {a.STAGE: stage}, keep=keep)
        return stage

    def _read_back(
        self, kind: str, layer: int, chunk: Chunk, target: Resource, slots: dict[str, int], *, keep: bool = False
    ) -> None:
        key = self.key(layer, chunk)
        file = r.spilled(kind, *key)
        if keep:
            self._move(a.PEEK[kind], layer, chunk, [file], [target], slots)
        else:  # a file that goes with its content is written as well as read
            self._on_nvme.remove((kind, *key))
            self._move(a.UNSPILL[kind], layer, chunk, [], [file, target], slots)

    def _discard(self, kind: str, layer: int, chunk: Chunk) -> None:
        """Remove an activation from NVMe, if it is there, because backward found it elsewhere."""
        key = self.key(layer, chunk)
        if (kind, *key) in self._on_nvme:
            self._on_nvme.remove((kind, *key))
            file = r.spilled(kind, *key)
            self._emit(a.DISCARD[kind], self._plan.blocks[layer].name, chunk.index, writes=[file])

    # ------------------------------------------------------------------ attention's output, graphs, keys and values

    def load_saved(self, kind: str, layer: int, chunk: Chunk) -> int:
        """Slot with attention's output and log-sum-exp, or with what a graph holds, loaded unless it is still there."""
        content, pool = self.content(layer, chunk), self.pool(kind)
        slot = pool.find(content)
        if slot is not None:
            self._discard(kind, layer, chunk)
            return slot
        slot = pool.take(content)
        self._restore(kind, layer, chunk, self._saved_region(kind, layer, chunk), slot)
        return slot

    def store_saved(self, kind: str, mode: Mode, layer: int, chunk: Chunk, slot: int) -> None:
        """What is saved beside the input leaves, unless backward makes it again, has it where it is or never comes."""
        if kind == a.SAVED and (
            mode == "evaluate"
            or self.key(layer, chunk) in self._plan.saved_graphs
            or (layer in self._unsaved and mode == "forward")
        ):
            return
        self._offload(kind, mode, layer, chunk, slot, self._saved_region(kind, layer, chunk))

    def _saved_region(self, kind: str, layer: int, chunk: Chunk) -> Resource:
        if kind == a.SAVED and layer in self._unsaved:
            return r.resource(r.RAM_WINDOW_SAVED, chunk.local)
        return r.saved_activation(kind, *self.key(layer, chunk))

    def _slots(self, kind: str, index: int) -> dict[str, int]:
        """The slot of a copy; a window has none."""
        return {} if kind == a.KV and not self._plan.streamed else {a.SLOT: index}

    def _restore(
        self, kind: str, layer: int, chunk: Chunk, region: Resource, index: int, written: list[Resource] | None = None
    ) -> None:
        slots, written = self._slots(kind, index), written or [r.activation(kind, index)]
        if (kind, *self.key(layer, chunk)) in self._on_nvme:
            slots[a.STAGE] = self._unspill(kind, layer, chunk)
            region = r.resource(r.RAM_ACTIVATION_STAGE, slots[a.STAGE])
        self._move(a.LOAD[kind], layer, chunk, [region], written, slots)

    def _offload(self, kind: str, mode: Mode, layer: int, chunk: Chunk, index: int, region: Resource) -> None:
        """Move to RAM; on to NVMe through a stage if the chunk is spilled."""
        slots, stays = self._slots(kind, index), layer in self._plan.recomputed or mode == "evaluate"
        spilled = not stays and self.key(layer, chunk) in self._plan.spilled
        staged = spilled and region[0] != r.RAM_WINDOW_KV
        if staged:
            slots[a.STAGE] = self._stages.take((kind, layer, chunk.index))
            region = r.resource(r.RAM_ACTIVATION_STAGE, slots[a.STAGE])
        self._move(a.STORE[kind], layer, chunk, [r.activation(kind, index)], [region], slots)
        if spilled:
            self._spill(kind, layer, chunk, region, {k: v for k, v in slots.items() if k != a.SLOT})
        if staged:
            self._stages.release(slots[a.STAGE])

    # ------------------------------------------------------------------ keys and values, whole

    def _window_index(self, chunk: Chunk) -> int:
        """A chunk's index in the windows."""
        return chunk.micro_batch % self._plan.windows * self._window_chunks + chunk.local

    def window(self, chunk: Chunk) -> list[Resource]:
        """The parts of its window of a chunk and of those before it."""
        index = self._window_index(chunk)
        return [r.activation(a.KV, i) for i in range(index - chunk.local, index + 1)]

    def write_window(self, layer: int, chunk: Chunk) -> list[Resource]:
        """The chunk's part of the window is about to be written: that part, and all others of the window where another
        layer was of other widths, whose parts lie elsewhere in the same memory."""
        index = self._window_index(chunk)
        written = [r.activation(a.KV, index)]
        if not self._fits_window(layer, chunk):
            self._widths[chunk.micro_batch % self._plan.windows] = _widths(self._plan.blocks[layer])
            first = index - chunk.local
            written += [r.activation(a.KV, i) for i in range(first, first + self._window_chunks) if i != index]
            self._window[first : first + self._window_chunks] = [None] * self._window_chunks
        self._window[index] = self.content(layer, chunk)
        return written

    def _fits_window(self, layer: int, chunk: Chunk) -> bool:
        """Whether a layer's keys and values lie in the chunk's window as those that are there."""
        return bool(self._widths[chunk.micro_batch % self._plan.windows] == _widths(self._plan.blocks[layer]))

    def store_window(self, layer: int, chunk: Chunk) -> None:
        """Keys and values leave, unless backward makes them again or never comes."""
        if layer not in self._unsaved:
            self.store_saved(a.KV, "forward", layer, chunk, self._window_index(chunk))

    def load_window(self, layer: int, chunk: Chunk) -> None:
        """Bring a chunk's keys and values to its part of the window, unless they are there."""
        content, index = self.content(layer, chunk), self._window_index(chunk)
        if self._window[index] == content or not self._plan.blocks[layer].attends:
            self._discard("kv", layer, chunk)
            return
        written = self.write_window(layer, chunk)
        self._restore(a.KV, layer, chunk, self._saved_region(a.KV, layer, chunk), index, written)

    def load_whole_window(self, layer: int, chunk: Chunk) -> None:
        """Bring keys and values of all chunks of a chunk's micro-batch."""
        for other in reversed(self.streams[chunk.micro_batch]):
            self.load_window(layer, other)

    def load_window_ahead(self, layer: int, chunk: Chunk) -> None:
        """This chunk's part of the window is free for the chunk that needs it next, in backward's order; so are those
        behind it where its stream ends with it."""
        order, windows = list(self.streams)[::-1], self._plan.windows
        turn = order.index(chunk.micro_batch) + 1
        while order[turn % len(order)] % windows != chunk.micro_batch % windows:
            turn += 1
        if turn >= len(order):
            layer = self._attending_before(layer)
        if layer in self._unsaved or not self._fits_window(layer, chunk):
            return
        following = self.streams[order[turn % len(order)]]
        behind = following[chunk.local + 1 :][::-1] if self.ends_stream(chunk) else []
        for other in [*behind, *following[chunk.local : chunk.local + 1]]:
            self.load_window(layer, other)

    def _attending_before(self, layer: int) -> int:
        """The nearest of the blocks before that attends; the embedding where none does."""
        while inputs := self._plan.blocks[layer].inputs:
            if self._plan.blocks[layer := inputs[0]].attends:
                break
        return layer

    # ------------------------------------------------------------------ keys and values, streamed

    def keys(self, layer: int, chunk: Chunk) -> list[Chunk]:
        """The chunks before `chunk` whose keys some of its queries may see. The order alternates from chunk to chunk,
        so that the last ones of a chunk serve the next one from their slots."""
        seen, stream = self._seen(layer, chunk), self.whole[chunk.micro_batch]
        before = itertools.takewhile(lambda other: other is not chunk, stream)
        result = [other for other in before if any(other.start < end and first < other.end for first, end in seen)]
        return result if chunk.ordinal % 2 else result[::-1]

    def _seen(self, layer: int, chunk: Chunk) -> list[tuple[int, int]]:
        """Ranges of the tokens before a chunk that some of its queries may see."""
        reach = self._plan.blocks[layer].sliding_window
        if self._documents is None:
            row = self._plan.problem.row_tokens
            documents: Sequence[int] = [0, chunk.start // row * row]  # each row is taken for a document
        else:
            documents = self._documents[chunk.micro_batch]  # packed rows lie end to end wherever one ends
        result = [(documents[bisect_right(documents, chunk.start) - 1], chunk.start, chunk.start)]
        prefixes = prefix_spans(chunk.start, chunk.end, 0, chunk.start, documents)
        result += [(span.k0, span.k1, span.q0 - span.shift) for span in prefixes]
        if reach is not None:
            result = [(max(first, query - reach + 1), end, query) for first, end, query in result]
        return [(first, end) for first, end, _ in result if first < end]

    def _kv_region(self, layer: int, chunk: Chunk) -> Resource:
        """Where keys and values wait in RAM to be streamed: as saved activations, or in the block's window."""
        key = self.key(layer, chunk)
        if layer in self._unsaved or key in self._plan.spilled:
            return r.resource(r.RAM_WINDOW_KV, chunk.local)
        return r.saved_activation("kv", *key)

    def store_kv(self, layer: int, chunk: Chunk, slot: int, mode: Mode) -> None:
        """Keys and values in `slot` leave, to be streamed by later chunks and in backward."""
        region = self._kv_region(layer, chunk)
        if self.ends_stream(chunk) and (mode == "evaluate" or (mode == "forward" and layer in self._unsaved)):
            return  # nobody reads them, or backward makes them again before
        if region[0] == r.RAM_WINDOW_KV:
            self._window[chunk.local] = self.content(layer, chunk)
        self._offload(a.KV, mode, layer, chunk, slot, region)

    def load_kv(self, layer: int, chunk: Chunk) -> int:
        """Slot with a chunk's keys and values, loaded unless they are there; pinned."""
        content = self.content(layer, chunk)
        slot = self.kv.find(content)
        if slot is None:
            slot = self.kv.take(content)
            region = self._kv_region(layer, chunk)
            self._move(a.LOAD[a.KV], layer, chunk, [region], [r.activation(a.KV, slot)], {a.SLOT: slot})
        return slot

    def restore_window(self, layer: int, chunk: Chunk) -> None:
        """Before backward of a micro-batch whose last chunk is `chunk`: spilled keys and values come back to RAM."""
        for other in reversed(self.streams[chunk.micro_batch]):
            if self._window[other.local] == self.content(layer, other):
                self._discard(a.KV, layer, other)
            elif (a.KV, *self.key(layer, other)) in self._on_nvme:
                self._window[other.local] = self.content(layer, other)
                self._read_back(a.KV, layer, other, r.resource(r.RAM_WINDOW_KV, other.local), {})

    def load_dkv(self, layer: int, chunk: Chunk) -> tuple[int, bool]:
        """Slot with the gradients of a chunk's keys and values summed so far, pinned; True where there are none yet."""
        content = self.content(layer, chunk)
        slot, new = self.dkv.find(content), self._summed[chunk.local] != content
        self._summed[chunk.local] = content
        if slot is None:
            slot = self.dkv.take(content)
            if not new:
                there = r.resource(r.RAM_WINDOW_DKV, chunk.local)
                self._move(a.LOAD[a.DKV], layer, chunk, [there], [r.activation(a.DKV, slot)], {a.SLOT: slot})
        return slot, new

    def store_dkv(self, layer: int, chunk: Chunk, slot: int) -> None:
        """The sum so far leaves for RAM; it stays in its slot until that is wanted."""
        there = r.resource(r.RAM_WINDOW_DKV, chunk.local)
        self._move(a.STORE[a.DKV], layer, chunk, [r.activation(a.DKV, slot)], [there], {a.SLOT: slot})
        self.dkv.release(slot, keep=True)


def _widths(block: BlockShape) -> tuple[int, int, int]:
    """What says how keys and values lie in a window: all of its keys, then all of its values."""
    return block.kv_numel_per_token, block.q_numel_per_token, block.out_numel_per_token
