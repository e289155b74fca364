"""Floating-point operations of a step, by formula: what the model needs, and what a plan makes of it.

A multiplication with an addition counts as two. Model FLOPs are those of PaLM's appendix B (arXiv 2204.02311): each
weight of a matrix product costs 2 a token forward and 4 backward; attention costs 2 per head, visible pair and element
of a head's q.k and p.v forward, twice that backward. Only the pairs that a causal query really sees count, document by
document; norms, activations, the embedding's lookup and the softmax do not, nor does anything that is recomputed.

Weights that are never trained cost no gradient of their own, and below the lowest block with something to be trained
there is no backward.

Executed FLOPs add what is recomputed: the matrix products that backward's graph needs, attention of layers that
save their input only, and q.k, which every flash kernel's backward computes once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.engine.attention.pairs import visible_pairs
from penstock.engine.model.spec import EMBED, AttentionShape, BlockSpec, ModelSpec, block_of
from penstock.engine.plan.chunks import Filled
from penstock.engine.plan.plan import Plan
from penstock.storage.tier.layout import ParamSpec

BACKWARD = 2
"""Forward passes that a backward pass costs: gradients of the inputs and of the weights, where these are trained."""


def matmul_flops(spec: ModelSpec) -> int:
    """Forward FLOPs of all matrix products for one token. Experts, parameters of three dimensions whose first is their
    number, count as often as a token is routed to one."""
    return sum(block_matmul(spec, block) for block in spec.blocks if block.inputs)


def active_params(spec: ModelSpec) -> int:
    """Parameters that a token computes with: of experts those that it is routed to."""
    idle = 0
    for param in spec.params:
        if len(param.shape) == 3 and (experts := _experts(param)) in spec.experts:
            idle += param.numel - spec.experts_per_token * param.numel // experts
    return spec.num_params - idle


def block_matmul(spec: ModelSpec, block: BlockSpec) -> int:
    """Forward FLOPs of a layer's or the head's matrix products for one token."""
    return _matmul(spec, block)


def trained_matmul(spec: ModelSpec, block: BlockSpec) -> int:
    """Those of `block_matmul` by weights that are trained."""
    return _matmul(spec, block, trained=True)


def backward_matmul(spec: ModelSpec, index: int) -> int:
    """Backward FLOPs of block `index`'s matrix products for one token: of the inputs' and the weights' gradients."""
    if index < spec.lowest_trained:
        return 0
    return block_matmul(spec, spec.blocks[index]) + trained_matmul(spec, spec.blocks[index])


def _matmul(spec: ModelSpec, block: BlockSpec, *, trained: bool = False, end: str = "") -> int:
    """Of the parameters whose names have that `end`, or of those of them that are `trained`."""
    result = 0
    for name in block.buffers:
        for param in spec.buffers[name].params if not (trained and spec.buffers[name].frozen) else ():
            if not param.name.endswith(end) or (block_of(name) == EMBED and param.shape[0] != spec.vocab_size):
                continue  # beside the shared token table there may be one of positions
            if len(param.shape) == 2:
                result += 2 * param.numel
            elif len(param.shape) == 3 and (experts := _experts(param)) in spec.experts:
                result += 2 * spec.experts_per_token * param.numel // experts
    return result


def _experts(param: ParamSpec) -> int:
    """Of which a parameter of three dimensions has some, or all."""
    return param.shape[0] if param.rows is None else param.rows.total


def attention_flops(spec: ModelSpec, lengths: Iterable[int]) -> int:
    """Forward FLOPs of all layers' attention over documents of these lengths in tokens."""
    lengths = list(lengths)
    return sum(pair_flops(shape, lengths, 1, 1) for shape in spec.attention)


def model_flops(spec: ModelSpec, lengths: Iterable[int], continued: Sequence[tuple[int, int]] = ()) -> int:
    """FLOPs of forward and backward over documents of these lengths in tokens, padding excluded. `continued`: of those
    that go on from a prefix, tokens of that and of the document (model/tokens.py: MicroBatch.continued)."""
    lengths = list(lengths)
    backward = sum(backward_matmul(spec, index) for index, block in enumerate(spec.blocks) if block.inputs)
    trained = spec.blocks[spec.lowest_trained :]
    attended = (spec.attention[block.layer] for block in trained if block.layer is not None)
    forward = sum(pair_flops(shape, lengths, 1, 1, continued) for shape in spec.attention)
    attention = forward + BACKWARD * sum(pair_flops(s, lengths, 1, 1, continued) for s in attended)
    return sum(lengths) * (matmul_flops(spec) + backward) + attention


