"""Layers whose keys and values pass through the compute device chunk by chunk: an op is cut in three, up to attention,
attention over each chunk of keys, and the rest."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from penstock.engine.plan.activations import BETWEEN
from penstock.engine.plan.chunks import Chunk
from penstock.engine.plan.plan import Plan
from penstock.engine.schedule import actions as a
from penstock.engine.schedule import resources as r
from penstock.engine.schedule.activations import ActivationSchedule
from penstock.engine.schedule.ops import WHOLE, Emitter
from penstock.engine.schedule.passes import Task
from penstock.engine.schedule.resources import Resource


def role(kind: str) -> str:
    """Role of the slot for what an op makes, where it may have an input of the same kind as well."""
    return a.OUT if kind in (a.X, a.DY) else a.DSENT_OUT if kind == a.DSENT else kind


def inputs(slots: Mapping[str, int], made: Container[str]) -> list[Resource]:
    """What an op with these slots reads of activations between blocks, but for what it makes."""
    return [r.activation(kind, slots[kind]) for kind in BETWEEN if kind in slots and kind not in made]


@dataclass(slots=True)
class Operands:
    """What a block's compute ops read and write, whichever of them it is."""

    slots: dict[str, int] = field(default_factory=dict)
    """Of weights and gradients."""
    weights: list[Resource] = field(default_factory=list)
    gradients: list[Resource] = field(default_factory=list)
    zero: list[str] = field(default_factory=list)
    """Flags of the gradients that begin with this chunk."""


