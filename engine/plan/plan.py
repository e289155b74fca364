"""The plan: where every kind of every buffer lives, how a step is cut, how many slots there are, what is saved for
backward.

`planner.py` makes it from a PlanInput. The schedule, the runtime and the command line read it; nothing else decides a
size or a place.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from typing import Any, Literal

from penstock.engine.plan.activations import ACTIVATIONS, BETWEEN, largest
from penstock.engine.plan.chunks import Chunk, Filled, Streams, cut_chunks, filled_streams, own, streams
from penstock.engine.plan.problem import (
    ALIGNMENT,
    FP32,
    GRAPH_SLACK_BYTES,
    SAMPLE_STAGES,
    UPDATE_PARTS,
    BlockShape,
    BufferShape,
    PlanInput,
    PlanOptions,
    Pool,
    Tier,
)

Graph = Literal["gpu", "offloaded"] | None
"""Where the saved graph of a layer's chunk is; None: it is not saved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferPlan(BufferShape):
    """A flat buffer, and where it lives."""

    pool: Pool
    weights: Tier
    """On NVMe a frozen buffer's are those of the committed state, any other's are scratch."""
    state: Tier | None
    """Tier of the optimizer's state: master weights and what it keeps beside them; None of a frozen buffer."""
    gradient: Tier | None
    """Tier in which the complete gradient waits for the optimizer; None of a frozen buffer."""
    sums: Tier | None = None
    """Tier in which the float32 sum waits for the step's next group; None where there is one group, or it is frozen."""
    ranks: int = 1
    first_owner: int = 0
    """Rank that owns the first part; the next one owns the next part, and so on."""
    by_part: bool = False
    """Whether each update op is of one part."""

    def owner(self, part: int) -> int:
        """The rank that keeps a part's state and gradient, and updates it."""
        return (self.first_owner + part) % self.ranks

    def owned(self, rank: int) -> range:
        """The parts of a rank."""
        return range((rank - self.first_owner) % self.ranks, self.num_parts, self.ranks)

    def owned_numel(self, rank: int) -> int:
        return sum(end - start for start, end in map(self.part, self.owned(rank)))

    def kept(self, start: int, end: int) -> slice:
        """Where elements from `start` to `end`, of whole parts, are in memory that holds the owner's parts alone, one
        behind the other."""
        first = start // self.part_numel // self.ranks * self.part_numel
        return slice(first, first + end - start)

    @property
    def num_parts(self) -> int:
        return -(-self.numel // self.part_numel)

    def part(self, index: int) -> tuple[int, int]:
        return index * self.part_numel, min(self.numel, (index + 1) * self.part_numel)

    def piece(self, index: int, pieces: int) -> tuple[int, int]:
        """First element and end of piece `index` of `pieces` of about equal length, each of whole pages."""
        pages = -(-self.numel // ALIGNMENT)
        return pages * index // pieces * ALIGNMENT, min(self.numel, pages * (index + 1) // pieces * ALIGNMENT)

    @property
    def update_numel(self) -> int:
        """Elements of one update op: a part, or UPDATE_PARTS of them where all that an update touches lives in RAM."""
        in_ram = self.weights == self.state == self.gradient == "ram" and not self.by_part
        return self.part_numel * (UPDATE_PARTS if in_ram else 1)

    @property
    def num_updates(self) -> int:
        """Update ops of the buffer in a step; the last may be shorter."""
        return -(-self.numel // self.update_numel)

    def update(self, index: int) -> tuple[int, int]:
        """First element and end of what update op `index` changes."""
        return index * self.update_numel, min(self.numel, (index + 1) * self.update_numel)


@dataclass(frozen=True, kw_only=True, slots=True)
class TierPlan:
    """Bytes of one tier; `parts` adds up to `peak_bytes`."""

    budget_bytes: int
    peak_bytes: int
    parts: dict[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The decisions for one run."""

    problem: PlanInput
    choice: PlanOptions
    buffers: dict[str, BufferPlan]
    chunks: tuple[Chunk, ...]
    weight_slots: dict[Pool, int]
    weight_slot_bytes: dict[Pool, int]
    gradient_slots: dict[Pool, int]
    state_stages: int
    """RAM slots that hold one part of the state (and gradient) on its way to or from NVMe."""
    part_stages: int
    """RAM slots that hold one part of weights or gradient on its way."""
    activation_stages: int
    """RAM slots that hold one saved activation on its way to or from NVMe."""
    activation_stage_bytes: int
    spilled: frozenset[tuple[int, int]]
    """(block, chunk of a group) whose saved activations live on NVMe between forward and backward."""
    recomputed: frozenset[int]
    """Layers of which only the input is saved: backward recomputes keys, values and attention."""
    saved_on_gpu: frozenset[tuple[int, int]]
    """(block, chunk) whose saved activations stay on the compute device, as RAM has no capacity for them."""
    saved_graphs: frozenset[tuple[int, int]]
    """(block, chunk) of which everything is saved: backward recomputes nothing."""
    offloaded_graphs: frozenset[tuple[int, int]]
    """Those of them whose graph leaves the compute device, as part of their saved activations."""
    streamed: bool
    """Keys and values pass through the compute device chunk by chunk; else those of a micro-batch are there whole."""
    windows: int
    """Windows for keys and values that are there whole; micro-batches take them in turn."""
    tiers: dict[str, TierPlan]
    rank: int = 0
    """Whose it is: all have as much of everything, but parts and chunks of their own."""

    def of_rank(self, rank: int) -> Plan:
        """The same of another rank."""
        return replace(self, rank=rank, chunks=cut_chunks(self.problem, rank)) if self.problem.ranks > 1 else self

    @property
    def spread(self) -> dict[int, int]:
        """Group of experts -> the rank that computes it in a training step, of all ranks' chunks: a layer's groups are
        dealt in turns. Empty where each rank computes all blocks of its own."""
        groups = self.problem.groups_of_experts if self.choice.spread else []
        return {block: i % self.problem.ranks for each in groups for i, block in enumerate(each)}

    @property
    def unspread(self) -> Plan:
        """The same with all blocks computed by each rank."""
        return replace(self, choice=replace(self.choice, spread=False))

    def others(self, filled: Filled | None, multiple: int = 1) -> list[Chunk]:
        """The other ranks' chunks of a step, where experts are spread: numbered on from this rank's own, first those of
        the next rank, then of the one behind it, and so on. `filled`: of all the step's micro-batches, or of a rank's,
        as all others' are; `multiple`: see filled_streams."""
        p, result = self.problem, list[Chunk]()
        for offset in range(1, p.ranks if self.choice.spread else 1):
            rank = (self.rank + offset) % p.ranks
            other = self.of_rank(rank) if p.sharded else replace(self, rank=rank)  # of equal chunks
            of = filled
            if filled is not None and len(filled) > p.micro_batches:
                of = [filled[other.in_step(number)] for number in range(p.micro_batches)]
            first = offset * len(self.chunks)
            result += [replace(c, index=first + c.index) for c in own(other.filled_streams(of, multiple))]
        return result

    def rank_of(self, chunk: int) -> int:
        """Whose the chunk of that number is."""
        return (self.rank + chunk // len(self.chunks)) % self.problem.ranks

    def in_step(self, micro_batch: int) -> int:
        """Where a micro-batch of this rank is among those of the whole step."""
        p, size = self.problem, self.problem.replica_micro_batches
        if p.sharded:
            return micro_batch
        return (micro_batch // size * p.ranks + self.rank) * size + micro_batch % size

    @property
    def streams(self) -> Streams:
        """Per micro-batch all of its chunks, of this rank or not."""
        if self.problem.sharded:
            return streams(self.problem, self.rank)
        result: dict[int, list[Chunk]] = {}
        for chunk in self.chunks:
            result.setdefault(chunk.micro_batch, []).append(chunk)
        return list(result.values())

    @property
    def blocks(self) -> tuple[BlockShape, ...]:
        return self.problem.blocks

    @property
    def window_tokens(self) -> int:
        """Tokens of one micro-batch's stream: the length of the K/V window."""
        return self.problem.rows * self.problem.row_tokens

    @property
    def group(self) -> int:
        """Micro-batches of a group; the step's last group may have fewer."""
        return self.problem.group_of(self.choice.group)

    @property
    def num_groups(self) -> int:
        return -(-self.problem.micro_batches // self.group)

    def replica(self, chunk: Chunk) -> int:
        """Which of a rank's replicas, by round, a chunk of the step belongs to."""
        if self.problem.sharded:
            return chunk.shard // self.problem.ranks
        return chunk.micro_batch // self.problem.replica_micro_batches

    def begins_replica(self, chunk: Chunk) -> bool:
        """Whether backward is through with a replica behind that chunk, the last one of its visit."""
        first = self.problem.sharded or chunk.local == 0
        return first and chunk.micro_batch % self.problem.replica_micro_batches == 0

    @property
    def group_chunks(self) -> tuple[Chunk, ...]:
        """The chunks of one group; the next group's saved activations take the place of theirs, index by index."""
        return self.chunks[: self.num_group_chunks]

    @property
    def num_group_chunks(self) -> int:
        return len(self.chunks) if self.num_groups == 1 else self.group * self.window_chunks

    def index_in_group(self, chunk: int) -> int:
        """The index, within its group, of the step's chunk of that index; other ranks' keep theirs."""
        return chunk if chunk >= len(self.chunks) else chunk % self.num_group_chunks

    @property
    def lazy(self) -> frozenset[str]:
        """Buffers of experts that are updated only when they are needed, or have a gradient: those whose state is not
        on the GPU, where an update moves nothing."""
        names = (name for block in self.problem.senders for name in self.blocks[block].buffers)
        return frozenset(name for name in names if self.buffers[name].state in ("ram", "nvme"))

    def groups(self, chunks: Sequence[Chunk]) -> list[list[Chunk]]:
        """`chunks` of a step by group, in the order in which groups are computed: the step's last chunks first.

        Backward goes through chunks from the last to the first. Gradients are thus summed in the same order, and with
        the same bits, in however many groups, except those of a buffer that two blocks share.
        """
        result: dict[int, list[Chunk]] = {}
        for chunk in chunks:
            result.setdefault(chunk.micro_batch // self.group, []).append(chunk)
        return [result[number] for number in sorted(result, reverse=True)]

    @property
    def row_documents(self) -> list[list[int]]:
        """Per micro-batch the starts of its documents when every row is one."""
        return [list(range(0, self.window_tokens, self.problem.row_tokens))] * self.problem.micro_batches

    def filled_streams(self, filled: Filled | None, multiple: int = 1) -> Streams:
        """`streams` of a step whose micro-batches have `filled` tokens before their padding."""
        if filled is None:
            return self.streams
        return filled_streams(self.streams, filled, multiple, 1 if self.problem.sharded else self.problem.apart)

    def filled_chunks(self, filled: Filled | None) -> Sequence[Chunk]:
        """What the rank computes of it."""
        return self.chunks if filled is None else list(own(self.filled_streams(filled)))

    @property
    def max_chunk_tokens(self) -> int:
        chunks = self.streams[0] if self.problem.sharded else self.chunks
        return max(chunk.end - chunk.start for chunk in chunks)

    @property
    def spill_bytes(self) -> int:
        """Bytes of saved activations on NVMe at the turn from forward to backward."""
        return sum(self.saved_bytes(*saved_activations) for saved_activations in self.spilled)

    @property
    def window_chunks(self) -> int:
        """Chunks of a micro-batch that the rank computes."""
        return bisect_right(self.chunks, 0, key=attrgetter("micro_batch"))

    @property
    def stream_chunks(self) -> int:
        """Chunks of a micro-batch, whoever computes them."""
        return len(self.streams[0]) if self.problem.sharded else self.window_chunks

    def saved_activations(self, block: int, chunk: int) -> dict[str, int]:
        """Kind -> bytes of what is saved for backward of a layer's chunk: x, saved, kv, recurrent, graph."""
        c, key = self.chunks[chunk], (block, chunk)
        graph = graph_location(key, self.saved_graphs, self.offloaded_graphs)
        first = c.local == 0 and not self.problem.sharded  # else another rank's chunk may come before it
        return saved_activations(self.problem, block, c.end - c.start, block in self.recomputed, graph, first)

    def saved_bytes(self, block: int, chunk: int) -> int:
        """Bytes of them, each kind in whole pages."""
        return sum(self.saved_activations(block, chunk).values())

    def _saved(self) -> dict[str, dict[str, Any]]:
        """Buffer, the first of its layer -> chunks by what is saved of them, and by where, if not in RAM."""
        layers = {b.buffers[0]: i for i, b in enumerate(self.blocks) if b.saved_inputs and b.backward and b.buffers}
        elsewhere = ("spilled", "saved_on_gpu", "offloaded_graphs")
        counts = {name: Counter(i for i, _ in getattr(self, name)) for name in ("saved_graphs", *elsewhere)}
        result = {}
        for name in self.buffers:
            saved, i = {}, layers.get(name, -1)
            if i >= 0:
                rest = "full" if i in self.recomputed or not self.blocks[i].attends else "selective"
                cached = counts["saved_graphs"][i]
                saved = {"none": cached, "selective": 0, "full": 0} | {rest: self.num_group_chunks - cached}
            result[name] = {"activation_checkpointing": saved, **{kind: counts[kind][i] for kind in elsewhere}}
        return result

    @property
    def reference_bytes(self) -> dict[Tier, int]:
        """Tier -> bytes of the reference model's weights there, of those that are not the model's; no tier has none."""
        held = Counter[Tier]()
        for buffer in self.buffers.values():
            if buffer.reference_of is not None:
                held[buffer.weights] += buffer.nbytes
        return dict(held)

    def _of_all(self, tier: str) -> TierPlan:
        """A tier of one rank, but RAM of all of them: what they share, each has its part of."""
        own, times = self.tiers[tier], self.problem.ranks
        if tier != "ram" or times == 1:
            return own
        parts = {name: times * size for name, size in own.parts.items()}
        return TierPlan(budget_bytes=times * own.budget_bytes, peak_bytes=times * own.peak_bytes, parts=parts)

    def _item_bytes(self, buffer: BufferPlan) -> int:
        """Bytes of one parameter's weights and state, gradient excluded."""
        state = 0 if buffer.frozen else len(self.problem.state_kinds) * FP32
        return buffer.weight_bytes + state

    def to_json(self) -> dict[str, Any]:
        """The plan for people and files: tier of every kind of every buffer, slots, bytes per tier."""
        saved = self._saved()
        owner = {name: block.name for block in reversed(self.blocks) for name in block.buffers}
        own = [buffer for buffer in self.buffers.values() if buffer.reference_of is None]
        return {
            "blocks": [
                {
                    "name": b.name,
                    "block": owner[b.name],
                    "weights": b.weights,
                    "state": b.state,
                    "gradient": b.gradient,
                    "sums": b.sums,
                    "bytes": b.numel * self._item_bytes(b),
                    "frozen": b.frozen,
                    "float32": b.float32,
                    **saved[b.name],
                }
                for b in own
            ],
            "reference": self.reference_bytes,
            "chunks": len(self.chunks),
            "chunk_tokens": self.max_chunk_tokens,
            "groups": self.num_groups,
            "group_tokens": self.group * self.window_tokens,
            "one_group": self.problem.one_group and self.problem.micro_batches > 1,
            "group_chunks": self.num_group_chunks,
            "layer_chunks": self.num_group_chunks * sum(bool(b.saved_inputs) and b.backward for b in self.blocks),
            "spilled_activations": {"chunks": len(self.spilled), "bytes": self.spill_bytes},
            "saved_on_gpu": {"chunks": len(self.saved_on_gpu), "bytes": self.tiers["gpu"].parts["saved activations"]},
            "spread_experts": self.choice.spread,
            "recomputed_blocks": [self.blocks[i].name for i in sorted(self.recomputed)],
            "saved_graphs": {"chunks": len(self.saved_graphs), "bytes": self.tiers["gpu"].parts["saved graphs"]},
            "offloaded_graphs": {
                "chunks": len(self.offloaded_graphs),
                "bytes": sum(self.saved_activations(*key)["graph"] for key in self.offloaded_graphs),
            },
            "kv_window": "streamed" if self.streamed else "whole",
            "weight_slots": dict(self.weight_slots),
            "gradient_slots": dict(self.gradient_slots),
            "state_stages": self.state_stages,
            "part_stages": self.part_stages,
            "activation_stages": self.activation_stages,
            "ranks": self.problem.ranks,
            "replicas": self.problem.replicas,
            "tiers": {name: asdict(self._of_all(name)) for name in self.tiers},
        }


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def graph_location(
    key: tuple[int, int], saved: Container[tuple[int, int]], offloaded: Container[tuple[int, int]]
) -> Graph:
    """Where the graph of the chunk `key` is, of which all those are `saved`, and those `offloaded` elsewhere."""
    return None if key not in saved else "offloaded" if key in offloaded else "gpu"


def saved_activations(
    problem: PlanInput, block: int, tokens: int, recomputed: bool, graph: Graph, first: bool
) -> dict[str, int]:
    """Kind -> bytes, in whole pages, of what is saved for backward of `tokens` tokens of a layer; nothing without a
    backward.

    x, sent: its inputs; saved: attention's output and log-sum-exp; kv: keys and values, unless ranks give each other
    theirs once more; recurrent: the state that it begins with; graph: all that its graph holds, of which x and saved
    are part. `graph`: where that is, if it is saved; `first`: it begins a micro-batch.
    """
    shape = problem.blocks[block]
    if not (shape.backward and shape.saved_inputs):
        return {}
    kinds = () if graph else shape.saved_inputs
    if shape.attends and not recomputed:
        kinds += ("kv",) if graph else ("saved",) if problem.sharded else ("saved", "kv")
    if shape.recurrent and not first:
        kinds += ("recurrent",)
    result = {kind: aligned(ACTIVATIONS[kind].nbytes(problem, shape, tokens)) for kind in kinds}
    return result | ({"graph": aligned(offloaded_graph_bytes(shape, tokens))} if graph == "offloaded" else {})


def graph_bytes(block: BlockShape) -> int:
    """Bytes a token of a saved graph of a layer, with attention's log-sum-exp."""
    assert block.graph_bytes_per_token is not None
    return block.graph_bytes_per_token + block.lse_bytes_per_token


def offloaded_graph_bytes(block: BlockShape, tokens: int) -> int:
    """Bytes of what a graph of `tokens` tokens holds where it is laid out in one piece."""
    return tokens * graph_bytes(block) + GRAPH_SLACK_BYTES


def graph_slot_bytes(problem: PlanInput, max_chunk: int) -> int:
    """Bytes of a slot on the compute device for any layer's graph of one chunk on its way."""
    shapes = [block for block in problem.blocks if block.graph_bytes_per_token is not None]
    return aligned(max(offloaded_graph_bytes(block, max_chunk) for block in shapes))


def activation_slots(problem: PlanInput, tokens: int) -> dict[str, list[int]]:
    """Space on the compute device -> bytes of its slots, in whole pages; none of a kind that the model does not
    make."""
    sizes = {row.gpu: [aligned(largest(problem, row.name, tokens))] * row.slots for row in ACTIVATIONS.values()}
    return {space: each for space, each in sizes.items() if any(each)}


def between_bytes(problem: PlanInput, tokens: int) -> dict[str, int]:
    """Memory in RAM for what waits of a chunk between two blocks: space -> bytes, in whole pages."""
    sizes = {str(ACTIVATIONS[kind].ram): aligned(largest(problem, kind, tokens)) for kind in BETWEEN}
    return {space: size for space, size in sizes.items() if size}


def gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"


@dataclass(frozen=True, slots=True)
class SampleRegions:
    """Memory of samples, each piece in whole pages."""

    layers: list[int]
    """Blocks with keys and values."""
    stages: list[int]
    """Bytes on the compute device of a layer's keys and values: one for each layer where they stay, else a few for
    all."""
    logits: int
    """Bytes on the compute device: float32 [sequences, vocabulary]."""
    cached: dict[int, int]
    """Block -> bytes in RAM of that layer's keys and values."""

    @property
    def gpu_bytes(self) -> int:
        return sum(self.stages) + self.logits

    @property
    def ram_bytes(self) -> int:
        return sum(self.cached.values())


def sample_regions(problem: PlanInput) -> SampleRegions:
    """What samples take with keys and values on the tier of `problem.samples`; nothing where there are none."""
    space = problem.samples
    if space is None:
        return SampleRegions([], [], 0, {})
    attending = [i for i, block in enumerate(problem.blocks) if block.attends]
    sizes = {i: aligned(space.rows * problem.blocks[i].kv_bytes_per_token) for i in attending}
    stages = [max(sizes.values(), default=0)] * min(SAMPLE_STAGES, len(sizes))
    if space.tier == "gpu":
        stages = list(sizes.values())
    logits = aligned(space.sequences * space.vocabulary * FP32)
    return SampleRegions(list(sizes), stages, logits, sizes if space.tier == "ram" else {})


def boundary_chunks(problem: PlanInput, group_chunks: tuple[Chunk, ...]) -> tuple[Chunk, ...]:
    """The chunks whose hidden state between two blocks may have to wait in RAM: none where all stay in their slots."""
    return group_chunks if problem.trains or not stay_in_slots(problem, len(group_chunks)) else ()


def stay_in_slots(problem: PlanInput, chunks: int) -> bool:
    """Whether a forward without backward leaves so many chunks in their slots: the running op takes one slot more."""
    return chunks < ACTIVATIONS["x"].slots and list(between_bytes(problem, 1)) == [ACTIVATIONS["x"].ram]
