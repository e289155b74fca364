"""The part of the schedule that moves state: weights to the compute device, gradients away, updates, generations."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from penstock.engine.plan.plan import BufferPlan, Plan
from penstock.engine.plan.problem import FP32, POOLS, RING_PARTS
from penstock.engine.schedule import actions as a
from penstock.engine.schedule import resources as r
from penstock.engine.schedule.ops import WHOLE, Emitter, Slots
from penstock.engine.schedule.resources import Resource

Content = tuple[str, int, int]
"""Buffer, how often it has been updated, and where ops on it may be skipped the group of micro-batches."""
Load = Callable[[], None]
"""Emits the ops that bring some of a block's weights to the compute device."""

LEAST_PIECE_BYTES = 16 * 2**20
"""Weights in RAM are loaded in pieces no smaller than this, 0.3 to 0.6 ms of a link."""


class StateSchedule:
    """Emits the ops on flat buffers. What it returns are the resources that compute ops read and write."""

    def __init__(self, plan: Plan, emitter: Emitter, behind_at: int | None) -> None:
        """`behind_at`: see ScheduleBuilder."""
        self._plan, self._kinds, self._rank = plan, plan.problem.state_kinds, plan.rank
        self._ring_owners: deque[int] = deque(maxlen=RING_PARTS)
        """Who adds each of the parts that were handed over last."""
        self._handed_over = 0
        """Parts of gradients that each rank has handed over so far."""
        self._added: set[tuple[str, bool]] = set()
        """Buffers whose gradient holds some of the step's replicas; True: what is added apart."""
        self._apart = plan.problem.added_apart
        self._updates = 0
        """Updates of buffers so far that all ranks take part in."""
        self._emit_any = emitter.emit
        self._routed = {
            name: r.resource(r.RAM_ROUTED, plan.blocks[sender].name)
            for block, sender in plan.problem.senders.items()
            for name in plan.blocks[block].buffers
        }
        """Buffer of a group of experts -> where it is known whether anything is sent to that."""
        self._lazy = plan.lazy
        self.whole = False
        """Nothing is skipped: the pass being emitted is no training step."""
        self._behind_at = behind_at
        """Step that a buffer in `_lazy` may not have been brought to; None: all have been."""
        self._turn = 0
        """Of the groups of micro-batches so far: what one has skipped is not there for the next."""
        self._chain = 0
        """Updates of such buffers so far."""
        self._state_bytes = len(self._kinds) * FP32
        """Of one parameter."""
        self.waiting: int | None = None
        """Step whose gradient waits for the optimizer."""
        self.uncommitted: int | None = None
        """Step whose gradient has been applied, but whose generation has not been committed."""
        self._version = dict.fromkeys(plan.buffers, 0)
        self._weights = {pool: Slots(f"gpu.weights.{pool}", plan.weight_slots[pool]) for pool in POOLS}
        self._gradients = {pool: Slots(f"gpu.gradient.{pool}", plan.gradient_slots[pool]) for pool in POOLS}
        self._stages = Slots("ram.state_stage", plan.state_stages)
        self._part_stages = Slots("ram.part_stage", plan.part_stages)
        self._copied: Content | None = None
        """Buffer whose dequantised weights are on the compute device."""
        self.weight_slot: dict[str, int] = {}
        """Slot of each buffer whose weights are on the compute device for now."""
        self._ahead: dict[tuple[str, int], int] = {}
        """(buffer, part) -> state stage into which it has been read before its update's turn."""
        self.replica = 0
        """Whose gradients the ops are about, of the replicas whose sums are open at once."""
        self.gradient_slot: dict[tuple[str, int], int] = {}
        """(buffer, replica) -> the slot in which its gradient is being summed; WHOLE where it has memory of its own."""
        self._begun: set[tuple[str, int]] = set()
        """Those of whose gradient there is a sum, in the step being emitted."""

    def begin(self) -> None:
        """The ops of another group of micro-batches follow."""
        self._turn += 1

    def take_routes(self, layer: str) -> None:
        """A layer's router has seen all chunks: bring what it chose to the host."""
        places = r.resource(r.GPU_ROUTED, layer), r.resource(r.RAM_ROUTED, layer)
        self._emit_any(a.TAKE_ROUTES, layer, reads=places[:1], writes=places[1:])

    def _emit(
        self,
        action: a.Action,
        name: str,
        index: int = WHOLE,
        *,
        reads: Iterable[Resource],
        writes: Iterable[Resource],
        nbytes: int = 0,
        slots: dict[str, int] | None = None,
        step: int | None = None,
    ) -> None:
        """Emit an op on a buffer, which may be skipped where the table says so of its action."""
        flags = []
        routed = self._routed.get(name)
        if routed is not None and r.RAM_ROUTED in action.reads and (name in self._lazy or action.skips == "load"):
            if action.skips in ("update", "commit"):
                slots = {**(slots or {}), a.CHAIN: self._chain}
            if not self.whole or action.skips == "update":
                reads, flags = [*reads, routed], [a.SKIPS, *([a.FORCED] if self.whole else [])]
        self._emit_any(
            action, name, index, reads=reads, writes=writes, nbytes=nbytes, slots=slots, step=step, flags=flags
        )

    def _content(self, name: str) -> Content:
        """What a slot holds with the weights of a buffer in it."""
        return name, self._version[name], self._turn if name in self._routed else 0

    def _move(
        self,
        action: a.Action,
        buffer: BufferPlan,
        part: int,
        reads: list[Resource],
        writes: list[Resource],
        slots: dict[str, int],
        item_bytes: int,
        step: int | None = None,
    ) -> None:
        """Emit what brings a part of a buffer, `item_bytes` an element, from one resource to another."""
        start, end = buffer.part(part)
        nbytes = (end - start) * item_bytes
        self._emit(action, buffer.name, part, reads=reads, writes=writes, nbytes=nbytes, slots=slots, step=step)

    def _through_stage(
        self,
        take: a.Action,
        bring: a.Action,
        buffer: BufferPlan,
        part: int,
        source: Resource,
        target: Resource,
        slots: dict[str, int],
        item_bytes: int,
        step: int | None = None,
        also: Sequence[Resource] = (),
    ) -> None:
        """Emit what brings a part through a stage in RAM; `also`: what else the second op reads."""
        stage = self._part_stages.take((buffer.name, part))
        staged, slots = r.resource(r.RAM_PART_STAGE, stage), {a.STAGE: stage} | slots
        self._move(take, buffer, part, [source], [staged], slots, item_bytes, step)
        self._move(bring, buffer, part, [staged, *also], [target], slots, item_bytes, step)
        self._part_stages.release(stage)

    def _pieces(
        self,
        action: a.Action,
        buffer: BufferPlan,
        slot: int,
        source: Resource,
        target: Resource,
        item_bytes: int,
        turns: int | None = None,
    ) -> list[Load]:
        """What copies a whole buffer between RAM and its slot, in `turns` pieces at most."""
        most = buffer.numel * item_bytes // LEAST_PIECE_BYTES
        pieces = max(1, most if turns is None else min(turns, most))

        def copy(index: int) -> None:
            start, end = buffer.piece(index, pieces)
            nbytes, slots = (end - start) * item_bytes, {buffer.name: slot, a.PIECES: pieces}
            self._emit(action, buffer.name, index, reads=[source], writes=[target], nbytes=nbytes, slots=slots)

        return [partial(copy, index) for index in range(pieces)]

    # ------------------------------------------------------------------ weights

    def weights(self, name: str) -> Resource:
        """Where the weights of buffer `name` are on the compute device."""
        buffer = self._plan.buffers[name]
        if buffer.weights == "gpu":
            return r.resource(r.GPU_WEIGHTS, name)
        return r.resource(r.GPU_WEIGHTS, buffer.pool, self.weight_slot[name])

    def operand(self, name: str) -> Resource:
        """What an op that computes with buffer `name` reads: its weights, or their dequantised copy, which is made
        unless it was the last one to be. What is quantised never changes."""
        weights = self.weights(name)
        if not self._plan.buffers[name].copy_numel:
            return weights
        copy = r.resource(r.GPU_COPY)
        if self._copied != self._content(name):
            slots = {name: self.weight_slot.get(name, WHOLE)}
            self._emit(a.DEQUANTISE, name, reads=[weights], writes=[copy], slots=slots)
            self._copied = self._content(name)
        return copy

    def fetch(self, buffers: Iterable[str], turns: int) -> list[Load]:
        """Pin slots for the weights of a block's `buffers`; what brings them there, unless they are there.

        The caller emits the loads in order, before the block's first op: in up to `turns` turns, between which small
        copies that are wanted sooner take theirs. Nothing overtakes on a lane.
        """
        loads: list[Load] = []
        for name in buffers:
            buffer = self._plan.buffers[name]
            if buffer.weights == "gpu":
                continue
            pool = self._weights[buffer.pool]
            content = self._content(name)
            slot = pool.find(content)
            if slot is None:
                slot = pool.take(content)
                loads += self._loads(buffer, slot, turns)
            self.weight_slot[name] = slot
        return loads

    def release(self, buffers: Iterable[str]) -> None:
        """Unpin what `fetch` pinned; it stays until its slot is wanted."""
        for name in buffers:
            buffer = self._plan.buffers[name]
            if buffer.weights != "gpu":
                self._weights[buffer.pool].release(self.weight_slot[name], keep=True)

    def _loads(self, buffer: BufferPlan, slot: int, turns: int) -> list[Load]:
        name, item = buffer.name, buffer.weight_bytes
        if buffer.weights == "ram":
            source, target = r.resource(r.RAM_WEIGHTS, name), r.resource(r.GPU_WEIGHTS, buffer.pool, slot)
            return self._pieces(a.LOAD_WEIGHTS, buffer, slot, source, target, item, turns)
        if self._plan.problem.device_reads:
            reads = [r.resource(r.NVME_WEIGHTS, name, part) for part in range(buffer.num_parts)]
            whole = partial(self._emit, a.READ_WEIGHTS_WHOLE, name, reads=reads, nbytes=buffer.numel * item)
            return [partial(whole, writes=[r.resource(r.GPU_WEIGHTS, buffer.pool, slot)], slots={name: slot})]
        return [partial(self._load_part, buffer, slot, part) for part in range(buffer.num_parts)]

    def _load_part(self, buffer: BufferPlan, slot: int, part: int) -> None:
        """A part of weights on NVMe to its slot."""
        file, target = r.resource(r.NVME_WEIGHTS, buffer.name, part), r.resource(r.GPU_WEIGHTS, buffer.pool, slot)
        slots = {buffer.name: slot}
        self._through_stage(a.READ_WEIGHTS, a.LOAD_WEIGHTS_PART, buffer, part, file, target, slots, buffer.weight_bytes)

    # ------------------------------------------------------------------ gradients

    def gradient(self, name: str) -> Resource:
        """Where the gradient of buffer `name` is being summed."""
        buffer = self._plan.buffers[name]
        if self.gradient_slot[name, self.replica] == WHOLE:
            return r.resource(r.GPU_GRADIENT, name)
        return r.resource(r.GPU_GRADIENT, buffer.pool, self.gradient_slot[name, self.replica])

    def open_gradient(self, name: str) -> bool:
        """Make sure that `name` has memory for its gradient; True when there is no sum yet and it must be zeroed."""
        new = (name, self.replica) not in self._begun
        if (name, self.replica) not in self.gradient_slot:
            if new:
                self._place_gradient(name)
            for load in self.fetch_sum(name, 1):
                load()
        self._begun.add((name, self.replica))
        return new

    def _place_gradient(self, name: str) -> int:
        buffer = self._plan.buffers[name]
        own = "gpu" in (buffer.gradient, buffer.sums)
        slot = self.gradient_slot[name, self.replica] = WHOLE if own else self._gradients[buffer.pool].take(name)
        return slot

    def fetch_sum(self, name: str, turns: int) -> list[Load]:
        """Where earlier groups summed a gradient of `name`, its place; what brings it there, as `fetch` does."""
        if (name, self.replica) in self.gradient_slot or (name, self.replica) not in self._begun:
            return []
        buffer, slot = self._plan.buffers[name], self._place_gradient(name)
        if slot == WHOLE:
            return []
        return self._pieces(
            a.LOAD_SUM, buffer, slot, r.resource(r.RAM_GRADIENT, name), self.gradient(name), FP32, turns
        )

    def suspend_gradient(self, name: str) -> list[Load]:
        """The gradient of `name` waits for the step's next group; what brings it to where it waits, as `fetch` does."""
        buffer, source = self._plan.buffers[name], self.gradient(name)
        slot = self.gradient_slot.pop((name, self.replica))
        if slot == WHOLE:
            return []
        stores = self._pieces(a.STORE_SUM, buffer, slot, source, r.resource(r.RAM_GRADIENT, name), FP32)
        return [*stores, partial(self._gradients[buffer.pool].release, slot)]

    def close_gradient(self, name: str) -> None:
        """The gradient of `name` is complete: take its norm and move it to where it waits."""
        buffer = self._plan.buffers[name]
        source = self.gradient(name)
        slots = {name: self.gradient_slot.pop((name, self.replica))}
        self._begun.discard((name, self.replica))
        self._emit(a.NORM, name, reads=[source], writes=[r.resource(r.GPU_NORMS)], slots=slots)
        item = self._plan.problem.gradient_bytes
        if buffer.gradient == "ram":
            size, waiting = buffer.numel * item, [r.resource(r.RAM_GRADIENT, name)]
            self._emit(a.STORE_GRADIENT, name, reads=[source], writes=waiting, nbytes=size, slots=slots)
        for part in range(buffer.num_parts if buffer.gradient == "nvme" else 0):
            file = r.resource(r.NVME_GRADIENT, name, part)
            self._through_stage(a.STORE_GRADIENT_PART, a.WRITE_GRADIENT, buffer, part, source, file, slots, item)
        if slots[name] != WHOLE:
            self._gradients[buffer.pool].release(slots[name])

    def add_replica(self, name: str) -> None:
        """The gradient of one more replica of `name` is complete: add it to the sum of those before it."""
        one, (slot, into) = self.gradient(name), (self.gradient_slot[name, replica] for replica in (self.replica, 0))
        del self.gradient_slot[name, self.replica]
        self._begun.discard((name, self.replica))
        self.replica = 0
        slots = {a.gradient_of(name): slot, name: into}
        self._emit(a.ADD_REPLICA, name, reads=[one], writes=[self.gradient(name)], slots=slots)
        self._gradients[self._plan.buffers[name].pool].release(slot)

    def hand_over(self, name: str, *, ends: bool, last: bool, of_rank: int | None = None) -> None:
        """The gradient of a replica of `name` is complete: it goes part by part through the ring to the ranks that own
        the parts, which add it to those before it. `ends`: no other block adds to it; `last`: with it the step's
        gradient is complete; `of_rank`: who alone has found it, where that is of all replicas."""
        buffer, emit = self._plan.buffers[name], self._emit
        found, alone = of_rank in (None, self._rank), {} if of_rank is None else {a.OF_RANK: of_rank}
        source: Resource = self.gradient(name) if found else ()
        slots = {name: self.gradient_slot.pop((name, self.replica))} if found else {}
        self._begun.discard((name, self.replica))
        apart = name in self._apart and not ends
        new = (name, apart) not in self._added
        self._added.add((name, apart))
        flags = [a.FIRST] * new + [a.COMPLETES] * last + [a.APART] * apart
        for part in range(buffer.num_parts):
            number, owner = self._handed_over, buffer.owner(part)
            full = len(self._ring_owners) == RING_PARTS
            place = {a.RING: number % RING_PARTS, a.SEQUENCE: number} | alone
            freed = {a.FREED_BY: self._ring_owners[0]} if full else {}
            self._ring_owners.append(owner)
            self._handed_over += 1
            ring = r.resource(r.RAM_RING, place[a.RING])
            if found:
                self._move(a.HAND_OVER, buffer, part, [source], [ring], slots | place | freed, FP32)
                if buffer.ranks > 1:
                    emit(a.SIGNAL_GRADIENT, name, part, reads=[ring], writes=[], slots=place)
            if owner == self._rank:
                self._add(buffer, part, ring, place, flags)
        if slots.get(name, WHOLE) != WHOLE:
            self._gradients[buffer.pool].release(slots[name])
        if last:
            self._added -= {(name, False), (name, True)}

    def _add(self, buffer: BufferPlan, part: int, ring: Resource, place: dict[str, int], flags: list[str]) -> None:
        """Emit what adds a part of all ranks' replicas of a round to the gradient that waits."""
        name = buffer.name
        norms = [r.resource(r.RAM_NORMS)] if a.COMPLETES in flags else []
        start, end = buffer.part(part)
        nbytes = (end - start) * FP32
        emit = partial(self._emit_any, a.ADD_GRADIENT, name, part, reads=[ring], flags=flags, nbytes=nbytes)
        in_ram = [r.resource(r.RAM_GRADIENT, name)]
        if buffer.gradient == "ram" or a.APART in flags:
            emit(writes=[*in_ram, *norms], slots=place)
            return
        file, stage = r.resource(r.NVME_GRADIENT, name, part), self._part_stages.take((name, part))
        staged = r.resource(r.RAM_PART_STAGE, stage)
        slots = place | {a.STAGE: stage}
        if a.FIRST not in flags:
            self._move(a.READ_GRADIENT, buffer, part, [file], [staged], slots, FP32)
        apart = in_ram if norms and name in self._apart else []
        emit(writes=[staged, *apart, *norms], slots=slots)
        self._move(a.WRITE_GRADIENT, buffer, part, [staged], [file], slots, FP32)
        self._part_stages.release(stage)

    # ------------------------------------------------------------------ optimizer

    def update(self, name: str, *, write_through: bool, fetched: bool) -> list[Load]:
        """Apply the gradient that waits, if one does, to `name` part by part, and write back what lives on NVMe.

        With `write_through` all of it is written, for the generation about to be committed. `fetched`: its weights are
        fetched next; those for NVMe go to their slot from the stage that they are made in. Returns what is left to be
        emitted, as `fetch` does, where new weights go to the compute device.
        """
        buffer = self._plan.buffers[name]
        if buffer.frozen:
            return []
        due = self.waiting
        if name in self._lazy:
            due = self._behind_at if due is None and fetched else due
            fetched = False  # what is skipped is made in no stage
        if buffer.ranks > 1:
            fetched = False  # others make most of it
        left = [] if due is None else self._apply(buffer, due, fetched)
        step = self._newest
        if write_through and buffer.state != "nvme" and step is not None:
            left += [partial(self._write_through, buffer, part, step) for part in buffer.owned(self._rank)]
        if buffer.state == "gpu" or buffer.weights == "ram" or not fetched:
            for emit in left:
                emit()
            left = []
        return left

    def applied(self, *, committed: bool) -> None:
        """The waiting gradient has been applied to every buffer, and maybe its generation committed."""
        self.uncommitted = None if committed else self._newest
        if self._lazy and (self.whole or self.waiting is not None):
            self._behind_at = None if self.whole else self.waiting
        self.waiting = None

    @property
    def _newest(self) -> int | None:
        """Step of the generation that is there once the waiting gradient is applied, unless it has been committed."""
        return self.uncommitted if self.waiting is None else self.waiting

    def _apply(self, buffer: BufferPlan, step: int, fetched: bool) -> list[Load]:
        """What applies the gradient of a step to a buffer."""
        name = buffer.name
        self._version[name] += 1
        self._chain += name in self._lazy
        if buffer.state == "gpu":
            reads: list[Resource] = [r.resource(r.GPU_GRADIENT, name), r.resource(r.RAM_CLIP)]
            writes: list[Resource] = [r.resource(r.GPU_STATE, name), r.resource(r.GPU_WEIGHTS, name)]
            return [partial(self._emit, a.UPDATE_ON_GPU, name, reads=reads, writes=writes, step=step)]
        onward = fetched or buffer.weights == "gpu"
        updates = range(buffer.num_updates) if buffer.ranks == 1 else buffer.owned(self._rank)
        result: list[Load] = [partial(self._update_part, buffer, i, step, onward) for i in updates]
        if buffer.ranks > 1:
            self._updates += 1
            result.append(partial(self._await_weights, buffer, self._updates, step))
        if fetched and buffer.weights == "nvme":
            pool = self._weights[buffer.pool]
            slot = self.weight_slot[name] = pool.take(self._content(name))
            result.append(partial(pool.release, slot, keep=True))
        return result

    def _await_weights(self, buffer: BufferPlan, number: int, step: int) -> None:
        """All ranks' parts of a buffer's weights are there from here on."""
        parts = range(buffer.num_parts) if buffer.weights == "nvme" else ()
        made = [r.resource(r.NVME_WEIGHTS, buffer.name, part) for part in parts]
        made = made or [r.resource(r.RAM_WEIGHTS, buffer.name)]
        self._emit(a.AWAIT_WEIGHTS, buffer.name, reads=[], writes=made, slots={a.SEQUENCE: number}, step=step)

    def _update_part(self, buffer: BufferPlan, part: int, step: int, onward: bool) -> None:
        """Emit update op number `part`: of one part, or of several that are in RAM and need no stage. `onward`: what is
        made in a stage goes to the compute device from there."""
        name = buffer.name
        reads: list[Resource] = [r.resource(r.RAM_CLIP)]
        writes: list[Resource] = []
        slots: dict[str, int] = {}
        staged: list[Resource] = []
        if "nvme" in (buffer.state, buffer.gradient):
            ahead = self._ahead.pop((name, part), None)
            slots[a.STAGE] = self._read_state(buffer, part, step) if ahead is None else ahead
            staged = [r.resource(r.RAM_STATE_STAGE, slots[a.STAGE])]
            reads += staged
            if buffer.state == "nvme":
                writes += staged
        if buffer.gradient == "ram":
            reads.append(r.resource(r.RAM_GRADIENT, name))
            if name in self._lazy:  # zeroed, where nothing was added to it
                writes.append(r.resource(r.RAM_GRADIENT, name))
        if buffer.state == "ram":
            writes.append(r.resource(r.RAM_STATE, name))
        if buffer.weights == "ram":
            writes.append(r.resource(r.RAM_WEIGHTS, name))
        else:
            slots[a.WEIGHTS_STAGE] = self._part_stages.take((name, part))
            writes.append(r.resource(r.RAM_PART_STAGE, slots[a.WEIGHTS_STAGE]))
        self._emit(a.UPDATE, name, part, reads=reads, writes=writes, slots=slots, step=step)
        if buffer.state == "nvme":
            file = r.resource(r.NVME_STATE, name, part)
            self._move(
                a.WRITE_STATE, buffer, part, [*staged, r.resource(r.GENERATION)], [file], slots, self._state_bytes, step
            )
        if a.WEIGHTS_STAGE in slots:  # of resident state new weights are made where they stay
            stage, item = slots[a.WEIGHTS_STAGE], buffer.weight_bytes
            made: list[Resource] = [r.resource(r.RAM_PART_STAGE, stage)]
            if buffer.weights == "nvme":
                file = r.resource(r.NVME_WEIGHTS, name, part)
                self._move(a.WRITE_WEIGHTS, buffer, part, made, [file], slots, item, step)
            if onward:
                there = {a.STAGE: stage, name: self.weight_slot.get(name, WHOLE)}
                there |= {a.CHAIN: self._chain} if name in self._lazy else {}
                self._move(a.LOAD_WEIGHTS_PART, buffer, part, made, [self.weights(name)], there, item)
            self._part_stages.release(stage)
        if a.STAGE in slots:
            self._stages.release(slots[a.STAGE])

    def _read_state(self, buffer: BufferPlan, part: int, step: int) -> int:
        """Bring what NVMe holds of a part to a stage; its number."""
        name = buffer.name
        stage = self._stages.take((name, part))
        files: list[Resource] = []
        item = 0
        if buffer.state == "nvme":
            files.append(r.resource(r.NVME_STATE, name, part))
            item += self._state_bytes
        if buffer.gradient == "nvme":
            files.append(r.resource(r.NVME_GRADIENT, name, part))
            item += self._plan.problem.gradient_bytes
        staged = [r.resource(r.RAM_STATE_STAGE, stage)]
        self._move(a.READ_STATE, buffer, part, files, staged, {a.STAGE: stage}, item, step)
        return stage

    def read_ahead(self, step: int) -> None:
        """Fill the state stages with what the next updates need first. The drive then works while the step's end is
        awaited; no state is changed before clipping is known."""
        known = itertools.takewhile(lambda b: b.name not in self._lazy, self._plan.buffers.values())
        staged = [b for b in known if "nvme" in (b.state, b.gradient)]
        parts = ((buffer, part) for buffer in staged for part in buffer.owned(self._rank))
        for buffer, part in itertools.islice(parts, self._plan.state_stages):
            self._ahead[buffer.name, part] = self._read_state(buffer, part, step)

    # ------------------------------------------------------------------ generations

    def commit(self) -> None:
        """Commit the generation whose state has been written, unless it has been committed."""
        if self._newest is not None:
            slots = {a.CHAIN: self._chain} if self._lazy else {}
            self._emit(a.COMMIT, "all", reads=[], writes=[r.resource(r.GENERATION)], slots=slots, step=self._newest)

    def _write_through(self, buffer: BufferPlan, part: int, step: int) -> None:
        """Write a part of state that lives in RAM or on the GPU, for the generation about to be committed."""
        name, committed = buffer.name, r.resource(r.GENERATION)
        if buffer.state == "ram":
            state, file = [r.resource(r.RAM_STATE, name), committed], r.resource(r.NVME_STATE, name, part)
            self._move(a.CHECKPOINT_STATE, buffer, part, state, [file], {}, self._state_bytes, step)
            return
        for number, kind in enumerate(self._kinds):
            ways = (r.resource(r.GPU_STATE, name), r.resource(r.NVME_STATE, name, part, kind), {a.KIND: number})
            self._through_stage(a.STAGE_STATE, a.CHECKPOINT_STAGED, buffer, part, *ways, FP32, step, [committed])
