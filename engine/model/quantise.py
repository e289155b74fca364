"""Quantising frozen weights, and their values back, in plain torch operations: the same bits on every device, whether
or not they are compiled.

int8: round(w / s) with s = absmax / 127 of the block. nf4: the nearest of the sixteen values of QLoRA's NormalFloat4
(arXiv 2305.14314, appendix E), times the block's absmax, two values a byte, the first in the upper half: values and
bytes are those of bitsandbytes. fp8: E4M3 times a float32 scale, rounded to bfloat16; the scale is the checkpoint's, or
absmax / 448. mxfp4: E2M1, two values a byte, times a power of two, the one that brings absmax between 4 and 8: of what
a checkpoint holds in MXFP4 (OCP Microscaling Formats 1.0) that is exact, as E2M1 has every value of its smaller ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from penstock.engine.model.spec import BufferSpec
from penstock.engine.model.stored import FORMATS, PIECE_BLOCKS, SCALES, StoredLayout, StoredParam
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
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_INT8_MAX = 127
_E4M3_MAX = 448


def _int8_values(values: Tensor, scales: Tensor, table: Tensor, out: Tensor) -> None:
    """`out` [groups, block, columns] of any float dtype, of its int8 values and scales [groups, 1, columns]."""
    out.copy_(values.view(out.shape).float() * scales)


def _nf4_values(values: Tensor, scales: Tensor, table: Tensor, out: Tensor) -> None:
    """The same of uint8 values, a pair each. `table` int64 [256]: the pairs of float32, as looking up eight bytes at
    once is faster."""
    out.copy_(table.index_select(0, values.int()).view(torch.float32).view(out.shape) * scales)


def _fp8_values(values: Tensor, scales: Tensor, table: Tensor, out: Tensor) -> None:
    """The same of uint8 values, of which `table` float32 [256] says what they are, as older GPUs have no E4M3."""
    product = table.index_select(0, values.int()).view(out.shape) * scales
    if out.dtype != torch.bfloat16:  # rounded by its bits: compilers leave out a cast there and back
        bits = product.view(torch.int32)
        product = ((((bits >> 16) & 1) + bits + 0x7FFF) & -0x10000).view(torch.float32)
    out.copy_(product)


def _mxfp4_values(values: Tensor, scales: Tensor, table: Tensor, out: Tensor) -> None:
    """The same of pairs, and uint8 scales: exponents as float32 has them."""
    _nf4_values(values, (scales.int() << 23).view(torch.float32), table, out)


_VALUES: dict[str, tuple[torch.dtype, torch.dtype, Callable[[Tensor, Tensor, Tensor, Tensor], None]]] = {
    "int8": (torch.int8, torch.float32, _int8_values),
    "nf4": (torch.uint8, torch.float32, _nf4_values),
    "fp8": (torch.uint8, torch.float32, _fp8_values),
    "mxfp4": (torch.uint8, torch.uint8, _mxfp4_values),
}
"""Format -> the dtypes of values and scales that are stored, and what makes values of them."""


def _pairs(codes: Tensor) -> Tensor:
    """int64 [256]: of sixteen float32 the two that a byte stands for."""
    return torch.stack([codes.repeat_interleave(16), codes.repeat(16)], dim=1).view(torch.int64).view(-1)


def _tables() -> dict[str, Tensor]:
    halves = torch.tensor(_E2M1)
    e4m3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    pairs = {"nf4": _pairs(torch.tensor(NF4)), "mxfp4": _pairs(torch.cat([halves, -halves]))}
    return {"int8": torch.empty(0), "fp8": e4m3, **pairs}


class Dequantiser:
    """Makes buffers' parameters from what is stored of them, on one device, on one thread."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._tables = {format: on_device(table, torch.device(device)) for format, table in _tables().items()}
        self._compiled: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], None]] = {}

    def fill(self, flat: Tensor, words: Tensor, layout: FlatLayout, stored: StoredLayout, *, compiled: bool) -> None:
        """Set `flat` [layout.numel] of any float dtype to the parameters in `words` [stored.numel], but for gaps beyond
        a parameter's last block."""
        raw = words.view(torch.uint8)
        run, table = _VALUES[stored.format][2], self._tables[stored.format]
        if compiled:  # in one piece, as nothing but the operands is ever in memory
            if stored.format not in self._compiled:
                self._compiled[stored.format] = torch.compile(run, dynamic=True)
            run = self._compiled[stored.format]
        for param in stored.params:
            start = layout.offsets[param.name]
            if param.dtype is not None:
                own = raw[slice(*param.values)].view(getattr(torch, param.dtype))
                flat[start : start + param.numel].copy_(own)
                continue
            values, scales = _stored_of(raw, param, stored.format)
            block = FORMATS[stored.format].block
            out = flat[start : start + scales.numel() * block].view(-1, block, param.columns)
            for some in [slice(None)] if compiled else _pieces(len(scales), param):
                run(values[some].view(-1), scales[some], table, out[some])


def dequantised(buffer: BufferSpec, words: Tensor) -> dict[str, Tensor]:
    """The float32 parameters in `words` of a quantised buffer on the host, by name."""
    assert buffer.stored is not None
    flat = torch.zeros(buffer.layout.numel)
    Dequantiser().fill(flat, words, buffer.layout, buffer.stored, compiled=False)
    return buffer.layout.views(flat)


