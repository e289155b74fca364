"""Attention kernels behind one protocol: saved output and log-sum-exp, and gradients from them.

A backend computes softmax(q k^T) v for one `Geometry` of queries and keys without ever holding more than a tile of
scores. Results that share queries are merged outside (engine/attention/chunk.py), so `backward` is given the output and
log-sum-exp of the *merged* attention: the gradient of one part then needs nothing of the others.

Shapes everywhere: q [n, heads, qk_dim], k [m, kv_heads, qk_dim], v [m, kv_heads, v_dim], out and dout [n, heads,
v_dim], lse [heads, n] in float32 (float64 for float64 inputs); heads is a multiple of kv_heads. They travel as
`Operands` and `Gradients`. Kernels for CUDA are in attention/torch_cuda.py, the choice in attention/select.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from penstock.engine.attention.spans import Call, Geometry

ALIGNMENT = 256
"""Lengths that are multiples of it are few in a run, wherever its documents begin."""
_TILE = 512
"""Queries and keys of one tile of the reference backend."""

_CPU_MULTIPLIES_BFLOAT16 = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", bool)()
"""Whether torch leaves products of bfloat16 to oneDNN, which takes AVX-512 (or Arm's bf16)."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What a layer asks of its attention: `window` counts the visible keys including the query's own."""

    softmax_scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Operands:
    """q [n, heads, qk_dim] at positions of a stream from `start`, k, v [m, kv_heads, dim] at those from `key_start`."""

    q: Tensor
    k: Tensor
    v: Tensor
    call: AttentionCall
    start: int = 0
    key_start: int = 0
    documents: Sequence[int] = (0,)
    """Sorted starts of the stream's documents, the first is 0; queries see only keys of their own document, and of its
    prefix where it has one (`spans.Documents`)."""
    both_ways: Sequence[tuple[int, int]] = ()
    """Ranges of the stream whose tokens see the later ones of theirs too; all of a range is in one chunk."""

    def rows(self, call: Call) -> slice:
        return slice(call.q0 - self.start, call.q1 - self.start)

    def keys(self, call: Call) -> slice:
        """The call's rows of k and v."""
        return slice(call.k0 - self.key_start, call.k1 - self.key_start)

    def of(self, call: Call) -> Operands:
        """What a kernel call computes with."""
        rows, keys = self.rows(call), self.keys(call)
        return Operands(self.q[rows], self.k[keys], self.v[keys], self.call, call.q0, call.k0, self.documents)


@dataclass(frozen=True, slots=True)
class Gradients:
    """What backward needs beside the operands: dout, out [n, heads, v_dim] and lse [heads, n], merged over all keys."""

    dout: Tensor
    out: Tensor
    lse: Tensor

    def of(self, rows: slice) -> Gradients:
        return Gradients(self.dout[rows], self.out[rows], self.lse[:, rows])


@dataclass(frozen=True, slots=True)
class Problem:
    """What a kernel has to do, without the numbers of queries and keys: it can, or it names what it cannot."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    causal: bool
    square: bool
    """As many queries as keys; a causal kernel may be right for these only."""
    window: bool
    segments: bool
    aligned: bool
    """Queries and keys are multiples of `ALIGNMENT`."""
    softcap: bool
    backward: bool
    deterministic: bool

    @staticmethod
    def of(x: Operands, geometry: Geometry, *, backward: bool) -> Problem:
        return Problem(
            device=x.q.device,
            dtype=x.q.dtype,
            heads=x.q.shape[1],
            kv_heads=x.v.shape[1],
            qk_dim=x.q.shape[2],
            v_dim=x.v.shape[2],
            causal=geometry.causal,
            square=geometry.n == geometry.m,
            window=geometry.left is not None,
            segments=bool(geometry.cu_q),
            aligned=not (geometry.n % ALIGNMENT or geometry.m % ALIGNMENT),
            softcap=x.call.softcap is not None,
            backward=backward,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )


class Backend(Protocol):
    """One implementation of attention."""

    name: str
    masks_tiles: bool = False
    """Takes a geometry it has no rule for as a dense mask: right, but for tiles only."""
    forward_keys: int | None = None
    """Earlier keys are cut into calls of so many, to bound what the kernel allocates; None: they are not."""
    backward_keys: int | None = None

    def refusal(self, problem: Problem) -> str | None:
        """Why this cannot be computed here exactly; None where it can."""
        ...

    def forward(self, x: Operands, geometry: Geometry) -> tuple[Tensor, Tensor]:
        """(out in q's dtype, lse)."""
        ...

    def backward(self, x: Operands, given: Gradients, geometry: Geometry) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of this part alone, in q's dtype or a wider one, from the merged `out` and `lse`."""
        ...


class TorchCpuFlash(Backend):
    """torch's fused CPU kernel: grouped-query heads natively; unequal head widths by zero padding."""

    name = "torch-cpu-flash"
    masks_tiles = True

    def refusal(self, problem: Problem) -> str | None:
        """CPU tensors of any float dtype but float16, without soft-cap."""
        if problem.device.type != "cpu":
            return "computes on the CPU only"
        if problem.dtype not in (torch.float32, torch.bfloat16, torch.float64):
            return f"does not take {problem.dtype}"
        if problem.softcap:
            return "has no soft-cap"
        return None

    def forward(self, x: Operands, geometry: Geometry) -> tuple[Tensor, Tensor]:
        v_dim = x.v.shape[-1]
        width = max(x.q.shape[-1], v_dim)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(_heads_first(tensor, width) for tensor in (x.q, x.k, x.v)),
            0.0,
            geometry.causal and not geometry.needs_mask,
            attn_mask=_additive_mask(geometry, x.q.dtype),
            scale=x.call.softmax_scale,
        )
        return out[0].transpose(0, 1)[..., :v_dim], lse[0]

    def backward(self, x: Operands, given: Gradients, geometry: Geometry) -> tuple[Tensor, Tensor, Tensor]:
        width = max(x.q.shape[-1], x.v.shape[-1])
        dtype = torch.float32 if emulated(x.q) else x.q.dtype
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(_heads_first(tensor, width).to(dtype) for tensor in (given.dout, x.q, x.k, x.v, given.out)),
            given.lse[None],
            0.0,
            geometry.causal and not geometry.needs_mask,
            attn_mask=_additive_mask(geometry, dtype),
            scale=x.call.softmax_scale,
        )
        dq, dk, dv = (
            grad[0].transpose(0, 1)[..., : like.shape[-1]] for grad, like in zip(grads, (x.q, x.k, x.v), strict=True)
        )
        return dq, dk, dv


