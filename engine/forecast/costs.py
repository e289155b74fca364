"""How long each op of a plan's schedule takes: by formula from a machine's rates, corrected by what was measured.

The formulas count what an op must do: FLOPs of its matrix products and of its visible pairs (forecast/flops.py), bytes
that its elementwise work passes through memory, bytes over a link or to a drive. A calibration (runtime/calibrate.py)
replaces them, for the ops that it measured, by their times on the real device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from msgspec import structs

from penstock.engine.attention.pairs import chunk_pairs
from penstock.engine.machine.profile import AttentionRate, Machine
from penstock.engine.plan.chunks import Filled
from penstock.engine.plan.plan import Plan, offloaded_graph_bytes
from penstock.engine.plan.problem import FP32, BlockShape
from penstock.engine.schedule import actions as a
from penstock.engine.schedule import resources as r
from penstock.engine.schedule.action import Cost
from penstock.engine.schedule.actions import ACTIONS
from penstock.engine.schedule.ops import WHOLE, Op

LAUNCH_S = {"cpu": 4e-4, "gpu": 1.5e-4}
"""What a layer's op takes beside its work: some twenty kernel launches, which a GPU's queue hides in part."""
COPY_S = 2e-5
"""What a copy takes beside its bytes."""
DISK_S = 1e-4
"""What a request to a drive takes beside its bytes."""
CLIP_S = 3e-4
COMMIT_S = 3e-2
"""Syncing what a commit has not synced yet, and replacing the manifest."""
HEAD_BYTES = 12
"""Bytes of memory that the loss passes through per token and entry of the vocabulary: engine/model/loss.py."""
UPDATE_BYTES = 30
"""Read or written per parameter by an optimizer with two moments, for which machines' rates are given."""

_WITH_GRAPH = "+" + a.SAVED_GRAPH


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured op."""

    tokens: int
    pairs: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """What was measured on the real device, at the chunk of a plan."""

    samples: dict[str, tuple[Sample, ...]] = field(default_factory=dict)
    """`op_kind` of a compute op -> its times."""
    graph_bytes_per_token: dict[str, int] = field(default_factory=dict)
    """First layer of a kind -> what a saved graph of it really takes."""
    update_params_per_s: float | None = None
    """The optimizer in RAM."""
    h2d_bytes_per_s: float | None = None
    d2h_bytes_per_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a step of a plan is simulated under: the machine, and what is known of the batch."""

    machine: Machine
    calibration: Calibration | None = None
    documents: Sequence[Sequence[int]] | None = None
    """Per micro-batch the sorted starts of its documents, with their prefixes (attention/spans.py); None: every row is
    one."""
    filled: Filled | None = None
    """Per micro-batch its tokens before the padding (Plan.filled_chunks); None: there is none."""


def representatives(blocks: Sequence[BlockShape]) -> list[str]:
    """For each block the name of the first one that computes the same."""
    first: dict[BlockShape, str] = {}
    return [first.setdefault(block.nameless, block.name) for block in blocks]


def op_kind(op: Op, representative: str) -> str:
    """Name under which ops that do the same are measured."""
    return f"{representative} {op.action.name}" + _WITH_GRAPH * (a.SAVED_GRAPH in op.flags)


def _twins(op: Op) -> tuple[Op, ...]:
    """Ops that are measured and do what `op` does, or as good as; the likest first."""
    twin = op if op.action.measured_as is None else structs.replace(op, action=ACTIONS[op.action.measured_as])
    return twin, structs.replace(twin, flags=op.flags ^ {a.SAVED_GRAPH})


