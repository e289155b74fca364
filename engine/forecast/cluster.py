"""A recipe on several machines: whether FSDP2 has room for it on their GPUs, how long a step takes, and what bounds it.

`penstock cluster` shards every parameter over all GPUs (torch.distributed.fsdp.fully_shard, a group per layer and one
for embedding and head). A GPU works on whole micro-batches; the micro-batches of a step are dealt out evenly.

**Memory** of a GPU: of each trained parameter master weight, gradient and two moments in float32, 16 bytes over the
number of GPUs, of a frozen one 2; of the layer that computes and of the next one, which is fetched meanwhile, the whole
weights in bfloat16, and those of embedding and head all the time; of the largest of these groups its gradient, in
bfloat16 and, to be reduced, in float32; what forward saves of each layer; and either the logits, which exist as a
whole, or the graph of one layer, whichever is more. `LOGIT_BYTES` and `RESERVE_BYTES` say what else.

**Time**: FLOPs by engine/forecast/flops.py over the GPU's rates, and elementwise work over its memory's, times what a
whole step of PyTorch reaches of these rates (`ACHIEVED`). Meanwhile a layer's weights cross the links in bfloat16, once
forward and once backward, and its gradient in float32 for every micro-batch: of each (N - 1) / N to every GPU, in a
ring. With a mixture's load-balancing loss all but one of a GPU's micro-batches go forward once more, to count where the
step's tokens go. The slower of the two counts, layer by layer; embedding and head have nothing to hide behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.engine.config import Recipe
from penstock.engine.forecast.costs import HEAD_BYTES, LAUNCH_S
from penstock.engine.forecast.flops import (
    BACKWARD,
    backward_matmul,
    block_matmul,
    model_flops,
    pair_flops,
    unread_matmul,
)
from penstock.engine.forecast.search import promised_s
from penstock.engine.machine.clusters import MOST_NODES, Cluster
from penstock.engine.machine.peaks import peak_flops, utilisation
from penstock.engine.machine.profile import AttentionRate
from penstock.engine.model.spec import ModelSpec, graph_key
from penstock.storage.files.errors import UserError

BF16, FP32 = 2, 4
UPDATE_BYTES = 32
"""Read or written per parameter by the norm of the gradient and AdamW: all four, three of them back."""
LOGIT_BYTES = 10
"""Of each logit at once: bfloat16, the logarithm of its softmax in float32, and the gradient of that."""
GRAPH_SHARE = 1.5
"""Of the graph of a layer that backward has recomputed: what it holds, and gradients that pass through it; assumed."""
RESERVE_BYTES = 3 * 2**30
"""CUDA's context and NCCL's buffers; assumed."""
ALLOCATOR_SHARE = 1 / 16
"""Of what is allocated, which the allocator takes more than it is asked for; assumed."""
COLLECTIVE_S = 1e-4
"""What an all-gather or a reduce-scatter takes beside its bytes; assumed."""
ACHIEVED = {"eager": 0.59, "compiled": 0.67}
"""Of the rates of kernels alone: what a whole step of PyTorch reaches, whose layers run eagerly or are compiled. Fitted
to published figures: torchtitan's of Llama 3.1 8B on 8 H100, 5,762 and 6,667 tokens/s of each (github.com/pytorch/
torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, table 1), and IBM's of Llama 2 70B on 96, compiled, 890
(github.com/foundation-model-stack/fms-fsdp, README.md). tests/engine/forecast/test_cluster.py holds the forecast
against these and others."""
SOURCE = "planned from data sheets, not measured"


@dataclass(frozen=True, slots=True)
class Recompute:
    """What backward recomputes of a layer: shares of its matrix products and of its attention."""

    matmul: float
    attention: float
    saved: tuple[int, ...]
    """Per layer: bytes a token that forward saves of it, beside its input."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What crosses the links in a collective of all GPUs, or in several: seconds by the link that they take."""

    nvlink_s: float
    network_s: float

    @property
    def seconds(self) -> float:
        return max(self.nvlink_s, self.network_s)

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.nvlink_s + other.nvlink_s, self.network_s + other.network_s)

    def __mul__(self, times: float) -> Traffic:
        return Traffic(times * self.nvlink_s, times * self.network_s)


def collective(cluster: Cluster, nbytes: float) -> Traffic:
    """An all-gather or a reduce-scatter of so many bytes, in rings through all GPUs. A GPU sends (N - 1) / N of the
    bytes over NVLink; a node as much to the next one, through all of its GPUs' ports."""
    if cluster.gpus == 1 or not nbytes:
        return Traffic(0.0, 0.0)
    share, gpu = nbytes * (cluster.gpus - 1) / cluster.gpus, cluster.gpu
    inside = share / gpu.nvlink_bytes_per_s if cluster.gpus_per_node > 1 else 0.0
    across = share / (cluster.gpus_per_node * gpu.network_bytes_per_s) if cluster.nodes > 1 else 0.0
    return Traffic(inside and inside + COLLECTIVE_S, across and across + COLLECTIVE_S)


