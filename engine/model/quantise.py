"""Quantising frozen weights, and their values back, in plain torch operations: the same bits on every device, whether
or not they are compiled.

int8: round(w / s) with s = absmax / 127 of the block. nf4: the nearest of the sixteen values of QLoRA's NormalFloat4
(arXiv 2305.14314, appendix E), times the block's absmax, two values a byte, the first in the upper half: values and
bytes are those of bitsandbytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from penstock.engine.model.spec import BufferSpec
from penstock.engine.model.stored import BLOCK, PIECE_BLOCKS, StoredLayout
from penstock.engine.optim.lr import on_device
from penstock.storage.files.errors import UserError
from penstock.storage.tier.arena import empty_aligned
from penstock.storage.tier.layout import FlatLayout

NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
_INT8_MAX = 127


def _int8_values(values: Tensor, scales: Tensor, table: Tensor, out: Tensor) -> None:
    """out [blocks, BLOCK] of int8 values [blocks x BLOCK] and scales [blocks]."""
    out.copy_(values.view(-1, BLOCK).float() * scales[:, None])


def _nf4_values(values: Tensor, scales: Tensor, table: Tensor, out: Tensor) -> None:
    """out [blocks, BLOCK] of uint8 values [blocks x BLOCK / 2], a pair each, and scales [blocks]. `table` int64 [256]:
    the pairs of float32, as looking up eight bytes at once is faster."""
    out.copy_(table.index_select(0, values.int()).view(torch.float32).view(-1, BLOCK) * scales[:, None])


_VALUES: dict[str, tuple[torch.dtype, Callable[[Tensor, Tensor, Tensor, Tensor], None]]] = {
    "int8": (torch.int8, _int8_values),
    "nf4": (torch.uint8, _nf4_values),
}
"""Format -> the dtype of what is stored, and what makes values of it. A format that a checkpoint has by itself is a row
here, one of model/stored.py and one below."""


class Dequantiser:
    """Makes buffers' parameters from what is stored of them, on one device, on one thread."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        codes = torch.tensor(NF4)
        pairs = torch.stack([codes.repeat_interleave(16), codes.repeat(16)], dim=1)
        self.table = on_device(pairs.view(torch.int64).view(-1), torch.device(device))
        self._compiled: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], None]] = {}

    def fill(self, flat: Tensor, words: Tensor, layout: FlatLayout, stored: StoredLayout, *, compiled: bool) -> None:
        """Set `flat` [layout.numel] of any float dtype to the parameters in `words` [stored.numel], but for gaps beyond
        a parameter's last block."""
        raw = words.view(torch.uint8)
        dtype, run = _VALUES[stored.format]
        if compiled:  # in one piece, as nothing but the operands is ever in memory
            if stored.format not in self._compiled:
                self._compiled[stored.format] = torch.compile(run, dynamic=True)
            run = self._compiled[stored.format]
        for param in stored.params:
            start, values = layout.offsets[param.name], raw[slice(*param.values)]
            if param.scales is None:
                flat[start : start + param.numel].copy_(values.view(torch.float32))
                continue
            scales = raw[slice(*param.scales)].view(torch.float32)
            out = flat[start : start + len(scales) * BLOCK].view(-1, BLOCK)
            values = values.view(dtype)
            step = len(scales) if compiled else PIECE_BLOCKS
            of_block = len(values) // len(scales)
            for first in range(0, len(scales), step):
                some = slice(first, first + step)
                run(values[first * of_block : (first + step) * of_block], scales[some], self.table, out[some])


def dequantised(buffer: BufferSpec, words: Tensor) -> dict[str, Tensor]:
    """The float32 parameters in `words` of a quantised buffer on the host, by name."""
    assert buffer.stored is not None
    flat = torch.zeros(buffer.layout.numel)
    Dequantiser().fill(flat, words, buffer.layout, buffer.stored, compiled=False)
    return buffer.layout.views(flat)


def as_held(buffer: BufferSpec, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Float32 parameters of a buffer as they are once they have been stored."""
    return values if buffer.stored is None else dequantised(buffer, quantised(buffer.stored, values)[0])


def quantised(stored: StoredLayout, values: Mapping[str, Tensor]) -> tuple[Tensor, float]:
    """What is stored of float32 parameters, and the largest relative error of a matrix, ||w - q|| / ||w||. UserError
    for a value that is not finite."""
    words = empty_aligned(stored.numel, torch.int16).zero_()
    raw, worst, pieces = words.view(torch.uint8), 0.0, _PIECES[stored.format]
    dtype, run = _VALUES[stored.format]
    table = Dequantiser().table
    for param in stored.params:
        own, given = raw[slice(*param.values)], values[param.name].reshape(-1)
        if param.scales is None:
            own.view(torch.float32).copy_(given)
            continue
        scales = raw[slice(*param.scales)].view(torch.float32)
        of_block, wrong, square = len(own) // len(scales), 0.0, 0.0
        for first in range(0, len(scales), PIECE_BLOCKS):
            some = slice(first, min(first + PIECE_BLOCKS, len(scales)))
            piece = given[first * BLOCK : some.stop * BLOCK]
            rows = nn.functional.pad(piece, (0, -len(piece) % BLOCK)).view(-1, BLOCK)
            mine = own[first * of_block : some.stop * of_block]
            packed, scales[some] = pieces(rows, torch.maximum(rows.amax(dim=1), -rows.amin(dim=1)))
            mine.copy_(packed.view(torch.uint8).view(-1))
            back = torch.empty_like(rows)
            run(mine.view(dtype), scales[some], table, back)
            wrong += float(torch.linalg.vector_norm(back - rows)) ** 2
            square += float(torch.linalg.vector_norm(rows)) ** 2
        if not scales.isfinite().all():
            raise UserError(
                f"model.frozen_format: '{param.name}' has a value that is not finite, which {stored.format} does not "
                "hold; use another checkpoint"
            )
        worst = max(worst, (wrong / square) ** 0.5 if square else 0.0)
    return words, worst


def _int8_pieces(rows: Tensor, absmax: Tensor) -> tuple[Tensor, Tensor]:
    """int8 and scales of rows [blocks, BLOCK] and the largest magnitude of each."""
    scales = absmax / _INT8_MAX
    return (rows / _divisors(scales)).round().to(torch.int8), scales


def _nf4_pieces(rows: Tensor, absmax: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs of codes, uint8, and scales of rows [blocks, BLOCK] and the largest magnitude of each."""
    codes = torch.tensor(NF4)
    nearest = torch.bucketize(rows / _divisors(absmax), (codes[1:] + codes[:-1]) / 2, out_int32=True).to(torch.uint8)
    return nearest[:, 0::2] * 16 + nearest[:, 1::2], absmax


def _divisors(scales: Tensor) -> Tensor:
    """`scales` as a column, those of blocks of zeros as 1."""
    return torch.where(scales == 0, 1.0, scales)[:, None]


_PIECES: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {"int8": _int8_pieces, "nf4": _nf4_pieces}
"""Format -> what makes it of float32 values."""
