"""Carries out real plans of real recipes through the real Runtime on a pretended device: every copy, read and slot.

What a layer computes is left out; which tensors it is given, and what it does with them, is told to the Watch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda_pretended import DEVICE, Pretended, pretended, up
from cuda_watch import PAGE, STREAMS, Watch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.app.planning.plan import recipe_task
from penstock.app.recipes.recipe import apply_overrides, load_recipe
from penstock.engine.attention import chunk as attention
from penstock.engine.attention.chunk import AttentionCall, AttentionState, Gradients, Operands
from penstock.engine.branches.base import Sent
from penstock.engine.config import SamplesConfig, TrainConfig
from penstock.engine.forecast.problem import LOGITS_BYTES
from penstock.engine.generate.decode import Row
from penstock.engine.generate.places import distinct, lay_out
from penstock.engine.hf.config import model_config
from penstock.engine.machine.device import compute_dtype
from penstock.engine.model.anatomy import model_spec
from penstock.engine.model.layer_graph import Projection
from penstock.engine.model.layers import LayerInputs
from penstock.engine.model.quantise import Dequantiser
from penstock.engine.model.recurrence import Segment
from penstock.engine.model.runner import Evaluated, ModelRunner
from penstock.engine.model.skeleton import LayerCall
from penstock.engine.model.spec import ModelSpec
from penstock.engine.model.tokens import ChunkTokens, MicroBatch
from penstock.engine.optim.adamw import AdamW, Scalars
from penstock.engine.optim.base import UpdateRange
from penstock.engine.plan.plan import Plan
from penstock.engine.plan.planner import make_plan
from penstock.engine.plan.problem import PlanOptions, SampleTier
from penstock.engine.runtime import sample_ops
from penstock.engine.runtime.batch import BatchCarrier, StepData
from penstock.engine.runtime.memory import GpuMemory, RamMemory, allocate_gpu, allocate_ram
from penstock.engine.runtime.runtime import Runtime
from penstock.engine.schedule.builder import ScheduleBuilder
from penstock.engine.schedule.ops import Op
from penstock.engine.schedule.passes import evaluation, sampling, training
from penstock.storage.tier.arena import HostArena

RECIPES = Path(__file__).parents[2] / "recipes"
Tensors = Mapping[str, Tensor]
State = AttentionState | None
NEW_TOKENS = 8
"""Written behind each prompt."""


@dataclass(frozen=True)
class Case:
    """A recipe on a machine."""

    recipe: str
    machine: str
    choice: PlanOptions | None = None
    """None: what the search finds best."""
    chunk_tokens: int | None = None
    """Of a given choice; None: the longest chunks there are."""
    device_reads: bool = True
    settings: tuple[str, ...] = ()
    """Fields that the recipe is given, as of fewer layers: what they do is alike."""
    prompt_tokens: tuple[int, ...] = ()
    """Of the prompts behind which samples are written; none are where it is empty."""
    samples_in: SampleTier | None = None
    """Where their keys and values are, of a given choice; None: where the plan puts them."""


@dataclass(frozen=True)
class Planned:
    """A case's plan, from shapes alone."""

    plan: Plan
    spec: ModelSpec
    train: TrainConfig
    inputs_bytes: int
    """Bytes of a chunk's LayerInputs per token."""


@cache
def planned(case: Case) -> Planned:
    """Plan a case; outside of `pretended`, which a model on the meta device is not made for."""
    shipped = load_recipe(RECIPES / f"{case.recipe}.py")
    machine, task = recipe_task(apply_overrides(shipped, case.settings), case.machine)
    recipe = task.recipe
    if case.prompt_tokens:
        samples = SamplesConfig(every=1, prompts=["a"] * len(case.prompt_tokens), tokens=NEW_TOKENS)
        recipe = replace(recipe, samples=samples)
        task = replace(task, recipe=recipe, prompt_tokens=case.prompt_tokens)
    spec = model_spec(model_config(recipe, recipe.data.tokenizer_vocab_size), recipe)  # a kept one has no config
    task = replace(task, spec=spec, device_reads=case.device_reads)
    if case.choice is None:
        plan = task.search(machine).plan
    else:
        problem = task.problem(case.chunk_tokens or task.chunks[-1])
        if case.samples_in is not None:
            problem = replace(problem, samples=replace(problem.samples, tier=case.samples_in))
        plan = make_plan(problem, case.choice)
    return Planned(plan, spec, recipe.train, inputs_bytes(spec, compute_dtype(recipe.train)))