def as_held(buffer: BufferSpec, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Float32 parameters of a buffer as they are once they have been stored."""
    return values if buffer.stored is None else dequantised(buffer, quantised(buffer.stored, values)[0])


def _stored_of(raw: Tensor, param: StoredParam, format: str) -> tuple[Tensor, Tensor]:
    """What is stored of a parameter, in `raw` uint8: values [groups, as many as block x columns take], scales [groups,
    1, columns]."""
    of_values, of_scales, _ = _VALUES[format]
    scales = raw[slice(*param.scales)].view(of_scales).view(-1, 1, param.columns)
    return raw[slice(*param.values)].view(of_values).view(len(scales), -1), scales


def _pieces(groups: int, param: StoredParam) -> list[slice]:
    """Groups of blocks beside each other that are handled at once."""
    step = max(1, PIECE_BLOCKS // param.columns)
    return [slice(first, first + step) for first in range(0, groups, step)]


def quantised(stored: StoredLayout, values: Mapping[str, Tensor]) -> tuple[Tensor, float]:
    """What is stored of float32 parameters, by the scales that a checkpoint has for them where they are among `values`,
    and the largest relative error of a matrix, ||w - q|| / ||w||. UserError for a value that is not finite."""
    words = empty_aligned(stored.numel, torch.int16).zero_()
    raw, worst, block = words.view(torch.uint8), 0.0, FORMATS[stored.format].block
    run, table, encode = _VALUES[stored.format][2], _tables()[stored.format], _CODES[stored.format]
    for param in stored.params:
        given = values[param.name].reshape(-1)
        if param.dtype is not None:
            raw[slice(*param.values)].view(getattr(torch, param.dtype)).copy_(given)
            continue
        own, scales = _stored_of(raw, param, stored.format)
        known = None if (scale := values.get(param.name + SCALES)) is None else scale.reshape(scales.shape)
        wrong, square, numel = 0.0, 0.0, block * param.columns
        for some in _pieces(len(scales), param):
            piece = given[some.start * numel : some.stop * numel]
            rows = nn.functional.pad(piece, (0, -len(piece) % numel)).view(-1, block, param.columns)
            most = torch.maximum(rows.amax(dim=1, keepdim=True), -rows.amin(dim=1, keepdim=True))
            if not most.isfinite().all():
                raise UserError(
                    f"model.frozen_format: '{param.name}' has a value that is not finite, which {stored.format} does "
                    "not hold; use another checkpoint"
                )
            codes, scales[some] = encode(rows, most, None if known is None else known[some])
            own[some].view(-1).copy_(codes.reshape(-1))
            back = torch.empty_like(rows)
            run(own[some].view(-1), scales[some], table, back)
            wrong += float(torch.linalg.vector_norm(back - rows, dtype=torch.float64)) ** 2
            square += float(torch.linalg.vector_norm(rows, dtype=torch.float64)) ** 2
        worst = max(worst, (wrong / square) ** 0.5 if square else 0.0)
    return words, worst


def _int8_codes(rows: Tensor, most: Tensor, known: Tensor | None) -> tuple[Tensor, Tensor]:
    """int8 and scales of rows [groups, block, columns] and the largest magnitude of each block, or the `known`
    scales."""
    scales = most / _INT8_MAX
    return (rows / _divisors(scales)).round().to(torch.int8), scales


def _nf4_codes(rows: Tensor, most: Tensor, known: Tensor | None) -> tuple[Tensor, Tensor]:
    """The same in pairs, uint8."""
    return _paired(_nearest(rows / _divisors(most), torch.tensor(NF4))), most


def _fp8_codes(rows: Tensor, most: Tensor, known: Tensor | None) -> tuple[Tensor, Tensor]:
    """The same, uint8. A value that was rounded from a product with the scale is nearest to that product's code."""
    scales = most / _E4M3_MAX if known is None else known
    codes = (rows / _divisors(scales)).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), scales


def _mxfp4_codes(rows: Tensor, most: Tensor, known: Tensor | None) -> tuple[Tensor, Tensor]:
    """The same in pairs, and exponents, both uint8."""
    exponents = (torch.frexp(most)[1] + 124).clamp(1, 254)
    magnitudes = rows.abs() / (exponents << 23).view(torch.float32)
    signs = rows.signbit().to(torch.uint8) * len(_E2M1)
    return _paired(_nearest(magnitudes, torch.tensor(_E2M1)) + signs), exponents.to(torch.uint8)


def _nearest(values: Tensor, codes: Tensor) -> Tensor:
    """Which of `codes`, ascending, each value is nearest to, uint8."""
    return torch.bucketize(values, (codes[1:] + codes[:-1]) / 2, out_int32=True).to(torch.uint8)


def _paired(codes: Tensor) -> Tensor:
    return codes.view(-1)[0::2] * 16 + codes.view(-1)[1::2]


def _divisors(scales: Tensor) -> Tensor:
    """Those of blocks of zeros as 1."""
    return torch.where(scales == 0, 1.0, scales)


_CODES: dict[str, Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]] = {
    "int8": _int8_codes,
    "nf4": _nf4_codes,
    "fp8": _fp8_codes,
    "mxfp4": _mxfp4_codes,
}
"""Format -> what makes it of float32 values."""
