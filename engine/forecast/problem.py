"""From a model, a recipe and budgets to what the planner has to solve; sizes by formula, nothing is allocated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.engine.attention import workspace
from penstock.engine.config import Recipe, SamplesConfig
from penstock.engine.forecast.costs import representatives
from penstock.engine.forecast.flops import block_matmul, projection_matmul, trained_matmul, unread_matmul
from penstock.engine.model.spec import BlockSpec, BufferSpec, ModelSpec, graph_key
from penstock.engine.plan.problem import (
    BYTES_PER_TOKEN,
    CUBLAS_WORKSPACE_BYTES,
    DTYPE_BYTES,
    FP32,
    INPUTS_CACHE_BYTES,
    BlockShape,
    BufferShape,
)

LOGITS_BYTES = {"cpu": 64 * 2**20, "cuda": 2**30}
"""What the logits that exist at once take with their gradient and their float32 rows, per device type."""

LOGIT_BYTES = 12
"""Of one of them: in the compute dtype, in float32, and their gradient."""

DRAW_BYTES = 64
"""Of an entry of the vocabulary while a sequence's next token is drawn, sorted, in float64."""

TEMPLATE_TOKENS = 128
"""What a chat template puts around a message, at most, as far as a plan without the tokenizer is concerned."""

ALLOCATOR_SHARE = 32
"""One part in so many of the GPU's budget is left to the allocator, whose pieces are larger than what is asked for."""

HOLES_BYTES = 5 * 20 * 2**20
"""Most that an op's temporaries lose to holes between them, beside that share: the allocator's large segments grow and
shrink by pages of 20 MiB, and blocks of about that size leave some of them half empty."""


def learned(blocks: tuple[BlockShape, ...], graph_bytes: Mapping[str, int]) -> tuple[BlockShape, ...]:
    """The blocks with what was measured of their graphs."""
    result = [graph_bytes.get(name) for name in representatives(blocks)]
    return tuple(
        block if size is None else replace(block, graph_bytes_per_token=max(1, size - block.lse_bytes_per_token))
        for block, size in zip(blocks, result, strict=True)
    )


def with_tower(blocks: tuple[BlockShape, ...], spec: ModelSpec, flops_per_token: int) -> tuple[BlockShape, ...]:
    """The blocks with what a trained vision tower computes forward for each token of a step."""
    if (vision := spec.vision) is None:
        return blocks
    trained, total = (sum(p.numel for p in spec.params_of(vision, trained=only)) for only in (True, False))
    frozen = flops_per_token - flops_per_token * trained // total
    return tuple(
        replace(block, matmul_flops_per_token=flops_per_token, frozen_flops_per_token=frozen)
        if block.name == vision.name
        else block
        for block in blocks
    )


def most_prompt_tokens(samples: SamplesConfig) -> tuple[int, ...]:
    """About the most tokens that prompts can have, before there is a tokenizer: one a byte, and what goes around."""
    around = TEMPLATE_TOKENS if samples.chat else 1
    return tuple(len(prompt.encode()) + around for prompt in samples.prompts)


def retained_generations(recipe: Recipe) -> int:
    """Generations that a whole run keeps on disk, at most, beside the newest and the one being written."""
    train, storage = recipe.train, recipe.storage
    commits = range(storage.checkpoint_every, train.steps + 1, storage.checkpoint_every)
    for_good = 0 if storage.keep_every is None else sum(step % storage.keep_every == 0 for step in commits)
    uploading = storage.offsite is not None  # a checkpoint until it is at the place
    return min(len(commits), storage.keep_last - 1 + for_good) + storage.keep_best + uploading


