"""The part of the schedule that moves state: weights to the compute device, gradients away, updates, generations."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

from engine.plan.plan import FP32, STATE_KINDS, BlockShape, BufferPlan, Plan, Pool
from engine.schedule.ops import WHOLE, Emitter, Resource, Slots

Load = Callable[[], None]
"""Emits the ops that bring some of a block's weights to the compute device."""

LEAST_PIECE_BYTES = 16 * 2**20
"""Weights in RAM are loaded in pieces no smaller than this, 0.3 to 0.6 ms of a link."""


class StateSchedule:
    """Emits the ops on flat buffers. What it returns are the resources that compute ops read and write."""

    def __init__(self, plan: Plan, emitter: Emitter) -> None:
        self._plan = plan
        self._emit = emitter.emit
        self.waiting: int | None = None
        """Step whose gradient waits for the optimizer."""
        self.uncommitted: int | None = None
        """Step whose gradient has been applied, but whose generation has not been committed."""
        self._version = dict.fromkeys(plan.buffers, 0)
        pools: tuple[Pool, ...] = ("layer", "edge")
        self._weights = {pool: Slots(f"gpu.weights.{pool}", plan.weight_slots[pool]) for pool in pools}
        self._gradients = {pool: Slots(f"gpu.gradient.{pool}", plan.gradient_slots[pool]) for pool in pools}
        self._stages = Slots("ram.state_stage", plan.state_stages)
        self._part_stages = Slots("ram.part_stage", plan.part_stages)
        self.weight_slot: dict[str, int] = {}
        """Slot of each buffer whose weights are on the compute device for now."""
        self._ahead: dict[tuple[str, int], int] = {}
        """(buffer, part) -> state stage into which it has been read before its update's turn."""
        self.gradient_slot: dict[str, int] = {}
        """Slot in which a buffer's gradient is being summed; WHOLE where it is resident."""

    # ------------------------------------------------------------------ weights

    def weights(self, name: str) -> Resource:
        """Where the weights of buffer `name` are on the compute device."""
        buffer = self._plan.buffers[name]
        if buffer.weights == "gpu":
            return ("gpu.weights", name)
        return ("gpu.weights", buffer.pool, self.weight_slot[name])

    def fetch(self, block: BlockShape, turns: int) -> list[Load]:
        """Pin slots for the weights of all buffers of `block`; what brings them there, unless they are there.

        The caller emits the loads in order, before the block's first op: in up to `turns` turns, between which small
        copies that are wanted sooner take theirs. Nothing overtakes on a lane.
        """
        loads: list[Load] = []
        for name in block.buffers:
            buffer = self._plan.buffers[name]
            if buffer.weights == "gpu":
                continue
            pool = self._weights[buffer.pool]
            content = (name, self._version[name])
            slot = pool.find(content)
            if slot is None:
                slot = pool.take(content)
                loads += self._loads(buffer, slot, turns)
            self.weight_slot[name] = slot
        return loads

    def release(self, block: BlockShape) -> None:
        """Unpin what `fetch` pinned; it stays until its slot is wanted."""
        for name in block.buffers:
            buffer = self._plan.buffers[name]
            if buffer.weights != "gpu":
                self._weights[buffer.pool].release(self.weight_slot[name], keep=True)

    def _loads(self, buffer: BufferPlan, slot: int, turns: int) -> list[Load]:
        name, item = buffer.name, self._plan.problem.compute_bytes
        target: list[Resource] = [("gpu.weights", buffer.pool, slot)]
        if buffer.weights == "ram":
            pieces = max(1, min(turns, buffer.numel * item // LEAST_PIECE_BYTES))
            return [partial(self._load_piece, buffer, slot, index, pieces) for index in range(pieces)]
        if self._plan.problem.device_reads:
            reads: list[Resource] = [("nvme.weights", name, part) for part in range(buffer.num_parts)]
            size = buffer.numel * item
            return [
                partial(
                    self._emit,
                    "nvme_read",
                    "read_weights_whole",
                    name,
                    reads=reads,
                    writes=target,
                    nbytes=size,
                    slots={name: slot},
                )
            ]
        return [partial(self._load_part, buffer, slot, part) for part in range(buffer.num_parts)]

    def _load_piece(self, buffer: BufferPlan, slot: int, index: int, pieces: int) -> None:
        """Weights in RAM to their slot, in `pieces` copies."""
        start, end = buffer.piece(index, pieces)
        self._emit(
            "h2d",
            "load_weights",
            buffer.name,
            index,
            reads=[("ram.weights", buffer.name)],
            writes=[("gpu.weights", buffer.pool, slot)],
            nbytes=(end - start) * self._plan.problem.compute_bytes,
            slots={buffer.name: slot, "pieces": pieces},
        )

    def _load_part(self, buffer: BufferPlan, slot: int, part: int) -> None:
        """A part of weights on NVMe to its slot, through a stage in RAM."""
        name = buffer.name
        start, end = buffer.part(part)
        size = (end - start) * self._plan.problem.compute_bytes
        stage = self._part_stages.take((name, part))
        staged: list[Resource] = [("ram.part_stage", stage)]
        slots = {"stage": stage, name: slot}
        self._emit(
            "nvme_read",
            "read_weights",
            name,
            part,
            reads=[("nvme.weights", name, part)],
            writes=staged,
            nbytes=size,
            slots=slots,
        )
        target: list[Resource] = [("gpu.weights", buffer.pool, slot)]
        self._emit("h2d", "load_weights_part", name, part, reads=staged, writes=target, nbytes=size, slots=slots)
        self._part_stages.release(stage)

    # ------------------------------------------------------------------ gradients

    def gradient(self, name: str) -> Resource:
        """Where the gradient of buffer `name` is being summed."""
        buffer = self._plan.buffers[name]
        if buffer.gradient == "gpu":
            return ("gpu.gradient", name)
        return ("gpu.gradient", buffer.pool, self.gradient_slot[name])

    def open_gradient(self, name: str) -> bool:
        """Make sure that `name` has a place for its gradient in this step; True when it is new and must be zeroed."""
        if name in self.gradient_slot:
            return False
        buffer = self._plan.buffers[name]
        self.gradient_slot[name] = WHOLE if buffer.gradient == "gpu" else self._gradients[buffer.pool].take(name)
        return True

    def close_gradient(self, name: str) -> None:
        """The gradient of `name` is complete: take its norm and move it to where it waits."""
        buffer = self._plan.buffers[name]
        source = [self.gradient(name)]
        slot = self.gradient_slot.pop(name)
        self._emit("compute", "norm", name, reads=source, writes=[("gpu.norms",)], slots={name: slot})
        if buffer.gradient == "gpu":
            return
        item = self._plan.problem.gradient_bytes
        if buffer.gradient == "ram":
            size, waiting = buffer.numel * item, [("ram.gradient", name)]
            self._emit("d2h", "store_gradient", name, reads=source, writes=waiting, nbytes=size, slots={name: slot})
        for part in range(buffer.num_parts if buffer.gradient == "nvme" else 0):
            start, end = buffer.part(part)
            size = (end - start) * item
            stage = self._part_stages.take((name, part))
            staged: list[Resource] = [("ram.part_stage", stage)]
            file: list[Resource] = [("nvme.gradient", name, part)]
            slots = {"stage": stage, name: slot}
            self._emit("d2h", "store_gradient_part", name, part, reads=source, writes=staged, nbytes=size, slots=slots)
            self._emit("nvme_write", "write_gradient", name, part, reads=staged, writes=file, nbytes=size, slots=slots)
            self._part_stages.release(stage)
        self._gradients[buffer.pool].release(slot)

    # ------------------------------------------------------------------ optimizer

    def update(self, name: str, *, write_through: bool) -> None:
        """Apply the gradient that waits, if one does, to `name` part by part, and write back what lives on NVMe.

        With `write_through` all of it is written, for the generation about to be committed.
        """
        buffer = self._plan.buffers[name]
        if self.waiting is not None:
            self._apply(buffer, self.waiting)
        step = self._newest
        if write_through and buffer.state != "nvme" and step is not None:
            for part in range(buffer.num_parts):
                self._write_through(buffer, part, step)

    def applied(self, *, committed: bool) -> None:
        """The waiting gradient has been applied to every buffer, and maybe its generation committed."""
        self.uncommitted = None if committed else self._newest
        self.waiting = None

    @property
    def _newest(self) -> int | None:
        """Step of the generation that is there once the waiting gradient is applied, unless it has been committed."""
        return self.uncommitted if self.waiting is None else self.waiting

    def _apply(self, buffer: BufferPlan, step: int) -> None:
        name = buffer.name
        self._version[name] += 1
        if buffer.state == "gpu":
            reads: list[Resource] = [("gpu.gradient", name), ("ram.clip",)]
            writes: list[Resource] = [("gpu.state", name), ("gpu.weights", name)]
            self._emit("compute", "update_on_gpu", name, reads=reads, writes=writes, step=step)
            return
        for index in range(buffer.num_updates):
            self._update_part(buffer, index, step)

    def _update_part(self, buffer: BufferPlan, part: int, step: int) -> None:
        """Emit update op number `part`: of one part, or of several that are in RAM and need no stage."""
        name = buffer.name
        start, end = buffer.update(part)
        numel = end - start
        state_bytes = len(STATE_KINDS) * numel * FP32
        reads: list[Resource] = [("ram.clip",)]
        writes: list[Resource] = []
        slots: dict[str, int] = {}
        staged: list[Resource] = []
        if "nvme" in (buffer.state, buffer.gradient):
            ahead = self._ahead.pop((name, part), None)
            slots["stage"] = self._read_state(buffer, part, step) if ahead is None else ahead
            staged = [("ram.state_stage", slots["stage"])]
            reads += staged
            if buffer.state == "nvme":
                writes += staged
        if buffer.gradient == "ram":
            reads.append(("ram.gradient", name))
        if buffer.state == "ram":
            writes.append(("ram.state", name))
        if buffer.weights == "ram":
            writes.append(("ram.weights", name))
        else:
            slots["weights"] = self._part_stages.take((name, part))
            writes.append(("ram.part_stage", slots["weights"]))
        self._emit("optimizer", "update", name, part, reads=reads, writes=writes, slots=slots, step=step)
        if buffer.state == "nvme":
            self._emit(
                "nvme_write",
                "write_state",
                name,
                part,
                reads=[*staged, ("generation",)],
                writes=[("nvme.state", name, part)],
                nbytes=state_bytes,
                slots=slots,
                step=step,
            )
        if "weights" in slots:
            self._weights_leave(buffer, part, slots, step)
            self._part_stages.release(slots["weights"])
        if "stage" in slots:
            self._stages.release(slots["stage"])

    def _read_state(self, buffer: BufferPlan, part: int, step: int) -> int:
        """Bring what NVMe holds of a part to a stage; its number."""
        name = buffer.name
        start, end = buffer.part(part)
        slots = {"stage": self._stages.take((name, part))}
        files: list[Resource] = []
        item = 0
        if buffer.state == "nvme":
            files.append(("nvme.state", name, part))
            item += len(STATE_KINDS) * FP32
        if buffer.gradient == "nvme":
            files.append(("nvme.gradient", name, part))
            item += self._plan.problem.gradient_bytes
        self._emit(
            "nvme_read",
            "read_state",
            name,
            part,
            reads=files,
            writes=[("ram.state_stage", slots["stage"])],
            nbytes=(end - start) * item,
            slots=slots,
            step=step,
        )
        return slots["stage"]

    def read_ahead(self, step: int) -> None:
        """Fill the state stages with what the next updates need first.

        The drive then works while the step's end is awaited; no state is changed before clipping is known.
        """
        staged = [b for b in self._plan.buffers.values() if "nvme" in (b.state, b.gradient)]
        parts = ((buffer, part) for buffer in staged for part in range(buffer.num_parts))
        for buffer, part in itertools.islice(parts, self._plan.state_stages):
            self._ahead[buffer.name, part] = self._read_state(buffer, part, step)

    def _weights_leave(self, buffer: BufferPlan, part: int, slots: dict[str, int], step: int) -> None:
        """New weights of a part go from their stage to NVMe: those of resident state are made where they stay."""
        assert buffer.weights == "nvme"
        start, end = buffer.part(part)
        self._emit(
            "nvme_write",
            "write_weights",
            buffer.name,
            part,
            reads=[("ram.part_stage", slots["weights"])],
            writes=[("nvme.weights", buffer.name, part)],
            nbytes=(end - start) * self._plan.problem.compute_bytes,
            slots=slots,
            step=step,
        )

    # ------------------------------------------------------------------ generations

    def commit(self) -> None:
        """Commit the generation whose state has been written, unless it has been committed."""
        if self._newest is not None:
            self._emit("nvme_write", "commit", "all", writes=[("generation",)], step=self._newest)

    def _write_through(self, buffer: BufferPlan, part: int, step: int) -> None:
        """Write a part of state that lives in RAM or on the GPU, for the generation about to be committed."""
        name = buffer.name
        start, end = buffer.part(part)
        size = (end - start) * FP32
        if buffer.state == "ram":
            self._emit(
                "nvme_write",
                "checkpoint_state",
                name,
                part,
                reads=[("ram.state", name), ("generation",)],
                writes=[("nvme.state", name, part)],
                nbytes=len(STATE_KINDS) * size,
                step=step,
            )
            return
        for kind in STATE_KINDS:
            slots = {"stage": self._part_stages.take((name, kind, part))}
            staged: list[Resource] = [("ram.part_stage", slots["stage"])]
            resident: list[Resource] = [("gpu.state", name)]
            self._emit(
                "d2h", "stage_" + kind, name, part, reads=resident, writes=staged, nbytes=size, slots=slots, step=step
            )
            self._emit(
                "nvme_write",
                "checkpoint_" + kind,
                name,
                part,
                reads=[*staged, ("generation",)],
                writes=[("nvme.state", name, part, kind)],
                nbytes=size,
                slots=slots,
                step=step,
            )
            self._part_stages.release(slots["stage"])
