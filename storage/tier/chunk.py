"""One chunk file: raw bytes, zero padding, CRC-32C; written and read by direct I/O, straight from and to arena slots.

It is a zarr3 chunk of codecs `bytes` and `crc32c`. The zarr chunk is a little longer than a part, so that the file,
checksum included, is a whole number of 4 KiB blocks: without that padding no reader can use direct I/O on it.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.storage.files.crc import checksum
from penstock.storage.files.disk import held, read_all, write_all

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]

BLOCK_BYTES = 4096
_CRC_BYTES = 4


class ChunkError(Exception):
    """A chunk file is missing, has the wrong size or does not match its checksum; the message says which."""


@dataclass(frozen=True, slots=True)
class ChunkFormat:
    """Sizes of the chunk files of one array, the same for all of its parts."""

    part_bytes: int
    """Payload of a whole part; the array's last part may hold less and is followed by zeros."""

    @property
    def file_bytes(self) -> int:
        """Size of every chunk file: payload, padding and checksum, a multiple of 4 KiB."""
        return -(-(self.part_bytes + _CRC_BYTES) // BLOCK_BYTES) * BLOCK_BYTES

    @property
    def stored_bytes(self) -> int:
        """Bytes of the zarr chunk: everything in the file but the checksum."""
        return self.file_bytes - _CRC_BYTES


def supports_direct(folder: Path) -> bool:
    """Whether a block can be written to existing `folder` by direct I/O; true as well where nothing can be written."""
    probe = folder / f".direct-{os.getpid()}.tmp"
    try:
        with held(os.open(probe, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o644)) as fd:
            os.pwrite(fd, mmap.mmap(-1, BLOCK_BYTES), 0)
    except OSError as error:
        return error.errno != errno.EINVAL
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    return True


def write_chunk(path: Path, data: Bytes, form: ChunkFormat, *, direct: bool) -> int:
    """Write `data` uint8 [<= part_bytes] as chunk file `path`, not synced; the CRC-32C of payload and padding. OSError.

    In place, which costs no allocation; but a file that a checkpoint shares is left to it and replaced by a new one.
    """
    crc = checksum(data.data, form.stored_bytes - data.size)
    whole, end, requests = _requests(data, form)
    _pages.last[:] = bytes(BLOCK_BYTES)
    end[:] = bytes(data.data[whole:]).ljust(BLOCK_BYTES, b"\0")
    _pages.last[-_CRC_BYTES:] = crc.to_bytes(_CRC_BYTES, "little")
    with held(_open_own(path, os.O_DIRECT if direct and _is_aligned(data) else 0, form.file_bytes)) as fd:
        for views, offset in requests:
            write_all(fd, views, offset)
    return crc


class _Pages(threading.local):
    """A thread's pages for what direct I/O cannot move from or to where it is: ends of payloads and of files."""

    def __init__(self) -> None:
        pages = memoryview(mmap.mmap(-1, 2 * BLOCK_BYTES))
        self.tail, self.last = pages[:BLOCK_BYTES], pages[BLOCK_BYTES:]


_pages = _Pages()


def _requests(data: Bytes, form: ChunkFormat) -> tuple[int, memoryview, list[tuple[list[memoryview], int]]]:
    """Bytes of the whole blocks of a payload, the page for what is behind them, and (views, offset) of all that moves
    between memory and the file: one request where it can be, as a small second one waits behind large ones of others.
    """
    whole = data.size - data.size % BLOCK_BYTES
    if whole + BLOCK_BYTES == form.file_bytes:
        return whole, _pages.last, [([data.data[:whole], _pages.last], 0)]
    front = [data.data[:whole], *([_pages.tail] if whole < data.size else [])]
    return whole, _pages.tail, [(front, 0), ([_pages.last], form.file_bytes - BLOCK_BYTES)]


def _open_own(path: Path, flags: int, file_bytes: int) -> int:
    """Open `path` for writing, making it where it is missing; a file with other hard links is replaced by a new one,
    and a longer one is cut to `file_bytes`."""
    flags |= os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(path, flags, 0o644)
    try:
        status = os.fstat(fd)
        if status.st_nlink <= 1:
            if status.st_size > file_bytes:
                os.ftruncate(fd, file_bytes)
            return fd
        os.unlink(path)
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return os.open(path, flags | os.O_EXCL, 0o644)


def read_chunk(path: Path, out: Bytes, form: ChunkFormat, *, direct: bool, expected: int | None = None) -> None:
    """Read the first `out.size` bytes of chunk file `path` into `out` uint8 and check the checksum.

    `out.size` is the part's payload; `expected` is the CRC-32C that the manifest records, where known. ChunkError on a
    missing, truncated, damaged or stale file (`out` then holds garbage), OSError on a failing disk. Direct I/O falls
    back to the page cache where the file system or the address of `out` does not allow it.
    """
    whole, end, requests = _requests(out, form)
    with held(_open_chunk(path, form, direct=direct and _is_aligned(out))) as fd:
        for views, offset in requests:
            _pread(fd, views, offset)
    out.data[whole:] = end[: out.size - whole]
    stored = _stored(out.size, form)
    require_sum(checksum(out.data, form.stored_bytes - out.size), stored)
    require_expected(stored, expected)


def check_chunk(path: Path, memory: Bytes, form: ChunkFormat, expected: int) -> None:
    """Read chunk file `path` into `memory` uint8 [file_bytes], padding included, and check both checksums, directly
    where `memory` starts at a 4 KiB address. ChunkError and OSError as in read_chunk."""
    with held(_open_chunk(path, form, direct=_is_aligned(memory))) as fd:
        _pread(fd, [memory.data], 0)
    stored = int.from_bytes(memory[form.stored_bytes :].tobytes(), "little")
    require_sum(checksum(memory[: form.stored_bytes].data), stored)
    require_expected(stored, expected)


def stored_checksum(path: Path, form: ChunkFormat, payload_bytes: int) -> int:
    """The CRC-32C at the end of chunk file `path`, for readers that move the payload by other means.

    ChunkError on a missing or truncated file, or where the last block's padding is not zero; OSError on a failing disk.
    """
    with held(_open_chunk(path, form, direct=True)) as fd:
        _pread(fd, [_pages.last], form.file_bytes - BLOCK_BYTES)
    return _stored(payload_bytes, form)


def _stored(payload_bytes: int, form: ChunkFormat) -> int:
    """The checksum in the last block, which this thread has just read. ChunkError where its padding is not zero."""
    block = _pages.last
    if bytes(block[max(payload_bytes - form.file_bytes, -BLOCK_BYTES) : -_CRC_BYTES]).strip(b"\0"):
        raise ChunkError("checksum mismatch: the padding after the payload is not zero")
    return int.from_bytes(block[-_CRC_BYTES:], "little")


def require_sum(result: int, stored: int) -> None:
    """Raise ChunkError unless the bytes' checksum `result` is the one that the file records."""
    if result != stored:
        raise ChunkError(f"checksum mismatch: the bytes have CRC-32C {result:08x}, the file records {stored:08x}")


def require_expected(stored: int, expected: int | None) -> None:
    """Raise ChunkError unless the file's checksum `stored` is the one that the manifest records, where known."""
    if expected is not None and stored != expected:
        raise ChunkError(
            f"stale: intact, but from another generation (CRC-32C {stored:08x}, the manifest records {expected:08x})"
        )


def _open_chunk(path: Path, form: ChunkFormat, *, direct: bool) -> int:
    """Open chunk file `path` for reading, direct where its file system allows, and check its size."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        try:
            fd = os.open(path, flags | (os.O_DIRECT if direct else 0))
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            fd = os.open(path, flags)  # no direct I/O on this file system
    except FileNotFoundError as error:
        raise ChunkError("the file is missing") from error
    size = os.fstat(fd).st_size
    if size != form.file_bytes:
        os.close(fd)
        raise ChunkError(f"the file has {size:,} bytes instead of {form.file_bytes:,}")
    return fd


def _is_aligned(data: Bytes) -> bool:
    return data.ctypes.data % BLOCK_BYTES == 0


def _pread(fd: int, out: list[memoryview], offset: int) -> None:
    if not read_all(fd, out, offset):
        raise ChunkError("the file ended while it was being read")
