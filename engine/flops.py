"""Floating-point operations of a step, by formula: what the model needs, whatever an implementation computes again.

A multiplication with an addition counts as two. Model FLOPs are those of PaLM's appendix B (arXiv 2204.02311): each
weight of a matrix product costs 2 a token forward and 4 backward; attention costs 2 per head, visible pair and element
of a head's q.k and p.v forward, twice that backward. Only the pairs that a causal query really sees count, document by
document; norms, activations, the embedding's lookup and the softmax do not, nor does anything that is recomputed.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.model import EMBED, AttentionShape, ModelSpec

BACKWARD = 2
"""A backward pass costs this many forward passes: gradients of the inputs and of the weights."""


def matmul_flops(spec: ModelSpec) -> int:
    """Forward FLOPs of all matrix products for one token.

    Experts, parameters of three dimensions whose first is their number, count as often as a token is routed to one.
    """
    text = spec.config.get_text_config(decoder=True)
    experts = {getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")}
    routed = getattr(text, "num_experts_per_tok", None) or 1
    total = 0
    for block in spec.blocks[1:]:
        for name in block.buffers:
            for param in spec.buffers[name]:
                if name == EMBED and param.shape[0] != spec.vocab_size:
                    continue  # beside the shared token table there may be one of positions
                if len(param.shape) == 2:
                    total += 2 * param.numel
                elif len(param.shape) == 3 and param.shape[0] in experts:
                    total += 2 * routed * param.numel // param.shape[0]
    return total


def visible_pairs(length: int, shape: AttentionShape) -> int:
    """Pairs of a query and a key that it sees, in a document of `length` tokens."""
    if shape.chunk is not None:
        whole, rest = divmod(length, shape.chunk)
        return whole * _triangle(shape.chunk) + _triangle(rest)
    if shape.window is not None and length > shape.window:
        return _triangle(shape.window) + (length - shape.window) * shape.window
    return _triangle(length)


def attention_flops(spec: ModelSpec, lengths: Iterable[int]) -> int:
    """Forward FLOPs of all layers' attention over documents of these lengths in tokens."""
    lengths = list(lengths)
    return sum(
        2 * shape.heads * (shape.qk_dim + shape.v_dim) * sum(visible_pairs(length, shape) for length in lengths)
        for shape in spec.attention
        if shape is not None
    )


def model_flops(spec: ModelSpec, lengths: Iterable[int]) -> int:
    """FLOPs of forward and backward over documents of these lengths in tokens, padding excluded."""
    lengths = list(lengths)
    forward = sum(lengths) * matmul_flops(spec) + attention_flops(spec, lengths)
    return (1 + BACKWARD) * forward


def _triangle(length: int) -> int:
    return length * (length + 1) // 2
