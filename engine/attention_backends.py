"""Attention kernels for one pair of query and key ranges, all with saved output and log-sum-exp.

A backend computes softmax(q k^T) v of one rectangle, without ever holding more than a tile of scores. Rectangles that
share queries are merged outside (engine/attention.py), so `backward` is given the output and log-sum-exp of the
*merged* attention: the gradient of one rectangle then needs nothing of the others.

Shapes everywhere: q [n, heads, qk_dim], k [m, kv_heads, qk_dim], v [m, kv_heads, v_dim], out and dout
[n, heads, v_dim], lse [heads, n] in float32 (float64 for float64 inputs); heads is a multiple of kv_heads. `mask` is
bool [n, m], true where the key is visible, and excludes `causal`; `causal` is for n == m only. A row that sees no key
has out 0 and lse -inf.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

_TILE = 512
"""Queries and keys of one tile of the reference backend."""


class Backend(Protocol):
    """One implementation of attention over a rectangle of queries and keys."""

    name: str

    def supports(self, q: Tensor, v: Tensor, *, softcap: float | None, mask: Tensor | None) -> bool:
        """Whether these inputs (their device, dtype and head widths) can be computed here."""
        ...

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool,
        scale: float,
        mask: Tensor | None = None,
        softcap: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(out in q's dtype, lse)."""
        ...

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool,
        scale: float,
        mask: Tensor | None = None,
        softcap: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of this rectangle alone, given the merged `out` and `lse`."""
        ...


class TorchCpuFlash:
    """torch's fused CPU kernel: grouped-query heads and masks natively; unequal head widths by zero padding."""

    name = "torch-cpu-flash"

    def supports(self, q: Tensor, v: Tensor, *, softcap: float | None, mask: Tensor | None) -> bool:
        """CPU tensors of any float dtype but float16, without soft-cap."""
        return q.device.type == "cpu" and softcap is None and q.dtype in (torch.float32, torch.bfloat16, torch.float64)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool,
        scale: float,
        mask: Tensor | None = None,
        softcap: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See Backend.forward."""
        v_dim = v.shape[-1]
        width = max(q.shape[-1], v_dim)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            _heads_first(q, width),
            _heads_first(k, width),
            _heads_first(v, width),
            0.0,
            causal,
            attn_mask=_additive(mask, q.dtype),
            scale=scale,
        )
        lse = lse[0]
        if mask is not None:
            # The kernel leaves lse 0 in rows that see no key.
            lse = lse.masked_fill(~mask.any(dim=-1), float("-inf"))
        return out[0].transpose(0, 1)[..., :v_dim], lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool,
        scale: float,
        mask: Tensor | None = None,
        softcap: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See Backend.backward."""
        qk_dim, v_dim = q.shape[-1], v.shape[-1]
        width = max(qk_dim, v_dim)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _heads_first(dout, width),
            _heads_first(q, width),
            _heads_first(k, width),
            _heads_first(v, width),
            _heads_first(out, width),
            lse[None],
            0.0,
            causal,
            attn_mask=_additive(mask, q.dtype),
            scale=scale,
        )
        return (
            dq[0].transpose(0, 1)[..., :qk_dim],
            dk[0].transpose(0, 1)[..., :qk_dim],
            dv[0].transpose(0, 1)[..., :v_dim],
        )


class TorchCudaFlash:
    """torch's built-in flash kernel: bfloat16 and float16, heads up to 256 wide, no masks."""

    name = "torch-cuda-flash"

    def supports(self, q: Tensor, v: Tensor, *, softcap: float | None, mask: Tensor | None) -> bool:
        """CUDA half-precision tensors, without soft-cap or mask."""
        width = max(q.shape[-1], v.shape[-1])
        half = q.dtype in (torch.bfloat16, torch.float16)
        return q.device.type == "cuda" and half and width <= 256 and softcap is None and mask is None

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool,
        scale: float,
        mask: Tensor | None = None,
        softcap: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See Backend.forward."""
        v_dim = v.shape[-1]
        width = _round_up(max(q.shape[-1], v_dim), 8)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            _pad(q, width)[None],
            _pad(k, width)[None],
            _pad(v, width)[None],
            None,
            None,
            q.shape[0],
            k.shape[0],
            0.0,
            causal,
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
        *,
        causal: bool,
        scale: float,
        mask: Tensor | None = None,
        softcap: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See Backend.backward."""
        qk_dim, v_dim = q.shape[-1], v.shape[-1]
        width = _round_up(max(qk_dim, v_dim), 8)
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            _pad(dout, width)[None],
            _pad(q, width)[None],
            _pad(k, width)[None],
            _pad(v, width)[None],
            _pad(out, width)[None],
            lse[None].contiguous(),
            None,
            None,
            q.shape[0],
            k.shape[0],
            0.0,
            causal,
            no_dropout,
            torch.empty(0, dtype=torch.uint64, device=q.device),
            scale=scale,
        )
        return dq[0, ..., :qk_dim], dk[0, ..., :qk_dim], dv[0, ..., :v_dim]


