"""Arrow's IPC files and streams; `datasets` saves its data sets as streams."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.engine.data.files import base
from penstock.engine.data.rows import BadRows, Row
from penstock.storage.errors import UserError
from penstock.storage.untrusted import one_line, printable

COMPRESSED = False
_MAGIC = b"ARROW1"
_BATCH_ROWS = 256  # made into Python's objects at once


def read(file: Path, bad: BadRows) -> Iterator[Row]:
    from pyarrow import ipc

    with base.open_bytes(file) as stream, whole(file):
        start = stream.read(len(_MAGIC))
        stream.seek(0)
        if start != _MAGIC:
            yield from rows_of(file, ipc.open_stream(stream))
            return
        reader = ipc.open_file(stream)
        yield from rows_of(file, (reader.get_batch(index) for index in range(reader.num_record_batches)))


def rows_of(file: Path, batches: Iterable[Any]) -> Iterator[Row]:
    """The rows of pyarrow's record batches."""
    number = 0
    for batch in batches:
        for start in range(0, batch.num_rows, _BATCH_ROWS):
            for fields in batch.slice(start, _BATCH_ROWS).to_pylist():
                number += 1
                yield Row(f"{printable(file)}:row {number}", {key: base.without_nulls(v) for key, v in fields.items()})


@contextmanager
def whole(file: Path) -> Iterator[None]:
    """What pyarrow raises is a UserError: the file is damaged, or none of its kind."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        raise UserError(
            f"{printable(file)}: not a whole {file.suffix} file ({one_line(error, 200)}); copy or download it again"
        ) from error
