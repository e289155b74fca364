"""CRC-32C (Castagnoli) of chunk files: the checksum of zarr3's `crc32c` codec."""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

try:
    import crc32c
except ImportError:  # a machine on which nothing may be installed: slower, the same checksum
    HAVE_CRC32C = False
else:
    HAVE_CRC32C = True

if TYPE_CHECKING:
    import tensorstore as ts

_POLYNOMIAL = 0x82F63B78  # reflected
_MASK = 0xFFFFFFFF


def checksum(data: memoryview, num_zeros: int) -> int:
    """CRC-32C of `data` followed by `num_zeros` zero bytes that need not exist in memory.

    A chunk file ends in padding; its zeros are accounted for by algebra and never gathered with the data.
    """
    crc: int = crc32c.crc32c(data) if HAVE_CRC32C else through_tensorstore(data)
    return followed(crc, num_zeros)


def followed(crc: int, num_zeros: int) -> int:
    """CRC-32C of what has CRC-32C `crc`, followed by `num_zeros` zero bytes."""
    return crc if num_zeros == 0 else _apply(_zeros_operator(num_zeros), crc ^ _MASK) ^ _MASK


def joined(first: int, second: int, second_bytes: int) -> int:
    """CRC-32C of two pieces of data in a row, of the CRC-32C of each; the second has `second_bytes` bytes."""
    return _apply(_zeros_operator(second_bytes), first) ^ second


def through_tensorstore(data: memoryview) -> int:
    """CRC-32C of `data` as tensorstore's codec computes it: two copies, piece by piece, at about 1 GB/s a core.

    Each thread keeps a store of one chunk in memory and writes every piece over it; the codec leaves the checksum
    behind the piece. Opening a store for each call would cost as much as a megabyte.
    """
    if not hasattr(_local, "piece"):
        _local.piece = _one_chunk_store()
    chunk, files = _local.piece
    values = np.frombuffer(data, dtype=np.uint8)
    register = _MASK
    for start in range(0, len(values), _PIECE_BYTES):
        piece = values[start : start + _PIECE_BYTES]
        register = _apply(_zeros_operator(len(piece)), register)
        if len(piece) < _PIECE_BYTES:
            # Zeros in front leave the register at 0 where it begins at 0, which is what `_of_zeros` accounts for.
            piece = np.concatenate([np.zeros(_PIECE_BYTES - len(piece), dtype=np.uint8), piece])
        chunk.write(piece).result()
        register ^= int.from_bytes(files["c/0"][-4:], "little") ^ _of_zeros(_PIECE_BYTES)
    return register ^ _MASK


_PIECE_BYTES = 120 << 10
"""With its checksum just under what malloc takes from the kernel and returns to it each time."""

_local = threading.local()


def _one_chunk_store() -> tuple[ts.TensorStore, ts.KvStore]:
    """A zarr3 array [_PIECE_BYTES] of uint8 in memory, one chunk, and the files that it consists of."""
    import tensorstore as ts

    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "memory"},
        "store_data_equal_to_fill_value": True,
        "metadata": {
            "shape": [_PIECE_BYTES],
            "data_type": "uint8",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [_PIECE_BYTES]}},
            "codecs": [{"name": "bytes"}, {"name": "crc32c"}],
        },
    }
    array = ts.open(spec, create=True, context=ts.Context()).result()
    files = array.kvstore
    assert files is not None
    return array, files


# Feeding a zero bit is a linear map of the 32-bit register over GF(2), kept as its images of the 32 single bits;
# feeding n zero bytes is its 8n-th power, found by repeated squaring.


def _apply(operator: tuple[int, ...], register: int) -> int:
    result = 0
    for image in operator:
        if register & 1:
            result ^= image
        register >>= 1
    return result


def _compose(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(_apply(second, image) for image in first)


@lru_cache(maxsize=256)
def _zeros_operator(num_zeros: int) -> tuple[int, ...]:
    result = tuple(1 << bit for bit in range(32))
    for power in range(num_zeros.bit_length()):
        if num_zeros >> power & 1:
            result = _compose(result, _doubled(power))
    return result


@lru_cache(maxsize=64)
def _doubled(power: int) -> tuple[int, ...]:
    """2^power zero bytes."""
    if power == -3:  # one bit
        return tuple(1 << (bit - 1) if bit else _POLYNOMIAL for bit in range(32))
    half = _doubled(power - 1)
    return _compose(half, half)


@lru_cache(maxsize=256)
def _of_zeros(num_zeros: int) -> int:
    """CRC-32C of zero bytes."""
    return _apply(_zeros_operator(num_zeros), _MASK) ^ _MASK