class Costs:
    """Seconds of any op that shares nothing; `merged`: each chunk stands for so many (forecast/extrapolate.py)."""

    def __init__(self, plan: Plan, on: Conditions, merged: int = 1) -> None:
        self.plan, self.on = plan, on
        machine = self._machine = on.machine
        self._calibration = on.calibration or Calibration()
        self._documents = plan.row_documents if on.documents is None else on.documents
        self._chunks = {chunk.index: chunk for chunk in plan.filled_chunks(on.filled)}
        streams = plan.filled_streams(on.filled) if plan.streamed else ()
        self._keys = {(chunk.micro_batch, chunk.ordinal): chunk for stream in streams for chunk in stream}
        self._tokens_of_step = sum(chunk.end - chunk.start for chunk in self._chunks.values())
        self._tokens_of_group = max(
            (sum(chunk.end - chunk.start for chunk in group) for group in plan.groups(list(self._chunks.values()))),
            default=0,
        )
        self._chunks |= {chunk.index: chunk for chunk in plan.others(on.filled)}
        self._launch, self._merged = LAUNCH_S["cpu" if machine.gpu is None else "gpu"], merged
        self._blocks = {block.name: block for block in plan.blocks}
        self._same = dict(zip(self._blocks, representatives(plan.blocks), strict=True))
        own = {block.name: [plan.buffers[name] for name in block.buffers] for block in plan.blocks}
        self._numel = {name: sum(b.computed_numel for b in buffers) for name, buffers in own.items()}
        self._trained = {name: sum(b.numel for b in buffers if not b.frozen) for name, buffers in own.items()}
        self._pairs: dict[tuple[Any, ...], int] = {}
        self._known: dict[tuple[Any, ...], float] = {}
        self._nvme_read, self._nvme_write = machine.nvme_read_bytes_per_s, machine.nvme_write_bytes_per_s
        self._h2d = self._calibration.h2d_bytes_per_s or machine.h2d_bytes_per_s
        self._d2h = self._calibration.d2h_bytes_per_s or machine.d2h_bytes_per_s
        self._update_bytes = 8 * len(plan.problem.state_kinds) + UPDATE_BYTES - 24
        self._update = self._calibration.update_params_per_s or (
            machine.optimizer_params_per_s * UPDATE_BYTES / self._update_bytes
        )
        by_cost: dict[Cost, Callable[[Op], float]] = {
            Cost.BLOCK: self._block,
            Cost.BUFFER: self._buffer,
            Cost.DEQUANTISE: self._dequantise,
            Cost.COPY: self._copy,
            Cost.UPDATE: self._update_seconds,
            Cost.ADD: self._add,
            Cost.SIGNAL: lambda op: COPY_S,
            Cost.REPORT: lambda op: CLIP_S,
            Cost.READ: self._read,
            Cost.READ_TO_DEVICE: self._read_to_device,
            Cost.WRITE: self._write,
            Cost.COMMIT: lambda op: COMMIT_S,
        }
        self._by_action = {name: by_cost[action.cost] for name, action in ACTIONS.items()}
        self._correction = self._mean_correction()

    # ------------------------------------------------------------------ every lane

    def seconds(self, op: Op) -> float:
        return self._by_action[op.action.name](op) * self.share(op)

    def share(self, op: Op) -> float:
        """In how many of the steps an op is not skipped, if a router is as likely to choose any expert."""
        routing = self.plan.problem.routing
        if routing is None or a.SKIPS not in op.flags:
            return 1.0
        tokens = self._tokens_of_step if op.action.skips == "gradient" else self._tokens_of_group
        idle = routing.idle(tokens)
        # What an update applies is of the step before, where it was used, or of all those since then, where it is now.
        return 1 - idle * routing.idle(self._tokens_of_step) if op.action.skips == "update" else 1 - idle

    def _copy(self, op: Op) -> float:
        if is_device_local(self.plan, op):
            return COPY_S + 2 * op.nbytes / self._machine.gpu_copy_bytes_per_s
        return COPY_S + op.nbytes / (self._h2d if op.lane == "h2d" else self._d2h)

    def _update_seconds(self, op: Op) -> float:
        start, end = self.plan.buffers[op.block].update(op.index)
        return COPY_S + (end - start) / self._update

    def _add(self, op: Op) -> float:
        """What ranks have found of the part is read, and the sum, which is written again."""
        found = 1 if a.OF_RANK in op.slots else self.plan.problem.ranks
        moved = op.nbytes * (found + 2)
        return COPY_S + moved / (self._update * self._update_bytes)

    def _read(self, op: Op) -> float:
        return DISK_S + op.nbytes / self._nvme_read

    def _read_to_device(self, op: Op) -> float:
        seconds = self._read(op)
        return seconds if self._machine.gpu is None else max(seconds, op.nbytes / self._h2d)  # they cross the same link

    def _write(self, op: Op) -> float:
        return DISK_S + op.nbytes / self._nvme_write

    def _buffer(self, op: Op) -> float:
        numel = self.plan.buffers[op.block].numel
        moved = self._update_bytes if op.action.phase == "update" else FP32 * (3 if op.action is a.ADD_REPLICA else 1)
        return COPY_S + numel * moved / self._machine.gpu_copy_bytes_per_s

    def _dequantise(self, op: Op) -> float:
        buffer = self.plan.buffers[op.block]
        made = buffer.copy_numel * self.plan.problem.compute_bytes
        return COPY_S + (buffer.nbytes + made) / self._machine.gpu_copy_bytes_per_s

    # ------------------------------------------------------------------ compute

    def representative(self, block: str) -> str:
        return self._same[block]

    def tokens(self, op: Op) -> int:
        chunk = self._chunks[op.index]
        return chunk.end - chunk.start

    def pairs(self, op: Op) -> int:
        """Pairs of a query of the op's chunk and a key that the op looks at."""
        block = self._blocks[op.block]
        work = op.action.work
        if not block.attends or work.pairs is None:
            return 0
        key = self._same[op.block], op.index, op.slots[a.KEYS] if work.one_chunk_of_keys else WHOLE
        if key not in self._pairs:
            chunk = self._chunks[op.index]
            documents, keys = self._documents[chunk.micro_batch], None
            if work.one_chunk_of_keys:
                other = self._keys[chunk.micro_batch, op.slots[a.KEYS]]
                keys = other.start, other.end
            ranges = chunk.start, chunk.end, documents, block.sliding_window, block.span_tokens, keys
            self._pairs[key] = chunk_pairs(*ranges)
        return self._pairs[key]

    def _block(self, op: Op) -> float:
        block = self._blocks[op.block]
        new = sum(self.plan.buffers[name].numel for name in block.buffers if a.zero(name) in op.flags)
        # A layer's first gradients take the place of sums that nobody reads; of other blocks they are zeroed before.
        zeroing = (-new if op.action.work.fresh_gradients else new) * FP32 / self._machine.gpu_copy_bytes_per_s
        key = (op_kind(op, self._same[op.block]), self.tokens(op), self.pairs(op))
        if key not in self._known:
            self._known[key] = self._measured(op) or self._formula(op) * self._correction
        offloading = 0.0
        if a.GRAPH in op.slots and op.action.phase == "forward":  # read and written
            offloading = 2 * offloaded_graph_bytes(block, self.tokens(op)) / self._machine.gpu_copy_bytes_per_s
        cached = op.slots.get(a.MOVED_TOKENS, 0) * block.kv_bytes_per_token / self._machine.gpu_copy_bytes_per_s
        return self._known[key] + zeroing + offloading + cached

    def _measured(self, op: Op) -> float | None:
        """From the samples of its kind: a time per token and one per pair where there are samples to tell them apart,
        else the formula, corrected by what it missed."""
        for twin in _twins(op):
            samples = self._calibration.samples.get(op_kind(twin, self._same[op.block]), ())
            if samples:
                break
        else:
            return None
        tokens, pairs = self.tokens(op), self.pairs(op)
        least, most = min(samples, key=lambda s: s.pairs), max(samples, key=lambda s: s.pairs)
        if most.pairs > 1.2 * least.pairs and most.tokens == least.tokens:
            slope = max(0.0, (most.seconds - least.seconds) / (most.pairs - least.pairs))
            base = max(0.0, least.seconds - slope * least.pairs)
            seconds = base * tokens / least.tokens + slope * pairs
            return seconds * self._formula(op, tokens, pairs) / self._formula(twin, tokens, pairs)
        return most.seconds * self._formula(op) / self._formula(twin, most.tokens, most.pairs)

    def _mean_correction(self) -> float:
        """Measured over computed time of all samples: how far the formulas are from this device."""
        measured = computed = 0.0
        names = {same: name for name, same in reversed(self._same.items())}
        for kind, samples in self._calibration.samples.items():
            block, _, action = kind.partition(" ")
            if block not in names:
                continue
            name, with_graph, _ = action.partition(_WITH_GRAPH)
            flags = frozenset([a.SAVED_GRAPH] if with_graph else [])
            op = Op(
                id=0,
                action=ACTIONS[name],
                block=block,
                index=0,
                step=0,
                reads=(),
                writes=(),
                deps=(),
                slots={a.KEYS: 0},
                flags=flags,
            )
            for sample in samples:
                measured += sample.seconds
                computed += self._formula(op, sample.tokens, sample.pairs)
        return measured / computed if computed else 1.0

    def _formula(self, op: Op, tokens: int | None = None, pairs: int | None = None) -> float:
        """Seconds of `op` by its figures, or of one like it on a single chunk of `tokens` tokens and `pairs` pairs."""
        times = self._merged if tokens is None else 1
        tokens = self.tokens(op) if tokens is None else tokens
        pairs = self.pairs(op) if pairs is None else pairs
        block, machine = self._blocks[op.block], self._machine
        p = self.plan.problem
        hidden = tokens * p.hidden_size * p.compute_bytes
        work, passes = op.action.work, self._matmul_passes(op, block)
        if work.looks_up:
            return times * self._launch + 6 * hidden / machine.gpu_copy_bytes_per_s
        seconds = passes[0] * tokens / machine.matmul_flops
        # Few tokens: reading the weights takes longer than multiplying by them.
        reads = passes[0] / block.matmul_flops_per_token if block.matmul_flops_per_token else passes[1]
        weights = times * self._numel[block.name] * p.compute_bytes * reads / machine.gpu_copy_bytes_per_s
        seconds = max(seconds, weights)
        if work.logits:
            vocabulary = block.matmul_flops_per_token // (2 * p.hidden_size)
            moved = HEAD_BYTES * vocabulary * tokens + (8 if work.sums_gradients else 2) * hidden
        else:
            elementwise = block.elementwise_bytes_per_token or 30 * p.hidden_size * p.compute_bytes
            moved = round(passes[1] * tokens * elementwise)
        if work.sums_gradients:
            # Gradients leave the products in the compute dtype and are added to float32 sums, or there at once.
            at_once = block.summed_numel if machine.gpu is not None or p.compute_bytes == FP32 else 0
            moved += times * self._trained[block.name] * 2 * FP32
            moved += times * (self._trained[block.name] - at_once) * p.compute_bytes
        if work.pairs is not None:
            seconds += self._attention(op, pairs, *work.pairs)
        launches = 1 if passes[1] <= 1 else 2
        return launches * times * self._launch + seconds + moved / machine.gpu_copy_bytes_per_s

    def _matmul_passes(self, op: Op, block: BlockShape) -> tuple[float, float]:
        """FLOPs a token of an op's matrix products, and how many forward passes through the layer its elementwise work
        comes to: it is the same whether or not weights are trained, which spares the products of their gradients."""
        matmul, projection = block.matmul_flops_per_token, block.projection_flops_per_token
        work = op.action.work
        flops = (work.matmul + work.gradients) * matmul + (work.projection + work.projection_gradients) * projection
        if work.recompute and a.SAVED_GRAPH not in op.flags:
            flops += matmul - block.unread_flops_per_token
        if not matmul:
            return flops, 0.0 if work.one_chunk_of_keys else 1.0
        frozen = block.frozen_flops_per_token / matmul
        spared = frozen * (work.gradients * matmul + work.projection_gradients * projection)
        return flops - spared, flops / matmul

    def _attention(self, op: Op, pairs: int, per_q: int, per_out: int) -> float:
        block = self._blocks[op.block]
        if not pairs:
            return 0.0
        heads = max(1, block.lse_bytes_per_token // FP32)
        width = block.q_numel_per_token // heads
        rate = attention_rate(self._machine, width, self.plan.max_chunk_tokens // self._merged)
        speed = rate.forward_flops if per_q == 2 else rate.backward_flops
        return pairs * (per_q * block.q_numel_per_token + per_out * block.out_numel_per_token) / speed


def attention_rate(machine: Machine, head_dim: int, chunk_tokens: int) -> AttentionRate:
    """The machine's rate at the nearest head size and, of those, the nearest chunk."""
    return min(
        machine.attention,
        key=lambda rate: (abs(rate.head_dim - head_dim), abs(rate.chunk_tokens - chunk_tokens), rate.chunk_tokens),
    )


def is_device_local(plan: Plan, op: Op) -> bool:
    """Whether a copy offloads an activation within the compute device, or restores it, and so crosses no link."""
    if not (device_local := plan.saved_on_gpu):
        return False
    for resources in (op.reads, op.writes):  # called for each op of each plan that is tried
        for resource in resources:
            if resource[0] in r.SAVED_SPACES and resource[1:] in device_local:
                return True
    return False