class TiledReference(Backend):
    """Plain torch, tile by tile: any device, dtype, soft-cap, window and head widths. Scores are in float32."""

    name = "tiled-reference"

    def refusal(self, problem: Problem) -> str | None:
        """Several segments at once are left to kernels."""
        return "computes one segment at a time" if problem.segments else None

    def forward(self, x: Operands, geometry: Geometry) -> tuple[Tensor, Tensor]:
        q, v = x.q, x.v
        n, heads, _ = q.shape
        work = work_dtype(q.dtype)
        out = torch.zeros(heads, n, v.shape[-1], dtype=work, device=q.device)
        lse = torch.full((heads, n), float("-inf"), dtype=work, device=q.device)
        for rows, columns in _tiles(geometry):
            scores = _scores(x, rows, columns, geometry)
            merged = torch.logaddexp(lse[:, rows], torch.logsumexp(scores, dim=-1))
            # A row that has seen no key yet keeps weight 0 instead of exp(-inf - -inf).
            base = merged.masked_fill(torch.isneginf(merged), 0.0)
            probabilities = torch.exp(scores - base[..., None])
            values = _expand(v[columns].to(work), heads)
            out[:, rows] = out[:, rows] * torch.exp(lse[:, rows] - base)[..., None] + probabilities @ values
            lse[:, rows] = merged
        return out.transpose(0, 1).to(q.dtype), lse

    def backward(self, x: Operands, given: Gradients, geometry: Geometry) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, dout = x.q, x.k, x.v, given.dout
        softmax_scale, softcap = x.call.softmax_scale, x.call.softcap
        n, heads, qk_dim = q.shape
        kv_heads = k.shape[1]
        work = work_dtype(q.dtype)
        delta = (dout.to(work) * given.out.to(work)).sum(dim=-1).transpose(0, 1)
        dq = torch.zeros(heads, n, qk_dim, dtype=work, device=q.device)
        dk = torch.zeros(kv_heads, k.shape[0], qk_dim, dtype=work, device=q.device)
        dv = torch.zeros(kv_heads, k.shape[0], v.shape[-1], dtype=work, device=q.device)
        for rows, columns in _tiles(geometry):
            scores = _scores(x, rows, columns, geometry)
            probabilities = torch.exp(scores - given.lse[:, rows, None])
            tile_dout = dout[rows].to(work).transpose(0, 1)
            dv[:, columns] += _group_sum(probabilities.transpose(1, 2) @ tile_dout, kv_heads)
            dprobabilities = tile_dout @ _expand(v[columns].to(work), heads).transpose(1, 2)
            dscores = probabilities * (dprobabilities - delta[:, rows, None])
            if softcap is not None:
                capped = torch.where(torch.isinf(scores), 0.0, scores)
                dscores = dscores * (1 - (capped / softcap) ** 2)
            dscores = dscores * softmax_scale
            dq[:, rows] += dscores @ _expand(k[columns].to(work), heads)
            dk[:, columns] += _group_sum(dscores.transpose(1, 2) @ q[rows].to(work).transpose(0, 1), kv_heads)
        return dq.transpose(0, 1), dk.transpose(0, 1), dv.transpose(0, 1)


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums and log-sum-exps of `dtype` are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def emulated(tensor: Tensor) -> bool:
    """Whether torch multiplies such matrices without the CPU's help, in many times the time that float32 takes."""
    return tensor.dtype == torch.bfloat16 and tensor.device.type == "cpu" and not _CPU_MULTIPLIES_BFLOAT16


