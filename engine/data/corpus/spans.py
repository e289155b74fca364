"""Files of a number per token: their checksums, and reading them so that no damaged number is handed out."""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.storage.files.crc import checksum
from penstock.storage.files.disk import read_all, reporting
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import open_regular

BLOCK_BYTES = 1 << 16
"""Under one checksum. Documents are drawn at random: a larger block would read much that is not wanted."""
COPY_BYTES = 1 << 23
"""Read or written at once; a multiple of BLOCK_BYTES."""


class SpanFile:
    """A number per token: `file[start:stop]` reads those.

    Each block is checked before the first of its numbers is handed out, once per process; UserError where it is
    damaged. Read, not mapped: what a failing drive does to a mapping ends the process without a word.
    """

    def __init__(
        self,
        path: Path,
        dtype: str,
        length: int,
        sums: NDArray[np.uint32],
        wrong: Callable[[NDArray[Any]], str | None],
    ) -> None:
        """`sums`: of every block; `wrong`: says of a block's numbers what cannot be among them.

        OSError where the file cannot be opened, UserError where its size is wrong.
        """
        self.path, self.dtype = path, np.dtype(dtype).newbyteorder("<")
        self._length, self._sums, self._wrong = length, sums, wrong
        fd = open_regular(self.path)
        weakref.finalize(self, os.close, fd)
        self._fd = fd
        self._num_bytes = length * self.dtype.itemsize
        result = os.fstat(fd).st_size
        if result != self._num_bytes:
            raise damage(self.path, f"it has {result:,} bytes instead of {self._num_bytes:,} as written")
        self._checked = np.zeros(len(sums), dtype=bool)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, span: slice) -> NDArray[Any]:
        start, stop, step = span.indices(len(self))
        assert step == 1
        start, stop = start * self.dtype.itemsize, max(start, stop) * self.dtype.itemsize
        first, end = start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)
        if self._checked[first:end].all():
            return np.frombuffer(self.read_bytes(start, stop - start), dtype=self.dtype)
        begin = first * BLOCK_BYTES
        data = memoryview(self.read_bytes(begin, min(end * BLOCK_BYTES, self._num_bytes) - begin))
        for fault in self._faults(begin, data):
            raise damage(self.path, fault)
        self._checked[first:end] = True
        return np.frombuffer(data[start - begin : stop - begin], dtype=self.dtype)

    def read_bytes(self, start: int, count: int) -> bytearray:
        """Bytes of the file as they are. UserError where the drive does not give them."""
        data = bytearray(count)
        with reporting(self.path, f"reading {count:,} bytes"):
            if not read_all(self._fd, [memoryview(data)], start):
                raise damage(self.path, f"it became shorter than {start + count:,} bytes while it was in use")
        return data

    def _faults(self, begin: int, blocks: memoryview) -> Iterator[str]:
        """What is wrong with blocks, of which the first begins at that byte of the file."""
        for at in range(0, len(blocks), BLOCK_BYTES):
            data, block = blocks[at : at + BLOCK_BYTES], (begin + at) // BLOCK_BYTES
            crc, wanted = checksum(data, 0), int(self._sums[block])
            where = f"block {block:,} (bytes {begin + at:,} to {begin + at + len(data):,})"
            if crc != wanted:
                yield f"{where} has CRC-32C {crc:08x} instead of {wanted:08x} as written"
            elif (why := self._wrong(np.frombuffer(data, dtype=self.dtype))) is not None:
                yield f"{where} holds {why}"

    def verify(self) -> int:
        """Read and check every block; the bytes read. UserError telling how many are damaged, and the first."""
        faults: list[str] = []
        for begin in range(0, self._num_bytes, COPY_BYTES):
            data = self.read_bytes(begin, min(COPY_BYTES, self._num_bytes - begin))
            faults += self._faults(begin, memoryview(data))
        if faults:
            more = f", one of {len(faults):,} damaged blocks of {len(self._sums):,}" if len(faults) > 1 else ""
            raise damage(self.path, faults[0] + more)
        return self._num_bytes


def damage(path: Path, why: str) -> UserError:
    """The UserError for a file of a corpus, or for its folder."""
    folder = path if path.is_dir() else path.parent
    return UserError(
        f"{path}: damaged: {why}; restore the file, or delete the folder {folder} and resume, which tokenizes the "
        "source again"
    )


class SpanWriter:
    """Writes a file of numbers with its checksums."""

    def __init__(self, path: Path) -> None:
        self._stream = path.open("wb")
        self._digest = hashlib.sha256()
        self._sums: list[int] = []
        self._rest = b""

    def add(self, data: bytes) -> None:
        self._digest.update(data)
        self._stream.write(data)
        whole = memoryview(self._rest + data)
        end = len(whole) - len(whole) % BLOCK_BYTES
        self._sums += [checksum(whole[at : at + BLOCK_BYTES], 0) for at in range(0, end, BLOCK_BYTES)]
        self._rest = bytes(whole[end:])

    def finish(self) -> tuple[str, bytes]:
        """Make it durable; its SHA-256, and the CRC-32C of each BLOCK_BYTES, of which the last may be shorter."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        last = [checksum(memoryview(self._rest), 0)] if self._rest else []
        return self._digest.hexdigest(), np.asarray([*self._sums, *last], dtype="<u4").tobytes()
