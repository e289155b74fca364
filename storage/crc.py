"""CRC-32C (Castagnoli) of chunk files: the checksum of zarr3's `crc32c` codec."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import tensorstore as ts

try:
    import crc32c
except ImportError:  # a machine on which nothing may be installed: slower, the same checksum
    HAVE_CRC32C = False
else:
    HAVE_CRC32C = True

_POLYNOMIAL = 0x82F63B78  # reflected
_MASK = 0xFFFFFFFF


def checksum(data: memoryview, num_zeros: int) -> int:
    """CRC-32C of `data` followed by `num_zeros` zero bytes that need not exist in memory.

    A chunk file ends in padding; its zeros are accounted for by algebra and never gathered with the data.
    """
    crc: int = crc32c.crc32c(data) if HAVE_CRC32C else through_tensorstore(data)
    return crc if num_zeros == 0 else _apply(_zeros_operator(num_zeros), crc ^ _MASK) ^ _MASK


def through_tensorstore(data: memoryview) -> int:
    """CRC-32C of `data`, at least one byte, as tensorstore's codec computes it: a copy and a quarter of the speed."""
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "memory"},
        "store_data_equal_to_fill_value": True,
        "metadata": {
            "shape": [len(data)],
            "data_type": "uint8",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [len(data)]}},
            "codecs": [{"name": "bytes"}, {"name": "crc32c"}],
        },
    }
    array = ts.open(spec, create=True, context=ts.Context()).result()
    array.write(np.frombuffer(data, dtype=np.uint8)).result()
    store = array.kvstore
    assert store is not None
    return int.from_bytes(store["c/0"][-4:], "little")


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
    step = tuple(1 << (bit - 1) if bit else _POLYNOMIAL for bit in range(32))  # one zero bit
    result = tuple(1 << bit for bit in range(32))
    count = 8 * num_zeros
    while count:
        if count & 1:
            result = _compose(result, step)
        step = _compose(step, step)
        count >>= 1
    return result
