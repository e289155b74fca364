"""Attention kernels for NVIDIA GPUs that come with torch; the protocol is engine/attention/backends.py's.

What a kernel says it can do is checked once more on the GPU itself before it is used (engine/attention/select.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from penstock.engine.attention.backends import ALIGNMENT, Backend, Gradients, Operands, Problem, pad
from penstock.engine.attention.spans import Geometry
from penstock.engine.attention.workspace import KEYS_PER_CALL


@cache
def capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@lru_cache(maxsize=4096)  # a step has two for each of its chunks, which all layers ask for in turn
def _on_device(values: tuple[int, ...], device: torch.device) -> Tensor:
    """Int32 tensor; the copy from pinned memory does not wait for the GPU."""
    return torch.tensor(values, dtype=torch.int32, pin_memory=True).to(device, non_blocking=True)


@cache
def _no_dropout(device: torch.device) -> Tensor:
    """A state of the random generator, which nothing reads without dropout."""
    return torch.zeros(2, dtype=torch.int64, device=device).view(torch.uint64)


class CudaKernel(Backend):
    """What the backends below share: half precision, widths that are multiples of 8, zero padding up to these."""

    packages: tuple[str, ...] = ()
    """Distributions that it comes from, beside torch."""
    backward_keys: int | None = KEYS_PER_CALL
    capabilities: tuple[int, ...] = (8, 9, 10, 11, 12)
    """Major compute capabilities that the kernel runs on."""
    widest = 256
    softcap = False

    def refusal(self, problem: Problem) -> str | None:
        if problem.device.type != "cuda":
            return "computes on CUDA devices only"
        if (unfit := self._unfit(problem.device)) is not None:
            return unfit
        if problem.dtype not in (torch.bfloat16, torch.float16):
            return f"does not take {problem.dtype}"
        if max(problem.qk_dim, problem.v_dim) > self.widest:
            return f"takes heads up to {self.widest} wide"
        if problem.softcap and not self.softcap:
            return "has no soft-cap"
        return self._missing() or self._limit(problem)

    def absent(self, device: torch.device) -> str | None:
        """Why nothing at all can be computed with it on this GPU; None where it is there."""
        return self._unfit(device) or self._missing()

    def _unfit(self, device: torch.device) -> str | None:
        major, minor = capability(device)
        if major in self.capabilities:
            return None
        wanted = ", ".join(f"{major}.x" for major in self.capabilities)
        return f"needs compute capability {wanted}; this GPU has {major}.{minor}"

    def _missing(self) -> str | None:
        """Why the package cannot be used on this machine."""
        return None

    def _limit(self, problem: Problem) -> str | None:
        """What of the problem this kernel in particular cannot do."""
        return None

    def _widths(self, qk_dim: int, v_dim: int) -> tuple[int, int]:
        """Widths of q and k, and of v, that the kernel takes in their place."""
        width = round_up(max(qk_dim, v_dim), 8)
        return width, width

    def forward(self, x: Operands, geometry: Geometry) -> tuple[Tensor, Tensor]:
        out, lse = self._forward(self._padded(x), geometry)
        return out[..., : x.v.shape[-1]], lse

    def backward(self, x: Operands, given: Gradients, geometry: Geometry) -> tuple[Tensor, Tensor, Tensor]:
        padded, qk_dim, v_dim = self._padded(x), x.q.shape[-1], x.v.shape[-1]
        # Some kernels take dout's and out's strides to be those of a new tensor.
        dout, out = (_rows(tensor, padded.v.shape[-1]).contiguous() for tensor in (given.dout, given.out))
        dq, dk, dv = self._backward(padded, Gradients(dout, out, given.lse.contiguous()), geometry)
        return dq[..., :qk_dim], dk[..., :qk_dim], dv[..., :v_dim]

    def _padded(self, x: Operands) -> Operands:
        qk_width, v_width = self._widths(x.q.shape[-1], x.v.shape[-1])
        return replace(x, q=_rows(x.q, qk_width), k=_rows(x.k, qk_width), v=_rows(x.v, v_width))

    def _forward(self, x: Operands, geometry: Geometry) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def _backward(self, x: Operands, given: Gradients, geometry: Geometry) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError


class FlashKernel(CudaKernel):
    """The flash-attn family: causal limits at the bottom right, windows, segments, one layout of arguments. Tensors are
    [1, n, heads, dim] and lse [1, heads, n]; with segments [n, heads, dim] and [heads, n]."""

    def _forward(self, x: Operands, geometry: Geometry) -> tuple[Tensor, Tensor]:
        if geometry.cu_q:
            return self._launch(x, geometry)
        out, lse = self._launch(_batched(x), geometry)
        return out[0], lse[0, :, : geometry.n]  # some versions round the length up

    def _backward(self, x: Operands, given: Gradients, geometry: Geometry) -> tuple[Tensor, Tensor, Tensor]:
        if geometry.cu_q:
            return self._launch_backward(x, given, geometry)
        batched = Gradients(given.dout[None], given.out[None], given.lse[None])
        dq, dk, dv = self._launch_backward(_batched(x), batched, geometry)
        return dq[0], dk[0], dv[0]

    def _launch(self, x: Operands, geometry: Geometry) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def _launch_backward(self, x: Operands, given: Gradients, geometry: Geometry) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError


class TorchCudaFlash(FlashKernel):
    """torch's own copy of flash-attn 2, through aten; deterministic backward by torch's global switch."""

    name = "torch-cuda-flash"

    def _launch(self, x: Operands, geometry: Geometry) -> tuple[Tensor, Tensor]:
        cu_q, cu_k, max_q, max_k = _lengths_or_none(geometry, x.q.device)
        left, right = window_limits(geometry)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *(x.q, x.k, x.v, cu_q, cu_k, max_q, max_k, 0.0, geometry.causal, False),
            scale=x.call.softmax_scale,
            window_size_left=left,
            window_size_right=right,
        )
        return out, lse

    def _launch_backward(self, x: Operands, given: Gradients, geometry: Geometry) -> tuple[Tensor, Tensor, Tensor]:
        tensors, lengths = (given.dout, x.q, x.k, x.v, given.out, given.lse), _lengths_or_none(geometry, x.q.device)
        left, right = window_limits(geometry)
        no_dropout = _no_dropout(x.q.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            *(*tensors, *lengths, 0.0, geometry.causal, no_dropout, no_dropout[:0]),
            scale=x.call.softmax_scale,
            window_size_left=left,
            window_size_right=right,
        )
        return dq, dk, dv


class TorchCudnn(CudaKernel):
    """cuDNN's fused attention through aten: causal for as many keys as queries (its limit is at the top left), or full.

    It builds a plan for every new pair of lengths, in some tenths of a second. Pieces of a fixed number of keys and
    lengths that are multiples of `ALIGNMENT` keep these few; documents that end anywhere are left to other kernels.
    """

    name = "torch-cudnn"
    forward_keys = 2 * KEYS_PER_CALL

    def _missing(self) -> str | None:
        version = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
        return "needs cuDNN 9.1 or newer" if version is None or version < 90100 else None

    def _limit(self, problem: Problem) -> str | None:
        if problem.deterministic:
            return "is not deterministic"
        if problem.window:
            return "has no sliding window"
        if problem.segments:
            return "computes one segment at a time"
        if problem.causal and not problem.square:
            return "aligns its causal limit at the top left"
        if not problem.aligned:
            return f"would build a plan for every length that is not a multiple of {ALIGNMENT}"
        return None

    def _widths(self, qk_dim: int, v_dim: int) -> tuple[int, int]:
        return round_up(qk_dim, 8), round_up(v_dim, 8)

    def _forward(self, x: Operands, geometry: Geometry) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *(*map(_heads_first, (x.q, x.k, x.v)), None, True, 0.0, geometry.causal, False), scale=x.call.softmax_scale
        )
        return out[0].transpose(0, 1), lse.reshape(x.q.shape[1], x.q.shape[0])

    def _backward(self, x: Operands, given: Gradients, geometry: Geometry) -> tuple[Tensor, Tensor, Tensor]:
        no_dropout = _no_dropout(x.q.device).view(torch.int64)[0]
        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *(_heads_first(t) for t in (given.dout, x.q, x.k, x.v, given.out)),
            *(given.lse[None, ..., None], no_dropout, no_dropout, None, None, None, geometry.n, geometry.m),
            *(0.0, geometry.causal),
            scale=x.call.softmax_scale,
        )
        dq, dk, dv = (grad[0].transpose(0, 1) for grad in grads)
        return dq, dk, dv


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _rows(tensor: Tensor, width: int) -> Tensor:
    """Padded to `width`, with a contiguous last dimension and rows that begin at multiples of 16 bytes."""
    padded = pad(tensor, width)
    aligned = padded.stride(-1) == 1 and padded.stride(0) % 8 == 0 and padded.stride(1) % 8 == 0
    if aligned and padded.data_ptr() % 16 == 0:
        return padded
    return padded.clone(memory_format=torch.contiguous_format)


def _batched(x: Operands) -> Operands:
    return replace(x, q=x.q[None], k=x.k[None], v=x.v[None])


def _heads_first(tensor: Tensor) -> Tensor:
    """[n, heads, d] -> [1, heads, n, d]."""
    return tensor.transpose(0, 1)[None]


def window_limits(geometry: Geometry) -> tuple[int, int]:
    """flash-attn's window: keys before and after the diagonal, -1 for all."""
    return (-1 if geometry.left is None else geometry.left), (0 if geometry.causal else -1)


def _longest(ends: Iterable[int]) -> int:
    return max(b - a for a, b in itertools.pairwise(ends))


def segment_lengths(geometry: Geometry, device: torch.device) -> dict[str, Any]:
    """Segments as flash-attn names them: cumulative ends (int32 on the device) and the longest of each."""
    return {
        "cu_seqlens_q": _on_device(geometry.cu_q, device),
        "cu_seqlens_k": _on_device(geometry.cu_k, device),
        "max_seqlen_q": _longest(geometry.cu_q),
        "max_seqlen_k": _longest(geometry.cu_k),
    }


def _lengths_or_none(geometry: Geometry, device: torch.device) -> tuple[Tensor | None, Tensor | None, int, int]:
    if not geometry.cu_q:
        return None, None, geometry.n, geometry.m
    lengths = segment_lengths(geometry, device)
    return lengths["cu_seqlens_q"], lengths["cu_seqlens_k"], lengths["max_seqlen_q"], lengths["max_seqlen_k"]
