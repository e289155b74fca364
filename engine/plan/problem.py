"""What a plan is made from: the model's blocks and buffers as the planner sees them, the budgets, the options."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

Tier = Literal["gpu", "ram", "nvme"]
Pool = Literal[
    "layer",
    "frozen layer",
    "embedding and head",
    "frozen embedding and head",
    "vision tower",
    "frozen vision tower",
    "float32",
]
Checkpointing = Literal["auto", "full", "selective", "none"]
"""What forward saves of a layer for backward: its input; also keys, values, attention's output and log-sum-exp; or all
that autograd wants, so that nothing is recomputed."""
Window = Literal["auto", "whole", "streamed"]
"""Whether one layer's keys and values are on the compute device whole or pass through it chunk by chunk."""

GpuFirst = Literal["graphs", "blocks", "half", "graphs only", "saved activations", "weights"]
"""What the GPU's memory that the working set leaves goes to: saved graphs, then resident blocks; the other way round;
half for each; graphs alone, as the update of resident blocks takes time of what computes; saved activations, then
resident blocks; or weights, whose state is elsewhere, then graphs. Graphs are saved only where no activation goes
to NVMe."""
Recompute = Literal["none", "half", "all"]
"""Whose attention backward recomputes: no layer's, the first half's, which wait longest, or every layer's."""
RamFirst = Literal["activations", "weights", "state", "frozen last"]
"""What RAM is filled with: all activations, so that none goes to NVMe, then weights, gradients, state; or weights,
activations, gradients, state; or weights, gradients, state, activations; or these with frozen weights, which a drive
only reads, last. What is not there moves twice a step, weights thrice."""

SampleTier = Literal["gpu", "ram", "nowhere"]
"""Where keys and values of samples are from one pass to the next; nowhere: each pass reads whole sequences again."""

OffloadedGraphs = Literal["none", "rest", "quarter", "half", "most", "all"]
"""Of which layer chunks whose graph is not saved on the GPU it is offloaded to RAM or NVMe: as many as RAM has capacity
for when all else has been placed; or, before anything else is, a quarter, half, three quarters or all of them, evenly
spread, as a link may be slower than forward."""

