"""The plan: where every kind of every buffer lives, how the step is cut into chunks, how many slots there are, what is
saved for backward and what is computed again.

`engine/plan/planner.py` makes it from a Problem. The schedule, the runtime and the command line read it; nothing else
decides a size or a place.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Literal

Tier = Literal["gpu", "ram", "nvme"]
Pool = Literal["layer", "edge"]
Role = Literal["embed", "layer", "head"]
Save = Literal["auto", "input", "attention", "everything"]
"""What forward saves of a layer for backward: its input; also keys, values, attention's output and log-sum-exp; or all
that autograd wants, so that nothing is computed again."""
Window = Literal["auto", "whole", "streamed"]
"""Whether one layer's keys and values are on the compute device whole or pass through it chunk by chunk."""

GpuFirst = Literal["graphs", "blocks", "half", "graphs only", "records"]
"""What the GPU's memory that the working set leaves goes to: kept graphs, then resident blocks; the other way round;
half for each; graphs alone, as the update of resident blocks takes time of what computes; or records that wait there,
then resident blocks. Graphs are kept only where no record goes to NVMe."""
Recompute = Literal["none", "half", "all"]
"""Whose attention backward computes again: no layer's, the first half's, which wait longest, or every layer's."""
RamFirst = Literal["activations", "weights", "state"]
"""What RAM is filled with: all records, so that none goes to NVMe, then weights, gradients, state; or weights, records,
gradients, state; or weights, gradients, state, records. What is not there moves twice a step, weights thrice."""

