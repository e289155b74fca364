"""An op's operands as tensors: what its slots, its block and its chunk stand for in the memory of the run."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.engine.branches.base import Sent
from penstock.engine.model.images import Images
from penstock.engine.model.layers import LayerInputs
from penstock.engine.model.recurrence import Segment
from penstock.engine.model.runner import ModelRunner
from penstock.engine.model.spec import AttentionShape, layouts
from penstock.engine.model.sums import GradientSums
from penstock.engine.model.tokens import ChunkTokens, last_positions
from penstock.engine.plan.activations import ACTIVATIONS
from penstock.engine.plan.chunks import Chunk
from penstock.engine.plan.plan import Plan
from penstock.engine.plan.problem import INPUTS_CACHE_BYTES
from penstock.engine.runtime.batch import Batch, EvaluationData, SampleData, StepData
from penstock.engine.runtime.memory import GpuMemory, RamMemory
from penstock.engine.schedule import actions as a
from penstock.engine.schedule import resources as r
from penstock.engine.schedule.ops import Op


def laid_out(raw: Tensor, *parts: tuple[torch.dtype, tuple[int, ...]]) -> list[Tensor]:
    """Tensors of such dtypes and shapes that lie one after the other in uint8 `raw`."""
    result, start = [], 0
    for dtype, shape in parts:
        end = start + math.prod(shape) * dtype.itemsize
        result.append(raw[start:end].view(dtype).view(shape))
        start = end
    return result


def sent_parts(raw: Tensor, tokens: int, sent: Sequence[Sent], dtype: torch.dtype) -> list[Tensor]:
    """What a layer hands to its branch, each [tokens, width], in uint8 `raw`; `dtype`: of the computation."""
    dtypes = {"compute": dtype, "int32": torch.int32, "float32": torch.float32}
    return laid_out(raw, *((dtypes[each.dtype], (tokens, each.width)) for each in sent))


def keys_and_values(raw: Tensor, tokens: int, shape: AttentionShape, dtype: torch.dtype) -> list[Tensor]:
    """k [tokens, kv_heads, qk_dim] and v [tokens, kv_heads, v_dim] in uint8 `raw`."""
    return laid_out(raw, *((dtype, (tokens, shape.kv_heads, width)) for width in (shape.qk_dim, shape.v_dim)))


def hidden_slots(plan: Plan, gpu: GpuMemory, dtype: torch.dtype) -> list[Tensor]:
    """The slots of hidden states as [max chunk tokens, hidden]."""
    shape = (plan.max_chunk_tokens, plan.problem.hidden_size)
    return [laid_out(raw, (dtype, shape))[0] for raw in gpu.slots[r.GPU_HIDDEN]]


class Views:
    """Looks operands up; allocates nothing."""

    def __init__(self, plan: Plan, runner: ModelRunner, gpu: GpuMemory, ram: RamMemory) -> None:
        self.plan, self.runner, self.gpu, self.ram = plan, runner, gpu, ram
        own, self._references = layouts(runner.spec), plan.problem.references
        self.layouts = own | {reference: own[name] for name, reference in self._references.items()}
        self.device, self.dtype = runner.device, runner.dtype
        self.gradient_dtype: torch.dtype = getattr(torch, plan.problem.gradient_dtype)
        self._blocks = {block.name: (i, block) for i, block in enumerate(plan.blocks)}
        self.steps: dict[int, StepData] = {}
        self.evaluated: dict[int, EvaluationData] = {}
        """Op.batch -> its tokens, of the validation's passes under way."""
        self.samples: dict[int, SampleData] = {}
        """Op.batch -> the tokens of the samples' pass under way."""
        self._hidden = hidden_slots(plan, gpu, self.dtype)
        self._inputs: OrderedDict[tuple[int, int, int, str], tuple[Any, int]] = OrderedDict()
        self._views: dict[tuple[str, str, int], dict[str, Tensor]] = {}

    def block_index(self, name: str) -> int:
        return self._blocks[name][0]

    def layer(self, op: Op) -> int:
        """Which of the model's decoder layers the op's block computes, or has a part of."""
        block = self.runner.spec.blocks[self.block_index(op.block)]
        layer = block.layer if block.branch_of is None else block.branch_of
        assert layer is not None
        return layer

    def group(self, op: Op) -> int:
        """Which of the layer's groups of experts the op's block is."""
        group = self.runner.spec.blocks[self.block_index(op.block)].group
        return 0 if group is None else group[0] // (group[1] - group[0])

    def chunk(self, op: Op) -> Chunk:
        """The op's chunk, as far as it holds tokens."""
        if op.batch < 0:
            return self.samples[op.batch].chunks[op.index].chunk
        batch = self.batch(op)
        return batch.cut[op.index] if op.index in batch.cut else self.steps[op.step].others[op.index]

    def keys(self, op: Op) -> Chunk:
        """The chunk of keys that a streamed op is about: its own, or the one that it names."""
        chunk = self.chunk(op)
        if a.KEYS not in op.slots:
            return chunk
        return self.batch(op).by_ordinal[chunk.micro_batch, op.slots[a.KEYS]]

    # ------------------------------------------------------------------ buffers

    def weights(self, op: Op) -> dict[str, Tensor]:
        """Parameters of every buffer of the op's block, by name: the reference model's in a pass of that."""
        of_reference = op.batch in self.evaluated and self.evaluated[op.batch].of_reference
        views: dict[str, Tensor] = {}
        for name in self._blocks[op.block][1].buffers:
            held = self._references.get(name, name) if of_reference else name
            views.update(self._buffer_views("weights", held, op.slots[held]))
        return views

    def gradients(self, op: Op) -> GradientSums:
        """float32 gradients of what is trained of the op's block: where this op is the first to add to them, fresh in a
        layer, and zero in other blocks."""
        block, result = self._blocks[op.block][1], GradientSums({})
        for name in block.buffers:
            if self.plan.buffers[name].frozen:
                continue
            slot = op.slots[a.gradient_of(name)]
            views = self._buffer_views("gradient", name, slot)
            if a.zero(name) in op.flags:
                flat = self.flat("gradient", name, slot)
                if op.action.work.fresh_gradients:
                    for start, end in self.layouts[name].gaps:
                        flat[start:end].zero_()
                    result.fresh |= views.keys()
                else:
                    flat.zero_()
            result |= views
        return result

    def flat(self, kind: str, name: str, slot: int) -> Tensor:
        """The flat tensor of a buffer on the compute device: resident, or in its slot."""
        buffer = self.plan.buffers[name]
        resident = self.gpu.buffers[name].get(kind)
        if resident is not None:
            return resident
        if kind == "weights":
            return self.gpu.weights[buffer.pool][slot][: buffer.nbytes].view(getattr(torch, buffer.dtype))
        return self.gpu.gradients[buffer.pool][slot][: buffer.numel]

    def copy(self, name: str) -> Tensor:
        """Where a quantised buffer's weights are dequantised to, all of one block at a time."""
        assert self.gpu.copy is not None
        return self.gpu.copy[: self.layouts[name].numel]

    def _buffer_views(self, kind: str, name: str, slot: int) -> dict[str, Tensor]:
        key = (kind, name, slot)
        if key not in self._views:
            copied = kind == "weights" and self.plan.buffers[name].copy_numel
            self._views[key] = self.layouts[name].views(self.copy(name) if copied else self.flat(kind, name, slot))
        return self._views[key]

    def part_stage(self, slot: int, numel: int, dtype: torch.dtype) -> Tensor:
        """A part on its way to or from NVMe."""
        return self.ram.part_stages[slot][: numel * dtype.itemsize].view(dtype)

    # ------------------------------------------------------------------ tokens

    def batch(self, op: Op) -> Batch:
        return self.evaluated[op.batch] if op.batch else self.steps[op.step]

    def documents(self, op: Op, chunk: Chunk) -> list[int]:
        return self.batch(op).micro_batches[chunk.micro_batch].documents

    def tokens(self, op: Op) -> ChunkTokens:
        return self.batch(op).chunks[op.index]

    def both_ways(self, op: Op) -> Sequence[tuple[int, int]]:
        """Ranges of the chunk's stream that attend in both directions."""
        images = self.stream_images(op)
        return () if images is None else images.both_ways

    def images(self, op: Op) -> Images | None:
        """What there is of images in the op's chunk."""
        return self.batch(op).images.get(op.index)

    def stream_images(self, op: Op) -> Images | None:
        """What there is of images in the whole stream of the op's chunk."""
        return self.batch(op).micro_batches[self.chunk(op).micro_batch].images

    def layer_inputs(self, op: Op, chunk: Chunk) -> LayerInputs:
        """Arguments of every layer for a chunk, made again where they have been dropped."""

        def make() -> tuple[LayerInputs, int]:
            inputs = self.runner.inputs(*self._positions(op, chunk))
            return inputs, inputs.nbytes

        result: LayerInputs = self._recent(op, "chunk", make)
        return result

    def segments(self, op: Op, chunk: Chunk) -> list[Segment]:
        """The same of a chunk document by document."""

        def make() -> tuple[list[Segment], int]:
            segments = self.runner.segments(*self._positions(op, chunk), chunk.start, self.documents(op, chunk))
            return segments, sum(LayerInputs(segment.calls).nbytes for segment in segments)

        result: list[Segment] = self._recent(op, "segments", make)
        return result

    def _positions(self, op: Op, chunk: Chunk) -> tuple[Tensor, Tensor | None]:
        """Of a chunk's tokens, and the last ones of their documents where rotary tables depend on those."""
        positions, images = self.tokens(op).positions, self.images(op)
        if images is not None and images.positions is not None:
            positions = images.positions.to(self.device, non_blocking=True)
        if not self.runner.spec.length_dependent_rotary:
            return positions, None
        stream = self.batch(op).micro_batches[chunk.micro_batch]
        longest = last_positions(stream.positions, stream.documents)
        return positions, longest[chunk.start : chunk.start + len(positions)]

    def _recent(self, op: Op, what: str, make: Callable[[], tuple[Any, int]]) -> Any:
        """What `make` makes for an op's chunk, with its bytes, unless it is there."""
        key = (op.step, op.batch, op.index, what)
        if key in self._inputs:
            self._inputs.move_to_end(key)
            return self._inputs[key][0]
        for old in [old for old in self._inputs if old[:2] != key[:2]]:
            del self._inputs[old]
        self._inputs[key] = make()
        while len(self._inputs) > 1 and sum(nbytes for _, nbytes in self._inputs.values()) > INPUTS_CACHE_BYTES:
            self._inputs.popitem(last=False)
        return self._inputs[key][0]

    # ------------------------------------------------------------------ activations

    def recurrent(self, layer: int, slot: int) -> list[Tensor]:
        """The recurrent state of a layer in a slot on the compute device."""
        return self._states(layer, self.gpu.slots[r.GPU_RECURRENT][slot])

    def recurrent_gradient(self, layer: int) -> list[Tensor]:
        """The gradient of the state that a chunk of a layer began with, on its way to the chunk before."""
        return self._states(layer, self.gpu.window["drecurrent"][0])

    def _states(self, layer: int, raw: Tensor) -> list[Tensor]:
        state = self.runner.spec.state_of(layer)
        assert state is not None
        return laid_out(raw, *((torch.float32 if each.float32 else self.dtype, each.shape) for each in state.tensors))

    def continued(self, op: Op, chunk: Chunk) -> bool:
        """Whether the chunk behind this one goes on with its last document."""
        following = self.batch(op).by_ordinal.get((chunk.micro_batch, chunk.ordinal + 1))
        return following is not None and following.start not in self.documents(op, chunk)

    def hidden(self, slot: int, chunk: Chunk) -> Tensor:
        """Activation [tokens, hidden] in a slot on the compute device."""
        return self._hidden[slot][: chunk.end - chunk.start]

    def sent(self, slot: int, chunk: Chunk) -> list[Tensor]:
        """What a layer hands to its branch of a chunk, or its gradients, in a slot on the compute device."""
        raw, tokens = self.gpu.slots[r.GPU_SENT][slot], chunk.end - chunk.start
        return sent_parts(raw, tokens, self.runner.spec.sent, self.dtype)

    def dsent(self, op: Op, role: str) -> Sequence[Tensor]:
        """The gradients of what a layer hands to its branches, in the op's slot of that role; none: it has none."""
        if role not in op.slots:
            return ()
        return self.runner.branches.with_gradient(self.sent(op.slots[role], self.chunk(op)))

    def send(self, slot: int, chunk: Chunk, sent: Sequence[Tensor]) -> None:
        """Put what a layer has handed to its branch of a chunk into a slot."""
        for target, source in zip(self.sent(slot, chunk), sent, strict=True):
            target.copy_(source.view(target.shape))

    def offloaded(self, op: Op) -> Tensor:
        """Where an activation of the op's block and chunk is offloaded to, uint8: its stage, what is saved of the
        chunk, the window of one block's pass, or the boundary between two blocks."""
        if a.STAGE in op.slots:
            return self.ram.activation_stages[op.slots[a.STAGE]][: op.nbytes]
        if a.PLACE in op.slots:
            return self.ram.shared_window[op.action.kind][op.slots[a.PLACE]][: op.nbytes]
        chunk, kind = self.plan.index_in_group(op.index), op.action.kind
        key = (self._blocks[op.block][0], chunk)
        saved = self.gpu.saved_activations.get(key) or self.ram.saved_activations.get(key) or {}
        if kind in saved:
            region = saved[kind]
        elif kind in self.ram.window:
            region = self.ram.window[kind][self.plan.chunks[op.index].local]
        else:
            region = self.ram.between[str(ACTIVATIONS[kind].ram), chunk]
        return region[: op.nbytes]
