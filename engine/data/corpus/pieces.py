"""Pieces of bytes end to end in a file, of which an index has the end and the CRC-32C of each."""

from __future__ import annotations

import hashlib
import os
import weakref
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.engine.data.corpus.spans import damage
from penstock.storage.files.crc import checksum
from penstock.storage.files.disk import read_all, reporting
from penstock.storage.files.untrusted import open_regular


class PieceFile:
    """Reads them; each is checked as it is read."""

    def __init__(
        self, path: Path, index_name: str, ends: NDArray[np.int64], sums: NDArray[np.int64], noun: str
    ) -> None:
        """`ends`, `sums` [pieces]: of the index, a file beside; `noun`: what a piece is called. UserError where they do
        not fit the file."""
        self.path, self._ends, self._sums, self._noun = path, ends, sums, noun
        if (np.diff(ends, prepend=0) <= 0).any():
            raise damage(path.with_name(index_name), "its offsets do not rise")
        try:
            self._fd = open_regular(path)
        except OSError as error:
            raise damage(path, f"it cannot be read ({error})") from error
        weakref.finalize(self, os.close, self._fd)
        if (size := os.fstat(self._fd).st_size) != ends[-1]:
            raise damage(path, f"it has {size:,} bytes instead of {ends[-1]:,} as written")

    def __len__(self) -> int:
        return len(self._ends)

    def read(self, number: int) -> bytes:
        """The bytes of a piece. UserError where they are damaged."""
        start = int(self._ends[number - 1]) if number else 0
        data = bytearray(int(self._ends[number]) - start)
        with reporting(self.path, f"reading {len(data):,} bytes"):
            whole = read_all(self._fd, [memoryview(data)], start)
        if not whole or checksum(memoryview(data)) != self._sums[number]:
            place = f"{self._noun} {number:,} (bytes {start:,} to {start + len(data):,})"
            raise damage(self.path, f"{place} is not as written")
        return bytes(data)

    def verify(self) -> int:
        """Read all of them; their bytes."""
        return sum(len(self.read(number)) for number in range(len(self)))


class PieceWriter:
    """Writes them."""

    def __init__(self, path: Path) -> None:
        self._stream = path.open("wb")
        self._digest = hashlib.sha256()
        self._end = 0

    def add(self, content: bytes) -> tuple[int, int]:
        """The end and the CRC-32C of the next piece."""
        self._stream.write(content)
        self._digest.update(content)
        self._end += len(content)
        return self._end, checksum(memoryview(content))

    def finish(self) -> str:
        """Make it durable; the SHA-256 of all."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        return self._digest.hexdigest()
