"""Parquet: a row group's pages at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from penstock.engine.data.files import base
from penstock.engine.data.files.arrow import Bounded, require_modest, rows_of, whole
from penstock.engine.data.files.parquet_pages import page_bytes
from penstock.engine.data.rows import BadRows, Row

COMPRESSED = False
_BATCH_ROWS = 256
_ONCE_BYTES = 256 << 20


def read(file: Path, bad: BadRows) -> Iterator[Row]:
    import pyarrow.parquet as parquet
    from pyarrow import PythonFile

    with base.open_bytes(file) as stream, whole(file):
        table = parquet.ParquetFile(PythonFile(Bounded(stream), mode="r"))
        pages = list(page_bytes(stream, file.stat().st_size))
        require_modest(file, (size for _, size in pages))
        repeated = max((size for dictionary, size in pages if dictionary), default=1)  # by each row, at worst
        rows = min(_BATCH_ROWS, max(1, _ONCE_BYTES // max(1, repeated)))
        yield from rows_of(file, table.iter_batches(batch_size=rows), bad)
