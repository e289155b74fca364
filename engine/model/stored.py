"""How frozen weights are stored at fewer bits than they are computed with: which bytes of a flat buffer are whose.

No torch; values are made and read back by model/quantise.py. A block of consecutive values of a matrix, in the order of
its rows, has one scale; those of a format that goes by columns lie below each other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.storage.tier.layout import ALIGN_NUMEL, ParamSpec, align_up

WORD_BYTES = 2
WORD = "int16"
"""Dtype of a buffer of quantised weights to planner, store and lanes, which do not look inside: words of two bytes, so
that what is aligned in elements (storage/tier/layout.py) lies at the same pages as bfloat16 does."""


class Format(NamedTuple):
    bits: int
    """Of a value, the scales apart."""
    block: int
    """Values that share a scale."""
    scale_bytes: int
    by_columns: bool = False
    """These are below each other, wherever the rows of a matrix divide by their number."""


FORMATS = {
    "int8": Format(8, 64, 4),
    "nf4": Format(4, 64, 4),
    "fp8": Format(8, 64, 4),
    "mxfp4": Format(4, 32, 1, by_columns=True),
}
"""Those of `model.frozen_format`; the last two are what checkpoints hold (model/checkpoint_format.py)."""
SCALES = ".scales"
"""Ends the name of the scales that a checkpoint has for a matrix, beside that of its values: float32, one for each
block, of the matrix's shape but for the last dimension."""
LEAST_SHARE = 64
"""A matrix with less than one part in so many of the values of its buffer's largest one stays float32: it saves next to
nothing, and what is so small (routers, decays) is sensitive. Beside what a checkpoint quantised its bytes count."""
PLAIN_BYTES = {"float32": 4, "bfloat16": 2}
"""Of a value that is not quantised."""
PIECE_BLOCKS = 1 << 16
"""Blocks that are dequantised at once where that is not compiled, which bounds the temporaries."""
_VALUE_BYTES = 12
"""What these take of each value: indices, what they look up, the products."""
_ALIGNMENT = 256
"""What every range of bytes begins at a multiple of, as CUDA's allocations do."""
assert all(ALIGN_NUMEL % format.block == 0 for format in FORMATS.values()), "a last block would reach too far"


@dataclass(frozen=True, slots=True)
class StoredParam:
    """Where a parameter is in a buffer, in bytes."""

    name: str
    numel: int
    dtype: str | None
    """Of its values; None: they are quantised."""
    values: tuple[int, int]
    """First byte and end of them; of quantised ones, whole blocks."""
    scales: tuple[int, int] = (0, 0)
    """The same of the scales."""
    columns: int = 1
    """How far the values of a block are from each other: 1, or what a row has."""


@dataclass(frozen=True, slots=True)
class StoredLayout:
    """A flat buffer of which some matrices are quantised; the rest is as they are computed with, or float32."""

    format: str
    params: tuple[StoredParam, ...]
    numel: int
    """Words of the buffer with padding, a multiple of ALIGN_NUMEL."""

    @property
    def quantised(self) -> list[StoredParam]:
        return [param for param in self.params if param.dtype is None]

    @property
    def work_bytes(self) -> int:
        """What dequantising takes beside its result, at most."""
        block = FORMATS[self.format].block
        blocks = max(-(-param.numel // block) for param in self.quantised)
        return min(PIECE_BLOCKS, blocks) * block * _VALUE_BYTES

    @staticmethod
    def build(params: Sequence[ParamSpec], format: str, names: Collection[str] | None = None) -> StoredLayout:
        """`names`: of the (whole) parameters that are quantised, beside which other matrices are bfloat16; None: all of
        two or more dimensions are. What is small or a vector is float32."""
        result, end, form = [], 0, FORMATS[format]
        largest = max(param.numel for param in params if len(param.shape) > 1)

        def take(nbytes: int) -> tuple[int, int]:
            nonlocal end
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = start + nbytes
            return start, end

        for param in params:
            share, dtype = param.numel * LEAST_SHARE if len(param.shape) > 1 else 0, "float32"
            if names is None:
                is_quantised = share >= largest
            else:
                is_quantised = (param.rows.of if param.rows else param.name) in names
                dtype = "bfloat16" if share * 32 >= largest * form.bits else "float32"
            if is_quantised:
                rows, columns = param.numel // param.shape[-1], param.shape[-1]
                columns = columns if form.by_columns and rows % form.block == 0 else 1
                blocks = -(-param.numel // form.block)
                values, scales = take(blocks * form.block * form.bits // 8), take(blocks * form.scale_bytes)
                result.append(StoredParam(param.name, param.numel, None, values, scales, columns))
            else:
                result.append(StoredParam(param.name, param.numel, dtype, take(param.numel * PLAIN_BYTES[dtype])))
        return StoredLayout(format, tuple(result), align_up(-(-end // WORD_BYTES)))
