"""How frozen weights are stored at fewer bits than they are computed with: which bytes of a flat buffer are whose.

No torch; values are made and read back by model/quantise.py. Blocks of 64 consecutive values of a matrix, in the order
of its rows, have one float32 scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.storage.tier.layout import ALIGN_NUMEL, ParamSpec, align_up

BLOCK = 64
"""Values that share a scale."""
WORD_BYTES = 2
WORD = "int16"
"""Dtype of a buffer of quantised weights to planner, store and lanes, which do not look inside: words of two bytes, so
that what is aligned in elements (storage/tier/layout.py) lies at the same pages as bfloat16 does."""
BITS = {"int8": 8, "nf4": 4}
"""Format of `model.frozen_format` -> bits of a value, the scales apart."""
LEAST_SHARE = 64
"""A matrix with less than one part in so many of the values of its buffer's largest one stays float32: it saves next to
nothing, and what is so small (routers, decays) is sensitive."""
PIECE_BLOCKS = 1 << 16
"""Blocks that are dequantised at once where that is not compiled, which bounds the temporaries."""
_VALUE_BYTES = 12
"""What these take of each value: indices, what they look up, the products."""
_SCALE_BYTES = 4
_ALIGNMENT = 256
"""What every range of bytes begins at a multiple of, as CUDA's allocations do."""
assert ALIGN_NUMEL % BLOCK == 0, "the last block of a parameter would reach into the next one"


@dataclass(frozen=True, slots=True)
class StoredParam:
    """Where a parameter is in a buffer, in bytes."""

    name: str
    numel: int
    values: tuple[int, int]
    """First byte and end of its values: quantised, whole blocks of them; else float32."""
    scales: tuple[int, int] | None
    """The same of its scales, float32; None: it is not quantised."""


@dataclass(frozen=True, slots=True)
class StoredLayout:
    """A flat buffer of which everything of two or more dimensions is quantised, unless it is small; the rest is
    float32."""

    format: str
    params: tuple[StoredParam, ...]
    numel: int
    """Words of the buffer with padding, a multiple of ALIGN_NUMEL."""

    @property
    def quantised(self) -> list[StoredParam]:
        return [param for param in self.params if param.scales is not None]

    @property
    def work_bytes(self) -> int:
        """What dequantising takes beside its result, at most."""
        blocks = max(-(-param.numel // BLOCK) for param in self.quantised)
        return min(PIECE_BLOCKS, blocks) * BLOCK * _VALUE_BYTES

    @staticmethod
    def build(params: Sequence[ParamSpec], format: str) -> StoredLayout:
        result, end = [], 0
        largest = max(param.numel for param in params if len(param.shape) > 1)

        def take(nbytes: int) -> tuple[int, int]:
            nonlocal end
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = start + nbytes
            return start, end

        for param in params:
            if len(param.shape) < 2 or param.numel * LEAST_SHARE < largest:
                result.append(StoredParam(param.name, param.numel, take(param.numel * 4), None))
                continue
            blocks = -(-param.numel // BLOCK)
            values = take(blocks * BLOCK * BITS[format] // 8)
            result.append(StoredParam(param.name, param.numel, values, take(blocks * _SCALE_BYTES)))
        return StoredLayout(format, tuple(result), align_up(-(-end // WORD_BYTES)))