FP32 = 4
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""What is computed with."""
STORED_BYTES = DTYPE_BYTES | {"int16": 2}
"""And what is stored: words of quantised weights as well (engine/model/stored.py)."""
LAST_GOOD = "last good generation"
"""Part of the NVMe tier that is there where the disk has room for it."""
ALIGNMENT = 4096
UPDATE_PARTS = 8
"""Parts that one op updates in RAM: a socket updates a part in 0.7 ms, and an op costs 0.1 to 0.2 ms of Python."""
CUBLAS_WORKSPACE_BYTES = 8 * 4096 * 1024
"""cuBLAS's workspace on the compute lane: eight buffers of 4,096 KiB, as engine/machine/device.py asks for."""
BYTES_PER_TOKEN = 7 * 8
"""Device memory of a token in a fetched step, at most: the tensors of engine/model/tokens.py."""
INPUTS_CACHE_BYTES = 64 * 2**20
"""Rotary tables and the like of recent chunks are kept on the device up to this size; beyond it they are made again."""
POOLS: tuple[Pool, ...] = get_args(Pool)
"""Slots on the GPU by what they are for: frozen buffers may be gigabytes beside the megabytes that are trained, and
float32 ones are kilobytes, whose weights stay there and need no slots."""
LAYER_POOLS: tuple[Pool, ...] = ("layer", "frozen layer", "float32")
RING_PARTS = 8
"""Parts of gradients that a rank may hand over before their owners have added them: at tens of gigabytes a second a
part is a millisecond, and a rank sleeps and wakes for another one in a tenth of that."""
GRAPH_SLACK_BYTES = 4 * ALIGNMENT
"""Of a graph that is laid out in one piece: what does not grow with its tokens, and gaps between its tensors."""
SAMPLE_STAGES = 2
"""Layers whose keys and values of the samples are on the GPU at once: the one that runs, the next one's."""
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
    dtype: str
    """Of its weights as they are stored and moved; all state is float32."""
    frozen: bool = False
    """Never trained: weights only, written once."""
    float32: bool = False
    """Its weights are float32 whatever the compute dtype, and stay on the GPU: routers and the like, all small."""
    copy_numel: int = 0
    """Elements of the dequantised copy that it is computed with; 0: it is computed with as it is stored."""
    reference_of: str | None = None
    """The trained buffer whose first values it keeps, for passes of the reference model; None: it is the model's."""

    @property
    def weight_bytes(self) -> int:
        """Of one element of the weights."""
        return STORED_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Of the weights."""
        return self.numel * self.weight_bytes

    @property
    def computed_numel(self) -> int:
        """Elements that are computed with."""
        return self.copy_numel or self.numel

    @property
    def reference(self) -> BufferShape:
        """What keeps the first values of this one, which is trained."""
        return replace(self, name=reference_name(self.name), frozen=True, reference_of=self.name)


def chunks_of_piece(stream_tokens: int, chunk_tokens: int, shards: int) -> int:
    """Into how many chunks of about `chunk_tokens` at most a piece of a shared stream is cut, two pieces a shard."""
    return max(1, min(-(-stream_tokens // (2 * shards * chunk_tokens)), stream_tokens // (2 * shards)))


def reference_name(buffer: str) -> str:
    """Name of the buffer that keeps the first values of one that is trained."""
    return f"{buffer}.reference"


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockShape:
    """One streamed unit of the model, as the planner sees it."""

    name: str
    kind: str
    """How it is computed (engine/schedule/kinds.py)."""
    buffers: tuple[str, ...]
    """Flat buffers whose weights it computes with: its own (the trained one bears its name) and shared ones."""
    inputs: tuple[int, ...] = ()
    """Indices of the blocks whose output it takes, all of them before it."""
    input_kinds: tuple[str, ...] = ("x",)
    """Kinds of activations (plan/activations.py) that it takes from them."""
    saved_inputs: tuple[str, ...] = ()
    """Those of them that backward computes with again."""
    sent_bytes_per_token: int = 0
    """What a layer hands to a branch of it (engine/branches): of both blocks."""
    sent_to: int | None = None
    """Where a layer has several branches, one behind the other, which all take what it sends: the first of them, under
    which that is known and saved. None: this is that one itself, or no branch."""
    backward: bool = True
    """Whether backward passes through it: it or a block below it has something to be trained."""
    out_bytes_per_token: int = 0
    """Saved attention output, compute dtype; 0 where the layer has no attention."""
    lse_bytes_per_token: int = 0
    """Saved log-sum-exp, float32."""
    kv_bytes_per_token: int = 0
    """Keys and values, compute dtype."""
    kv_numel_per_token: int = 0
    q_numel_per_token: int = 0
    out_numel_per_token: int = 0
    recurrent_bytes: int = 0
    """State that a layer hands from chunk to chunk beside keys and values; 0: none."""
    sliding_window: int | None = None
    """Keys that a query sees, its own included; None: all before it."""
    span_tokens: int | None = None
    """A query sees keys of its own span of so many tokens only, counted from the document's start; None: of all."""
    graph_bytes_per_token: int | None = None
    """What a saved graph of this layer holds, weights excluded; None: not known, so it is never saved."""
    elementwise_bytes_per_token: int = 0
    """Read and written by what is elementwise in a forward of this layer, about; 0: not known."""
    summed_numel: int = 0
    """Trained parameters whose gradients products sum in one kernel (engine/model/sums.py)."""
    matmul_flops_per_token: int = 0
    """FLOPs of its matrix products forward; experts count for the tokens routed to them."""
    frozen_flops_per_token: int = 0
    """Those of them by weights that are never trained, which have no gradient of their own."""
    unread_flops_per_token: int = 0
    """Those of them that a forward which is repeated in backward leaves out."""
    projection_flops_per_token: int = 0
    """Those of them that make queries, keys and values."""

    @property
    def of_layer(self) -> bool:
        """Whether it is a decoder layer or a part of one, which backward runs forward once more."""
        return bool(self.saved_inputs) or self.sent_to is not None

    @property
    def attends(self) -> bool:
        return self.kv_bytes_per_token > 0

    @property
    def recurrent(self) -> bool:
        return self.recurrent_bytes > 0

    @property
    def saved_bytes_per_token(self) -> int:
        return self.out_bytes_per_token + self.lse_bytes_per_token

    @property
    def nameless(self) -> BlockShape:
        """Equal of blocks that compute the same."""
        saved = self.saved_inputs if self.sent_to is None else ("sent",)
        return replace(self, name="", buffers=(), inputs=(), sent_to=None, saved_inputs=saved)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleSpace:
    """What sequences that are continued need memory for: the samples of a run or texts of a model that is queried, and
    the completions that a run is trained on, which use the same memory at other times."""

    lengths: tuple[int, ...] = ()
    """Tokens that each sample or text comes to, with what is written behind it."""
    prompts: int = 0
    """With completions that are sampled side by side: all of a generation's, or as many as there is room for."""
    copies: int = 1
    """Completions of a prompt."""
    prompt_tokens: int = 0
    """Of the longest prompt."""
    new_tokens: int = 0
    """Of a completion, at most."""
    shared: bool = False
    """Whether the completions of a prompt have its keys and values in common."""
    keeps: bool
    """Keys and values may be cached; else every new token computes its sequence again."""
    vocabulary: int
    """Logits behind a token."""
    tier: SampleTier | None = None
    """Where they are cached; None: the planner has not chosen yet."""

    @property
    def rows(self) -> int:
        """Of keys and values in each layer."""
        return max(sum(self.lengths), self.prompts * self.rows_of_prompt(self.new_tokens))

    def rows_of_prompt(self, new_tokens: int) -> int:
        """With so many tokens of each of its completions."""
        return self.prompt_tokens * (1 if self.shared else self.copies) + self.copies * new_tokens

    def at_once(self, copies: int) -> int:
        """Prompts that there is room for with so many completions of each, at most `self.copies`."""
        each = replace(self, copies=copies).rows_of_prompt(self.new_tokens)
        return max(1, min(self.prompts * self.copies // copies, self.rows // each))

    @property
    def sequences(self) -> int:
        return max(len(self.lengths), self.prompts * self.copies)

    @property
    def some(self) -> Iterator[SampleSpace]:
        """All prompts at once, or fewer and fewer, at last one."""
        yield self
        if self.prompts > 1:
            yield from replace(self, prompts=-(-self.prompts // 2)).some


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionSpace:
    """What images in the data need memory for."""

    weights_bytes: int = 0
    """Of the tower's weights, which stay on the GPU."""
    work_bytes: int = 0
    """What the tower takes beside them for one image; no other op runs then."""
    flops_per_token: int = 0
    """Forward FLOPs of a trained tower's matrix products, about, for each token of a step, be it of an image or not."""
    features_bytes: int = 0
    """RAM of what the text model is given of the images of the steps on their way."""
    whole_chunks: bool = False
    """A micro-batch is one chunk: its images may lie anywhere in it, and no chunk may cut one."""


NO_VISION = VisionSpace()


@dataclass(frozen=True, slots=True)
class Routing:
    """How the tokens of a layer are sent to its groups of experts."""

    experts: int
    per_token: int
    """Experts that a token is sent to."""
    groups: int

    def idle(self, tokens: int) -> float:
        """The expected share of groups that none of so many tokens is sent to, if all experts are as likely."""
        others = self.experts - self.experts // self.groups
        return float((math.comb(others, self.per_token) / math.comb(self.experts, self.per_token)) ** tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanInput:
    """Everything that the planner needs to know about a model, a batch and a machine."""

    blocks: tuple[BlockShape, ...]
    """embed, the decoder layers in order, head."""
    buffers: tuple[BufferShape, ...]
    hidden_size: int
    compute_dtype: str
    """Of activations."""
    gradient_dtype: str = "float32"
    """Of a waiting gradient."""
    micro_batches: int
    """Of a step, as far as one rank computes it."""
    replicas: int = 1
    """Parts of a step whose gradients are summed apart and added in one order, over all ranks."""
    sharded: bool = False
    """Whether these are shards of every sequence (plan/chunks.py), and not some of the step's micro-batches each."""
    ranks: int = 1
    """Processes that share the step, the weights in RAM and the state, each with a compute device of its own."""
    rows: int
    """Sequences laid end to end in one micro-batch."""
    row_tokens: int
    chunk_tokens: int
    chunk_per_row: bool
    """One chunk per sequence, whatever its length: layers that cannot hand a recurrent state from chunk to chunk."""
    workspace_bytes: int
    """Temporaries of the largest compute op: activations of one layer, gradients before they are summed, logits."""
    gpu_budget: int
    ram_budget: int
    allocator_share: int = 0
    """One part in so many of the GPU's budget is left to the allocator; 0: none."""
    device_reads: bool = True
    """Weights on NVMe are read straight into their slot on the compute device, not through a stage in RAM."""
    reader_bytes: int = 0
    """Pinned RAM that the reader takes for itself."""
    offsite_bytes: int = 0
    """RAM of the process that uploads generations (storage.offsite)."""
    vision: VisionSpace = NO_VISION
    activation_checkpointing: Checkpointing = "auto"
    kv_window: Window = "auto"
    nvme_budget: int | None = None
    """Bytes of disk; None: as much as there is."""
    nvme_capacity: int | None = None
    """Bytes that there are for the run, where there is no such budget; None: not known."""
    retained_generations: int = 0
    """Generations that are kept on disk beside the two between which a run alternates."""
    state_kinds: tuple[str, ...]
    """The optimizer's kinds of state, master weights first."""
    samples: SampleSpace | None = None
    """None: the run writes none."""
    last_good: bool = False
    """Whether the last good generation is to be kept beside these, where there is room."""
    scores: bool = False
    """The loss of a target depends on those of its whole sequence (engine/objectives): the head is visited twice."""
    routing: Routing | None = None
    """Of a mixture whose groups of experts are skipped where a step sends them nothing; None: nothing is skipped."""
    spread_experts: bool | None = False
    """Whether each rank computes some of a layer's groups of experts for all ranks' tokens; None: as is faster."""
    one_group: bool = False
    """Backward needs what all of the step's forward finds, so that all micro-batches are one group."""

    @property
    def compute_bytes(self) -> int:
        """Of one element of activations."""
        return DTYPE_BYTES[self.compute_dtype]

    @property
    def gradient_bytes(self) -> int:
        return DTYPE_BYTES[self.gradient_dtype]

    @property
    def adds_replicas(self) -> bool:
        """Whether gradients leave the compute device once for each replica, and are added in RAM by their owners."""
        return self.replicas > 1

    @property
    def rounds(self) -> int:
        """Replicas that each rank computes: in round i of n ranks rank k computes replica i n + k."""
        return self.replicas // self.ranks

    @property
    def replica_micro_batches(self) -> int:
        return self.micro_batches if self.sharded else self.micro_batches // self.rounds

    @property
    def apart(self) -> int:
        """Micro-batches of a replica, whose gradient is by itself; 0: there is one for all of the step."""
        return self.replica_micro_batches if self.adds_replicas else 0

    def group_of(self, wanted: int) -> int:
        """Micro-batches of a group, where so many are wanted (0: all of them): where replicas are added whole ones."""
        if not wanted or wanted >= self.micro_batches:
            return self.micro_batches
        multiple = self.replica_micro_batches if self.adds_replicas else 1
        return min(self.micro_batches, -(-wanted // multiple) * multiple)

    def divided(self, count: int, at_once: int) -> list[range]:
        """So many prompts in groups that are continued side by side, at most `at_once` in each; ranks take them in
        turns. There is one for each replica if there are prompts enough, whatever the number of ranks."""
        size = min(at_once, -(-count // self.replicas))
        return [range(at, min(at + size, count)) for at in range(0, count, size)]

    @property
    def ring_bytes(self) -> int:
        """RAM of the ring through which a rank hands its gradients to their owners, of what it adds apart, and of what
        all ranks note of a step: the squared norm of each part and the loss of each chunk."""
        if not self.adds_replicas:
            return 0
        noted = (8 * sum(-(-b.numel // b.part_numel) for b in self.buffers), 8 * self.num_chunks)
        apart = [-(-b.numel * FP32 // self.ranks) for b in self.buffers if b.name in self.added_apart]
        sizes = (*noted, *apart, *[self.state_part_numel * FP32] * RING_PARTS)
        return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)

    @property
    def added_apart(self) -> set[str]:
        """Trained buffers that two blocks compute with, where replicas are added: what the upper one finds of all
        replicas is summed by itself, so that it does not matter which of them go forward and backward together."""
        if not self.adds_replicas:
            return set()
        users = Counter(name for block in self.blocks for name in block.buffers)
        return {b.name for b in self.buffers if users[b.name] > 1 and not b.frozen}

    @property
    def num_chunks(self) -> int:
        """Of all ranks' micro-batches."""
        total, width = self.rows * self.row_tokens, self.row_tokens if self.chunk_per_row else self.chunk_tokens
        if self.sharded:
            return self.micro_batches * 2 * self.replicas * chunks_of_piece(total, width, self.replicas)
        return self.ranks * self.micro_batches * -(-total // width)

    @property
    def references(self) -> dict[str, str]:
        """Trained buffer -> the one that keeps its first values; empty where no pass is of the reference model."""
        return {b.reference_of: b.name for b in self.buffers if b.reference_of is not None}

    @property
    def weights_bytes(self) -> int:
        """Of the weights of one model."""
        return sum(buffer.nbytes for buffer in self.buffers if buffer.reference_of is None)

    @property
    def trains(self) -> bool:
        """Whether there is anything to train; else the model is only queried."""
        return not all(buffer.frozen for buffer in self.buffers)

    @property
    def senders(self) -> dict[int, int]:
        """Blocks that are skipped where nothing is sent to them, each with the layer that sends."""
        skipped = [] if self.routing is None else self.groups_of_experts
        return {number: self.blocks[groups[0]].inputs[0] for groups in skipped for number in groups}

    @property
    def groups_of_experts(self) -> list[list[int]]:
        """The blocks that are groups of experts, of each layer that has any."""
        result: list[list[int]] = []
        for number, block in enumerate(self.blocks):
            if block.sent_to is not None:
                result[-1].append(number)
            elif "sent" in block.input_kinds:
                result.append([number])
        return result

    @property
    def may_spread(self) -> bool:
        """Whether ranks may have groups of experts of their own: each has some of every layer's."""
        groups = self.groups_of_experts
        return self.ranks > 1 and bool(groups) and all(len(each) >= self.ranks for each in groups)

    @property
    def may_stream(self) -> bool:
        """Whether keys and values may pass through the compute device: a layer that also carries a recurrent state is
        never cut at its attention."""
        return not any(block.attends and block.recurrent for block in self.blocks)

    def gradient_slot_numel(self, pool: Pool, weight_slot_bytes: int) -> int:
        """Elements of a gradient slot beside weight slots of so many bytes: what is trained is not quantised."""
        return weight_slot_bytes // (FP32 if pool == "float32" else self.compute_bytes)

    @property
    def copy_bytes(self) -> int:
        """Of the dequantised weights of one block, the largest; 0 where none are quantised."""
        return max(buffer.copy_numel for buffer in self.buffers) * self.compute_bytes

    @property
    def state_part_numel(self) -> int:
        """Elements of the largest part of a buffer that is trained; 0 where none is."""
        return max((buffer.part_numel for buffer in self.buffers if not buffer.frozen), default=0)

    @property
    def part_stage_bytes(self) -> int:
        """Bytes that a part of any kind fits; of frozen buffers where the device does not read itself."""
        reads = 0 if self.device_reads else 1
        return max(b.part_numel * (reads * b.weight_bytes if b.frozen else FP32) for b in self.buffers)

    @property
    def continues_only(self) -> bool:
        """Whether all passes are those of samples, which have memory of their own for keys and values."""
        return not self.trains and self.samples is not None

    @property
    def sequences(self) -> int:
        """That are continued side by side, at most."""
        return 0 if self.samples is None else self.samples.sequences

    @property
    def beside_bytes(self) -> int:
        """RAM of the budget that others than the arena take."""
        return self.reader_bytes + self.offsite_bytes + self.vision.features_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """What the search decides (engine/forecast/search.py); budgets decide the rest."""

    streamed: bool = False
    gpu_first: GpuFirst = "blocks"
    recompute: Recompute = "none"
    ram_first: RamFirst = "weights"
    stages: int = 2
    """Parts of state, and of weights or gradients, that are on their way to or from NVMe at once."""
    spare_slots: int = 1
    """Layers whose weights are fetched ahead, each into a slot; one less for embedding and head."""
    group: int = 0
    """Micro-batches that go forward and backward before the next ones do; 0: all of a step."""
    offloaded_graphs: OffloadedGraphs = "none"
    spread: bool = False
    """Each rank computes some of a layer's groups of experts, for the tokens of all ranks."""
