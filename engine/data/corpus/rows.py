"""The rows of a corpus of prompts: `rows.bin` holds them end to end, each an object as JSON; `rows.idx` the end of each
in it and its CRC-32C, int64 little-endian."""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.engine.data.corpus.spans import damage
from penstock.storage.files.crc import checksum
from penstock.storage.files.disk import read_all, reporting
from penstock.storage.files.untrusted import open_regular

ROWS, ROW_INDEX = "rows.bin", "rows.idx"
ROW_COLUMNS = 2


class RowFile:
    """Reads them; each is checked as it is read."""

    def __init__(self, path: Path, index: NDArray[np.int64]) -> None:
        """`index`: [documents, ROW_COLUMNS]. UserError where it does not fit the file."""
        self.path, self._ends, self._sums = path, *index.T
        if (np.diff(self._ends, prepend=0) <= 0).any():
            raise damage(path.with_name(ROW_INDEX), "its offsets do not rise")
        try:
            self._fd = open_regular(path)
        except OSError as error:
            raise damage(path, f"it cannot be read ({error})") from error
        weakref.finalize(self, os.close, self._fd)
        if (size := os.fstat(self._fd).st_size) != self._ends[-1]:
            raise damage(path, f"it has {size:,} bytes instead of {self._ends[-1]:,} as written")

    def read(self, document: int) -> dict[str, Any]:
        """The row of a document. UserError where it is damaged."""
        content = self._content(document)
        try:
            result = json.loads(content)
        except (ValueError, RecursionError):
            result = None
        if not isinstance(result, dict):
            raise damage(self.path, f"row {document:,} is no object")
        return result

    def _content(self, document: int) -> bytes:
        start = int(self._ends[document - 1]) if document else 0
        data = bytearray(int(self._ends[document]) - start)
        with reporting(self.path, f"reading {len(data):,} bytes"):
            whole = read_all(self._fd, [memoryview(data)], start)
        if not whole or checksum(memoryview(data)) != self._sums[document]:
            raise damage(self.path, f"row {document:,} (bytes {start:,} to {start + len(data):,}) is not as written")
        return bytes(data)

    def verify(self) -> int:
        """Read all of them; their bytes."""
        return sum(len(self._content(number)) for number in range(len(self._ends)))


class RowWriter:
    """Writes them."""

    def __init__(self, folder: Path) -> None:
        self._stream = (folder / ROWS).open("wb")
        self._digest = hashlib.sha256()
        self._index: list[tuple[int, int]] = []

    def add(self, row: str) -> None:
        """The row of the next document, as JSON."""
        content = row.encode()
        self._stream.write(content)
        self._digest.update(content)
        end = self._index[-1][0] if self._index else 0
        self._index.append((end + len(content), checksum(memoryview(content))))

    def finish(self) -> tuple[str, bytes]:
        """Make it durable; the SHA-256 of all, and the index."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        return self._digest.hexdigest(), np.asarray(self._index, dtype="<i8").tobytes()
