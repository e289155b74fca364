"""The plan: where every kind of every buffer lives, how the step is cut into chunks, how many slots there are.

`make_plan` reads shapes and budgets only: no torch, no device, no file. The schedule, the runtime and the
command line read the result; nothing else decides a size or a place.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from storage.errors import BudgetError

Tier = Literal["gpu", "ram", "nvme"]
Pool = Literal["layer", "edge"]
Role = Literal["embed", "layer", "head"]

STATE_KINDS = ("master", "exp_avg", "exp_avg_sq")
FP32 = 4
ALIGNMENT = 4096
HIDDEN_SLOTS = 6
"""Activations of one chunk on the GPU: x, dy and dx or y of the running op, x and dy of the next, one leaving."""
SAVED_SLOTS = 3
"""Attention outputs of one chunk on the GPU: the running op's, the next one's, one leaving."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferShape:
    """One flat buffer of the model, as the planner sees it."""

    name: str
    numel: int
    """Elements, padding included."""
    part_numel: int
    """Elements of one part (chunk file); the last part may be shorter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockShape:
    """One streamed unit of the model, as the planner sees it."""

    name: str
    role: Role
    buffers: tuple[str, ...]
    """Flat buffers whose weights it computes with: its own, which bears its name, and shared ones."""
    out_bytes_per_token: int = 0
    """Saved attention output, compute dtype; 0 where the layer has no attention."""
    lse_bytes_per_token: int = 0
    """Saved log-sum-exp, float32."""
    kv_bytes_per_token: int = 0
    """Keys and values, compute dtype."""
    kv_numel_per_token: int = 0
    """Elements of keys and values of one token."""

    @property
    def saved_bytes_per_token(self) -> int:
        """Attention output and log-sum-exp of one token."""
        return self.out_bytes_per_token + self.lse_bytes_per_token


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Everything that the planner needs to know about a model, a batch and a machine."""

    blocks: tuple[BlockShape, ...]
    """embed, the decoder layers in order, head."""
    buffers: tuple[BufferShape, ...]
    hidden_size: int
    compute_bytes: int
    """Bytes of one element in the compute dtype: 2 for bfloat16, 4 for float32."""
    gradient_bytes: int
    """Bytes of one element of a waiting gradient."""
    micro_batches: int
    rows: int
    """Sequences laid end to end in one micro-batch."""
    row_tokens: int
    chunk_tokens: int
    chunk_per_row: bool
    """One chunk per sequence, whatever its length: layers that carry a recurrent state."""
    workspace_bytes: int
    """Temporaries of the largest compute op: activations of one layer, gradients before they are summed, logits."""
    gpu_budget: int
    ram_budget: int
    device_reads: bool = True
    """Weights on NVMe are read straight into their slot on the compute device, not through a stage in RAM."""
    reader_bytes: int = 0
    """Pinned RAM that the reader takes for itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferPlan:
    """Where one flat buffer lives."""

    name: str
    numel: int
    part_numel: int
    pool: Pool
    weights: Tier
    state: Tier
    """Tier of master, exp_avg and exp_avg_sq."""
    gradient: Tier
    """Tier in which the complete gradient waits for the optimizer."""

    @property
    def num_parts(self) -> int:
        """Parts of the buffer; the last may be shorter."""
        return -(-self.numel // self.part_numel)

    def part(self, index: int) -> tuple[int, int]:
        """First element and end of part `index`."""
        return index * self.part_numel, min(self.numel, (index + 1) * self.part_numel)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A contiguous range of tokens of one micro-batch's stream."""

    index: int
    """Position within the step."""
    micro_batch: int
    local: int
    """Position within the micro-batch."""
    start: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TierPlan:
    """Bytes of one tier; `parts` adds up to `peak_bytes`."""

    budget_bytes: int
    peak_bytes: int
    parts: dict[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The decisions for one run."""

    problem: Problem
    buffers: dict[str, BufferPlan]
    chunks: tuple[Chunk, ...]
    weight_slots: dict[Pool, int]
    weight_slot_numel: dict[Pool, int]
    gradient_slots: dict[Pool, int]
    state_stages: int
    """RAM slots that hold one part of master, exp_avg, exp_avg_sq (and gradient) on its way to or from NVMe."""
    part_stages: int
    """RAM slots that hold one part of weights or gradient on its way."""
    activation_stages: int
    """RAM slots that hold one saved activation on its way to or from NVMe."""
    activation_stage_bytes: int
    spilled: frozenset[tuple[int, int]]
    """(block, chunk) whose saved activations live on NVMe between forward and backward."""
    tiers: dict[str, TierPlan]

    @property
    def blocks(self) -> tuple[BlockShape, ...]:
        """embed, layers, head."""
        return self.problem.blocks

    @property
    def window_tokens(self) -> int:
        """Tokens of one micro-batch's stream: the length of the K/V window."""
        return self.problem.rows * self.problem.row_tokens

    @property
    def max_chunk_tokens(self) -> int:
        """Tokens of the longest chunk."""
        return max(chunk.end - chunk.start for chunk in self.chunks)

    @property
    def spill_bytes(self) -> int:
        """Bytes of saved activations on NVMe at the turn from forward to backward."""
        return sum(self.record_bytes(*record) for record in self.spilled)

    def record_bytes(self, block: int, chunk: int) -> int:
        """Bytes that backward of a layer's chunk needs saved, see _record_bytes."""
        c = self.chunks[chunk]
        return sum(_record_bytes(self.problem, self.blocks[block], c.end - c.start))

    @property
    def part_numel(self) -> int:
        """Elements of the largest part of any buffer."""
        return max(buffer.part_numel for buffer in self.buffers.values())

    def to_json(self) -> dict[str, Any]:
        """The plan for people and files: tier of every kind of every block, slots, bytes per tier."""
        return {
            "blocks": [
                {
                    "name": b.name,
                    "weights": b.weights,
                    "state": b.state,
                    "gradient": b.gradient,
                    "bytes": b.numel * (self.problem.compute_bytes + 3 * FP32),
                }
                for b in self.buffers.values()
            ],
            "chunks": len(self.chunks),
            "chunk_tokens": self.max_chunk_tokens,
            "spilled_activations": {"chunks": len(self.spilled), "bytes": self.spill_bytes},
            "weight_slots": dict(self.weight_slots),
            "gradient_slots": dict(self.gradient_slots),
            "state_stages": self.state_stages,
            "part_stages": self.part_stages,
            "activation_stages": self.activation_stages,
            "tiers": {name: asdict(tier) for name, tier in self.tiers.items()},
        }


def cut_chunks(micro_batches: int, rows: int, row_tokens: int, chunk_tokens: int, per_row: bool) -> tuple[Chunk, ...]:
    """The chunks of one step: each micro-batch's stream cut every `chunk_tokens`, or once per row."""
    total = rows * row_tokens
    width = row_tokens if per_row else min(chunk_tokens, total)
    bounds = [(start, min(start + width, total)) for start in range(0, total, width)]
    return tuple(
        Chunk(index=m * len(bounds) + local, micro_batch=m, local=local, start=start, end=end)
        for m in range(micro_batches)
        for local, (start, end) in enumerate(bounds)
    )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _record_bytes(problem: Problem, block: BlockShape, tokens: int) -> tuple[int, int, int]:
    """Bytes, in whole pages, of what a layer's backward needs of a chunk: input, attention output, keys and values."""
    hidden = problem.hidden_size * problem.compute_bytes
    sizes = (hidden, block.saved_bytes_per_token, block.kv_bytes_per_token)
    hidden_bytes, saved, kv = (_aligned(tokens * size) for size in sizes)
    return hidden_bytes, saved, kv


def gib(nbytes: int) -> str:
    """`nbytes` for people."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"


@dataclass(slots=True)
class _RamPlacement:
    """What place_ram decides."""

    tiers: dict[str, dict[str, Tier]]
    """Buffer -> kind -> tier, for buffers not on the GPU."""
    parts: dict[str, int]
    """Bytes of RAM by use."""
    state_stages: int = 0
    part_stages: int = 0
    activation_stages: int = 0
    activation_stage_bytes: int = 0
    spilled: set[tuple[int, int]] = field(default_factory=set)


class _Planner:
    """Fills the GPU's budget with whole buffers, then RAM's with activations, weights, gradients and state."""

    def __init__(self, problem: Problem) -> None:
        self.problem = p = problem
        self.chunks = cut_chunks(p.micro_batches, p.rows, p.row_tokens, p.chunk_tokens, p.chunk_per_row)
        self.max_chunk = max(c.end - c.start for c in self.chunks)
        layers = [buffers for block in p.blocks if block.role == "layer" for buffers in block.buffers]
        numel = {b.name: b.numel for b in p.buffers}
        self.layer_numel = max(numel[name] for name in layers)
        self.pool: dict[str, Pool] = {n: "layer" if size <= self.layer_numel else "edge" for n, size in numel.items()}
        self.part_numel = max(b.part_numel for b in p.buffers)
        self.ram_budget = p.ram_budget - p.reader_bytes
        # A block that computes with several buffers holds them all at once.
        self.at_once = {
            pool: max(sum(self.pool[n] == pool for n in block.buffers) for block in p.blocks)
            for pool in ("layer", "edge")
        }

    def slots(self, resident: set[str]) -> tuple[dict[Pool, int], dict[Pool, int], dict[Pool, int]]:
        """Weight slots, gradient slots and their elements per pool when `resident` buffers need none."""
        streamed = [b for b in self.problem.buffers if b.name not in resident]
        weights: dict[Pool, int] = {"layer": 0, "edge": 0}
        gradients: dict[Pool, int] = {"layer": 0, "edge": 0}
        numel: dict[Pool, int] = {"layer": 0, "edge": 0}
        for pool in ("layer", "edge"):
            members = [b for b in streamed if self.pool[b.name] == pool]
            if not members:
                continue
            numel[pool] = max(b.numel for b in members)
            extra = 1 if pool == "layer" else 0
            weights[pool] = min(len(members), self.at_once[pool] + extra)
            gradients[pool] = min(len(members), self.at_once[pool] + extra)
        return weights, gradients, numel

    def gpu_parts(self, resident: set[str]) -> dict[str, int]:
        """Bytes of everything on the GPU when `resident` buffers live there whole."""
        p = self.problem
        weights, gradients, numel = self.slots(resident)
        window = p.rows * p.row_tokens
        kv = max(b.kv_bytes_per_token for b in p.blocks)
        kv_numel = max(b.kv_numel_per_token for b in p.blocks)
        saved = max(b.saved_bytes_per_token for b in p.blocks)
        held = sum(b.numel for b in p.buffers if b.name in resident)
        pools: tuple[Pool, ...] = ("layer", "edge")
        return {
            "resident blocks": held * (p.compute_bytes + 4 * FP32),
            "weight slots": sum(weights[k] * _aligned(numel[k] * p.compute_bytes) for k in pools),
            "gradient slots": sum(gradients[k] * _aligned(numel[k] * FP32) for k in pools),
            "K/V window": _aligned(window * kv) + _aligned(window * kv_numel * FP32),
            "activation slots": HIDDEN_SLOTS * _aligned(self.max_chunk * p.hidden_size * p.compute_bytes)
            + SAVED_SLOTS * _aligned(self.max_chunk * saved),
            "workspace": p.workspace_bytes,
        }

    def stream_bytes(self) -> int:
        """The chunks of one block boundary: the hidden states going up, their gradients coming down."""
        hidden = self.problem.hidden_size * self.problem.compute_bytes
        return sum(_aligned((chunk.end - chunk.start) * hidden) for chunk in self.chunks)

    def records(self) -> dict[tuple[int, int], int]:
        """(block, chunk) -> bytes of its saved activations, in the order in which backward wants them."""
        p = self.problem
        return {
            (i, chunk.index): sum(_record_bytes(p, block, chunk.end - chunk.start))
            for i, block in reversed(list(enumerate(p.blocks)))
            if block.role == "layer"
            for chunk in reversed(self.chunks)
        }

    def stage_bytes(self, grad_on_nvme: bool) -> tuple[int, int]:
        """Bytes of one state stage and of one part stage."""
        p = self.problem
        part = self.part_numel
        gradient = p.gradient_bytes if grad_on_nvme else 0
        return _aligned(part * FP32) * 3 + _aligned(part * gradient), _aligned(part * FP32)

    def place_gpu(self) -> set[str]:
        p = self.problem
        resident: set[str] = set()
        need = sum(self.gpu_parts(resident).values())
        if need > p.gpu_budget:
            listing = ", ".join(f"{k} {gib(v)}" for k, v in self.gpu_parts(resident).items() if v)
            raise BudgetError(
                f"budgets.gpu: {gib(p.gpu_budget)} cannot hold one block's working set of {gib(need)} ({listing}); "
                f"give at least {need} bytes, or lower train.chunk_tokens, train.sequences_per_micro_batch or "
                "data.sequence_length"
            )
        for buffer in p.buffers:
            if sum(self.gpu_parts(resident | {buffer.name}).values()) <= p.gpu_budget:
                resident.add(buffer.name)
        return resident

    def place_ram(self, resident: set[str]) -> _RamPlacement:
        """Tier of every kind of the buffers not on the GPU and of every saved activation; RAM by use.

        All activations go to RAM where they fit. Where they do not, weights come first: on NVMe each of their bytes
        would move three times a step (read, read, written), each byte of anything else twice.
        """
        p = self.problem
        rest = [b for b in p.buffers if b.name not in resident]
        records, stream = self.records(), self.stream_bytes()
        activations = stream + sum(records.values())
        sizes = {"weights": p.compute_bytes, "gradient": p.gradient_bytes, "state": 3 * FP32}
        everything = sum(_aligned(b.numel * s) for b in rest for s in sizes.values())
        part_stage = self.stage_bytes(False)[1]
        # GPU-resident state passes through part stages when it is checkpointed.
        through = 2 if resident else 0
        if activations + everything + through * part_stage <= self.ram_budget:
            tiers: dict[str, dict[str, Tier]] = {b.name: {k: "ram" for k in sizes} for b in rest}
            parts = {"activations": activations, "resident blocks": everything, "stages": through * part_stage}
            return _RamPlacement(tiers, parts, part_stages=through)
        placement = self._stages(stream, activations)
        left = self.ram_budget - sum(placement.parts.values())
        spilling = placement.activation_stages > 0
        if spilling:
            placement.spilled.update(records)
        held = 0
        for buffer in rest:
            placement.tiers[buffer.name] = dict.fromkeys(sizes, "nvme")
        for kind, size in sizes.items():
            for buffer in rest:
                need = _aligned(buffer.numel * size)
                if held + need <= left:
                    placement.tiers[buffer.name][kind] = "ram"
                    held += need
            if kind == "weights" and spilling:
                for record, need in records.items():
                    if need > left - held:
                        break
                    placement.spilled.remove(record)
                    placement.parts["activations"] += need
                    left -= need
        placement.parts["resident blocks"] = held
        return placement

    def _stages(self, stream: int, activations: int) -> _RamPlacement:
        """How many stages there are: as many as half of the budget holds beside the activations, or the least."""
        p = self.problem
        state_stage, part_stage = self.stage_bytes(True)[0], self.stage_bytes(False)[1]
        record = max(max(_record_bytes(p, block, self.max_chunk)) for block in p.blocks if block.role == "layer")
        least = 2 * (state_stage + part_stage)
        for spilling in (False, True):
            held = stream if spilling else activations
            for each, own in ((4, 9), (3, 6), (2, 4), (2, 2)):
                staged = each * (state_stage + part_stage)
                moving = own * record if spilling else 0
                if held + staged + moving <= self.ram_budget * (1.0 if own == 2 else 0.5):
                    parts = {"activations": held + moving, "resident blocks": 0, "stages": staged}
                    return _RamPlacement({}, parts, each, each, own if spilling else 0, record if spilling else 0)
        need = stream + 2 * record + least + p.reader_bytes
        raise BudgetError(
            f"budgets.ram: {gib(p.ram_budget)} cannot hold one block's working set of {gib(need)} (hidden states of "
            f"the step {gib(stream)}, staging of one part {gib(least)} and of one chunk {gib(2 * record)}); give at "
            f"least {need} bytes, or lower train.sequences_per_step, data.sequence_length or storage.chunk_bytes"
        )

    def plan(self) -> Plan:
        p = self.problem
        resident = self.place_gpu()
        ram = self.place_ram(resident)
        if p.reader_bytes:
            ram.parts["reader buffers"] = p.reader_bytes
        on_gpu: dict[str, Tier] = {"weights": "gpu", "gradient": "gpu", "state": "gpu"}
        buffers = {}
        for shape in p.buffers:
            kinds = on_gpu if shape.name in resident else ram.tiers[shape.name]
            buffers[shape.name] = BufferPlan(
                name=shape.name,
                numel=shape.numel,
                part_numel=shape.part_numel,
                pool=self.pool[shape.name],
                weights=kinds["weights"],
                state=kinds["state"],
                gradient=kinds["gradient"],
            )
        weights, gradients, numel = self.slots(resident)
        gpu = self.gpu_parts(resident)
        return Plan(
            problem=p,
            buffers=buffers,
            chunks=self.chunks,
            weight_slots=weights,
            weight_slot_numel=numel,
            gradient_slots=gradients,
            state_stages=ram.state_stages,
            part_stages=ram.part_stages,
            activation_stages=ram.activation_stages,
            activation_stage_bytes=ram.activation_stage_bytes,
            spilled=frozenset(ram.spilled),
            tiers={
                "gpu": TierPlan(budget_bytes=p.gpu_budget, peak_bytes=sum(gpu.values()), parts=gpu),
                "ram": TierPlan(budget_bytes=p.ram_budget, peak_bytes=sum(ram.parts.values()), parts=ram.parts),
            },
        )


def make_plan(problem: Problem) -> Plan:
    """Place every kind of every buffer within the budgets.

    Raises BudgetError, with the figures, when a budget cannot hold one block's working set.
    """
    return _Planner(problem).plan()
