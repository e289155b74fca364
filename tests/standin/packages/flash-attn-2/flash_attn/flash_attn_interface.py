"""flash-attn 2.8 as it is called: its operators' arguments, what they refuse, and the memory that kernels take."""

from __future__ import annotations

from typing import Any

import torch
from computes.flash import Rules, backward, forward, num_queries, operator, refuse_unless, round_up, shape_is, take
from torch import Tensor

_FLAGS = "float dropout_p, float softmax_scale, bool causal"
_LENGTHS = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k"
_WINDOW = "SymInt window_size_left, SymInt window_size_right, float softcap, Tensor? alibi_slopes"
_DEFAULT_WINDOW = _WINDOW.replace("left", "left=-1").replace("right", "right=-1").replace("softcap", "softcap=0.0")
_GIVEN = "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse"
_GRADS = "Tensor(a!)? dq, Tensor(b!)? dk, Tensor(c!)? dv"
_FOUR = "(Tensor, Tensor, Tensor, Tensor)"
_MUTATES = ("dq", "dk", "dv")


def _rules(q: Tensor, v: Tensor, options: dict[str, Any]) -> Rules:
    """Of the arguments that are no operands: those that nobody here gives are refused."""
    major, _ = torch.cuda.get_device_capability(q.device)
    refuse_unless(major >= 8, "FlashAttention only supports Ampere GPUs or newer.")
    shape_is(v, (*v.shape[:-1], q.shape[-1]))
    lengths = [options.pop(f"cu_seqlens_{side}", None) for side in "qk"]
    names = ("softmax_scale", "causal", "window_size_left", "window_size_right", "softcap")
    rules = Rules(*lengths, *(options.pop(name) for name in names))
    unused = {name for name, value in options.items() if value}
    assert unused <= {"max_seqlen_q", "max_seqlen_k"}, f"not emulated: {unused}"
    return rules


def _forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, ...]:
    rules = _rules(q, v, options)
    out, lse = forward(*(x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v)), rules)
    return out, lse, q.new_empty(0), torch.empty(2, dtype=torch.int64, device=q.device)


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, **options: Any
) -> Tensor:
    grads, deterministic = [options.pop(name) for name in _MUTATES], options.pop("deterministic")
    rules = _rules(q, v, options)
    width, heads, kv_heads, batch = q.shape[-1], q.shape[-2], k.shape[-2], q.shape[0]
    if rules.cu_seqlens_q is not None:
        batch = len(rules.cu_seqlens_q) - 1
    rows = num_queries(q, rules.cu_seqlens_q, 128)
    multiprocessors = torch.cuda.get_device_properties(q.device).multi_processor_count
    sums = -(-multiprocessors // (batch * heads)) if deterministic else 1
    expanded = (k.shape[:-2].numel(), heads, width, q.dtype) if heads != kv_heads else (0, q.dtype)
    summed = (sums, rows, heads, round_up(width, 32 if width <= 128 else 64), torch.float32)
    softmax_d = torch.empty(rows * heads, dtype=torch.float32, device=q.device)
    take(q, summed, expanded, expanded)
    for grad, found in zip(grads, backward(dout, q, k, v, out, softmax_lse, rules), strict=True):
        shape_is(grad, found.shape)
        grad.copy_(found)
    return softmax_d


_wrapped_flash_attn_forward = operator(
    "flash_attn::_flash_attn_forward",
    f"(Tensor q, Tensor k, Tensor v, {_FLAGS}, {_WINDOW}, bool return_softmax) -> {_FOUR}",
    _forward,
)
_wrapped_flash_attn_varlen_forward = operator(
    "flash_attn::_flash_attn_varlen_forward",
    f"(Tensor q, Tensor k, Tensor v, {_LENGTHS}, {_FLAGS}, {_DEFAULT_WINDOW}=None, bool return_softmax=False, "
    "Tensor? block_table=None, Tensor? leftpad_k=None, Tensor? seqused_k=None, bool zero_tensors=False, "
    f"SymInt num_splits=0) -> {_FOUR}",
    _forward,
)
_wrapped_flash_attn_backward = operator(
    "flash_attn::_flash_attn_backward",
    f"({_GIVEN}, {_GRADS}, {_FLAGS}, {_WINDOW}, bool deterministic, Tensor? rng_state=None) -> Tensor",
    _backward,
    _MUTATES,
)
_wrapped_flash_attn_varlen_backward = operator(
    "flash_attn::_flash_attn_varlen_backward",
    f"({_GIVEN}, {_GRADS}, {_LENGTHS}, {_FLAGS}, {_WINDOW}, bool deterministic, Tensor? rng_state=None, "
    "bool zero_tensors=False) -> Tensor",
    _backward,
    _MUTATES,
)
