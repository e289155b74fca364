"""The schedule: one optimizer step as a list of ops with every dependency, pure data, no torch.

`ScheduleBuilder` emits ops in program order. Each op names the resources (slots, regions, parts on disk) that it
reads and writes; its dependencies follow: after the last writer of what it reads, after the last writer and all
later readers of what it writes. Slots are assigned here, statically. Any execution that respects the
dependencies therefore computes the same bits.

The builder keeps its tables from one step to the next, so that ops of step s+1 depend on ops of step s where they
share a resource, and on nothing else: the optimizer's updates of step s run under the forward pass of step s+1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.plan import HIDDEN_SLOTS, SAVED_SLOTS, STATE_KINDS, BlockShape, BufferPlan, Chunk, Plan, Pool

Lane = Literal["nvme_read", "h2d", "compute", "d2h", "optimizer", "nvme_write"]
LANES: tuple[Lane, ...] = ("nvme_read", "h2d", "compute", "d2h", "optimizer", "nvme_write")

Resource = tuple[str | int, ...]
"""Name of a piece of memory or disk, for example ("gpu.hidden", 2) or ("nvme.state", "layers.3", 0)."""

WHOLE = -1
"""Chunk index of an op that concerns a whole block."""


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
    """Slot of each operand by role: x, y, dy, dx, saved, stage, or the name of a flat buffer."""
    flags: frozenset[str] = frozenset()


class _Slots:
    """A pool of slots with statically known contents; the least recently used free one is given out."""

    def __init__(self, name: str, count: int) -> None:
        self.name = name
        self.content: list[Any] = [None] * count
        self._used = [0] * count
        self._pinned = [0] * count
        self._clock = 0

    def find(self, content: Any) -> int | None:
        """The slot that holds `content`."""
        return self.content.index(content) if content in self.content else None

    def take(self, content: Any) -> int:
        """A slot, pinned until `release`, now holding `content`."""
        free = [i for i, pins in enumerate(self._pinned) if not pins]
        assert free, f"{self.name}: all {len(self.content)} slots are in use"
        slot = min(free, key=lambda i: (self.content[i] is not None, self._used[i]))
        self.content[slot] = content
        self.pin(slot)
        return slot

    def pin(self, slot: int) -> None:
        self._clock += 1
        self._used[slot] = self._clock
        self._pinned[slot] += 1

    def release(self, slot: int, *, keep: bool = False) -> None:
        """Unpin; `keep` leaves the content to be found again."""
        self._pinned[slot] -= 1
        assert self._pinned[slot] >= 0
        if not keep and not self._pinned[slot]:
            self.content[slot] = None


@dataclass(frozen=True, slots=True)
class _Task:
    """A block computing one chunk."""

    visit: int
    mode: Literal["forward", "head", "backward"]
    layer: int
    """Index of the block in the plan."""
    chunk: Chunk
    first: bool
    last: bool


class ScheduleBuilder:
    """Emits the ops of consecutive optimizer steps.

    `step(s)` is forward and backward of step s, preceded block by block by the updates of the gradient that still
    waits, and ends with op "clip", after which loss and gradient norm are known. `finish(s)` is the updates alone.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._next_id = 0
        self._writer: dict[Resource, int] = {}
        self._readers: dict[Resource, list[int]] = {}
        self._ops: list[Op] = []
        self._step = 0
        self._waiting: int | None = None
        """Step whose gradient waits for the optimizer."""
        self._commit_waiting = False
        self._version = {name: 0 for name in plan.buffers}
        pools: tuple[Pool, ...] = ("layer", "edge")
        self._weights = {pool: _Slots(f"gpu.weights.{pool}", plan.weight_slots[pool]) for pool in pools}
        self._gradients = {pool: _Slots(f"gpu.gradient.{pool}", plan.gradient_slots[pool]) for pool in pools}
        self._hidden = _Slots("gpu.hidden", HIDDEN_SLOTS)
        self._saved = _Slots("gpu.saved", SAVED_SLOTS)
        self._stages = _Slots("ram.state_stage", plan.state_stages)
        self._part_stages = _Slots("ram.part_stage", plan.part_stages)
        locals_ = max(chunk.local for chunk in plan.chunks) + 1
        self._kv: list[Any] = [None] * locals_
        self._kv_slots = locals_
        self._gradient_slot: dict[str, int] = {}
        self._weight_slot: dict[str, int] = {}

    # ------------------------------------------------------------------ emission

    def _emit(
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
    ) -> Op:
        reads, writes = tuple(reads), tuple(writes)
        deps: set[int] = set()
        for resource in (*reads, *writes):
            if resource in self._writer:
                deps.add(self._writer[resource])
        for resource in writes:
            deps.update(self._readers.get(resource, ()))
        op = Op(
            id=self._next_id,
            lane=lane,
            action=action,
            block=block,
            index=index,
            step=self._step if step is None else step,
            reads=reads,
            writes=writes,
            deps=tuple(sorted(deps)),
            nbytes=nbytes,
            slots=dict(slots or {}),
            flags=frozenset(flags),
        )
        for resource in reads:
            self._readers.setdefault(resource, []).append(op.id)
        for resource in writes:
            self._writer[resource] = op.id
            self._readers[resource] = []
        self._next_id += 1
        self._ops.append(op)
        return op

    def _take(self) -> list[Op]:
        ops, self._ops = self._ops, []
        return ops

    # ------------------------------------------------------------------ public

    @property
    def waiting(self) -> bool:
        """Whether a gradient waits for the optimizer."""
        return self._waiting is not None

    def step(self, step: int, *, commit_previous: bool = False) -> list[Op]:
        """Ops of step `step`. `commit_previous` commits a generation once the waiting gradient is applied."""
        self._commit_waiting = commit_previous
        self._step = step
        self._pass_over_blocks()
        self._emit("optimizer", "clip", "all", reads=[("gpu.norms",), ("gpu.losses",)], writes=[("ram.clip",)])
        self._waiting = step
        return self._take()

    def finish(self, *, commit: bool) -> list[Op]:
        """Ops that apply the waiting gradient and, with `commit`, commit the generation."""
        self._commit_waiting = commit
        for name in self.plan.buffers:
            self._update(name)
        self._commit_if_due()
        self._waiting = None
        return self._take()

    # ------------------------------------------------------------------ weights and gradients

    def _buffer(self, name: str) -> BufferPlan:
        return self.plan.buffers[name]

    def _weight_resource(self, name: str) -> Resource:
        buffer = self._buffer(name)
        if buffer.weights == "gpu":
            return ("gpu.weights", name)
        return ("gpu.weights", buffer.pool, self._weight_slot[name])

    def _gradient_resource(self, name: str) -> Resource:
        buffer = self._buffer(name)
        if buffer.gradient == "gpu":
            return ("gpu.gradient", name)
        return ("gpu.gradient", buffer.pool, self._gradient_slot[name])

    def _fetch(self, block: BlockShape) -> None:
        """Bring the weights of all buffers of `block` into GPU slots and pin them."""
        for name in block.buffers:
            buffer = self._buffer(name)
            if buffer.weights == "gpu":
                continue
            pool = self._weights[buffer.pool]
            content = (name, self._version[name])
            slot = pool.find(content)
            if slot is not None:
                pool.pin(slot)
                self._weight_slot[name] = slot
                continue
            slot = pool.take(content)
            self._weight_slot[name] = slot
            target: Resource = ("gpu.weights", buffer.pool, slot)
            item = self.plan.problem.compute_bytes
            if buffer.weights == "ram":
                self._emit(
                    "h2d",
                    "load_weights",
                    name,
                    reads=[("ram.weights", name)],
                    writes=[target],
                    nbytes=buffer.numel * item,
                    slots={name: slot},
                )
                continue
            for part in range(buffer.num_parts):
                start, end = buffer.part(part)
                stage = self._part_stages.take((name, part))
                self._emit(
                    "nvme_read",
                    "read_weights",
                    name,
                    part,
                    reads=[("nvme.weights", name, part)],
                    writes=[("ram.part_stage", stage)],
                    nbytes=(end - start) * item,
                    slots={"stage": stage},
                )
                self._emit(
                    "h2d",
                    "load_weights_part",
                    name,
                    part,
                    reads=[("ram.part_stage", stage)],
                    writes=[target],
                    nbytes=(end - start) * item,
                    slots={"stage": stage, name: slot},
                )
                self._part_stages.release(stage)

    def _release_weights(self, block: BlockShape) -> None:
        for name in block.buffers:
            buffer = self._buffer(name)
            if buffer.weights != "gpu":
                self._weights[buffer.pool].release(self._weight_slot[name], keep=True)

    def _acquire_gradient(self, name: str) -> bool:
        """Make sure that `name` has a gradient slot in this step; True when it is new and must be zeroed."""
        if name in self._gradient_slot:
            return False
        buffer = self._buffer(name)
        self._gradient_slot[name] = WHOLE if buffer.gradient == "gpu" else self._gradients[buffer.pool].take(name)
        return True

    def _leave_gradient(self, name: str) -> None:
        """The gradient of `name` is complete: take its norm and move it to where it waits."""
        buffer = self._buffer(name)
        source = self._gradient_resource(name)
        slot = self._gradient_slot.pop(name)
        slots = {} if slot == WHOLE else {name: slot}
        self._emit("compute", "norm", name, reads=[source], writes=[("gpu.norms",)], slots=slots)
        if buffer.gradient == "gpu":
            return
        item = self.plan.problem.gradient_bytes
        if buffer.gradient == "ram":
            self._emit(
                "d2h",
                "store_gradient",
                name,
                reads=[source],
                writes=[("ram.gradient", name)],
                nbytes=buffer.numel * item,
                slots=slots,
            )
        else:
            for part in range(buffer.num_parts):
                start, end = buffer.part(part)
                stage = self._part_stages.take((name, part))
                self._emit(
                    "d2h",
                    "store_gradient_part",
                    name,
                    part,
                    reads=[source],
                    writes=[("ram.part_stage", stage)],
                    nbytes=(end - start) * item,
                    slots={"stage": stage, **slots},
                )
                self._emit(
                    "nvme_write",
                    "write_gradient",
                    name,
                    part,
                    reads=[("ram.part_stage", stage)],
                    writes=[("nvme.gradient", name, part)],
                    nbytes=(end - start) * item,
                    slots={"stage": stage},
                )
                self._part_stages.release(stage)
        self._gradients[buffer.pool].release(slot)

    # ------------------------------------------------------------------ optimizer

    def _update(self, name: str) -> None:
        """Apply the waiting gradient to `name`, part by part; write back what lives on NVMe."""
        if self._waiting is None:
            return
        step = self._waiting
        buffer = self._buffer(name)
        self._version[name] += 1
        if buffer.state == "gpu":
            self._emit(
                "compute",
                "update_on_gpu",
                name,
                reads=[("gpu.gradient", name), ("ram.clip",)],
                writes=[("gpu.state", name), ("gpu.weights", name)],
                step=step,
            )
        else:
            for part in range(buffer.num_parts):
                self._update_part(buffer, part, step)
        if self._commit_waiting:
            self._write_through(buffer, step)

    def _update_part(self, buffer: BufferPlan, part: int, step: int) -> None:
        name, item = buffer.name, self.plan.problem.compute_bytes
        start, end = buffer.part(part)
        numel = end - start
        reads: list[Resource] = [("ram.clip",)]
        writes: list[Resource] = []
        slots: dict[str, int] = {}
        if "nvme" in (buffer.state, buffer.gradient):
            slots["stage"] = self._stages.take((name, part))
            staged: Resource = ("ram.state_stage", slots["stage"])
            sources: list[Resource] = []
            nbytes = 0
            if buffer.state == "nvme":
                sources.append(("nvme.state", name, part))
                nbytes += len(STATE_KINDS) * numel * 4
            if buffer.gradient == "nvme":
                sources.append(("nvme.gradient", name, part))
                nbytes += numel * self.plan.problem.gradient_bytes
            self._emit(
                "nvme_read",
                "read_state",
                name,
                part,
                reads=sources,
                writes=[staged],
                nbytes=nbytes,
                slots=slots,
                step=step,
            )
            reads.append(staged)
            if buffer.state == "nvme":
                writes.append(staged)
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
                reads=[("ram.state_stage", slots["stage"]), ("generation",)],
                writes=[("nvme.state", name, part)],
                nbytes=len(STATE_KINDS) * numel * 4,
                slots=slots,
                step=step,
            )
        if buffer.weights == "nvme":
            self._emit(
                "nvme_write",
                "write_weights",
                name,
                part,
                reads=[("ram.part_stage", slots["weights"])],
                writes=[("nvme.weights", name, part)],
                nbytes=numel * item,
                slots=slots,
                step=step,
            )
        elif buffer.weights == "gpu":
            self._emit(
                "h2d",
                "load_resident_part",
                name,
                part,
                reads=[("ram.part_stage", slots["weights"])],
                writes=[("gpu.weights", name)],
                nbytes=numel * item,
                slots=slots,
                step=step,
            )
        if "stage" in slots:
            self._stages.release(slots["stage"])
        if "weights" in slots:
            self._part_stages.release(slots["weights"])

    def _write_through(self, buffer: BufferPlan, step: int) -> None:
        """Write state that lives in RAM or on the GPU to NVMe, for the generation about to be committed."""
        if buffer.state == "nvme":
            return
        for part in range(buffer.num_parts):
            start, end = buffer.part(part)
            nbytes = (end - start) * 4
            if buffer.state == "ram":
                self._emit(
                    "nvme_write",
                    "checkpoint_state",
                    buffer.name,
                    part,
                    reads=[("ram.state", buffer.name), ("generation",)],
                    writes=[("nvme.state", buffer.name, part)],
                    nbytes=len(STATE_KINDS) * nbytes,
                    step=step,
                )
                continue
            for kind in STATE_KINDS:
                stage = self._part_stages.take((buffer.name, kind, part))
                slots = {"stage": stage}
                self._emit(
                    "d2h",
                    "stage_" + kind,
                    buffer.name,
                    part,
                    reads=[("gpu.state", buffer.name)],
                    writes=[("ram.part_stage", stage)],
                    nbytes=nbytes,
                    slots=slots,
                    step=step,
                )
                self._emit(
                    "nvme_write",
                    "checkpoint_" + kind,
                    buffer.name,
                    part,
                    reads=[("ram.part_stage", stage), ("generation",)],
                    writes=[("nvme.state", buffer.name, part, kind)],
                    nbytes=nbytes,
                    slots=slots,
                    step=step,
                )
                self._part_stages.release(stage)

    def _commit_if_due(self) -> None:
        if self._commit_waiting and self._waiting is not None:
            self._emit("nvme_write", "commit", "all", writes=[("generation",)], step=self._waiting)
        self._commit_waiting = False

    # ------------------------------------------------------------------ forward and backward

    def _tasks(self) -> list[_Task]:
        blocks, chunks = self.plan.blocks, self.plan.chunks
        tasks: list[_Task] = []

        def visit(mode: Literal["forward", "head", "backward"], layer: int, order: Iterable[Chunk]) -> None:
            number = tasks[-1].visit + 1 if tasks else 0
            items = list(order)
            for i, chunk in enumerate(items):
                tasks.append(_Task(number, mode, layer, chunk, i == 0, i == len(items) - 1))

        head = len(blocks) - 1
        for layer in range(head):
            visit("forward", layer, chunks)
        # The head runs in backward's order, so that its last gradients are the first ones needed.
        visit("head", head, reversed(chunks))
        for layer in range(head - 1, -1, -1):
            visit("backward", layer, reversed(chunks))
        return tasks

    def _pass_over_blocks(self) -> None:
        tasks = self._tasks()
        visits = [task.layer for task in tasks if task.first]
        self._prepare(visits, 0)
        loaded = self._load(tasks[0])
        for i, task in enumerate(tasks):
            following = tasks[i + 1] if i + 1 < len(tasks) else None
            # The next operands travel while this op computes, unless this op makes them.
            early = following is not None and (following.visit - 1, following.chunk) != (task.visit, task.chunk)
            next_loaded = self._load(following) if following is not None and early else None
            self._compute(task, loaded)
            if task.first:
                self._prepare(visits, task.visit + 1)
            if task.last:
                self._release_weights(self.plan.blocks[task.layer])
                if task.mode != "forward":
                    self._leave_finished(task)
            if following is not None:
                loaded = self._load(following) if next_loaded is None else next_loaded

    def _prepare(self, visits: list[int], visit: int) -> None:
        """Update and fetch the weights of the block of `visit`, ahead of its first chunk."""
        if visit >= len(visits):
            return
        block = self.plan.blocks[visits[visit]]
        first_visit = visit == visits.index(visits[visit])
        if first_visit:
            if block.name in block.buffers:
                self._update(block.name)
            if block.role == "head":
                self._commit_if_due()
        self._fetch(block)

    def _load_hidden(self, kind: str, layer: int, chunk: Chunk) -> int:
        """Slot with activation `kind` ("x", "dy") of a block's chunk, loaded from RAM unless it is still there."""
        content = (kind, layer, chunk.index, self._step)
        slot = self._hidden.find(content)
        if slot is not None:
            self._hidden.pin(slot)
            return slot
        slot = self._hidden.take(content)
        self._emit(
            "h2d",
            "load_" + kind,
            self.plan.blocks[layer].name,
            chunk.index,
            reads=[self._hidden_region(kind, layer, chunk)],
            writes=[("gpu.hidden", slot)],
            nbytes=self._hidden_bytes(chunk),
            slots={"slot": slot},
        )
        return slot

    @staticmethod
    def _hidden_region(kind: str, layer: int, chunk: Chunk) -> Resource:
        return ("ram.x", layer, chunk.index) if kind == "x" else ("ram.dx", chunk.index)

    def _hidden_bytes(self, chunk: Chunk) -> int:
        problem = self.plan.problem
        return (chunk.end - chunk.start) * problem.hidden_size * problem.compute_bytes

    def _load(self, task: _Task) -> dict[str, int]:
        """Emit the loads of a task's operands; returns their slots."""
        block, chunk = self.plan.blocks[task.layer], task.chunk
        loaded: dict[str, int] = {}
        if block.role != "embed":
            loaded["x"] = self._load_hidden("x", task.layer, chunk)
        if task.mode == "backward":
            loaded["dy"] = self._load_hidden("dy", task.layer, chunk)
            if block.saved_bytes_per_token:
                loaded["saved"] = self._load_saved(task)
        return loaded

    def _load_saved(self, task: _Task) -> int:
        block, chunk = self.plan.blocks[task.layer], task.chunk
        content = (task.layer, chunk.index, self._step)
        slot = self._saved.find(content)
        if slot is not None:
            self._saved.pin(slot)
            return slot
        slot = self._saved.take(content)
        self._emit(
            "h2d",
            "load_saved",
            block.name,
            chunk.index,
            reads=[("ram.saved", task.layer, chunk.index)],
            writes=[("gpu.saved", slot)],
            nbytes=(chunk.end - chunk.start) * block.saved_bytes_per_token,
            slots={"saved": slot},
        )
        return slot

    def _load_kv(self, layer: int, chunk: Chunk) -> None:
        block = self.plan.blocks[layer]
        content = (layer, chunk.index, self._step)
        if self._kv[chunk.local] == content or not block.kv_bytes_per_token:
            return
        self._kv[chunk.local] = content
        self._emit(
            "h2d",
            "load_kv",
            block.name,
            chunk.index,
            reads=[("ram.kv", layer, chunk.index)],
            writes=[("gpu.kv", chunk.local)],
            nbytes=(chunk.end - chunk.start) * block.kv_bytes_per_token,
        )

    def _compute(self, task: _Task, loaded: dict[str, int]) -> None:
        block, chunk = self.plan.blocks[task.layer], task.chunk
        reads: list[Resource] = [self._weight_resource(name) for name in block.buffers]
        writes: list[Resource] = []
        slots = {name: self._weight_slot.get(name, WHOLE) for name in block.buffers}
        for role in ("x", "dy"):
            if role in loaded:
                reads.append(("gpu.hidden", loaded[role]))
                slots[role] = loaded[role]
        flags: list[str] = []
        # kind, layer of the activation that this task produces
        produces = {
            "forward": ("x", task.layer + 1),
            "head": ("dy", task.layer - 1),
            "backward": ("dy", task.layer - 1),
        }
        kind, layer = produces[task.mode]
        output = self._hidden.take((kind, layer, chunk.index, self._step)) if layer >= 0 else None
        if output is not None:
            slots["out"] = output
            writes.append(("gpu.hidden", output))
        attends = bool(block.kv_bytes_per_token)
        if task.mode != "forward":
            for name in block.buffers:
                if self._acquire_gradient(name):
                    flags.append("zero:" + name)
                slots["gradient:" + name] = self._gradient_slot[name]
                writes.append(self._gradient_resource(name))
        if task.mode == "head":
            writes.append(("gpu.losses",))
        window: list[Resource] = [("gpu.kv", i) for i in range(chunk.local + 1)]
        if attends and task.mode == "backward" and chunk.local == self._kv_slots - 1:
            # All earlier keys and values of the micro-batch are needed by its last chunk.
            for other in reversed(self.plan.chunks):
                if other.micro_batch == chunk.micro_batch:
                    self._load_kv(task.layer, other)
        if attends and task.mode == "forward":
            slots["saved"] = self._saved.take((task.layer, chunk.index, self._step))
            self._kv[chunk.local] = (task.layer, chunk.index, self._step)
            reads += window[:-1]
            writes += [window[-1], ("gpu.saved", slots["saved"])]
        if attends and task.mode == "backward":
            slots["saved"] = loaded["saved"]
            reads += [*window, ("gpu.saved", loaded["saved"])]
            writes.append(("gpu.dkv",))
            if chunk.local == self._kv_slots - 1:
                flags.append("zero:dkv")
        action = {"forward": f"{block.role}_forward", "head": "head", "backward": f"{block.role}_backward"}[task.mode]
        self._emit("compute", action, block.name, chunk.index, reads=reads, writes=writes, slots=slots, flags=flags)
        self._store(task, slots, output, kind, layer)
        for role in ("x", "dy"):
            if role in loaded:
                # The input of a layer is read again in backward.
                self._hidden.release(loaded[role], keep=role == "x" and task.mode == "forward")
        if "saved" in slots:
            self._saved.release(slots["saved"], keep=task.mode == "forward")
        if attends and task.mode == "backward":
            # The window's place of this chunk is free for the same chunk of the block before.
            before = self._previous_use(task)
            if before is not None:
                self._load_kv(*before)

    def _previous_use(self, task: _Task) -> tuple[int, Chunk] | None:
        """The (layer, chunk) that uses this chunk's place in the K/V window next, in backward order."""
        chunk, chunks = task.chunk, self.plan.chunks
        if chunk.micro_batch > 0:
            return task.layer, chunks[chunk.index - self._kv_slots]
        layer = task.layer - 1
        return (layer, chunks[len(chunks) - self._kv_slots + chunk.local]) if layer >= 1 else None

    def _store(self, task: _Task, slots: dict[str, int], output: int | None, kind: str, layer: int) -> None:
        block, chunk = self.plan.blocks[task.layer], task.chunk
        tokens = chunk.end - chunk.start
        if output is not None:
            self._emit(
                "d2h",
                "store_" + kind,
                self.plan.blocks[layer].name,
                chunk.index,
                reads=[("gpu.hidden", output)],
                writes=[self._hidden_region(kind, layer, chunk)],
                nbytes=self._hidden_bytes(chunk),
                slots={"slot": output},
            )
            self._hidden.release(output, keep=True)
        if task.mode == "forward" and block.kv_bytes_per_token:
            self._emit(
                "d2h",
                "store_saved",
                block.name,
                chunk.index,
                reads=[("gpu.saved", slots["saved"]), ("gpu.kv", chunk.local)],
                writes=[("ram.saved", task.layer, chunk.index), ("ram.kv", task.layer, chunk.index)],
                nbytes=tokens * (block.saved_bytes_per_token + block.kv_bytes_per_token),
                slots={"saved": slots["saved"]},
            )

    def _leave_finished(self, task: _Task) -> None:
        """Gradients whose last contribution this visit made leave the GPU."""
        last_user: dict[str, int] = {}
        for index, block in enumerate(self.plan.blocks):
            for name in block.buffers:
                last_user[name] = min(index, last_user.get(name, index))
        for name in self.plan.blocks[task.layer].buffers:
            if last_user[name] == task.layer:
                self._leave_gradient(name)
