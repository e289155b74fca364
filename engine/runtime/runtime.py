"""Carries out the ops of a schedule: one method per action, each on the op's own lane.

Everything an op touches was named when the schedule was built; nothing here allocates a slot, chooses a place or
waits for another op.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.config import TrainConfig
from engine.model.layers import LayerInputs
from engine.model.runner import ModelRunner
from engine.optim.adamw import AdamW, clip_coefficient, learning_rate, scalars, wait_for_copies
from engine.plan.plan import STATE_KINDS, Chunk, Plan
from engine.runtime.batch import Batch, ChunkTokens, ScoreData, StepData
from engine.runtime.failures import DivergedError, first_not_finite
from engine.runtime.health import require_usable
from engine.runtime.layer_ops import LayerOps
from engine.runtime.memory import GpuMemory, RamMemory
from engine.schedule.ops import WHOLE, Op
from storage.layout import FlatLayout
from storage.nvme import NvmeStore

INPUTS_CACHE_BYTES = 64 * 2**20
"""Rotary tables and the like of recent chunks are kept up to this size; beyond it they are made again."""


class Runtime:
    """The memory and the functions behind the ops. `perform` is what an Executor is given."""

    def __init__(
        self,
        plan: Plan,
        layouts: dict[str, FlatLayout],
        runner: ModelRunner,
        adamw: AdamW,
        store: NvmeStore | None,
        gpu: GpuMemory,
        ram: RamMemory,
        config: TrainConfig,
        logits_bytes: int,
        commit: Callable[[int], None],
    ) -> None:
        self.plan, self.layouts, self.runner, self.adamw, self._store = plan, layouts, runner, adamw, store
        self.gpu, self.ram, self.config = gpu, ram, config
        self._logits_bytes = logits_bytes
        self._commit = commit
        self._device = runner.device
        self._dtype = runner.dtype
        self._blocks = {block.name: (i, block) for i, block in enumerate(plan.blocks)}
        self._number = {name: i for i, name in enumerate(plan.buffers)}
        # What "clip" reads of a step, in one tensor so that it is one copy.
        shapes = [(len(plan.chunks),), (len(plan.buffers),), (2, len(plan.blocks), len(plan.chunks))]
        self._report = torch.zeros(sum(math.prod(shape) for shape in shapes), device=self._device)
        self._losses, self._square_norms, self._marks = self._split_report(self._report)
        self._scores = torch.zeros(len(plan.chunks), dtype=torch.float64, device=self._device)
        pinned = self._device.type == "cuda"
        self._report_on_host, self._scores_on_host = (
            torch.empty_like(tensor, device="cpu", pin_memory=pinned) for tensor in (self._report, self._scores)
        )
        self._steps: dict[int, StepData] = {}
        self._scored: dict[int, ScoreData] = {}
        """Op.batch -> its tokens, of the validation's passes under way."""
        self._inputs: OrderedDict[tuple[int, int, int], LayerInputs] = OrderedDict()
        self._views: dict[tuple[str, str, int], dict[str, Tensor]] = {}
        self.layer_ops = LayerOps(self)
        self._actions = self._all_actions()

    @property
    def store(self) -> NvmeStore:
        """The NVMe tier; who carries out compute ops only needs none."""
        assert self._store is not None
        return self._store

    def begin(self, step: int, data: StepData) -> None:
        """Give the batch of `step` before its ops are submitted; forgets steps that no op can need any more."""
        self._steps[step] = data
        for old in [s for s in self._steps if s < step - 1]:
            del self._steps[old]

    def drop_tokens(self) -> None:
        """Forget the tokens of the steps so far, which have been computed."""
        for done in self._steps.values():
            done.chunks = ()

    def begin_score(self, batch: int, data: ScoreData) -> None:
        """Give the tokens of a validation's pass, numbered from 1, before its ops are submitted."""
        self._scored[batch] = data

    def end_score(self, batch: int) -> ScoreData:
        """What `begin_score` was given, with its loss, once the pass's "score" is done; forgets it."""
        return self._scored.pop(batch)

    def data(self, step: int) -> StepData:
        """What `begin` was given, with the results filled in once the step's "clip" is done."""
        return self._steps[step]

    def perform(self, op: Op) -> Future[Any] | None:
        """Carry out `op`; a Future means that it goes on in the background."""
        with torch.no_grad():
            future = self._actions[op.action](op)
            if op.lane == "compute" and "out" in op.slots and not op.batch:
                self._mark(op, self.hidden(op.slots["out"], self._chunk(op)))
        return future

    def _all_actions(self) -> dict[str, Callable[[Op], Future[Any] | None]]:
        """Action -> its method: `_op_ACTION` here or in LayerOps, or one method for an action on several kinds."""
        of_kinds: dict[tuple[str, Callable[[str, Op], Future[Any] | None]], tuple[str, ...]] = {
            ("load", self._load_hidden): ("x", "dy"),
            ("store", self._store_hidden): ("x", "dy"),
            ("spill", self._spill): ("x", "saved", "kv"),
            ("unspill", self._unspill): ("x", "saved", "kv"),
            ("peek", partial(self._unspill, keep=True)): ("x",),
            ("discard", self._discard): ("x", "saved", "kv"),
            ("stage", self._stage_state): STATE_KINDS,
            ("checkpoint", self._checkpoint_part): STATE_KINDS,
        }
        actions = {name[4:]: getattr(self, name) for name in dir(self) if name.startswith("_op_")}
        actions |= self.layer_ops.actions()
        for (verb, method), kinds in of_kinds.items():
            actions |= {f"{verb}_{kind}": partial(method, kind) for kind in kinds}
        return actions

    # ------------------------------------------------------------------ views

    def weights(self, op: Op) -> dict[str, Tensor]:
        """Parameters of every buffer of the op's block, by name."""
        views: dict[str, Tensor] = {}
        for name in self._blocks[op.block][1].buffers:
            views.update(self._buffer_views("weights", name, op.slots[name]))
        return views

    def gradients(self, op: Op) -> dict[str, Tensor]:
        """float32 gradients of every buffer of the op's block, zeroed where this op is the first to add to them."""
        views: dict[str, Tensor] = {}
        for name in self._blocks[op.block][1].buffers:
            slot = op.slots["gradient:" + name]
            if "zero:" + name in op.flags:
                self._flat("gradient", name, slot).zero_()
            views.update(self._buffer_views("gradient", name, slot))
        return views

    def _flat(self, kind: str, name: str, slot: int) -> Tensor:
        """The flat tensor of a buffer on the compute device: resident, or in its slot."""
        buffer = self.plan.buffers[name]
        memory = self.gpu.buffers[name]
        resident = memory.weights if kind == "weights" else memory.gradient
        if resident is not None:
            return resident
        pools = self.gpu.weights if kind == "weights" else self.gpu.gradients
        return pools[buffer.pool][slot][: buffer.numel]

    def _buffer_views(self, kind: str, name: str, slot: int) -> dict[str, Tensor]:
        key = (kind, name, slot)
        if key not in self._views:
            self._views[key] = self.layouts[name].views(self._flat(kind, name, slot))
        return self._views[key]

    def hidden(self, slot: int, chunk: Chunk) -> Tensor:
        """Activation [tokens, hidden] in a slot on the compute device."""
        return self.gpu.hidden[slot][: chunk.end - chunk.start]

    def block_index(self, name: str) -> int:
        """Place of a block in the plan."""
        return self._blocks[name][0]

    def _batch(self, op: Op) -> Batch:
        return self._scored[op.batch] if op.batch else self._steps[op.step]

    def documents(self, op: Op, chunk: Chunk) -> list[int]:
        """Starts of the documents of the chunk's micro-batch."""
        return self._batch(op).micro_batches[chunk.micro_batch].documents

    def _tokens(self, op: Op) -> ChunkTokens:
        return self._batch(op).chunks[op.index]

    def layer_inputs(self, op: Op, chunk: Chunk) -> LayerInputs:
        """Arguments of every layer for a chunk, made again where they have been dropped."""
        key = (op.step, op.batch, chunk.index)
        if key in self._inputs:
            self._inputs.move_to_end(key)
            return self._inputs[key]
        for old in [old for old in self._inputs if old[:2] != key[:2]]:
            del self._inputs[old]
        longest = self._batch(op).micro_batches[chunk.micro_batch].max_position
        inputs = self.runner.inputs(self._tokens(op).positions, longest)
        self._inputs[key] = inputs
        while len(self._inputs) > 1 and sum(i.nbytes for i in self._inputs.values()) > INPUTS_CACHE_BYTES:
            self._inputs.popitem(last=False)
        return inputs

    # ------------------------------------------------------------------ compute

    def _chunk(self, op: Op) -> Chunk:
        return self.plan.chunks[op.index]

    def _op_embed_forward(self, op: Op) -> None:
        chunk, tokens = self._chunk(op), self._tokens(op)
        x = self.runner.embed(self.weights(op), tokens.ids, tokens.positions)
        self.hidden(op.slots["out"], chunk).copy_(x)

    _op_embed_score = _op_embed_forward

    def _op_embed_backward(self, op: Op) -> None:
        chunk, tokens = self._chunk(op), self._tokens(op)
        dx = self.hidden(op.slots["dy"], chunk)
        self.runner.embed_backward(self.weights(op), tokens, dx, self.gradients(op))

    def _op_head_score(self, op: Op) -> None:
        x = self.hidden(op.slots["x"], self._chunk(op))
        self._scores[op.index] = self.runner.score(self.weights(op), x, self._tokens(op), self._logits_bytes)

    def _op_head(self, op: Op) -> None:
        chunk, tokens = self._chunk(op), self._tokens(op)
        scale = 1.0 / self._steps[op.step].num_targets
        x, gradients = self.hidden(op.slots["x"], chunk), self.gradients(op)
        loss, dx = self.runner.head(self.weights(op), x, tokens, scale, gradients, self._logits_bytes)
        self._losses[op.index] = loss
        self.hidden(op.slots["out"], chunk).copy_(dx)

    def _op_norm(self, op: Op) -> None:
        gradient = self._flat("gradient", op.block, op.slots.get(op.block, WHOLE))
        self._square_norms[self._number[op.block]] = torch.linalg.vector_norm(gradient).square()

    def _op_update_on_gpu(self, op: Op) -> None:
        memory = self.gpu.buffers[op.block]
        assert memory.state is not None
        assert memory.gradient is not None
        assert memory.weights is not None
        decay = self.layouts[op.block].decay_numel
        values = self._steps[op.step].scalars[self._device.type]
        self.adamw.step(memory.state, memory.gradient, memory.weights, decay, values)

    # ------------------------------------------------------------------ links

    def activation(self, kind: str, op: Op) -> Tensor:
        """Where an activation of the op's block and chunk is put aside, uint8: its stage, its record, the place of its
        chunk in one block's pass, or the stream."""
        if "stage" in op.slots:
            return self.ram.activation_stages[op.slots["stage"]][: op.nbytes]
        key = (self._blocks[op.block][0], op.index)
        record = self.gpu.records.get(key) or self.ram.records.get(key) or {}
        if kind in record:
            region = record[kind]
        elif kind in self.ram.window:
            region = self.ram.window[kind][self.plan.chunks[op.index].local]
        else:
            region = self.ram.stream[op.index]
        return region.view(torch.uint8).view(-1)[: op.nbytes]

    def _load_hidden(self, kind: str, op: Op) -> None:
        slot = self.hidden(op.slots["slot"], self._chunk(op))
        slot.copy_(self.activation(kind, op).view(self._dtype).view(slot.shape), non_blocking=True)

    def _store_hidden(self, kind: str, op: Op) -> None:
        slot = self.hidden(op.slots["slot"], self._chunk(op))
        self.activation(kind, op).view(self._dtype).view(slot.shape).copy_(slot, non_blocking=True)

    def _op_load_weights(self, op: Op) -> None:
        weights = self.ram.buffers[op.block].weights
        assert weights is not None
        start, end = self.plan.buffers[op.block].piece(op.index, op.slots["pieces"])
        flat = self._flat("weights", op.block, op.slots[op.block])
        flat[start:end].copy_(weights[start:end], non_blocking=True)

    def _op_load_weights_part(self, op: Op) -> None:
        start, end = self.plan.buffers[op.block].part(op.index)
        flat = self._flat("weights", op.block, op.slots[op.block])
        flat[start:end].copy_(self._part_stage(op.slots["stage"], end - start, self._dtype), non_blocking=True)

    def _op_store_gradient(self, op: Op) -> None:
        waiting = self.ram.buffers[op.block].gradient
        assert waiting is not None
        buffer = self.plan.buffers[op.block]
        flat = self._flat("gradient", op.block, op.slots[op.block])
        for part in range(buffer.num_parts):
            start, end = buffer.part(part)
            waiting[start:end].copy_(flat[start:end].to(waiting.dtype), non_blocking=True)

    def _op_store_gradient_part(self, op: Op) -> None:
        start, end = self.plan.buffers[op.block].part(op.index)
        flat = self._flat("gradient", op.block, op.slots[op.block])
        stage = self._part_stage(op.slots["stage"], end - start, self._gradient_dtype)
        stage.copy_(flat[start:end].to(stage.dtype), non_blocking=True)

    def _stage_state(self, kind: str, op: Op) -> None:
        state = self.gpu.buffers[op.block].state
        assert state is not None
        start, end = self.plan.buffers[op.block].part(op.index)
        stage = self._part_stage(op.slots["stage"], end - start, torch.float32)
        stage.copy_(state[STATE_KINDS.index(kind)][start:end], non_blocking=True)

    # ------------------------------------------------------------------ host: optimizer

    @property
    def _gradient_dtype(self) -> torch.dtype:
        return torch.float32 if self.config.gradient_dtype == "float32" else torch.bfloat16

    def _part_stage(self, slot: int, numel: int, dtype: torch.dtype) -> Tensor:
        return self.ram.part_stages[slot][: numel * dtype.itemsize].view(dtype)

    def _op_clip(self, op: Op) -> None:
        """Loss, global norm and clipping factor of the step, checked before any state changes.

        Reads the step's results from the compute device, once; the ops that made them are done.
        """
        data = self._steps[op.step]
        self._to_host(self._report, self._report_on_host)
        losses, squares, marks = (part.double() for part in self._split_report(self._report_on_host))
        if (culprit := first_not_finite(self.plan, losses, squares, marks)) is not None:
            raise DivergedError(f"step {op.step}: {culprit} is not finite")
        data.loss = float(losses.sum()) / data.num_targets
        data.grad_norm = float(squares.sum().sqrt())
        clip = clip_coefficient(data.grad_norm, self.config.clip_norm)
        for device in {torch.device("cpu"), self._device}:
            data.scalars[device.type] = scalars(self.config, op.step, clip, device)

    def _op_score(self, op: Op) -> None:
        data = self._scored[op.batch]
        self._to_host(self._scores, self._scores_on_host)
        data.total_loss = float(self._scores_on_host[: len(data.chunks)].sum())

    def _to_host(self, source: Tensor, target: Tensor) -> None:
        """Copy what ops that are done have left on the compute device, and wait for that copy alone."""
        target.copy_(source, non_blocking=True)
        wait_for_copies(self._device)

    def _split_report(self, report: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Losses [chunks], squared norms [buffers] and marks [2, blocks, chunks] in a step's report."""
        plan = self.plan
        chunks, blocks = len(plan.chunks), len(plan.blocks)
        losses, squares, marks = report.split([chunks, len(plan.buffers), 2 * blocks * chunks])
        return losses, squares, marks.view(2, blocks, chunks)

    def _mark(self, op: Op, result: Tensor) -> None:
        """Note a value that is finite if the result of a block's op on a chunk is; "clip" names the first that is not.

        One more pass over a hidden state, which no one waits for.
        """
        backward = not op.action.endswith("_forward")
        self._marks[int(backward), self._blocks[op.block][0], op.index].copy_(result.sum(dtype=torch.float32))

    def learning_rate(self, step: int) -> float:
        """Learning rate with which the gradient of `step` is applied."""
        return learning_rate(self.config, step)

    def _op_update(self, op: Op) -> None:
        buffer, memory = self.plan.buffers[op.block], self.ram.buffers[op.block]
        start, end = buffer.update(op.index)
        numel = end - start
        stage = self.ram.state_stages[op.slots["stage"]] if "stage" in op.slots else None
        if memory.state is not None:
            master, first, second = (t[start:end] for t in memory.state)
        else:
            assert stage is not None
            master, first, second = (t[:numel] for t in stage[:3])
        if memory.gradient is not None:
            gradient = memory.gradient[start:end]
        else:
            assert stage is not None
            gradient = stage[3][:numel]
        if memory.weights is not None:
            weights = memory.weights[start:end]
        else:
            weights = self._part_stage(op.slots["weights"], numel, self._dtype)
        values = self._steps[op.step].scalars["cpu"]
        decay = min(max(self.layouts[op.block].decay_numel - start, 0), numel)
        self.adamw.step((master, first, second), gradient, weights, decay, values)

    # ------------------------------------------------------------------ host: NVMe

    def _op_read_state(self, op: Op) -> Future[Any]:
        buffer = self.plan.buffers[op.block]
        start, end = buffer.part(op.index)
        stage = self.ram.state_stages[op.slots["stage"]]
        futures = []
        if buffer.state == "nvme":
            for kind, tensor in zip(STATE_KINDS, stage, strict=False):
                futures.append(self.store.read(op.block, kind, op.index, tensor[: end - start]))
        if buffer.gradient == "nvme":
            futures.append(self.store.read(op.block, "gradient", op.index, stage[3][: end - start]))
        return gather(futures)

    def _op_read_weights(self, op: Op) -> Future[Any]:
        start, end = self.plan.buffers[op.block].part(op.index)
        stage = self._part_stage(op.slots["stage"], end - start, self._dtype)
        return self.store.read(op.block, "weights", op.index, stage)

    def _op_read_weights_whole(self, op: Op) -> Future[Any]:
        """Every part of a buffer's weights at once, straight into their slot on the compute device."""
        buffer, flat = self.plan.buffers[op.block], self._flat("weights", op.block, op.slots[op.block])
        bounds = [buffer.part(part) for part in range(buffer.num_parts)]
        return gather([self.store.read(op.block, "weights", i, flat[a:b]) for i, (a, b) in enumerate(bounds)])

    def _spill(self, kind: str, op: Op) -> Future[Any]:
        return self.store.spill(f"{kind}.{op.block}.{op.index}", self.activation(kind, op))

    def _unspill(self, kind: str, op: Op, *, keep: bool = False) -> Future[Any]:
        return self.store.unspill(f"{kind}.{op.block}.{op.index}", self.activation(kind, op), keep=keep)

    def _discard(self, kind: str, op: Op) -> Future[Any]:
        return self.store.discard(f"{kind}.{op.block}.{op.index}")

    def _op_write_state(self, op: Op) -> Future[Any]:
        start, end = self.plan.buffers[op.block].part(op.index)
        stage = self.ram.state_stages[op.slots["stage"]]
        return gather(
            [
                self._write_state(kind, op, tensor[: end - start])
                for kind, tensor in zip(STATE_KINDS, stage, strict=False)
            ]
        )

    def _op_write_weights(self, op: Op) -> Future[Any]:
        start, end = self.plan.buffers[op.block].part(op.index)
        stage = self._part_stage(op.slots["weights"], end - start, self._dtype)
        return self.store.write(op.block, "weights", op.index, stage)

    def _op_write_gradient(self, op: Op) -> Future[Any]:
        start, end = self.plan.buffers[op.block].part(op.index)
        stage = self._part_stage(op.slots["stage"], end - start, self._gradient_dtype)
        return self.store.write(op.block, "gradient", op.index, stage)

    def _op_checkpoint_state(self, op: Op) -> Future[Any]:
        state = self.ram.buffers[op.block].state
        assert state is not None
        start, end = self.plan.buffers[op.block].part(op.index)
        return gather(
            [self._write_state(kind, op, tensor[start:end]) for kind, tensor in zip(STATE_KINDS, state, strict=True)]
        )

    def _checkpoint_part(self, kind: str, op: Op) -> Future[Any]:
        start, end = self.plan.buffers[op.block].part(op.index)
        return self._write_state(kind, op, self._part_stage(op.slots["stage"], end - start, torch.float32))

    def _write_state(self, kind: str, op: Op, values: Tensor) -> Future[None]:
        """Write updated state, which is looked at on its way: what cannot be trained on never becomes a generation."""
        check = partial(require_usable, kind, op.block, op.step, values)
        return self.store.write(op.block, kind, op.index, values, check=check)

    def _op_commit(self, op: Op) -> None:
        self._commit(op.step)


def gather(futures: Sequence[Future[Any]]) -> Future[None]:
    """A future that is done when all of `futures` are, with the first exception among them."""

    result: Future[None] = Future()
    lock = threading.Lock()
    left = len(futures)
    assert left

    def one_done(_: Future[Any]) -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            errors = [error for error in (future.exception() for future in futures) if error is not None]
            if errors:
                result.set_exception(errors[0])
            else:
                result.set_result(None)

    for future in futures:
        future.add_done_callback(one_done)
    return result
