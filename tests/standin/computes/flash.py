"""What the emulated packages of flash-attn (../packages) have in common: arithmetic, and memory of a kernel's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Rules(NamedTuple):
    """Which keys a query sees, by flash-attn's names: -1 is no limit."""

    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    softmax_scale: float
    causal: bool
    window_size_left: int
    window_size_right: int
    softcap: float


def forward(q: Tensor, k: Tensor, v: Tensor, rules: Rules) -> tuple[Tensor, Tensor]:
    """Out and log-sum-exp, which is inf for a query that sees nothing."""
    check(q, k, v, rules)
    out, lse = torch.ops.standin.attention_forward(q, k, v, *rules)
    return out, lse


def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rules: Rules) -> list[Tensor]:
    """Gradients of q, k and v."""
    check(q, k, v, rules)
    for tensor in (dout, out):
        shape_is(tensor, (*q.shape[:-1], v.shape[-1]))
        refuse_unless(tensor.dtype == q.dtype, "query, out and dout must have the same dtype")
        refuse_unless(tensor.stride(-1) == 1, "out and dout must have contiguous last dimension")
        refuse_unless(tensor.data_ptr() % 16 == 0, "misaligned address")
    heads_first = (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (q.shape[1], q.shape[0])
    shape_is(lse, heads_first)
    refuse_unless(lse.dtype == torch.float32 and lse.is_contiguous(), "softmax_lse must be plain float32")
    return list(torch.ops.standin.attention_backward(dout, q, k, v, out, lse, *rules))


def check(q: Tensor, k: Tensor, v: Tensor, rules: Rules) -> None:
    """What all versions refuse; the kernel behind them looks at dtypes, widths, strides and addresses."""
    refuse_unless(q.dtype == k.dtype == v.dtype, "query, key and value must have the same dtype")
    segments = rules.cu_seqlens_q is not None
    refuse_unless(q.dim() == (3 if segments else 4), f"q has {q.dim()} dimensions")
    shape_is(k, (*k.shape[:-1], q.shape[-1]))
    shape_is(v, (*k.shape[:-1], v.shape[-1]))
    if segments:
        for ends in (rules.cu_seqlens_q, rules.cu_seqlens_k):
            refuse_unless(ends is not None and ends.dtype == torch.int32, "cu_seqlens must have dtype int32")
            refuse_unless(ends.is_cuda and ends.is_contiguous(), "cu_seqlens must be contiguous, on CUDA")
            shape_is(ends, rules.cu_seqlens_q.shape)


def refuse_unless(holds: bool, message: str) -> None:
    """As TORCH_CHECK."""
    if not holds:
        raise RuntimeError(message)


def shape_is(tensor: Tensor, expected: Sequence[int]) -> None:
    refuse_unless(tuple(tensor.shape) == tuple(expected), f"a tensor of {tuple(tensor.shape)} must have {expected}")


def operator(name: str, schema: str, function: Callable[..., Any], mutates: Sequence[str] = ()) -> Any:
    """torch's operator of that name: `function` is given every argument that `schema` declares, by its name."""
    namespace, _, short = name.partition("::")

    def called(*given: Any, **named: Any) -> Any:
        declared = getattr(getattr(torch.ops, namespace), short).default._schema.arguments
        values = {argument.name: argument.default_value for argument in declared}
        names = [argument.name for argument in declared]
        return function(**values | dict(zip(names, given, strict=False)) | named)

    torch.library.custom_op(name, called, mutates_args=mutates, device_types="cuda", schema=schema)
    return getattr(getattr(torch.ops, namespace), short)


def num_queries(q: Tensor, cu_seqlens_q: Tensor | None, block: int) -> int:
    """Rows of a kernel's own sums of q's gradient: rounded up to a block, of each segment."""
    if cu_seqlens_q is None:
        return q.shape[0] * round_up(q.shape[1], block)
    return q.shape[0] + block * (len(cu_seqlens_q) - 1)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def take(like: Tensor, *shapes: Sequence[Any]) -> None:
    """Memory that a kernel takes beside its results, for the allocator's peak; a shape ends with its dtype."""
    held = [torch.empty(math.prod(sizes), dtype=dtype, device=like.device) for *sizes, dtype in shapes]
    del held
