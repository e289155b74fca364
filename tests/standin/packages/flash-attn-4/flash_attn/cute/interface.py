"""flash-attn 4 as it is called: its functions' arguments, what they refuse by card, and the memory of their kernels."""

from __future__ import annotations

import math
from typing import Any

import torch
from computes.flash import Rules, backward, forward, num_queries, refuse_unless, take
from torch import Tensor

_SMALL_SHARED_BYTES = 99 << 10
"""Of a block on compute capability 12."""


def _check(q: Tensor, v: Tensor, *, backward: bool, deterministic: bool = False, softcap: float = 0.0) -> None:
    major, _ = torch.cuda.get_device_capability(q.device)
    shape: tuple[int, int] = (q.shape[-1], v.shape[-1])
    assert major in ((9, 10, 11, 12) if backward else (8, 9, 10, 11, 12)), "Unsupported compute capability"
    assert q.shape[-2] % v.shape[-2] == 0, "num_head must be divisible by num_head_kv"
    if major == 9:
        assert max(shape) <= 256, f"{shape} is not supported on SM90"
    elif major in (10, 11):
        assert max(shape) <= 128 or shape in ((192, 128), (256, 256)), f"{shape} is not supported on SM100/SM110"
        assert shape != (256, 256) or not softcap, "SM100 with head_dim=256 does not support softcap"
    elif major == 12:
        assert not deterministic, "deterministic backward not supported on SM 12.0"
        # Tiles of q and k, of v and dout: their rows.
        if backward:
            rows = (192, 192) if shape[0] <= 64 else (128, 128)
        else:
            rows = (256, 128) if shape[0] <= 64 else (192, 64)
        used = 2 * sum(n * width for n, width in zip(rows, shape, strict=True))
        refuse_unless(used <= _SMALL_SHARED_BYTES, f"CUDA_ERROR_INVALID_VALUE: {used} bytes of shared memory")


def _rules(q: Tensor, options: dict[str, Any]) -> Rules:
    """Of the arguments that are no operands: those that nobody here gives are refused."""
    scale, causal = options.pop("softmax_scale"), options.pop("causal")
    left, right = (options.pop(f"window_size_{side}") for side in ("left", "right"))
    lengths = [options.pop(f"cu_seqlens_{side}") for side in "qk"]
    softcap = options.pop("softcap") or 0.0
    assert not any(options.values()), options
    limits = [-1 if limit is None else limit for limit in (left, right)]
    return Rules(*lengths, 1 / math.sqrt(q.shape[-1]) if scale is None else scale, causal, *limits, softcap)


def _flash_attn_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    learnable_sink: Tensor | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None, None, None]:
    options = dict(locals())
    for name in ("q", "k", "v", "max_seqlen_q", "max_seqlen_k", "return_lse"):
        del options[name]
    _check(q, v, backward=False, softcap=softcap or 0.0)
    out, lse = forward(q, k, v, _rules(q, options))
    # A query that sees nothing has -inf here, and inf in flash-attn 2.
    return out, lse.masked_fill(lse.isposinf(), -math.inf) if return_lse else None, None, None


def _flash_attn_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float = 0.0,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    deterministic: bool = False,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
) -> tuple[Tensor, ...]:
    options = dict(locals())
    for name in ("q", "k", "v", "out", "dout", "lse", "max_seqlen_q", "max_seqlen_k", "deterministic"):
        del options[name]
    _check(q, v, backward=True, deterministic=deterministic, softcap=softcap)
    rules = _rules(q, options)
    heads, kv_heads = q.shape[-2], k.shape[-2]
    widths = [-(-tensor.shape[-1] // 32) * 32 for tensor in (q, v)]
    rows, keys = num_queries(q, cu_seqlens_q, 128), num_queries(k, cu_seqlens_k, 128)
    sums = [(keys, kv_heads, width, torch.float32) for width in widths if heads != kv_heads]
    take(q, (rows, heads, widths[0], torch.float32), (2, rows, heads, torch.float32), *sums)
    return tuple(backward(dout, q, k, v, out, lse.masked_fill(lse.isneginf(), math.inf), rules))
