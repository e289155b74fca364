"""The images of a corpus: `images.bin` holds the files end to end, as they were found, so that a run needs no others;
`images.index` for each its document, its end in images.bin, its CRC-32C and its tokens, int64 little-endian."""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.engine.data.corpus.spans import damage
from penstock.engine.data.samples import ImageFile
from penstock.storage.files.crc import checksum
from penstock.storage.files.disk import read_all, reporting
from penstock.storage.files.untrusted import open_regular

IMAGES, IMAGE_INDEX = "images.bin", "images.index"
COLUMNS = 4


class ImageFiles:
    """Reads them; each is checked as it is read. `tokens` [images] int64: as many stand for each."""

    def __init__(self, path: Path, index: NDArray[np.int64]) -> None:
        """`index`: [images, COLUMNS]. UserError where it does not fit the file."""
        self.path, self._documents, self._ends, self._sums, self.tokens = path, *index.T
        if (np.diff(self._documents) < 0).any() or (np.diff(self._ends, prepend=0) <= 0).any():
            raise damage(path.with_name(IMAGE_INDEX), "its documents or offsets do not rise")
        try:
            self._fd = open_regular(path)
        except OSError as error:
            raise damage(path, f"it cannot be read ({error})") from error
        weakref.finalize(self, os.close, self._fd)
        if (size := os.fstat(self._fd).st_size) != self._ends[-1]:
            raise damage(path, f"it has {size:,} bytes instead of {self._ends[-1]:,} as written")

    def __len__(self) -> int:
        return len(self._ends)

    def of_document(self, document: int) -> range:
        """The numbers of a document's images."""
        return range(*np.searchsorted(self._documents, [document, document + 1]).tolist())

    def share(self, lengths: NDArray[np.int64]) -> float:
        """The largest share of a document's tokens that stand for images, of documents of such `lengths`."""
        counts = np.bincount(self._documents, self.tokens, len(lengths))
        return float((counts / lengths).max())

    @property
    def documents(self) -> NDArray[np.int64]:
        """Those that have images."""
        return np.unique(self._documents)

    def read(self, number: int) -> bytes:
        """The content of an image's file. UserError where it is damaged."""
        start = int(self._ends[number - 1]) if number else 0
        data = bytearray(int(self._ends[number]) - start)
        with reporting(self.path, f"reading {len(data):,} bytes"):
            whole = read_all(self._fd, [memoryview(data)], start)
        if not whole or checksum(memoryview(data)) != self._sums[number]:
            raise damage(self.path, f"image {number:,} (bytes {start:,} to {start + len(data):,}) is not as written")
        return bytes(data)

    def verify(self) -> int:
        """Read all of them; their bytes."""
        return sum(len(self.read(number)) for number in range(len(self)))


class ImageWriter:
    """Writes them."""

    def __init__(self, folder: Path) -> None:
        self._stream = (folder / IMAGES).open("wb")
        self._digest = hashlib.sha256()
        self._rows: list[tuple[int, int, int, int]] = []

    def add(self, document: int, images: Sequence[ImageFile]) -> None:
        """The images of a document, which comes behind those that were added."""
        for content, tokens in images:
            self._stream.write(content)
            self._digest.update(content)
            end = self._rows[-1][1] if self._rows else 0
            self._rows.append((document, end + len(content), checksum(memoryview(content)), tokens))

    def finish(self) -> tuple[str, bytes]:
        """Make it durable; the SHA-256 of all, and the index."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        return self._digest.hexdigest(), np.asarray(self._rows, dtype="<i8").tobytes()
