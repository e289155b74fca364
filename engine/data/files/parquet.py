"""Parquet: a row group's pages at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from penstock.engine.data.files import base
from penstock.engine.data.files.arrow import rows_of, whole
from penstock.engine.data.rows import BadRows, Row

COMPRESSED = False
_BATCH_ROWS = 256


def read(file: Path, bad: BadRows) -> Iterator[Row]:
    import pyarrow.parquet as parquet

    with base.open_bytes(file) as stream, whole(file):
        yield from rows_of(file, parquet.ParquetFile(stream).iter_batches(batch_size=_BATCH_ROWS))
