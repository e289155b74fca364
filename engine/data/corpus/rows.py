"""The rows of a corpus of prompts: `rows.bin` holds them end to end, each an object as JSON; `rows.idx` the end of each
in it and its CRC-32C, int64 little-endian."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.engine.data.corpus.pieces import PieceFile, PieceWriter
from penstock.engine.data.corpus.spans import damage

ROWS, ROW_INDEX = "rows.bin", "rows.idx"
ROW_COLUMNS = 2


class RowFile(PieceFile):
    """Reads them."""

    def __init__(self, path: Path, index: NDArray[np.int64]) -> None:
        """`index`: [documents, ROW_COLUMNS]. UserError where it does not fit the file."""
        ends, sums = index.T
        super().__init__(path, ROW_INDEX, ends, sums, noun="row")

    def row(self, document: int) -> dict[str, Any]:
        """The row of a document. UserError where it is damaged."""
        content = self.read(document)
        try:
            result = json.loads(content)
        except (ValueError, RecursionError):
            result = None
        if not isinstance(result, dict):
            raise damage(self.path, f"row {document:,} is no object")
        return result


class RowWriter(PieceWriter):
    """Writes them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / ROWS)
        self._index: list[tuple[int, int]] = []

    def add_row(self, row: str) -> None:
        """The row of the next document, as JSON."""
        self._index.append(self.add(row.encode()))

    @property
    def index(self) -> bytes:
        """The content of ROW_INDEX."""
        return np.asarray(self._index, dtype="<i8").tobytes()