def pad(tensor: Tensor, width: int) -> Tensor:
    """Zero-pad the last dimension to `width`: zeros add nothing to q k^T and give output columns that are cut off."""
    missing = width - tensor.shape[-1]
    return functional.pad(tensor, (0, missing)) if missing else tensor


def _heads_first(tensor: Tensor, width: int) -> Tensor:
    """[n, heads, d] -> [1, heads, n, width]."""
    return pad(tensor, width).transpose(0, 1)[None]


def _additive_mask(geometry: Geometry, dtype: torch.dtype) -> Tensor | None:
    """[1, 1, n, m] of 0 and -inf; None where the kernel needs none."""
    if not geometry.needs_mask:
        return None
    n, m = geometry.n, geometry.m
    hidden = torch.full((n, m), float("-inf"), dtype=dtype)
    mask = hidden.triu(m - n + 1) if geometry.causal else torch.zeros_like(hidden)
    if geometry.left is not None:
        mask += hidden.tril_(m - n - geometry.left - 1)
    return mask[None, None]


def _tiles(geometry: Geometry) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of the tiles in which something is visible."""
    shift = geometry.m - geometry.n
    for row in range(0, geometry.n, _TILE):
        rows = slice(row, min(row + _TILE, geometry.n))
        stop = min(geometry.m, rows.stop + shift) if geometry.causal else geometry.m
        first = 0 if geometry.left is None else max(0, rows.start + shift - geometry.left)
        for column in range(first - first % _TILE, stop, _TILE):
            yield rows, slice(column, min(column + _TILE, geometry.m))


def _expand(tensor: Tensor, heads: int) -> Tensor:
    """[m, kv_heads, d] -> [heads, m, d], each KV head repeated for its group of query heads."""
    return tensor.transpose(0, 1).repeat_interleave(heads // tensor.shape[1], dim=0)


def _group_sum(tensor: Tensor, kv_heads: int) -> Tensor:
    """[heads, m, d] -> [kv_heads, m, d], summed over each group of query heads."""
    grouped: Tensor = tensor.unflatten(0, (kv_heads, -1))
    return grouped.sum(dim=1)


def _scores(x: Operands, rows: slice, columns: slice, geometry: Geometry) -> Tensor:
    """Scaled, capped and masked scores [heads, rows, columns] of one tile."""
    q, softcap = x.q, x.call.softcap
    work = work_dtype(q.dtype)
    queries = q[rows].to(work).transpose(0, 1)
    scores: Tensor = queries @ _expand(x.k[columns].to(work), q.shape[1]).transpose(1, 2) * x.call.softmax_scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if geometry.causal or geometry.left is not None:
        shift = geometry.m - geometry.n
        row_index = torch.arange(rows.start + shift, rows.stop + shift, device=q.device)[:, None]
        column_index = torch.arange(columns.start, columns.stop, device=q.device)
        if geometry.causal and columns.stop > rows.start + shift + 1:
            scores = scores.masked_fill(column_index > row_index, float("-inf"))
        if geometry.left is not None:
            scores = scores.masked_fill(column_index < row_index - geometry.left, float("-inf"))
    return scores