class TiledReference:
    """Plain torch, tile by tile: any device, dtype, soft-cap, mask and head widths. Scores are computed in float32."""

    name = "tiled-reference"

    def supports(self, q: Tensor, v: Tensor, *, softcap: float | None, mask: Tensor | None) -> bool:
        """Everything."""
        return True

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool,
        scale: float,
        mask: Tensor | None = None,
        softcap: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See Backend.forward."""
        n, heads, _ = q.shape
        work = _work_dtype(q.dtype)
        out = torch.zeros(heads, n, v.shape[-1], dtype=work, device=q.device)
        lse = torch.full((heads, n), float("-inf"), dtype=work, device=q.device)
        for rows, columns in _tiles(n, k.shape[0], causal):
            scores, visible = _scores(q, k, rows, columns, causal, scale, mask, softcap)
            tile_lse = torch.logsumexp(scores, dim=-1)
            merged = torch.logaddexp(lse[:, rows], tile_lse)
            # A row that has seen no key yet keeps weight 0 instead of exp(-inf - -inf).
            base = torch.where(visible, merged, 0.0)
            probabilities = torch.exp(scores - base[..., None])
            values = _expand(v[columns].to(work), heads)
            out[:, rows] = out[:, rows] * torch.exp(lse[:, rows] - base)[..., None] + probabilities @ values
            lse[:, rows] = merged
        return out.transpose(0, 1).to(q.dtype), lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool,
        scale: float,
        mask: Tensor | None = None,
        softcap: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See Backend.backward."""
        n, heads, qk_dim = q.shape
        kv_heads = k.shape[1]
        work = _work_dtype(q.dtype)
        delta = (dout.to(work) * out.to(work)).sum(dim=-1).transpose(0, 1)
        dq = torch.zeros(heads, n, qk_dim, dtype=work, device=q.device)
        dk = torch.zeros(kv_heads, k.shape[0], qk_dim, dtype=work, device=q.device)
        dv = torch.zeros(kv_heads, k.shape[0], v.shape[-1], dtype=work, device=q.device)
        for rows, columns in _tiles(n, k.shape[0], causal):
            scores, _ = _scores(q, k, rows, columns, causal, scale, mask, softcap)
            base = torch.where(torch.isinf(lse[:, rows]), 0.0, lse[:, rows])
            probabilities = torch.exp(scores - base[..., None])
            tile_dout = dout[rows].to(work).transpose(0, 1)
            dv[:, columns] += _group_sum(probabilities.transpose(1, 2) @ tile_dout, kv_heads)
            dprobabilities = tile_dout @ _expand(v[columns].to(work), heads).transpose(1, 2)
            dscores = probabilities * (dprobabilities - delta[:, rows, None])
            if softcap is not None:
                capped = torch.where(torch.isinf(scores), 0.0, scores)
                dscores = dscores * (1 - (capped / softcap) ** 2)
            dscores = dscores * scale
            dq[:, rows] += dscores @ _expand(k[columns].to(work), heads)
            dk[:, columns] += _group_sum(dscores.transpose(1, 2) @ q[rows].to(work).transpose(0, 1), kv_heads)
        return dq.transpose(0, 1).to(q.dtype), dk.transpose(0, 1).to(q.dtype), dv.transpose(0, 1).to(q.dtype)


BACKENDS: tuple[Backend, ...] = (TorchCpuFlash(), TorchCudaFlash(), TiledReference())
"""In order of preference; the last one takes everything."""


def choose_backend(q: Tensor, v: Tensor, *, softcap: float | None, mask: Tensor | None) -> Backend:
    """The first backend that supports the inputs."""
    return next(b for b in BACKENDS if b.supports(q, v, softcap=softcap, mask=mask))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _pad(tensor: Tensor, width: int) -> Tensor:
    """Zero-pad the last dimension to `width`: zeros add nothing to q k^T and give output columns that are cut off."""
    missing = width - tensor.shape[-1]
    return functional.pad(tensor, (0, missing)) if missing else tensor


def _heads_first(tensor: Tensor, width: int) -> Tensor:
    """[n, heads, d] -> [1, heads, n, width]."""
    return _pad(tensor, width).transpose(0, 1)[None]


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Bool [n, m] -> [1, 1, n, m] of 0 and -inf."""
    if mask is None:
        return None
    zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return zeros.masked_fill_(~mask, float("-inf"))[None, None]


def _work_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _tiles(n: int, m: int, causal: bool) -> Iterator[tuple[slice, slice]]:
    for row in range(0, n, _TILE):
        rows = slice(row, min(row + _TILE, n))
        for column in range(0, min(m, rows.stop) if causal else m, _TILE):
            yield rows, slice(column, min(column + _TILE, m))


def _expand(tensor: Tensor, heads: int) -> Tensor:
    """[m, kv_heads, d] -> [heads, m, d], each KV head repeated for its group of query heads."""
    return tensor.transpose(0, 1).repeat_interleave(heads // tensor.shape[1], dim=0)


def _group_sum(tensor: Tensor, kv_heads: int) -> Tensor:
    """[heads, m, d] -> [kv_heads, m, d], summed over each group of query heads."""
    grouped: Tensor = tensor.unflatten(0, (kv_heads, -1))
    return grouped.sum(dim=1)


def _scores(
    q: Tensor,
    k: Tensor,
    rows: slice,
    columns: slice,
    causal: bool,
    scale: float,
    mask: Tensor | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Scaled, capped and masked scores [heads, rows, columns] of one tile, and which rows [rows] see any key so far."""
    work = _work_dtype(q.dtype)
    queries = q[rows].to(work).transpose(0, 1)
    scores: Tensor = queries @ _expand(k[columns].to(work), q.shape[1]).transpose(1, 2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    rows_seen = torch.ones(scores.shape[1], dtype=torch.bool, device=q.device)
    if causal and columns.stop > rows.start + 1:
        row_index = torch.arange(rows.start, rows.stop, device=q.device)
        column_index = torch.arange(columns.start, columns.stop, device=q.device)
        scores = scores.masked_fill(column_index > row_index[:, None], float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask[rows, columns], float("-inf"))
        rows_seen = mask[rows, : columns.stop].any(dim=-1)
    return scores, rows_seen