def require_whole(recipe: Recipe) -> None:
    """Raise UserError where the vision tower is trained, frozen weights are quantised, or experts in groups: none of
    that is there on several machines or in a DCP checkpoint."""
    if recipe.model.train_vision != "none":
        raise UserError(
            f"model.train_vision: {recipe.model.train_vision}, but images are trained on one machine only; set it to "
            "none for several machines or a DCP checkpoint"
        )
    if recipe.model.frozen_format != "compute":
        raise UserError(
            f"model.frozen_format: {recipe.model.frozen_format} runs on one machine only; set it to compute in a new "
            "run for several machines or a DCP checkpoint"
        )
    if (groups := recipe.train.expert_groups or 1) > 1:
        raise UserError(
            f"train.expert_groups: {groups} groups of experts run on one machine only; set it to 1 in a new run for "
            "several machines or a DCP checkpoint"
        )


def require_cluster(recipe: Recipe, cluster: Cluster) -> int:
    """Micro-batches of a step for each GPU. Raises UserError where the recipe's do not divide by the GPUs, or it has
    what several machines do not."""
    require_whole(recipe)
    train, gpus = recipe.train, cluster.gpus
    if train.compute_dtype == "float32":
        raise UserError("--cluster: only bfloat16 can be planned, but train.compute_dtype is float32")
    micro_batches = train.micro_batches
    if micro_batches % gpus:
        sequences = max(1, round(micro_batches / gpus)) * gpus * train.micro_batch_size
        fix = f"train.global_batch_size={sequences}"
        if train.global_batch_size % gpus == 0:  # the step stays what it is
            fix = f"train.micro_batch_size={train.global_batch_size // gpus}"
        raise UserError(
            f"--cluster {cluster.nodes}x{cluster.gpus_per_node}: the {micro_batches:,} micro-batches of a step "
            f"(train.global_batch_size {train.global_batch_size:,} / train.micro_batch_size "
            f"{train.micro_batch_size:,}) cannot be divided among {gpus:,} GPUs; set {fix}, or choose other nodes"
        )
    return micro_batches // gpus


def cluster_forecast(
    spec: ModelSpec,
    recipe: Recipe,
    cluster: Cluster,
    lengths: Sequence[int] | None = None,
    *,
    compiled: bool = False,
    recompute: Recompute | None = None,
) -> dict[str, Any]:
    """What FSDP2 makes of a recipe on `cluster`, as JSON-ready data. Raises UserError as `require_cluster` does.

    `lengths`: of a step's documents in tokens; None: every row is one. `compiled`: layers run through torch.compile.
    `recompute`: None is what train.activation_checkpointing says, auto being full.
    """
    each, train = require_cluster(recipe, cluster), recipe.train
    rows = [recipe.data.sequence_length] * train.global_batch_size
    lengths = rows if lengths is None else list(lengths)
    model = _OnCluster(spec, cluster, recompute or _recompute(spec, train.activation_checkpointing, compiled), compiled)
    tokens = train.micro_batch_size * recipe.data.sequence_length
    parts = model.memory(tokens)
    peak_bytes, budget = sum(parts.values()), cluster.gpu.gpu_bytes
    compute_s, traffic, step_s = model.step(
        tokens, lengths, each, counted=(each - 1) * spec.balances_routers(train.router_aux_loss)
    )
    step_s = promised_s(step_s)
    total, peak = sum(lengths), peak_flops(cluster.gpu.gpu)
    links = {"NVLink": traffic.nvlink_s, "the network": traffic.network_s}
    slowest = max(links, key=lambda name: links[name])
    return {
        "nodes": cluster.nodes,
        "gpus_per_node": cluster.gpus_per_node,
        "gpu": cluster.gpu.gpu,
        "source": SOURCE,
        "compiled": compiled,
        "fits": peak_bytes <= budget,
        "budget_bytes": budget,
        "peak_bytes": peak_bytes,
        "parts": parts,
        "steps": train.steps,
        "micro_batches_per_gpu": each,
        "step_s": step_s,
        "tokens_per_s": total / step_s,
        "run_s": train.steps * step_s,
        "compute_s": compute_s,
        "nvlink_s": traffic.nvlink_s,
        "network_s": traffic.network_s,
        "bound_by": "compute" if compute_s >= links[slowest] else slowest,
        "network_gbit_per_s": cluster.gpu.network_gbit_per_s,
        "mfu": utilisation(model_flops(spec, lengths), step_s * cluster.gpus, peak),
        "would_fit": [] if peak_bytes <= budget else _would_fit(spec, recipe, cluster, recompute, compiled),
    }


