"""What the kernels of a step reach alone: matrix products of its layers' shapes, attention, AdamW."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch.nn import functional

from penstock.engine.attention.backends import AttentionCall, Backend, Gradients, Operands
from penstock.engine.attention.select import Attends, measured, prepare, select
from penstock.engine.attention.spans import Call, spans
from penstock.engine.clock import clock
from penstock.engine.config import TrainConfig
from penstock.engine.machine.probe_compute import products_of, random_operand
from penstock.engine.model.spec import AttentionShape, ModelSpec
from penstock.engine.optim.base import UpdateRange, find_optimizer


def step_kernels(
    spec: ModelSpec, rows: int, row_tokens: int, device: torch.device, train: TrainConfig, *, compiled: bool
) -> dict[str, float]:
    """Seconds that the kernels of one optimizer step take alone, by kind: every matrix product once forward and once
    for either gradient, attention of every layer forward and backward, AdamW of all parameters.

    rows, row_tokens: the batch, one document a row. Each distinct kernel runs once, warm, and counts as often as the
    step needs it.
    """
    dtype = getattr(torch, train.compute_dtype)
    tokens = rows * row_tokens
    times = dict.fromkeys(("layer_products", "head_products", "attention_forward", "attention_backward", "adamw"), 0.0)
    matrices = {
        role: Counter(
            param.shape
            for block in spec.blocks
            if block.kind == role
            for param in spec.params_of(block)
            if len(param.shape) == 2
        )
        for role in ("layer", "head")
    }
    for role, shapes in matrices.items():
        for matrix, count in shapes.items():
            for product in products_of(matrix, tokens, device, dtype):
                times[f"{role}_products"] += count * _once(product, device)
    attention = Counter(shape for shape in spec.attention if shape is not None)
    if measured(device):
        prepare(
            device,
            dtype,
            [Attends(s.heads, s.kv_heads, s.qk_dim, s.v_dim, row_tokens, row_tokens, s.window) for s in attention],
        )
    for shape, count in attention.items():
        forward_s, backward_s = _attention_once(shape, rows, row_tokens, device, dtype)
        times["attention_forward"] += count * forward_s
        times["attention_backward"] += count * backward_s
    times["adamw"] = _adamw_once(spec, device, train, compiled=compiled)
    return times


def _attention_once(
    shape: AttentionShape, rows: int, row_tokens: int, device: torch.device, dtype: torch.dtype
) -> tuple[float, float]:
    """Seconds forward and backward of a layer's attention over whole rows: of the engine's kernels row by row or of
    torch's own for all rows, whichever take less."""
    engine = attention_of_chunk(shape, 0, row_tokens, device, dtype, 0.0)
    result = [(rows * engine["forward"][1], rows * engine["backward"][1])]
    if shape.window is None and shape.qk_dim == shape.v_dim:
        q, k, v = (
            random_operand((rows, row_tokens, heads, shape.qk_dim), device, dtype).transpose(1, 2).requires_grad_()
            for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
        )
        attend = partial(functional.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
        forward_s = _once(attend, device)
        out = attend()
        dout = torch.randn_like(out)
        backward_s = _once(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True), device)
        result.append((forward_s, backward_s))
    return min(result, key=sum)


def _adamw_once(spec: ModelSpec, device: torch.device, train: TrainConfig, *, compiled: bool) -> float:
    """Seconds of the engine's update of all parameters, from one layer's."""
    layer = next(block for block in spec.blocks if block.layer is not None)
    layout = spec.buffers[layer.buffers[0]].layout
    optimizer_spec = find_optimizer(train)
    optimizer = optimizer_spec.make("compiled" if compiled else "fused")
    state = {kind: torch.zeros(layout.numel, device=device) for kind in optimizer_spec.state_kinds}
    gradient, weights = (random_operand((layout.numel,), device, getattr(torch, train.compute_dtype)) for _ in range(2))
    where = UpdateRange(layout, 0, layout.numel)
    scalars = optimizer.scalars(train, train.lr, 1, 1.0, device)
    work = partial(optimizer.step, state, gradient, weights, where, scalars)
    return _once(work, device) * spec.num_params / layout.numel


def _once(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one `work` on the device that is not its first."""
    return clock(work, device, 0.0)


def attention_of_chunk(
    shape: AttentionShape, start: int, end: int, device: torch.device, dtype: torch.dtype, seconds: float
) -> dict[str, tuple[int, float, str]]:
    """Direction -> pairs, seconds and kernels' names of the chunk start..end of one document."""
    n = end - start
    q = random_operand((n, shape.heads, shape.qk_dim), device, dtype)
    k = random_operand((end, shape.kv_heads, shape.qk_dim), device, dtype)
    v = random_operand((end, shape.kv_heads, shape.v_dim), device, dtype)
    dout = random_operand((n, shape.heads, shape.v_dim), device, dtype)
    x = Operands(q, k, v, AttentionCall(shape.qk_dim**-0.5, shape.window), start)
    # Log-sum-exp of about what such scores have; the kernels' speed does not depend on it.
    lse = torch.full((shape.heads, n), float(torch.tensor(end).log()), device=device)
    given = Gradients(dout, dout, lse)
    parts = spans(start, end, 0, end, [0], shape.window)
    causal = [span for span in parts if span.causal]
    result = {}
    for direction in ("forward", "backward"):
        calls: list[tuple[Backend, Call]] = []
        for unit in (causal, parts[len(causal) :]):
            if unit:
                strategy = select(x, unit, given if direction == "backward" else None)
                calls += [(strategy.backend, call) for group in strategy.groups(unit) for call in group]

        def work(calls: Iterable[tuple[Backend, Call]] = calls, is_forward: bool = direction == "forward") -> None:
            for backend, call in calls:
                if is_forward:
                    backend.forward(x.of(call), call.geometry)
                else:
                    backend.backward(x.of(call), given.of(x.rows(call)), call.geometry)

        names = ", ".join(sorted({backend.name for backend, _ in calls}))
        pairs = sum(call.geometry.pairs for _, call in calls)
        result[direction] = (pairs, clock(work, device, seconds / 2), names)
    return result
