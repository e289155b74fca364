"""CRC-32C (Castagnoli) of chunk files: the checksum of zarr3's `crc32c` codec."""

from __future__ import annotations

import crc32c

_ZEROS = memoryview(bytes(1 << 20))


def checksum(data: memoryview, num_zeros: int = 0, before: int = 0) -> int:
    """CRC-32C of `data` followed by `num_zeros` zero bytes, or of all that behind data of CRC-32C `before`."""
    crc: int = crc32c.crc32c(data, before)
    while num_zeros > 0:  # a chunk file's padding is not copied behind its data
        crc = crc32c.crc32c(_ZEROS[:num_zeros], crc)
        num_zeros -= len(_ZEROS)
    return crc