class _OnCluster:
    """A model whose parameters are sharded over a cluster's GPUs."""

    def __init__(self, spec: ModelSpec, cluster: Cluster, recompute: Recompute, compiled: bool) -> None:
        self.spec, self.cluster, self.recompute = spec, cluster, recompute
        self.achieved = ACHIEVED["compiled" if compiled else "eager"]
        self.graphs = _graph_bytes(spec, compiled)
        """Per layer: bytes a token of its graph, which its elementwise work passes through memory."""
        layers = [self._params(block.buffers) for block in spec.blocks[1:-1]]
        ends = self._params(dict.fromkeys((*spec.blocks[0].buffers, *spec.blocks[-1].buffers)))
        self.groups = [*layers, ends]
        """(parameters, trained ones) of what is gathered at once: each layer, then embedding and head."""

    def _params(self, buffers: Sequence[str] | dict[str, None]) -> tuple[int, int]:
        sizes = {name: sum(param.numel for param in self.spec.buffers[name].params) for name in buffers}
        return sum(sizes.values()), sum(size for name, size in sizes.items() if not self.spec.buffers[name].frozen)

    # ------------------------------------------------------------------ memory

    def memory(self, tokens: int) -> dict[str, int]:
        """Part -> bytes of a GPU's memory at most, with micro-batches of so many tokens."""
        spec, gpus = self.spec, self.cluster.gpus
        trained = spec.num_trained
        layers, ends = [params for params, _ in self.groups[:-1]], self.groups[-1][0]
        two = sum(sorted(layers)[-2:])
        logits = tokens * spec.vocab_size * LOGIT_BYTES
        graph = round(max(self.graphs, default=0) * GRAPH_SHARE) * tokens
        saved = sum(tokens * (BF16 * spec.hidden_size + size) for size in self.recompute.saved)
        parts = {
            "master weights": -(-trained * FP32 // gpus),
            "gradients": -(-trained * FP32 // gpus),
            "moments": -(-trained * 2 * FP32 // gpus),
            "frozen weights": -(-(spec.num_params - trained) * BF16 // gpus),
            "gathered weights": BF16 * (two + ends),
            "gradient to be reduced": (BF16 + FP32) * max(trained for _, trained in self.groups),
            "saved activations": saved,
            "logits": logits if logits >= graph else 0,
            "one layer's graph": graph if logits < graph else 0,
        }
        parts["CUDA, NCCL, allocator"] = RESERVE_BYTES + round(ALLOCATOR_SHARE * sum(parts.values()))
        return {name: size for name, size in parts.items() if size}

    # ------------------------------------------------------------------ time

    def step(self, tokens: int, lengths: Sequence[int], each: int, *, counted: int = 0) -> tuple[float, Traffic, float]:
        """(seconds that a GPU computes, what crosses the links, seconds) of a step; `lengths`: of all GPUs' documents;
        `counted`: of a GPU's `each` micro-batches those that go forward twice."""
        spec, trained = self.spec, self.spec.num_trained
        all_micro_batches = each * self.cluster.gpus
        update = UPDATE_BYTES * trained / self.cluster.gpus / self.cluster.gpu.copy_bytes_per_s
        compute, traffic, step, forwards = 0.0, Traffic(0.0, 0.0), 0.0, 1 + counted / each
        for index, (params, own) in enumerate(self.groups[:-1], start=1):
            gathered, reduced = collective(self.cluster, BF16 * params), collective(self.cluster, FP32 * own)
            forward = self._forward(index, tokens, lengths, all_micro_batches)
            compute, traffic = compute + forwards * forward, traffic + gathered * forwards
            step += forwards * max(forward, gathered.seconds)
            if index >= spec.lowest_trained:
                backward = self._backward(index, tokens, lengths, all_micro_batches, forward)
                moved = gathered + reduced
                compute, traffic, step = compute + backward, traffic + moved, step + max(backward, moved.seconds)
        params, own = self.groups[-1]
        ends = collective(self.cluster, BF16 * params) + collective(self.cluster, FP32 * own)
        head = self._head(tokens)
        compute, traffic, step = compute + head, traffic + ends, step + head + ends.seconds
        return each * compute + update, traffic * each, each * step + update

    def _forward(self, index: int, tokens: int, lengths: Sequence[int], micro_batches: int) -> float:
        """Seconds of a layer's forward; `lengths` are of so many micro-batches."""
        spec, gpu = self.spec, self.cluster.gpu
        shape, rate = spec.attention[index - 1], self._attention_rate(index)
        seconds = tokens * block_matmul(spec, spec.blocks[index]) / gpu.matmul_flops
        seconds += pair_flops(shape, lengths, 1, 1) / micro_batches / rate.forward_flops
        seconds += tokens * self.graphs[index - 1] / gpu.copy_bytes_per_s
        return seconds / self.achieved + LAUNCH_S["gpu"]

    def _backward(self, index: int, tokens: int, lengths: Sequence[int], micro_batches: int, forward: float) -> float:
        """Seconds of a layer's backward with what it recomputes."""
        spec, gpu, again = self.spec, self.cluster.gpu, self.recompute
        block, shape, rate = spec.blocks[index], spec.attention[index - 1], self._attention_rate(index)
        # torch.utils.checkpoint stops once it has all that backward wants: what nobody reads is not recomputed.
        recomputed = block_matmul(spec, block) - unread_matmul(spec, block, spec.unread[index - 1])
        seconds = tokens * (backward_matmul(spec, index) + again.matmul * recomputed) / gpu.matmul_flops
        seconds += pair_flops(shape, lengths, 3, 2) / micro_batches / rate.backward_flops
        seconds += again.attention * pair_flops(shape, lengths, 1, 1) / micro_batches / rate.forward_flops
        seconds += (BACKWARD + again.matmul) * tokens * self.graphs[index - 1] / gpu.copy_bytes_per_s
        return seconds / self.achieved + 2 * LAUNCH_S["gpu"]

    def _attention_rate(self, index: int) -> AttentionRate:
        """The rate at the nearest head size."""
        shape = self.spec.attention[index - 1]
        head_dim = 0 if shape is None else shape.qk_dim
        return min(self.cluster.gpu.attention, key=lambda rate: abs(rate.head_dim - head_dim))

    def _head(self, tokens: int) -> float:
        """Seconds of the head and the loss, whose logits, made whole, pass through memory twice as often as in ours."""
        spec, gpu, last = self.spec, self.cluster.gpu, len(self.spec.blocks) - 1
        flops = block_matmul(spec, spec.blocks[last]) + backward_matmul(spec, last)
        passed = 2 * HEAD_BYTES * spec.vocab_size
        return (tokens * flops / gpu.matmul_flops + tokens * passed / gpu.copy_bytes_per_s) / self.achieved


def _graph_bytes(spec: ModelSpec, compiled: bool) -> list[int]:
    """Per layer the bytes a token of its graph in bfloat16; where they are not known as costs.py has it."""
    known: Sequence[int | None] = (None,) * len(spec.attention)
    for key, scale in ((graph_key("bfloat16", compiled), 1), (graph_key("bfloat16", False), 1), ("float32", 2)):
        if key in spec.graph_bytes:
            known = tuple(None if size is None else size // scale for size in spec.graph_bytes[key])
            break
    return [30 * spec.hidden_size * BF16 if size is None else size for size in known]


def _recompute(spec: ModelSpec, checkpointing: str, compiled: bool) -> Recompute:
    """What train.activation_checkpointing means there: selective saves attention's output, too."""
    if checkpointing == "none":
        return Recompute(0.0, 0.0, tuple(_graph_bytes(spec, compiled)))
    if checkpointing != "selective":
        return Recompute(1.0, 1.0, (0,) * len(spec.attention))
    outputs = (0 if shape is None else shape.heads * (BF16 * shape.v_dim + FP32) for shape in spec.attention)
    return Recompute(1.0, 0.0, tuple(outputs))


def _would_fit(
    spec: ModelSpec, recipe: Recipe, cluster: Cluster, recompute: Recompute | None, compiled: bool
) -> list[str]:
    """Changes that were tried and make it fit, each alone: a smaller micro-batch, full recomputation, twice as many
    nodes and so on; where none does, more nodes and a smaller micro-batch."""
    train, result = recipe.train, []

    def fits(changed: Recipe, on: Cluster) -> bool:
        again = recompute or _recompute(spec, changed.train.activation_checkpointing, compiled)
        tokens = changed.train.micro_batch_size * changed.data.sequence_length
        return sum(_OnCluster(spec, on, again, compiled).memory(tokens).values()) <= on.gpu.gpu_bytes

    smaller = replace(recipe, train=replace(train, micro_batch_size=1))
    if train.micro_batch_size > 1 and fits(smaller, cluster):
        result.append("train.micro_batch_size=1")
    full = replace(recipe, train=replace(train, activation_checkpointing="full"))
    if recompute is None and train.activation_checkpointing in ("selective", "none") and fits(full, cluster):
        result.append("train.activation_checkpointing=full")
    for changed, words in ((recipe, ""), (smaller, "train.micro_batch_size=1 on ")):
        more = (replace(cluster, nodes=cluster.nodes << power) for power in range(1, MOST_NODES.bit_length()))
        on = next((on for on in more if on.nodes <= MOST_NODES and fits(changed, on)), None)
        if on is not None:
            return [*result, f"{words}{on.nodes}x{on.gpus_per_node} GPUs"]
    return result
