"""flash-attn 3.0 as it is called: torch.ops.flash_attn_3, what it refuses, and the memory that its kernels take."""

from __future__ import annotations

import math
from typing import Any

import torch
from computes.flash import Rules, backward, forward, num_queries, operator, refuse_unless, round_up, shape_is, take
from torch import Tensor

_RULES = "float? softmax_scale = None, bool is_causal = False, int window_size_left = -1, int window_size_right = -1"
_LENGTHS = "Tensor? seqused_q = None, Tensor? seqused_k = None, int? max_seqlen_q = None, int? max_seqlen_k = None"
_FORWARD = (
    "(Tensor q, Tensor k, Tensor v, Tensor? k_new = None, Tensor? v_new = None, Tensor? q_v = None, "
    "Tensor? out = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, Tensor? cu_seqlens_k_new = None, "
    f"{_LENGTHS}, Tensor? page_table = None, Tensor? kv_batch_idx = None, Tensor? leftpad_k = None, "
    "Tensor? rotary_cos = None, Tensor? rotary_sin = None, Tensor? seqlens_rotary = None, Tensor? q_descale = None, "
    f"Tensor? k_descale = None, Tensor? v_descale = None, {_RULES}, int attention_chunk = 0, float softcap = 0.0, "
    "bool is_rotary_interleaved = False, Tensor? scheduler_metadata = None, int num_splits = 0, "
    "bool? pack_gqa = None, int sm_margin = 0) -> (Tensor, Tensor, Tensor, Tensor)"
)
_BACKWARD = (
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(a!)? dq = None, "
    "Tensor(b!)? dk = None, Tensor(c!)? dv = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, "
    f"{_LENGTHS}, {_RULES}, float softcap = 0.0, bool deterministic = False, int sm_margin = 0) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _rules(q: Tensor, v: Tensor, options: dict[str, Any]) -> Rules:
    """Of the arguments that are no operands: those that nobody here gives are refused."""
    major, minor = torch.cuda.get_device_capability(q.device)
    refuse_unless(major == 9, f"no kernel image is available for sm_{major}{minor}")
    shape: tuple[int, int] = (q.shape[-1], v.shape[-1])
    refuse_unless(max(shape) <= 256, "FlashAttention only supports head dimension at most 256")
    if shape[0] != shape[1]:
        wide, narrow = 128 < shape[0] <= 192 and 96 < shape[1] <= 128, shape[0] <= 64
        refuse_unless(wide or narrow, "V headdim differs from Q/K: only (128, 192] and (96, 128] are supported")
    lengths = [options.pop(f"cu_seqlens_{side}") for side in "qk"]
    for side, ends in zip("qk", lengths, strict=True):
        longest = options.pop(f"max_seqlen_{side}")
        refuse_unless(ends is None or longest is not None, f"max_seqlen_{side} must be provided")
    scale, softcap = options.pop("softmax_scale"), options.pop("softcap")
    rules = [options.pop(name) for name in ("is_causal", "window_size_left", "window_size_right")]
    assert not any(value for name, value in options.items() if name != "num_splits"), options
    return Rules(*lengths, 1 / math.sqrt(q.shape[-1]) if scale is None else scale, *rules, softcap)


def _fwd(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, ...]:
    out, lse = forward(q, k, v, _rules(q, v, options))
    # A query that sees nothing has -inf here, and inf in flash-attn 2.
    return out, lse.masked_fill(lse.isposinf(), -math.inf), lse.new_empty(0), lse.new_empty(0)


def _bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, **options: Any
) -> tuple[Tensor, ...]:
    grads = [options.pop(name) for name in ("dq", "dk", "dv")]
    deterministic = options.pop("deterministic")
    rules = _rules(q, v, options)
    width, heads, kv_heads = max(q.shape[-1], v.shape[-1]), q.shape[-2], k.shape[-2]
    rounded = next(size for size in (64, 96, 128, 192, 256) if width <= size)
    refuse_unless(not deterministic or rounded < 256, "Deterministic backward not supported for hdim 256.")
    rows, keys = num_queries(q, rules.cu_seqlens_q, 128), num_queries(k, rules.cu_seqlens_k, 128)
    statistics = torch.empty(heads, round_up(rows, 128), dtype=torch.float32, device=q.device)
    key_sums = (keys, kv_heads, rounded, torch.float32) if heads != kv_heads else (0, torch.float32)
    take(q, (rows, heads, rounded, torch.float32), key_sums, key_sums)
    lse = softmax_lse.masked_fill(softmax_lse.isneginf(), math.inf)
    for grad, found in zip(grads, backward(dout, q, k, v, out, lse, rules), strict=True):
        shape_is(grad, found.shape)
        grad.copy_(found)
    return statistics, statistics.clone(), *(statistics.new_empty(0) for _ in range(3))


operator("flash_attn_3::fwd", _FORWARD, _fwd)
operator("flash_attn_3::bwd", _BACKWARD, _bwd, ("dq", "dk", "dv"))