class Branches:
    """Stands in for parts of layers that are blocks of their own."""

    def __init__(self, around: Arithmetic) -> None:
        self._around = around

    def forward(self, index: int, weights: Tensors, x: Tensor, sent: Sequence[Tensor], group: int = 0) -> Tensor:
        self._around._cuda.use(*weights.values(), x, *sent, write=False)
        return self._around._result(x.shape[0])

    def backward(
        self,
        index: int,
        weights: Tensors,
        sent: Sequence[Tensor],
        dy: Tensor,
        grads: Tensors,
        *,
        group: int = 0,
        dsent: Sequence[Tensor] = (),
    ) -> list[Tensor]:
        self._around._cuda.use(*weights.values(), *sent, dy, *dsent, write=False)
        self._around._cuda.use(*grads.values(), write=True)
        return self._around._scratch(dy.shape[0], [each for each in self._around.spec.sent if each.has_gradient])

    def with_gradient(self, sent: Sequence[Tensor]) -> list[Tensor]:
        return [tensor for tensor, each in zip(sent, self._around.spec.sent, strict=True) if each.has_gradient]


class Arithmetic:
    """Stands in for the blocks' computation: every tensor that a block is given is used as the block uses it."""

    def __init__(self, cuda: Pretended, shapes: Planned) -> None:
        self.spec, self.device, self.dtype = shapes.spec, DEVICE, compute_dtype(shapes.train)
        self.layers, self.balance, self.branches, self.compiled = self, None, Branches(self), True
        self.sent: Sequence[Tensor] = ()
        self._cuda, self._plan, self._inputs_bytes = cuda, shapes.plan, shapes.inputs_bytes

    # ------------------------------------------------------------------ ModelRunner

    def inputs(self, positions: Tensor, longest: Tensor | int | None) -> LayerInputs:
        """Rotary tables and the like of a chunk, in one tensor of their size."""
        self._cuda.use(positions, write=False)
        tables = torch.empty(positions.numel() * self._inputs_bytes, dtype=torch.uint8, device=DEVICE)
        self._cuda.use(tables, write=True)
        return LayerInputs((LayerCall((tables,), {}),))

    def segments(self, positions: Tensor, longest: Any, start: int, documents: Sequence[int]) -> list[Segment]:
        """A chunk as one document, which began before it where it can have."""
        return [Segment(0, positions.numel(), start > 0, self.inputs(positions, longest).calls)]

    def embed(self, weights: Tensors, ids: Tensor, positions: Tensor) -> Tensor:
        self._cuda.use(*weights.values(), ids, positions, write=False)
        return self._result(ids.numel())

    def embed_backward(self, weights: Tensors, tokens: ChunkTokens, dx: Tensor, grads: Tensors) -> None:
        self._cuda.use(*weights.values(), *tokens.tensors(), dx, write=False)
        self._cuda.use(*grads.values(), write=True)

    def head(
        self, weights: Tensors, x: Tensor, tokens: ChunkTokens, scale: float, grads: Tensors, *_: Any, **_options: float
    ) -> tuple[Tensor, Tensor]:
        self._cuda.use(*weights.values(), x, tokens.rows, tokens.labels, tokens.weights, write=False)
        self._cuda.use(*grads.values(), write=True)
        return self._cuda.scratch(1, dtype=torch.float64)[0], self._result(x.shape[0])

    def evaluate(
        self, weights: Tensors, x: Tensor, tokens: ChunkTokens, limit: int, heat: float, statistics: Sequence[str]
    ) -> Evaluated:
        self._cuda.use(*weights.values(), x, tokens.rows, tokens.labels, tokens.weights, write=False)
        count = tokens.labels.numel()
        scores = self._cuda.scratch(1 + len(statistics), count, dtype=torch.float64)
        return Evaluated(scores, self._cuda.scratch(count, dtype=torch.bool))

    def read(self, logits: Tensor) -> None:
        self._cuda.use(logits, write=False)

    def logits(self, weights: Tensors, x: Tensor) -> Tensor:
        self._cuda.use(*weights.values(), x, write=False)
        return self._cuda.scratch(x.shape[0], self.spec.vocab_size, dtype=self.dtype)

    # ------------------------------------------------------------------ LayerRunner

    def forward_by(self, index: int, weights: Tensors, x: Tensor, inputs: LayerInputs, handler: Any) -> Tensor:
        self._read(weights, inputs, x)
        new, kept = handler
        for row, place in zip(new.rows, new.places, strict=True):
            for tensor in kept:
                for first, end in place.ranges(row.start, row.end):
                    self._cuda.use(tensor[first:end], write=True)
                for first, end in place.ranges(0, row.end):
                    self._cuda.use(tensor[first:end], write=False)
        return self._result(x.shape[0])

    def dequantise(self, flat: Tensor, words: Tensor) -> None:
        self._cuda.use(words, write=False)
        self._cuda.use(flat, write=True)

    def documents(self, index: int, documents: Sequence[int], tokens: int) -> Sequence[int]:
        return documents

    def in_blocks(self, index: int, state: AttentionState) -> AttentionState:
        return state

    def forward(self, index: int, weights: Tensors, x: Tensor, inputs: LayerInputs, state: State) -> Tensor:
        self._read(weights, inputs, x)
        self._attend(state)
        self._send(index, x.shape[0])
        return self._result(x.shape[0])

    def segment_handlers(self, index: int, state: State) -> State:
        return state

    def _states(self, index: int) -> list[Tensor]:
        state = self.spec.states[index]
        assert state is not None
        dtypes = ((each.shape, torch.float32 if each.float32 else self.dtype) for each in state.tensors)
        return [self._cuda.scratch(*shape, dtype=dtype) for shape, dtype in dtypes]

    def forward_segments(
        self, index: int, weights: Tensors, x: Tensor, segments: Sequence[Segment], state: State, before: Any
    ) -> tuple[Tensor, list[Tensor]]:
        self._read(weights, LayerInputs(segments[0].calls), x, *(before or ()))
        self._attend(state)
        self._send(index, x.shape[0])
        return self._result(x.shape[0]), self._states(index)

    def backward_segments(
        self,
        index: int,
        weights: Tensors,
        x: Tensor,
        dy: Tensor,
        segments: Sequence[Segment],
        state: State,
        before: Any,
        dbehind: Sequence[Tensor],
        grads: Tensors,
        *,
        dsent: Sequence[Tensor] = (),
    ) -> tuple[Tensor, Sequence[Tensor]]:
        self._cuda.use(*(before or ()), *dbehind, write=False)
        inputs = LayerInputs(segments[0].calls)
        dx = self.backward(index, weights, x, dy, inputs, state, grads, dsent=dsent)
        return dx, self._states(index) if before else ()

    def _send(self, index: int, tokens: int) -> None:
        self.sent = self._scratch(tokens, self.spec.sent)

    def _scratch(self, tokens: int, sent: Sequence[Sent]) -> list[Tensor]:
        dtypes = {"compute": self.dtype, "int32": torch.int64, "float32": self.dtype}
        return [self._cuda.scratch(tokens, each.width, dtype=dtypes[each.dtype]) for each in sent]

    def forward_given(self, index: int, weights: Tensors, x: Tensor, inputs: LayerInputs, out: Tensor) -> Tensor:
        self._read(weights, inputs, x, out)
        return self._result(x.shape[0])

    def backward(
        self,
        index: int,
        weights: Tensors,
        x: Tensor,
        dy: Tensor,
        inputs: LayerInputs,
        state: State,
        grads: Tensors,
        *,
        dsent: Sequence[Tensor] = (),
    ) -> Tensor:
        self._read(weights, inputs, x, dy, *dsent)
        if state is not None:
            self._cuda.use(state.k[: state.end], state.v[: state.end], state.out, state.lse, write=False)
            self._cuda.use(state.dk[: state.end], state.dv[: state.end], write=True)
        self._cuda.use(*grads.values(), write=True)
        return self._result(x.shape[0])

    def project(self, index: int, weights: Tensors, x: Tensor, inputs: LayerInputs) -> Projection:
        self._read(weights, inputs, x)
        return self._projection(index, x.shape[0])

    def projected(self, index: int, weights: Tensors, x: Tensor, inputs: LayerInputs, dx_past: Tensor | None) -> Graph:
        self._read(weights, inputs, x, *([] if dx_past is None else [dx_past]))
        return Graph(self, x.shape[0], 0, self._projection(index, x.shape[0]))

    def save_graph(
        self, index: int, weights: Tensors, x: Tensor, inputs: LayerInputs, handler: Any
    ) -> tuple[Graph, Tensor]:
        self._read(weights, inputs, x)
        if handler is not None:
            self._attend(handler.__self__.state)
        graph = Graph(self, x.shape[0], self._graph_bytes(index, x.shape[0]), None)
        return graph, graph.y

    def graph(
        self, index: int, weights: Tensors, x: Tensor, inputs: LayerInputs, out: Tensor, *, save_graph: bool
    ) -> Graph:
        self._read(weights, inputs, x)
        projection = self._projection(index, x.shape[0])
        self._cuda.use(out, write=False)
        graph = Graph(self, x.shape[0], self._graph_bytes(index, x.shape[0]) if save_graph else 0, projection)
        graph.out = self._cuda.scratch(*out.shape, dtype=out.dtype)
        return graph

    def _graph_bytes(self, index: int, tokens: int) -> int:
        numbers = [i for i, block in enumerate(self.spec.blocks) if block.layer == index]
        return tokens * self._plan.blocks[numbers[0]].graph_bytes_per_token

    def _projection(self, index: int, tokens: int) -> Projection:
        shape = self.spec.attention[index]
        sizes = [(shape.heads, shape.qk_dim), (shape.kv_heads, shape.qk_dim), (shape.kv_heads, shape.v_dim)]
        q, k, v = (self._cuda.scratch(tokens, *size, dtype=self.dtype) for size in sizes)
        return Projection(q, k, v, AttentionCall(softmax_scale=1.0))

    def _read(self, weights: Tensors, inputs: LayerInputs, *others: Tensor) -> None:
        self._cuda.use(*weights.values(), *inputs.calls[0].args, *others, write=False)

    def _attend(self, state: State) -> None:
        """Forward: own keys and values written, earlier ones read, output and log-sum-exp written."""
        if state is not None:
            own = slice(state.start, state.end)
            self._cuda.use(state.k[own], state.v[own], state.out, state.lse, write=True)
            self._cuda.use(state.k[: state.end], state.v[: state.end], write=False)

    # ------------------------------------------------------------------ engine.attention.chunk

    def handler(self, state: AttentionState) -> Callable[..., Tensor]:
        """forward_handler."""

        def handle(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
            self._attend(state)
            return state.out

        return handle

    def attend(self, x: Operands) -> tuple[Tensor, Tensor]:
        self._cuda.use(x.q, x.k, x.v, write=False)
        n, heads, _ = x.q.shape
        out = self._cuda.scratch(n, heads, x.v.shape[-1], dtype=x.q.dtype)
        return out, self._cuda.scratch(heads, n, dtype=torch.float32)

    def merge(self, total: Tensor, total_lse: Tensor, out: Tensor, lse: Tensor) -> None:
        self._cuda.use(total, total_lse, write=True)

    def attend_backward(self, x: Operands, given: Gradients, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        self._cuda.use(given.dout, x.q, x.k, x.v, given.out, given.lse, write=False)
        self._cuda.use(dq, dk, dv, write=True)

    def _result(self, tokens: int) -> Tensor:
        return self._cuda.scratch(tokens, self.spec.hidden_size, dtype=self.dtype)


class Graph:
    """engine.model.layer_graph.LayerGraph without a graph, of the size that the plan expects."""

    def __init__(self, owner: Arithmetic, tokens: int, nbytes: int, projection: Projection | None) -> None:
        cuda = self._cuda = owner._cuda
        self.y = self.output = owner._result(tokens)
        self.nbytes = nbytes
        self._held = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE) if nbytes else None
        if self._held is not None:
            cuda.use(self._held, write=True)
        self.projection = projection
        self.out: Tensor | None = None
        self.lse: Tensor | None = None
        self._also: list[Tensor] = []

    def offload(self, slot: Tensor, also: list[Tensor]) -> bool:
        self._cuda.use(*also, write=False)
        self._cuda.use(slot, write=True)
        self._held, self._also = None, also
        return True

    def restore(self, slot: Tensor) -> list[Tensor]:
        self._cuda.use(slot, write=False)
        found, start = [], 0
        for tensor in self._also:
            end = start + tensor.numel() * tensor.dtype.itemsize
            found.append(slot[start:end].view(tensor.dtype).view(tensor.shape))
            start = end
        return found

    def top(self, weights: Tensors, dy: Tensor, grads: Tensors, dsent: Sequence[Tensor] = ()) -> Tensor | None:
        held = [] if self._held is None else [self._held]
        self._cuda.use(*weights.values(), dy, *held, write=False)
        self._cuda.use(*grads.values(), write=True)
        return self.out

    def bottom(self, weights: Tensors, given: Any, grads: Tensors, dsinks: Any) -> Tensor:
        self._cuda.use(*weights.values(), *given, write=False)
        self._cuda.use(*grads.values(), write=True)
        return self.y

    def dx(self) -> Tensor:
        return self.y

    def dx_past(self) -> Tensor:
        return self.y


class Updates:
    """Stands in for AdamW: its scalars, no arithmetic."""

    scalars = staticmethod(AdamW.scalars)

    def __init__(self, cuda: Pretended) -> None:
        self._cuda = cuda

    def step(self, state: Tensors, gradient: Tensor, weights: Tensor, where: UpdateRange, values: Scalars) -> None:
        self._cuda.use(gradient, write=False)
        self._cuda.use(*state.values(), weights, write=True)
        self._cuda.use(values.decayed, values.undecayed, write=False)


class Spilled:
    """Activations of `Files`."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def write(self, name: str, data: Tensor) -> Future[None]:
        return self._files.moved(data, write=False)

    def read(self, name: str, out: Tensor, *, keep: bool = False) -> Future[None]:
        return self._files.moved(out, write=True)

    def discard(self, name: str) -> Future[None]:
        return self._files.moved(write=False)


class Files:
    """Stands in for NvmeStore: reads and writes are over when the op is."""

    def __init__(self, cuda: Pretended) -> None:
        self._cuda = cuda
        self.spilled = Spilled(self)

    def read(self, buffer: str, kind: str, part: int, out: Tensor) -> Future[None]:
        self._cuda.watch.read_direct(out.data_ptr(), out.nbytes, 0)
        return self.moved(out, write=True)

    def write(self, buffer: str, kind: str, part: int, data: Tensor, **check: Any) -> Future[None]:
        self._cuda.watch.read_direct(data.data_ptr(), 0, 0)
        return self.moved(data, write=False)

    def moved(self, *tensors: Tensor, write: bool) -> Future[None]:
        self._cuda.use_at_once(*tensors, write=write)
        future: Future[None] = Future()
        future.set_result(None)
        return future


class Replay:
    """A session without threads: memory as the plan says, and ops carried out in program order."""

    def __init__(self, shapes: Planned, cuda: Pretended, layers: int | None = None) -> None:
        """`layers`: carry out the ops of so many layers, the first and the last ones; of the others it is only noted
        what they come after. What they do is alike, and every slot is looked at when it is carved."""
        names = [block.name for block in shapes.plan.blocks if block.saved_inputs]
        half = len(names) if layers is None else layers // 2
        self._left_out = set(names[half:-half])
        self.plan, self.spec, train = shapes.plan, shapes.spec, shapes.train
        self.cuda, self.watch = cuda, cuda.watch
        self._streams = {lane: SimpleNamespace(name=lane) for lane in sorted(STREAMS)}
        cuda.misalign()
        self.gpu: GpuMemory = allocate_gpu(self.plan, DEVICE)
        self.slot_bytes = cuda.live_bytes()
        self.ram: RamMemory = carve(cuda, self.plan)
        self._carrier = BatchCarrier(self.plan, DEVICE)
        self.arithmetic = Arithmetic(cuda, shapes)
        work: tuple[Any, ...] = self.arithmetic, Updates(cuda), Files(cuda), self.gpu, self.ram
        rest = train, LOGITS_BYTES["cuda"], lambda step: None
        self.runtime = Runtime(self.plan, *work, *rest)
        self.builder = ScheduleBuilder(self.plan)
        torch.cuda.synchronize(DEVICE)  # as the executor does when it begins
        self._batches = 0
        self._next: StepData | None = None

    def step(self, number: int, *, commit: bool = False) -> None:
        """As engine.train.train_step."""
        last = 0
        for ops in self.streamed(number, commit=commit):
            last = self.perform(ops)
        self._next = self._fetch()
        self.watch.wait(last)

    def streamed(self, number: int, *, commit: bool = False) -> Iterator[list[Op]]:
        """The ops of a step whose batch is there, pass by pass."""
        data = self._next or self._fetch()
        self.runtime.begin(number, data)
        documents = [batch.documents for batch in data.micro_batches]
        return self.builder.stream(training(self.plan, number, documents=documents), commit_previous=commit)

    def evaluate(self, step: int, batch: int) -> None:
        """As engine.validation: one pass, of one micro-batch."""
        self.runtime.drop_tokens()
        micro_batches = [self._micro_batch()]
        data = self._carrier.evaluation(micro_batches)
        self.runtime.begin_evaluation(batch, data)
        last = 0
        pass_ = evaluation(self.plan, step, batch, documents=[m.documents for m in micro_batches])
        for ops in self.builder.stream(pass_):
            last = self.perform(ops)
        self.watch.wait(last)
        self.runtime.end_evaluation(batch)

    def sample(self, step: int) -> None:
        """As engine.samples: a pass over the prompts, and one for a token behind each."""
        assert self.plan.problem.samples is not None
        self.runtime.drop_tokens()
        lengths = [length - NEW_TOKENS for length in self.plan.problem.samples.lengths]
        prompts = [Row(i, 0, range(length)) for i, length in enumerate(lengths)]
        tokens = [Row(i, length, [1]) for i, length in enumerate(lengths)]
        places = lay_out(self.plan.problem.samples.lengths)
        self.runtime.sample_ops.lay_out(places)
        for rows, read in ((prompts, []), (tokens, distinct(places, enumerate(lengths)))):
            data = self._carrier.samples([rows], places, read, self._choose)
            number = self.runtime.begin_samples(data)
            last: dict[str, int] = {}
            counts = {"read_tokens": sum(end - first for first, end in read)}
            cut: dict[str, Any] = {"chunks": [data.chunks[0].chunk], "wanted": [0], **counts}
            for ops in self.builder.stream(sampling(self.plan, step, number, **cut)):
                self.perform(ops)
                last |= {op.lane: op.id for op in ops}
            for op in sorted(last.values()):
                self.watch.wait(op)
            self.runtime.end_samples(number)

    def _choose(self, logits: Tensor, nbytes: int) -> list[int]:
        self.arithmetic.read(logits)
        return []

    def finish(self) -> None:
        self.perform(self.builder.finish(commit=True))

    def perform(self, ops: Iterable[Op]) -> int:
        """Carry out ops as the executor would, one after the other; the last one's id."""
        last = -1
        for op in ops:
            last = op.id
            self.watch.begin(op)
            if op.block not in self._left_out:
                stream: Any = self._streams.get(op.lane)
                with torch.cuda.stream(stream) if stream else nullcontext():
                    self.runtime.perform(op)
            self.watch.end()
        return last

    def _fetch(self) -> StepData:
        micro_batches = [self._micro_batch() for _ in range(self.plan.problem.micro_batches)]
        return self._carrier.step(micro_batches, {})

    def _micro_batch(self) -> MicroBatch:
        self._batches += 1
        return self.batch_of(self.plan.window_tokens, self.plan.problem.row_tokens, self._batches, self.spec.vocab_size)

    @staticmethod
    def batch_of(tokens: int, row: int, number: int, vocabulary: int) -> MicroBatch:
        """A micro-batch of rows of one document each."""
        ids = torch.arange(tokens) * (2 * number + 1) % vocabulary
        starts = list(range(0, tokens, row))
        positions = torch.arange(tokens) % row
        return MicroBatch(ids, ids.roll(-1), positions, starts, tokens, [row] * len(starts))


@contextmanager
def replay(case: Case, layers: int | None = None) -> Iterator[Replay]:
    """A case's memory and runtime on a pretended device; see Replay."""
    shapes = planned(case)
    with pretended(Watch()) as cuda, pytest.MonkeyPatch.context() as patch:
        replay = Replay(shapes, cuda, layers)
        compute = replay.arithmetic
        patch.setattr(Dequantiser, "fill", lambda _, flat, words, *layouts, **how: compute.dequantise(flat, words))
        patch.setattr(sample_ops, "rows_handler", lambda new, kept, chunk: (new, kept))
        patch.setattr(attention, "forward_handler", compute.handler)
        patch.setattr(attention, "attend", compute.attend)
        patch.setattr(attention, "merge_", compute.merge)
        patch.setattr(attention, "finish", lambda out, lse, sinks: (out, lse))
        patch.setattr(attention, "attend_backward", compute.attend_backward)
        yield replay


def carve(cuda: Pretended, plan: Plan) -> RamMemory:
    """The run's RAM, pinned, with every slot known to the Watch."""
    carved = HostArena.slot
    slots: list[tuple[int, int]] = []

    def slot(arena: HostArena, name: str, nbytes: int) -> Tensor:
        tensor = carved(arena, name, nbytes)
        cuda.watch.allocate(tensor.data_ptr(), up(nbytes, PAGE))
        cuda.watch.read_direct(tensor.data_ptr(), 0, 0)
        slots.append((tensor.data_ptr(), nbytes))
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostArena, "slot", slot)
        patch.setattr("penstock.storage.tier.arena._page_in", lambda address, nbytes: None)
        ram = allocate_ram(plan)
        cuda.arena(ram.arena._bytes.data_ptr(), ram.arena.capacity_bytes)
        ram.arena.pin(cuda.watch)
    for address, nbytes in slots:
        cuda.watch.require_pinned(address, nbytes)
    return ram


def inputs_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of a chunk's LayerInputs per token, found by making some on the meta device."""
    runner = ModelRunner(spec, device="meta", dtype=dtype)
    made = runner.inputs(torch.zeros(64, dtype=torch.int64, device="meta"), 63)
    leaves = pytree.tree_leaves([(call.args, call.kwargs) for call in made.calls])
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in leaves if isinstance(t, Tensor)}
    return -(-sum(storages.values()) // 64)
