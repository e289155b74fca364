"""What the kernels of a step reach alone: attention at the step's own chunks, matrix products of its layers' shapes.

Attention's FLOPs are counted as in attention.chunk.COUNTS: two products of a visible pair forward, five backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from penstock.engine.attention.backends import AttentionCall, Backend, Gradients, Operands
from penstock.engine.attention.select import select
from penstock.engine.attention.spans import Call, spans
from penstock.engine.clock import clock
from penstock.engine.model.spec import AttentionShape, ModelSpec

_HEAD_ROWS = 4096


def matmul_rates(
    spec: ModelSpec, chunk_tokens: int, device: torch.device, dtype: torch.dtype, seconds: float
) -> dict[str, float]:
    """TFLOP/s of the products of one layer's matrices and of the head's with a chunk: forward and both gradients."""
    shapes = {
        "layer": [p.shape for name in spec.blocks[1].buffers for p in spec.buffers[name] if len(p.shape) == 2],
        "head": [(spec.vocab_size, spec.hidden_size)],
    }
    rows = {"layer": chunk_tokens, "head": min(chunk_tokens, _HEAD_ROWS)}
    rates = {}
    for name, matrices in shapes.items():
        total_s = flops = 0.0
        for out_features, in_features in matrices:
            weight = _random((out_features, in_features), device, dtype)
            x, dy = (_random((rows[name], width), device, dtype) for width in (in_features, out_features))
            products: tuple[Callable[[], Tensor], ...] = (
                lambda x=x, w=weight: x @ w.t(),  # type: ignore[misc]
                lambda dy=dy, w=weight: dy @ w,  # type: ignore[misc]
                lambda x=x, dy=dy: dy.t() @ x,  # type: ignore[misc]
            )
            for product in products:
                total_s += clock(lambda p=product: _drop(p()), device, seconds / (3 * len(matrices)))  # type: ignore[misc]
                flops += 2 * rows[name] * out_features * in_features
        rates[name] = flops / total_s / 1e12
    return rates


def attention_rates(
    spec: ModelSpec, row_tokens: int, chunk_tokens: int, device: torch.device, dtype: torch.dtype, seconds: float
) -> dict[str, Any]:
    """TFLOP/s, forward and backward, of the kernels that the engine takes for a sequence cut into chunks.

    Time grows linearly from a sequence's first chunk to its last, so the two ends stand for all: their FLOPs over their
    time is the rate of the whole.
    """
    shape = next(shape for shape in spec.attention if shape is not None)
    tokens = min(chunk_tokens, row_tokens)
    starts = sorted({0, (row_tokens - 1) // tokens * tokens})
    flops, times, names = {"forward": 0.0, "backward": 0.0}, {"forward": 0.0, "backward": 0.0}, dict[str, str]()
    for start in starts:
        end = min(start + tokens, row_tokens)
        for direction, (pairs, seconds_once, name) in _chunk(shape, start, end, device, dtype, seconds).items():
            per_pair = (1, 1) if direction == "forward" else (3, 2)
            flops[direction] += 2 * shape.heads * (per_pair[0] * shape.qk_dim + per_pair[1] * shape.v_dim) * pairs
            times[direction] += seconds_once
            names[direction] = name
    rates: dict[str, Any] = {direction: flops[direction] / times[direction] / 1e12 for direction in flops}
    return rates | {"kernels": names}


def _chunk(
    shape: AttentionShape, start: int, end: int, device: torch.device, dtype: torch.dtype, seconds: float
) -> dict[str, tuple[int, float, str]]:
    """Direction -> pairs, seconds and kernels' names of the chunk start..end of one document."""
    n = end - start
    q = _random((n, shape.heads, shape.qk_dim), device, dtype)
    k = _random((end, shape.kv_heads, shape.qk_dim), device, dtype)
    v = _random((end, shape.kv_heads, shape.v_dim), device, dtype)
    dout = _random((n, shape.heads, shape.v_dim), device, dtype)
    x = Operands(q, k, v, AttentionCall(shape.qk_dim**-0.5, shape.window), start)
    # Log-sum-exp of about what such scores have; the kernels' speed does not depend on it.
    lse = torch.full((shape.heads, n), float(torch.tensor(end).log()), device=device)
    given = Gradients(dout, dout, lse)
    parts = spans(start, end, 0, end, [0], shape.window)
    causal = [span for span in parts if span.causal]
    found = {}
    for direction in ("forward", "backward"):
        calls: list[tuple[Backend, Call]] = []
        for unit in (causal, parts[len(causal) :]):
            if unit:
                strategy = select(x, unit, given if direction == "backward" else None)
                calls += [(strategy.backend, call) for group in strategy.groups(unit) for call in group]

        def forward(calls: Iterable[tuple[Backend, Call]] = calls) -> None:
            for backend, call in calls:
                _drop(backend.forward(x.of(call), call.geometry))

        def backward(calls: Iterable[tuple[Backend, Call]] = calls) -> None:
            for backend, call in calls:
                _drop(backend.backward(x.of(call), given.of(x.rows(call)), call.geometry))

        work = forward if direction == "forward" else backward
        names = ", ".join(sorted({backend.name for backend, _ in calls}))
        pairs = sum(call.geometry.pairs for _, call in calls)
        found[direction] = (pairs, clock(work, device, seconds / 2), names)
    return found


def _random(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=device, dtype=dtype)


def _drop(result: Any) -> None:
    """A result that nobody reads."""
