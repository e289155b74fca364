"""The images of a corpus: `images.bin` holds the files end to end, as they were found, so that a run needs no others;
`images.index` for each its document, its end in images.bin, its CRC-32C and its tokens, int64 little-endian."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.engine.data.corpus.pieces import PieceFile, PieceWriter
from penstock.engine.data.corpus.spans import damage
from penstock.engine.data.samples import ImageFile

IMAGES, IMAGE_INDEX = "images.bin", "images.index"
COLUMNS = 4


class ImageFiles(PieceFile):
    """Reads them. `tokens` [images] int64: as many stand for each."""

    def __init__(self, path: Path, index: NDArray[np.int64]) -> None:
        """`index`: [images, COLUMNS]. UserError where it does not fit the file."""
        self._documents, ends, sums, self.tokens = index.T
        if (np.diff(self._documents) < 0).any():
            raise damage(path.with_name(IMAGE_INDEX), "its documents do not rise")
        super().__init__(path, IMAGE_INDEX, ends, sums, noun="image")

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


class ImageWriter(PieceWriter):
    """Writes them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / IMAGES)
        self._rows: list[tuple[int, int, int, int]] = []

    def add_images(self, document: int, images: Sequence[ImageFile]) -> None:
        """The images of a document, which comes behind those that were added."""
        self._rows += [(document, *self.add(content), tokens) for content, tokens in images]

    @property
    def index(self) -> bytes:
        """The content of IMAGE_INDEX."""
        return np.asarray(self._rows, dtype="<i8").tobytes()