STATE_KINDS = ("master", "exp_avg", "exp_avg_sq")
FP32 = 4
LAST_GOOD = "last good generation"
"""Part of the NVMe tier that is there where the disk has room for it."""
ALIGNMENT = 4096
UPDATE_PARTS = 8
"""Parts that one op updates in RAM, where nothing has to be staged: a socket updates a part in 0.7 ms, and an op costs
0.1 to 0.2 ms of Python."""
HIDDEN_SLOTS = 6
"""Activations of one chunk on the GPU: x, dy and dx or y of the running op, x and dy of the next, one leaving."""
SAVED_SLOTS = 3
"""Attention outputs of one chunk on the GPU: the running op's, the next one's, one leaving."""
KV_SLOTS = 4
"""Chunks of keys and values on the GPU when they are streamed: the op's own, the running one's, two on their way."""
DKV_SLOTS = 4
"""Chunks of their gradients on the GPU then: the running op's, the next one's, one leaving, the chunk's own."""


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
    q_numel_per_token: int = 0
    """Elements of the queries of one token."""
    out_numel_per_token: int = 0
    """Elements of attention's output of one token."""
    window_tokens: int | None = None
    """Keys that a query sees, its own included; None: all before it."""
    span_tokens: int | None = None
    """A query sees keys of its own span of so many tokens only, counted from the document's start; None: of all."""
    graph_bytes_per_token: int | None = None
    """What autograd keeps of a forward of this layer, weights excluded; None: not known, so it is never kept."""
    matmul_flops_per_token: int = 0
    """FLOPs of its matrix products forward; experts count for the tokens routed to them."""
    unread_flops_per_token: int = 0
    """Those of them that a forward which is repeated in backward leaves out."""
    projection_flops_per_token: int = 0
    """Those of them that make queries, keys and values."""

    @property
    def attends(self) -> bool:
        """Whether the layer has attention."""
        return self.kv_bytes_per_token > 0

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
    save: Save = "auto"
    kv_window: Window = "auto"
    nvme_budget: int | None = None
    """Bytes of disk; None: as much as there is."""
    kept_generations: int = 0
    """Generations that are kept on disk beside the two between which a run alternates."""
    last_good: bool = False
    """Whether the last good generation is to be kept beside these, where there is room."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What the search decides (engine/forecast/search.py); budgets decide the rest."""

    streamed: bool = False
    gpu_first: GpuFirst = "blocks"
    recompute: Recompute = "none"
    ram_first: RamFirst = "weights"
    stages: int = 2
    """Parts of state, and of weights or gradients, that are on their way to or from NVMe at once."""
    spare_slots: int = 1
    """Weight slots for layers beyond those that one layer computes with: how many are fetched ahead."""


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

    def piece(self, index: int, pieces: int) -> tuple[int, int]:
        """First element and end of piece `index` of `pieces` of about equal length, each of whole pages."""
        pages = -(-self.numel // ALIGNMENT)
        return pages * index // pieces * ALIGNMENT, min(self.numel, pages * (index + 1) // pieces * ALIGNMENT)

    @property
    def update_numel(self) -> int:
        """Elements of one update op: a part, or UPDATE_PARTS of them where all that an update touches lives in RAM."""
        in_ram = self.weights == self.state == self.gradient == "ram"
        return self.part_numel * (UPDATE_PARTS if in_ram else 1)

    @property
    def num_updates(self) -> int:
        """Update ops of the buffer in a step; the last may be shorter."""
        return -(-self.numel // self.update_numel)

    def update(self, index: int) -> tuple[int, int]:
        """First element and end of what update op `index` changes."""
        return index * self.update_numel, min(self.numel, (index + 1) * self.update_numel)


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
    choice: Choice
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
    recomputed: frozenset[int]
    """Layers of which only the input is saved: backward computes keys, values and attention again."""
    held: frozenset[tuple[int, int]]
    """(block, chunk) whose saved activations stay on the compute device, as RAM has no room for them."""
    kept: frozenset[tuple[int, int]]
    """(block, chunk) of which everything is saved, on the compute device: backward computes nothing again."""
    streamed: bool
    """Keys and values pass through the compute device chunk by chunk; else those of a micro-batch are there whole."""
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
    def row_documents(self) -> list[list[int]]:
        """Per micro-batch the starts of its documents when every row is one."""
        return [list(range(0, self.window_tokens, self.problem.row_tokens))] * self.problem.micro_batches

    @property
    def max_chunk_tokens(self) -> int:
        """Tokens of the longest chunk."""
        return max(chunk.end - chunk.start for chunk in self.chunks)

    @property
    def spill_bytes(self) -> int:
        """Bytes of saved activations on NVMe at the turn from forward to backward."""
        return sum(self.record_bytes(*record) for record in self.spilled)

    @property
    def window_chunks(self) -> int:
        """Chunks of one micro-batch."""
        return max(chunk.local for chunk in self.chunks) + 1

    def record(self, block: int, chunk: int) -> dict[str, int]:
        """Kind -> bytes of what is put aside for backward of a layer's chunk: x, saved, kv."""
        c = self.chunks[chunk]
        return record(self.problem, block, c.end - c.start, block in self.recomputed, (block, chunk) in self.kept)

    def record_bytes(self, block: int, chunk: int) -> int:
        """Bytes of the record, each of its kinds in whole pages."""
        return sum(self.record(block, chunk).values())

    @property
    def part_numel(self) -> int:
        """Elements of the largest part of any buffer."""
        return max(buffer.part_numel for buffer in self.buffers.values())

    def _saved(self) -> dict[str, dict[str, Any]]:
        """Buffer -> chunks of its layer by what is saved of them, and those whose records are not in RAM."""
        kept, spilled, held = _counts(self.kept), _counts(self.spilled), _counts(self.held)
        found = {name: {"saved": {}, "spilled": 0, "held": 0} for name in self.buffers}
        for i, block in enumerate(self.blocks):
            if block.role == "layer" and block.name in found:
                rest = "input" if i in self.recomputed or not block.attends else "attention"
                saved = {"everything": kept[i], "attention": 0, "input": 0} | {rest: len(self.chunks) - kept[i]}
                found[block.name] = {"saved": saved, "spilled": spilled[i], "held": held[i]}
        return found

    def to_json(self) -> dict[str, Any]:
        """The plan for people and files: tier of every kind of every block, slots, bytes per tier."""
        saved = self._saved()
        return {
            "blocks": [
                {
                    "name": b.name,
                    "weights": b.weights,
                    "state": b.state,
                    "gradient": b.gradient,
                    "bytes": b.numel * (self.problem.compute_bytes + 3 * FP32),
                    **saved[b.name],
                }
                for b in self.buffers.values()
            ],
            "chunks": len(self.chunks),
            "chunk_tokens": self.max_chunk_tokens,
            "layer_chunks": len(self.chunks) * sum(block.role == "layer" for block in self.blocks),
            "spilled_activations": {"chunks": len(self.spilled), "bytes": self.spill_bytes},
            "held_activations": {"chunks": len(self.held), "bytes": self.tiers["gpu"].parts["held activations"]},
            "recomputed_blocks": [self.blocks[i].name for i in sorted(self.recomputed)],
            "kept_activations": {"chunks": len(self.kept), "bytes": self.tiers["gpu"].parts["kept activations"]},
            "kv_window": "streamed" if self.streamed else "whole",
            "weight_slots": dict(self.weight_slots),
            "gradient_slots": dict(self.gradient_slots),
            "state_stages": self.state_stages,
            "part_stages": self.part_stages,
            "activation_stages": self.activation_stages,
            "tiers": {name: asdict(tier) for name, tier in self.tiers.items()},
        }


def _counts(keys: frozenset[tuple[int, int]]) -> Counter[int]:
    return Counter(block for block, _ in keys)


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


def aligned(nbytes: int) -> int:
    """Bytes in whole pages."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def record(problem: Problem, block: int, tokens: int, recomputed: bool, kept: bool) -> dict[str, int]:
    """Kind -> bytes, in whole pages, of what is put aside for backward of `tokens` tokens of a layer.

    x: its input; saved: attention's output and log-sum-exp; kv: keys and values.
    """
    shape = problem.blocks[block]
    per_token = {
        "x": 0 if kept else problem.hidden_size * problem.compute_bytes,
        "saved": 0 if kept or recomputed else shape.saved_bytes_per_token,
        "kv": 0 if recomputed else shape.kv_bytes_per_token,
    }
    return {kind: aligned(tokens * size) for kind, size in per_token.items() if size}


def gib(nbytes: int) -> str:
    """`nbytes` for people."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"


def _widest(blocks: tuple[BlockShape, ...], name: str) -> int:
    widths: list[int] = [getattr(block, name) for block in blocks]
    return max(widths)


def window_bytes(problem: Problem, max_chunk: int, streamed: bool) -> dict[str, list[int]]:
    """What attention reads and sums on the compute device: name -> bytes of each buffer, in whole pages.

    Whole: keys and values of a micro-batch (kv) and their float32 gradients (dkv). Streamed: KV_SLOTS and DKV_SLOTS
    chunks of them, and of the running chunk queries (q), the gradient of attention's output (dout), and in float32 the
    partial output and its log-sum-exp, or the queries' gradient (partial, partial_lse).
    """
    blocks = problem.blocks
    kv, kv_numel = _widest(blocks, "kv_bytes_per_token"), _widest(blocks, "kv_numel_per_token")
    if not streamed:
        tokens = problem.rows * problem.row_tokens
        return {"kv": [aligned(tokens * kv)], "dkv": [aligned(tokens * kv_numel * FP32)]}
    q, out = _widest(blocks, "q_numel_per_token"), _widest(blocks, "out_numel_per_token")
    return {
        "kv": [aligned(max_chunk * kv)] * KV_SLOTS,
        "dkv": [aligned(max_chunk * kv_numel * FP32)] * DKV_SLOTS,
        "q": [aligned(max_chunk * q * problem.compute_bytes)],
        "dout": [aligned(max_chunk * out * problem.compute_bytes)],
        "partial": [aligned(max_chunk * max(q, out) * FP32)],
        "partial_lse": [aligned(max_chunk * _widest(blocks, "lse_bytes_per_token"))],
    }


def attention_regions(
    problem: Problem, chunks: tuple[Chunk, ...], streamed: bool, recomputing: bool, spilling: bool
) -> dict[str, list[int]]:
    """RAM that one block's pass over a micro-batch needs beside the records: name -> bytes per chunk, in whole pages.

    saved: attention's output and log-sum-exp, computed again; kv: keys and values that have no record in RAM; dkv:
    their float32 gradients.
    """
    tokens = [chunk.end - chunk.start for chunk in chunks if chunk.micro_batch == 0]
    blocks = problem.blocks
    wanted = {
        "saved": _widest(blocks, "saved_bytes_per_token") * recomputing,
        "kv": _widest(blocks, "kv_bytes_per_token") * (streamed and (recomputing or spilling)),
        "dkv": _widest(blocks, "kv_numel_per_token") * FP32 * streamed,
    }
    return {name: [aligned(n * size) for n in tokens] if size else [] for name, size in wanted.items()}