class Streaming:
    """Emits the ops of one chunk of such a layer."""

    def __init__(
        self,
        plan: Plan,
        emitter: Emitter,
        activations: ActivationSchedule,
        emit_block: Callable[..., None],
        outputs: Callable[[Task], tuple[Sequence[str], int]],
    ) -> None:
        """`emit_block` and `outputs`: see ScheduleBuilder."""
        self.plan, self.emitter, self.activations = plan, emitter, activations
        self.emit_block, self._outputs = emit_block, outputs

    def compute(self, task: Task, operands: Operands, slots: dict[str, int]) -> None:
        (self.backward if task.mode == "backward" else self.forward)(task, operands, slots)

    def emitting(self, task: Task) -> Callable[..., None]:
        """What emits an op of the task's chunk."""
        return partial(self.emitter.emit, block=self.plan.blocks[task.layer].name, index=task.chunk.index)

    def forward(self, task: Task, operands: Operands, slots: dict[str, int]) -> None:
        layer, chunk, activations, emit = task.layer, task.chunk, self.activations, self.emitting(task)
        slots[a.SAVED] = activations.pool(a.SAVED).take(activations.content(layer, chunk))
        self.project(task, operands, slots)
        keys = [chunk, *activations.keys(layer, chunk)]
        for other in keys:
            kv = activations.load_kv(layer, other)
            flags = [a.FIRST] * (other is keys[0]) + [a.LAST] * (other is keys[-1])
            saved: list[Resource] = [r.activation(a.SAVED, slots[a.SAVED])] if other is keys[-1] else []
            emit(
                a.ATTEND,
                reads=[r.resource(r.GPU_QUERIES), r.activation(a.KV, kv)],
                writes=[r.resource(r.GPU_PARTIAL), *saved],
                slots={a.KV: kv, a.KEYS: other.ordinal, a.SAVED: slots[a.SAVED]},
                flags=flags,
            )
            activations.kv.release(kv, keep=True)
        activations.store_saved(a.SAVED, task.mode, layer, chunk, slots[a.SAVED])
        if task.mode != "recompute":
            action = a.LAYER_FORWARD_BOTTOM if task.mode == "forward" else a.LAYER_EVALUATE_BOTTOM
            self.emit_block(task, operands, slots, action, reads=[r.activation(a.SAVED, slots[a.SAVED])])

    def project(self, task: Task, operands: Operands, slots: dict[str, int]) -> None:
        """Queries, keys and values of the task's chunk."""
        layer, chunk, activations = task.layer, task.chunk, self.activations
        own = activations.kv.take(activations.content(layer, chunk))
        self.emitting(task)(
            a.LAYER_PROJECT,
            reads=[*operands.weights, r.activation(a.X, slots[a.X])],
            writes=[r.resource(r.GPU_QUERIES), r.activation(a.KV, own)],
            slots=operands.slots | {a.X: slots[a.X], a.KV: own},
        )
        activations.store_kv(layer, chunk, own, task.mode)
        activations.kv.release(own, keep=True)

    def backward(self, task: Task, operands: Operands, slots: dict[str, int]) -> None:
        layer, chunk, activations = task.layer, task.chunk, self.activations
        if activations.ends_stream(chunk):
            activations.restore_window(layer, chunk)
        graph = self.top(task, operands, slots)
        dkv = WHOLE
        for other, dkv in self.attended(task, slots):
            if other is not chunk:
                activations.store_dkv(layer, other, dkv)
        operands.zero = []
        sums: list[Resource] = [r.resource(r.GPU_PARTIAL), r.activation(a.DKV, dkv)]
        self.emit_block(task, operands, slots | {a.DKV: dkv}, a.LAYER_BACKWARD_BOTTOM, reads=sums, writes=[graph])
        activations.dkv.release(dkv)

    def top(self, task: Task, operands: Operands, slots: dict[str, int], *also: Resource) -> Resource:
        """Backward down to attention, which writes `also`; the graph that the rest goes on with."""
        key = self.activations.key(task.layer, task.chunk)
        has_graph = key in self.plan.saved_graphs
        graph = r.resource(r.GPU_GRAPH, *key) if has_graph else r.resource(r.GPU_GRAPH)
        saved: list[Resource] = [] if has_graph else [r.activation(a.SAVED, slots[a.SAVED])]
        self.emitting(task)(
            a.LAYER_BACKWARD_TOP,
            reads=[*operands.weights, *inputs(slots, {role(kind) for kind in self._outputs(task)[0]}), *saved],
            writes=[*operands.gradients, graph, r.resource(r.GPU_QUERIES), r.resource(r.GPU_DOUT), *also],
            slots=operands.slots | slots,
            flags=[*operands.zero, *([a.SAVED_GRAPH] if has_graph else [])],
        )
        return graph

    def attended(self, task: Task, slots: dict[str, int], *last: Resource) -> Iterator[tuple[Chunk, int]]:
        """Attention's backward over each chunk of keys; these, and the slot with the gradients of their keys and
        values, which the caller releases. The last one, of the chunk's own, writes `last`."""
        layer, chunk, activations, emit = task.layer, task.chunk, self.activations, self.emitting(task)
        key = activations.key(layer, chunk)
        has_graph = key in self.plan.saved_graphs
        held = r.resource(r.GPU_GRAPH, *key) if has_graph else r.activation(a.SAVED, slots[a.SAVED])
        kept = {name: slot for name, slot in slots.items() if name in (a.SAVED, a.DQ)}
        keys = [*activations.keys(layer, chunk), chunk]
        for other in keys:
            kv, (dkv, new) = activations.load_kv(layer, other), activations.load_dkv(layer, other)
            flags = [a.ZERO_DKV] * new + [a.FIRST] * (other is keys[0]) + [a.SAVED_GRAPH] * has_graph
            flags += [a.LAST] * (other is chunk)
            emit(
                a.ATTEND_BACKWARD,
                reads=[r.resource(r.GPU_QUERIES), r.resource(r.GPU_DOUT), r.activation(a.KV, kv), held],
                writes=[r.resource(r.GPU_PARTIAL), r.activation(a.DKV, dkv), *(last if other is chunk else ())],
                slots=kept | {a.KV: kv, a.DKV: dkv, a.KEYS: other.ordinal},
                flags=flags,
            )
            activations.kv.release(kv, keep=other is not chunk)
            yield other, dkv
