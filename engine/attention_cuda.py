"""CUDA attention kernels; the protocol is engine/attention_backends.py's."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention_backends import Problem, pad
from engine.attention_pieces import Geometry


class TorchCudaFlash:
    """torch's built-in flash kernel: bfloat16 and float16, heads up to 256 wide."""

    name = "torch-cuda-flash"
    masks_tiles = False

    def refusal(self, problem: Problem) -> str | None:
        """CUDA half-precision tensors, square causal or full, without soft-cap."""
        if problem.device.type != "cuda":
            return "computes on CUDA devices only"
        if problem.dtype not in (torch.bfloat16, torch.float16):
            return f"does not take {problem.dtype}"
        if max(problem.qk_dim, problem.v_dim) > 256:
            return "takes heads up to 256 wide"
        if problem.softcap:
            return "has no soft-cap"
        if problem.window or problem.segments or (problem.causal and not problem.square):
            return "takes square causal or full attention"
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, geometry: Geometry, *, scale: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        """See Backend.forward."""
        v_dim = v.shape[-1]
        width = _round_up(max(q.shape[-1], v_dim), 8)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            pad(q, width)[None],
            pad(k, width)[None],
            pad(v, width)[None],
            None,
            None,
            q.shape[0],
            k.shape[0],
            0.0,
            geometry.causal,
            False,
            scale=scale,
        )
        return out[0, ..., :v_dim], lse[0, :, : q.shape[0]]

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        geometry: Geometry,
        *,
        scale: float,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See Backend.backward."""
        qk_dim, v_dim = q.shape[-1], v.shape[-1]
        width = _round_up(max(qk_dim, v_dim), 8)
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            pad(dout, width)[None],
            pad(q, width)[None],
            pad(k, width)[None],
            pad(v, width)[None],
            pad(out, width)[None],
            lse[None].contiguous(),
            None,
            None,
            q.shape[0],
            k.shape[0],
            0.0,
            geometry.causal,
            no_dropout,
            torch.empty(0, dtype=torch.uint64, device=q.device),
            scale=scale,
        )
        return dq[0, ..., :qk_dim], dk[0, ..., :qk_dim], dv[0, ..., :v_dim]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