def block_shapes(spec: ModelSpec, dtype: str, *, compiled: bool = False) -> tuple[BlockShape, ...]:
    """The blocks as the planner sees them, computing in `dtype`; what is to be trained has spec.graph_bytes of that.
    `compiled`: layers are, and so are their graphs where it is known what these take."""
    shapes, item = [], DTYPE_BYTES[dtype]
    eager = spec.graph_bytes.get(dtype, (None,) * len(spec.attention))
    graphs = spec.graph_bytes.get(graph_key(dtype, compiled), eager)
    numbers = {block.name: i for i, block in enumerate(spec.blocks)}
    for i, block in enumerate(spec.blocks):
        matmul = block_matmul(spec, block) if block.inputs else 0  # what begins with tokens looks them up
        layer, branch = block.layer, block.branch_of
        of, shape = layer if branch is None else branch, None
        first = next((j for j, other in enumerate(spec.blocks) if branch is not None and other.branch_of == branch), i)
        sends = of is not None and spec.branches and spec.branches[of] is not None
        figures: dict[str, Any] = {}
        if layer is not None:
            shape = spec.attention[layer]
            state = spec.state_of(layer)
            figures = {
                # A branch is not part of a graph that is saved, and a graph is of one document.
                "graph_bytes_per_token": None if spec.branches or state is not None else graphs[layer],
                "recurrent_bytes": 0 if state is None else state.nbytes(item),
                # What is saved of a layer that runs eagerly is what its operations hand on to one another.
                "elementwise_bytes_per_token": eager[layer] or 0,
                "unread_flops_per_token": unread_matmul(spec, block, spec.unread[layer]),
                "summed_numel": summed_numel(spec, block, spec.summed[layer]),
            }
        if shape is not None:
            kv, out = shape.kv_heads * (shape.qk_dim + shape.v_dim), shape.heads * shape.v_dim
            figures |= {
                "out_bytes_per_token": out * item,
                "lse_bytes_per_token": shape.heads * FP32,
                "kv_bytes_per_token": kv * item,
                "kv_numel_per_token": kv,
                "q_numel_per_token": shape.heads * shape.qk_dim,
                "out_numel_per_token": out,
                "sliding_window": shape.window,
                "span_tokens": shape.chunk,
                "projection_flops_per_token": projection_matmul(spec, shape),
            }
        shapes.append(
            BlockShape(
                name=block.name,
                kind=block.kind,
                buffers=block.buffers,
                inputs=tuple(numbers[name] for name in block.inputs),
                input_kinds=("x",) if branch is None else ("x", "sent"),
                saved_inputs=("x",) if layer is not None else ("sent",) if branch is not None and first == i else (),
                sent_to=None if first == i else first,
                sent_bytes_per_token=sum(each.nbytes(item) for each in spec.sent) if sends else 0,
                backward=i >= spec.lowest_trained,
                matmul_flops_per_token=matmul,
                frozen_flops_per_token=matmul and matmul - trained_matmul(spec, block),
                **figures,
            )
        )
    return tuple(shapes)


def whole_buffers(spec: ModelSpec, dtype: str) -> tuple[BufferShape, ...]:
    """The flat buffers, of one part each, computed with in that dtype."""
    return tuple(buffer_shape(name, buffer, buffer.numel, dtype) for name, buffer in spec.buffers.items())


def buffer_shape(name: str, buffer: BufferSpec, part_numel: int, dtype: str) -> BufferShape:
    """A flat buffer as the planner sees it, in parts of so many elements, computed with in `dtype`."""
    return BufferShape(
        name=name,
        numel=buffer.numel,
        part_numel=part_numel,
        dtype=buffer.dtype(dtype),
        frozen=buffer.frozen,
        float32=buffer.float32,
        copy_numel=0 if buffer.stored is None else buffer.layout.numel,
    )


def summed_numel(spec: ModelSpec, block: BlockSpec, names: Sequence[str]) -> int:
    """Trained weights of the linear modules `names` of a layer."""
    trained = spec.params_of(block, trained=True)
    return sum(p.numel for p in trained if any(p.name.endswith(f".{name}.weight") for name in names))


def attention_workspace(spec: ModelSpec, tokens: int, stream_tokens: int, *, deterministic: bool) -> int:
    """Most that the kernels for a layer's attention take on a GPU, for chunks of a stream of `stream_tokens`."""
    rest: dict[str, Any] = {"chunk": tokens, "total": stream_tokens, "deterministic": deterministic}
    sizes = (
        workspace.workspace_bytes(heads=s.heads, kv_heads=s.kv_heads, qk_dim=s.qk_dim, v_dim=s.v_dim, **rest)
        for s in spec.attention
        if s is not None
    )
    return max(sizes, default=0)