@dataclass(frozen=True, slots=True)
class StepFlops:
    """What one step computes."""

    layer_matmul: int
    """Matrix products of the layers: forward, backward, and again where backward's graph needs them."""
    head_matmul: int
    attention_forward: int
    """Attention, forward: again for layers that save their input only."""
    attention_backward: int
    """Five products of a visible pair for the two of forward: q.k again, and the four gradients."""

    @property
    def total(self) -> int:
        return self.layer_matmul + self.head_matmul + self.attention_forward + self.attention_backward


def executed_flops(
    spec: ModelSpec,
    plan: Plan,
    lengths: Iterable[int],
    filled: Filled | None = None,
    continued: Sequence[tuple[int, int]] = (),
) -> StepFlops:
    """FLOPs that a step of `plan` carries out over documents of these lengths in tokens; `continued` as for
    `model_flops`.

    The layers compute padding too, but for that behind a micro-batch's `filled` tokens. Backward computes a layer's
    matrix products again, except the one whose output nobody reads (ModelSpec.unread), and none where the chunk's graph
    is saved. Queries, keys and values are computed once more, and attention with them, where only the input is saved,
    and where they are streamed; and thrice more where ranks share each sequence. Of a plan by which they do it is what
    all of them carry out, else one.
    """
    lengths = list(lengths)
    chunks = [(chunk.index, chunk.end - chunk.start) for stream in plan.filled_streams(filled) for chunk in stream]
    layer_matmul = forward = backward = 0
    for index, block in enumerate(spec.blocks):
        layer = block.branch_of if block.layer is None else block.layer
        if layer is None:
            continue
        shape = None if block.layer is None else spec.attention[layer]
        once = block_matmul(spec, block)
        again = once - unread_matmul(spec, block, spec.unread[layer])
        passes, below = (2 if index in plan.recomputed else 1), index < spec.lowest_trained
        extra = projection_matmul(spec, shape) * (passes - 1 + plan.streamed + 3 * plan.problem.sharded)
        for chunk, count in chunks:
            layer_matmul += count * (once + backward_matmul(spec, index) + extra)
            if not below and (index, plan.index_in_group(chunk)) not in plan.saved_graphs:
                layer_matmul += count * again
        forward += passes * pair_flops(shape, lengths, 1, 1, continued)
        backward += 0 if below else pair_flops(shape, lengths, 3, 2, continued)
    last = len(spec.blocks) - 1
    head = sum(lengths) * (block_matmul(spec, spec.blocks[last]) + backward_matmul(spec, last))
    return StepFlops(layer_matmul, head, forward, backward)


def unread_matmul(spec: ModelSpec, block: BlockSpec, unread: str | None) -> int:
    """Forward FLOPs a token of the product that a recomputation leaves out."""
    return 0 if unread is None else _matmul(spec, block, end=f".{unread}.weight")


def projection_matmul(spec: ModelSpec, shape: AttentionShape | None) -> int:
    """Forward FLOPs a token of the products that make a layer's queries, keys and values."""
    if shape is None:
        return 0
    return 2 * spec.hidden_size * (shape.heads * shape.qk_dim + shape.kv_heads * (shape.qk_dim + shape.v_dim))


def pair_flops(
    shape: AttentionShape | None,
    lengths: Sequence[int],
    qk_products: int,
    v_products: int,
    continued: Sequence[tuple[int, int]] = (),
) -> int:
    """FLOPs of so many products of the q.k kind and of the p.v kind over all visible pairs of one layer."""
    if shape is None:
        return 0

    def seen(length: int) -> int:
        return visible_pairs(length, shape.window, shape.chunk)

    pairs = sum(map(seen, lengths)) + sum(seen(prefix + own) - seen(prefix) - seen(own) for prefix, own in continued)
    return 2 * shape.heads * (qk_products * shape.qk_dim + v_products * shape.v_dim) * pairs
