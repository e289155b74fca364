"""The schedule: one optimizer step as a list of ops with every dependency, pure data, no torch.

`ScheduleBuilder` emits ops in program order. Each op names the resources (slots, regions, parts on disk) that it reads
and writes, and its dependencies follow from them (engine/ops.py). Slots are assigned here, statically. Any execution
that respects the dependencies therefore computes the same bits.

The tables live on from one step to the next, so that ops of step s+1 depend on ops of step s where they share a
resource, and on nothing else: the optimizer's updates of step s run under the forward pass of step s+1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from engine.ops import LANES, WHOLE, Emitter, Op, Resource, Slots
from engine.plan import HIDDEN_SLOTS, SAVED_SLOTS, BlockShape, Chunk, Plan
from engine.state_schedule import StateSchedule

Mode = Literal["forward", "head", "backward"]
"""The head runs forward and backward at once, so that a chunk's logits die where they are made."""


@dataclass(frozen=True, slots=True)
class _Task:
    """A block computing one chunk."""

    visit: int
    """Number of the pass over all chunks that it belongs to."""
    mode: Mode
    layer: int
    """Index of the block in the plan."""
    chunk: Chunk
    first: bool
    last: bool


class ScheduleBuilder:
    """Emits the ops of consecutive optimizer steps.

    `step(s)` is forward and backward of step s, preceded block by block by the updates of the gradient that still
    waits, and ends with op "clip", after which loss and gradient norm are known. `finish` is the updates alone.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._emitter = Emitter()
        self._emit = self._emitter.emit
        self._state = StateSchedule(plan, self._emitter)
        self._hidden = Slots("gpu.hidden", HIDDEN_SLOTS)
        self._saved = Slots("gpu.saved", SAVED_SLOTS)
        self._stages = Slots("ram.activation_stage", plan.activation_stages)
        self._on_nvme: set[tuple[str, int, int]] = set()
        """(kind, block, chunk) of the activations on NVMe."""
        self._window_chunks = max(chunk.local for chunk in plan.chunks) + 1
        self._window: list[Any] = [None] * self._window_chunks
        """Which (layer, chunk, step) each chunk's place in the K/V window holds."""
        self._last_user: dict[str, int] = {}
        """Buffer -> the block that is the last to add to its gradient."""
        for index, block in reversed(list(enumerate(plan.blocks))):
            self._last_user |= dict.fromkeys(block.buffers, index)

    @property
    def waiting(self) -> bool:
        """Whether a gradient waits for the optimizer."""
        return self._state.waiting is not None

    def step(self, step: int, *, commit_previous: bool = False) -> list[Op]:
        """Ops of step `step`. `commit_previous` commits a generation once the waiting gradient is applied."""
        return [op for ops in self.stream(step, commit_previous=commit_previous) for op in ops]

    def stream(self, step: int, *, commit_previous: bool = False) -> Iterator[list[Op]]:
        """The same ops block by block, so that the lanes start on the first while the rest is being built."""
        self._emitter.step = step
        for _ in self._passes(commit_previous):
            yield self._emitter.take()
        self._state.read_ahead(step)
        self._emit("optimizer", "clip", "all", reads=[("gpu.norms",), ("gpu.losses",)], writes=[("ram.clip",)])
        self._state.waiting = step
        yield self._emitter.take()

    def finish(self, *, commit: bool) -> list[Op]:
        """Ops that apply the waiting gradient and, with `commit`, commit the generation."""
        for name in self._plan.buffers:
            self._state.update(name, write_through=commit)
        if commit:
            self._state.commit()
        self._state.waiting = None
        return self._emitter.take()

    # ------------------------------------------------------------------ passes over the blocks

    def _tasks(self) -> list[_Task]:
        chunks, head = self._plan.chunks, len(self._plan.blocks) - 1
        visits: list[tuple[Mode, int, list[Chunk]]] = [("forward", layer, list(chunks)) for layer in range(head)]
        # The head goes in backward's order: its last gradients are the first ones needed.
        visits.append(("head", head, list(reversed(chunks))))
        visits += [("backward", layer, list(reversed(chunks))) for layer in range(head - 1, -1, -1)]
        return [
            _Task(visit, mode, layer, chunk, chunk is order[0], chunk is order[-1])
            for visit, (mode, layer, order) in enumerate(visits)
            for chunk in order
        ]

    def _passes(self, commit: bool) -> Iterator[None]:
        """Emit the ops of all passes, with a pause after each."""
        tasks = self._tasks()
        visits = [task.layer for task in tasks if task.first]
        self._prepare(visits, 0, commit)
        loaded = self._load(tasks[0])
        for task, following in zip(tasks, [*tasks[1:], None], strict=True):
            # The next operands travel while this op computes, unless this op makes them.
            early = following is not None and (following.visit - 1, following.chunk) != (task.visit, task.chunk)
            next_loaded = self._load(following) if following is not None and early else None
            self._compute(task, loaded)
            if task.first:
                self._prepare(visits, task.visit + 1, commit)
            if task.last:
                self._leave(task)
            if following is not None:
                loaded = self._load(following) if next_loaded is None else next_loaded
            if task.last:
                yield

    def _prepare(self, visits: list[int], visit: int, commit: bool) -> None:
        """Update, where this step has not yet, and fetch the weights of the block of `visit`, ahead of its first op."""
        if visit >= len(visits):
            return
        block = self._plan.blocks[visits[visit]]
        if visits.index(visits[visit]) == visit:
            if block.name in block.buffers:
                self._state.update(block.name, write_through=commit)
            if commit and block.role == "head":
                self._state.commit()
        self._state.fetch(block)

    def _leave(self, task: _Task) -> None:
        """The block has seen all chunks: its weights may go, and gradients that got their last contribution do."""
        block = self._plan.blocks[task.layer]
        self._state.release(block)
        if task.mode != "forward":
            for name in block.buffers:
                if self._last_user[name] == task.layer:
                    self._state.close_gradient(name)

    # ------------------------------------------------------------------ operands

    def _load(self, task: _Task) -> dict[str, int]:
        """Emit the loads of a task's activations; their slots by role."""
        block = self._plan.blocks[task.layer]
        loaded: dict[str, int] = {}
        if block.role != "embed":
            loaded["x"] = self._load_hidden("x", task)
        if task.mode == "backward":
            loaded["dy"] = self._load_hidden("dy", task)
            if block.saved_bytes_per_token:
                loaded["saved"] = self._load_saved(task.layer, task.chunk)
        return loaded

    def _load_hidden(self, kind: str, task: _Task) -> int:
        """Slot with activation `kind` ("x", "dy") of a block's chunk, loaded unless it is still there."""
        layer, chunk = task.layer, task.chunk
        content = (kind, layer, chunk.index, self._emitter.step)
        slot = self._hidden.find(content)
        if slot is None:
            slot = self._hidden.take(content)
            if task.mode == "backward" and kind == "x" and (layer, chunk.index) in self._plan.spilled:
                stage = self._unspill("x", layer, chunk, self._hidden_bytes(chunk))
                source: Resource = ("ram.activation_stage", stage)
                slots = {"slot": slot, "stage": stage}
            else:
                source = self._hidden_region(kind, layer, chunk)
                slots = {"slot": slot}
            self._emit(
                "h2d",
                "load_" + kind,
                self._plan.blocks[layer].name,
                chunk.index,
                reads=[source],
                writes=[("gpu.hidden", slot)],
                nbytes=self._hidden_bytes(chunk),
                slots=slots,
            )
        elif task.mode == "backward":
            self._discard(kind, layer, chunk)
        return slot

    def _hidden_region(self, kind: str, layer: int, chunk: Chunk) -> Resource:
        """Where a hidden state waits in RAM: a layer's saved input in its own place, all else in the chunk's stream."""
        for_layer = kind == "x" and self._plan.blocks[layer].role == "layer"
        if for_layer and (layer, chunk.index) not in self._plan.spilled:
            return ("ram.x", layer, chunk.index)
        return ("ram.stream", chunk.index)

    def _spill(self, kind: str, layer: int, chunk: Chunk, source: Resource, nbytes: int, slots: dict[str, int]) -> None:
        """Write a saved activation to NVMe from where it waits in RAM."""
        self._on_nvme.add((kind, layer, chunk.index))
        self._emit(
            "nvme_write",
            "spill_" + kind,
            self._plan.blocks[layer].name,
            chunk.index,
            reads=[source],
            writes=[("nvme." + kind, layer, chunk.index)],
            nbytes=nbytes,
            slots=slots,
        )

    def _unspill(self, kind: str, layer: int, chunk: Chunk, nbytes: int) -> int:
        """Read a saved activation back; the stage that it is in, free for others once the next op has emptied it.

        The read lane runs ahead of the computation by as many stages as there are.
        """
        self._on_nvme.remove((kind, layer, chunk.index))
        stage = self._stages.take((kind, layer, chunk.index))
        self._stages.release(stage)
        # Written as well as read: the file goes with its content.
        self._emit(
            "nvme_read",
            "unspill_" + kind,
            self._plan.blocks[layer].name,
            chunk.index,
            writes=[("nvme." + kind, layer, chunk.index), ("ram.activation_stage", stage)],
            nbytes=nbytes,
            slots={"stage": stage},
        )
        return stage

    def _discard(self, kind: str, layer: int, chunk: Chunk) -> None:
        """Remove an activation from NVMe, if it is there, because backward found it on the GPU."""
        if (kind, layer, chunk.index) in self._on_nvme:
            self._on_nvme.remove((kind, layer, chunk.index))
            name, file = self._plan.blocks[layer].name, ("nvme." + kind, layer, chunk.index)
            self._emit("nvme_read", "discard_" + kind, name, chunk.index, writes=[file])

    def _hidden_bytes(self, chunk: Chunk) -> int:
        problem = self._plan.problem
        return (chunk.end - chunk.start) * problem.hidden_size * problem.compute_bytes

    def _load_saved(self, layer: int, chunk: Chunk) -> int:
        block = self._plan.blocks[layer]
        content = (layer, chunk.index, self._emitter.step)
        slot = self._saved.find(content)
        if slot is None:
            slot = self._saved.take(content)
            nbytes = (chunk.end - chunk.start) * block.saved_bytes_per_token
            self._load_saved_part("saved", layer, chunk, ("gpu.saved", slot), nbytes, {"saved": slot})
        else:
            self._discard("saved", layer, chunk)
        return slot

    def _load_saved_part(
        self, kind: str, layer: int, chunk: Chunk, target: Resource, nbytes: int, slots: dict[str, int]
    ) -> None:
        """Load what forward saved of attention ("saved": output and log-sum-exp, "kv": keys and values)."""
        source: Resource = ("ram." + kind, layer, chunk.index)
        if (layer, chunk.index) in self._plan.spilled:
            slots["stage"] = self._unspill(kind, layer, chunk, nbytes)
            source = ("ram.activation_stage", slots["stage"])
        name = self._plan.blocks[layer].name
        self._emit(
            "h2d", "load_" + kind, name, chunk.index, reads=[source], writes=[target], nbytes=nbytes, slots=slots
        )

    def _load_window(self, layer: int, chunk: Chunk) -> None:
        """Bring a chunk's keys and values to its place in the window, unless they are there."""
        block = self._plan.blocks[layer]
        content = (layer, chunk.index, self._emitter.step)
        if self._window[chunk.local] == content or not block.kv_bytes_per_token:
            self._discard("kv", layer, chunk)
            return
        self._window[chunk.local] = content
        nbytes = (chunk.end - chunk.start) * block.kv_bytes_per_token
        self._load_saved_part("kv", layer, chunk, ("gpu.kv", chunk.local), nbytes, {})

    # ------------------------------------------------------------------ compute

    def _compute(self, task: _Task, loaded: dict[str, int]) -> None:
        block, chunk = self._plan.blocks[task.layer], task.chunk
        attends = bool(block.kv_bytes_per_token)
        if attends and task.mode == "backward" and chunk.local == self._window_chunks - 1:
            # A micro-batch's last chunk attends to all of its keys and values.
            for other in reversed(self._plan.chunks):
                if other.micro_batch == chunk.micro_batch:
                    self._load_window(task.layer, other)
        reads = [self._state.weights(name) for name in block.buffers]
        slots = {name: self._state.weight_slot.get(name, WHOLE) for name in block.buffers} | loaded
        reads += [("gpu.hidden", loaded[role]) for role in ("x", "dy") if role in loaded]
        writes: list[Resource] = [("gpu.losses",)] if task.mode == "head" else []
        flags: list[str] = []
        if task.mode != "forward":
            for name in block.buffers:
                if self._state.open_gradient(name):
                    flags.append("zero:" + name)
                slots["gradient:" + name] = self._state.gradient_slot[name]
                writes.append(self._state.gradient(name))
        kind, layer = ("x", task.layer + 1) if task.mode == "forward" else ("dy", task.layer - 1)
        if layer >= 0:
            slots["out"] = self._hidden.take((kind, layer, chunk.index, self._emitter.step))
            writes.append(("gpu.hidden", slots["out"]))
        if attends:
            self._attend(task, slots, reads, writes, flags)
        action = "head" if task.mode == "head" else f"{block.role}_{task.mode}"
        self._emit("compute", action, block.name, chunk.index, reads=reads, writes=writes, slots=slots, flags=flags)
        if layer >= 0:
            self._store_hidden(kind, layer, chunk, slots["out"])
        if attends and task.mode == "forward":
            self._store_attention(block, task, slots["saved"])
        for role in loaded.keys() & {"x", "dy"}:
            # The input of a layer is read again in backward.
            self._hidden.release(loaded[role], keep=role == "x" and task.mode == "forward")
        if "saved" in slots:
            self._saved.release(slots["saved"], keep=task.mode == "forward")
        if attends and task.mode == "backward":
            self._load_window_ahead(task)

    def _attend(
        self, task: _Task, slots: dict[str, int], reads: list[Resource], writes: list[Resource], flags: list[str]
    ) -> None:
        """Add attention's operands: the window up to this chunk, output and log-sum-exp, and dK/dV in backward."""
        chunk = task.chunk
        window: list[Resource] = [("gpu.kv", i) for i in range(chunk.local + 1)]
        if task.mode == "forward":
            content = (task.layer, chunk.index, self._emitter.step)
            slots["saved"] = self._saved.take(content)
            self._window[chunk.local] = content
            reads += window[:-1]
            writes += [window[-1], ("gpu.saved", slots["saved"])]
            return
        reads += [*window, ("gpu.saved", slots["saved"])]
        writes.append(("gpu.dkv",))
        if chunk.local == self._window_chunks - 1:
            flags.append("zero:dkv")

    def _load_window_ahead(self, task: _Task) -> None:
        """This chunk's place in the window is free for the chunk that needs it next, in backward's order."""
        chunk, chunks = task.chunk, self._plan.chunks
        if chunk.micro_batch > 0:
            self._load_window(task.layer, chunks[chunk.index - self._window_chunks])
        elif task.layer > 1:
            self._load_window(task.layer - 1, chunks[len(chunks) - self._window_chunks + chunk.local])

    def _store_hidden(self, kind: str, layer: int, chunk: Chunk, slot: int) -> None:
        region, nbytes = self._hidden_region(kind, layer, chunk), self._hidden_bytes(chunk)
        self._emit(
            "d2h",
            "store_" + kind,
            self._plan.blocks[layer].name,
            chunk.index,
            reads=[("gpu.hidden", slot)],
            writes=[region],
            nbytes=nbytes,
            slots={"slot": slot},
        )
        self._hidden.release(slot, keep=True)
        if kind == "x" and (layer, chunk.index) in self._plan.spilled:
            self._spill("x", layer, chunk, region, nbytes, {})

    def _store_attention(self, block: BlockShape, task: _Task, slot: int) -> None:
        layer, chunk = task.layer, task.chunk
        tokens = chunk.end - chunk.start
        parts: tuple[tuple[str, Resource, int], ...] = (
            ("saved", ("gpu.saved", slot), tokens * block.saved_bytes_per_token),
            ("kv", ("gpu.kv", chunk.local), tokens * block.kv_bytes_per_token),
        )
        for kind, source, nbytes in parts:
            region: Resource = ("ram." + kind, layer, chunk.index)
            slots = {"saved": slot}
            spilled = (layer, chunk.index) in self._plan.spilled
            if spilled:
                slots["stage"] = self._stages.take((kind, layer, chunk.index))
                region = ("ram.activation_stage", slots["stage"])
            self._emit(
                "d2h",
                "store_" + kind,
                block.name,
                chunk.index,
                reads=[source],
                writes=[region],
                nbytes=nbytes,
                slots=slots,
            )
            if spilled:
                self._spill(kind, layer, chunk, region, nbytes, slots)
                self._stages.release(slots["stage"])


def bytes_per_step(plan: Plan) -> dict[str, int]:
    """Bytes that each lane moves in a step once the run is under way; what a commit writes through is not counted."""
    builder = ScheduleBuilder(plan)
    for _ in builder.stream(1):
        pass
    moved: Counter[str] = Counter(dict.fromkeys(LANES, 0))
    for ops in builder.stream(2):
        for op in ops:
            moved[op.lane] += op.nbytes
    return dict(moved)