def workspace_bytes(spec: ModelSpec, tokens: int, compute_bytes: int, logits_bytes: int) -> int:
    """Estimate of the temporaries of the largest compute op.

    A layer's backward holds the output of every projection, twice for the elementwise work between them, eight hidden
    states, and the gradients of its trained parameters; of those that products sum the products' inputs instead, and
    one gradient where the device has no kernel for it. Experts count for the tokens routed to them. A forward without a
    backward holds half. The head holds its logits in the compute dtype, replaced by their gradient, and some rows in
    float32.
    """
    worst = 0
    for block in spec.blocks:
        params, trained = spec.params_of(block), spec.params_of(block, trained=True)
        gradients = sum(param.numel for param in trained) * compute_bytes
        if block.layer is not None or block.branch_of is not None:
            summed = () if block.layer is None else spec.summed[block.layer]
            widths = sum(p.shape[0] for p in params if len(p.shape) == 2)
            widths += sum(spec.experts_per_token * p.shape[1] for p in params if len(p.shape) == 3)
            if summed:
                matrices = [p for p in trained if len(p.shape) == 2]
                gradients -= summed_numel(spec, block, summed) * compute_bytes
                gradients += max((p.numel for p in matrices), default=0) * compute_bytes
                # Several projections have one input: about as many inputs as there are distinct widths, twice.
                widths += sum({p.shape[1] for p in matrices})
            held = 2 * widths + 8 * spec.hidden_size
            temporaries = tokens * compute_bytes * (held if spec.num_trained else held // 2)
        else:
            logits = min(logits_bytes, tokens * spec.vocab_size * LOGIT_BYTES) if block is spec.blocks[-1] else 0
            temporaries = logits + 4 * tokens * spec.hidden_size * 4
        worst = max(worst, temporaries + gradients)
    return worst


def temporaries_bytes(
    spec: ModelSpec,
    tokens: int,
    stream_tokens: int,
    step_tokens: int,
    *,
    compute_bytes: int,
    device_type: str,
    logits_bytes: int | None = None,
    deterministic: bool = False,
    score_bytes: int = 0,
) -> int:
    """What the largest compute op takes beside its slots, and on a GPU what a pass takes beside all ops; `score_bytes`:
    of a token of the step, for what an objective over whole sequences finds of it."""
    result = workspace_bytes(spec, tokens, compute_bytes, logits_bytes or LOGITS_BYTES[device_type])
    result += adapter_workspace(spec, compute_bytes)
    # Weights are dequantised while no other op computes.
    result = max([result, *(buffer.stored.work_bytes for buffer in spec.buffers.values() if buffer.stored)])
    if device_type == "cuda":
        result += attention_workspace(spec, tokens, stream_tokens, deterministic=deterministic)
        result += min(result // 8, HOLES_BYTES)
        result += overhead_bytes(step_tokens) + step_tokens * score_bytes
    return result


def adapter_workspace(spec: ModelSpec, compute_bytes: int) -> int:
    """What peft's layers make beside that which is as large as a matrix of the base, in the block where it is most.

    Dora's is as long as each matrix's rows are measured: the sum, its share and the whole, one matrix at a time. Of
    experts there is the whole stack with the adapter in it, and gradients of that, until backward has passed it.
    """
    worst = 0
    for block in spec.blocks if spec.adapter is not None else ():
        params = [param for param in spec.params_of(block) if ".base_layer." in param.name]
        stacks = sum(param.numel for param in params if len(param.shape) == 3)
        matrix = max((param.numel for param in params if len(param.shape) == 2), default=0)
        dora = spec.adapter is not None and spec.adapter.method == "dora"
        worst = max(worst, 3 * stacks + (3 * matrix if dora else 0))
    return worst * compute_bytes


def overhead_bytes(step_tokens: int) -> int:
    """GPU memory that a run of `step_tokens` tokens a step takes beside its slots and the temporaries of its ops.

    cuBLAS's workspace on the compute lane, the layers' arguments that are kept (rotary tables), and the tokens of three
    steps: the one that runs, the one before and the one after.
    """
    return CUBLAS_WORKSPACE_BYTES + INPUTS_CACHE_BYTES + 3 * step_tokens * BYTES_PER_TOKEN
