"""Arrow's IPC files and streams; `datasets` saves its data sets as streams."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from penstock.engine.data.files import base
from penstock.engine.data.files.arrow_sizes import ROW_BYTES, object_bytes, uncompressed_bytes, viewed_bytes
from penstock.engine.data.samples import BadRows, Row, RowError
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import one_line, parse_json, printable, unique_names

Make = Callable[[Any], Any]
_MAGIC = b"ARROW1"
_BATCH_ROWS = 256  # made into Python's objects at once
_FEW_BYTES = 32 << 20
"""Of Python's objects, which all files may become; `base.FEW_BYTES` the same of what is decompressed."""


def read(file: Path, bad: BadRows) -> Iterator[Row]:
    from pyarrow import PythonFile, ipc

    with base.open_bytes(file) as stream, whole(file):
        begin = 0
        if stream.read(len(_MAGIC)) == _MAGIC:  # a file: a stream behind eight bytes, then a footer that is not needed
            begin = 8
            stream.seek(-len(_MAGIC), os.SEEK_END)
            if stream.read() != _MAGIC:
                raise ValueError("its end is missing")
        require_modest(file, uncompressed_bytes(stream, begin))
        stream.seek(begin)
        yield from rows_of(file, ipc.open_stream(PythonFile(Bounded(stream), mode="r")), bad)


def require_modest(file: Path, claimed: Iterable[int]) -> None:
    """UserError where what is to be uncompressed would take far more memory than the file has bytes."""
    size, total = file.stat().st_size, 0
    for count in claimed:
        total += max(0, count)
        if total > base.FEW_BYTES + base.MOST_TIMES * size:
            raise UserError(
                f"{printable(file)}: becomes more than {base.MOST_TIMES} times as large as the file when uncompressed; "
                "if that is right, write it as JSON lines"
            )


def rows_of(file: Path, batches: Iterable[Any], bad: BadRows) -> Iterator[Row]:
    """The rows of pyarrow's record batches, of which no value is read before all of its batch is known to be sound."""
    number, left = 0, _FEW_BYTES + base.MOST_TIMES * file.stat().st_size
    for batch in batches:
        batch.validate()
        if sum(map(viewed_bytes, batch.columns)) > left:
            raise _repeats(file, number)
        batch.validate(full=True)
        names = batch.schema.names
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise UserError(f"{printable(file)}: the column '{one_line(twice)}' appears twice; name each column once")
        for start in range(0, batch.num_rows, _BATCH_ROWS):
            for piece, size in _pieces(batch.slice(start, _BATCH_ROWS), file):
                left -= size
                if left < 0:
                    raise _repeats(file, number)
                yield from _rows(piece, size, file, number, bad)
                number += piece.num_rows


def _repeats(file: Path, number: int) -> UserError:
    return UserError(
        f"{printable(file)}: from row {number + 1} on it becomes more than {base.MOST_TIMES} times as large as the "
        "file; if that is right, write it as JSON lines"
    )


def _pieces(batch: Any, file: Path) -> Iterator[tuple[Any, int]]:
    """A batch, by halves where it is large, and the `object_bytes` of its columns."""
    size = sum(_sizes(batch, file))
    if size <= base.LINE_BYTES or batch.num_rows == 1:
        yield batch, size
        return
    half = batch.num_rows // 2
    yield from _pieces(batch.slice(0, half), file)
    yield from _pieces(batch.slice(half), file)


def _sizes(batch: Any, file: Path) -> Iterator[int]:
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            yield object_bytes(column)
        except UserError as error:
            raise UserError(f"{printable(file)}: column '{one_line(name)}': {error}") from error
    yield batch.num_rows * ROW_BYTES


def _rows(batch: Any, size: int, file: Path, number: int, bad: BadRows) -> Iterator[Row]:
    """The rows of a piece that has `number` rows before it."""
    name = printable(file)
    if size > base.LINE_BYTES:
        bad.add(RowError(f"{name}:row {number + 1}: a row of more than {base.LINE_BYTES >> 20} MiB; split it"))
        return
    try:
        listed = batch.to_pylist()
    except Exception as error:  # of a date that Python does not know, say
        if batch.num_rows > 1:
            for at in range(batch.num_rows):
                yield from _rows(batch.slice(at, 1), 0, file, number + at, bad)
            return
        wrong = f"{name}:row {number + 1}: {_unreadable(batch, error)}"
        bad.add(RowError(f"{wrong}; correct the value, or leave the column out"))
        return
    makers = {field.name: maker(field.type) for field in batch.schema}
    for at, fields in enumerate(listed, number + 1):
        where = f"{name}:row {at}"
        try:
            row = Row(where, {column: _value(column, item, makers[column]) for column, item in fields.items()})
        except ValueError as error:
            bad.add(RowError(f"{where}: {error}"))
        else:
            yield row


def _value(column: str, value: Any, make: Make | None) -> Any:
    """ValueError naming the column where the value is none of its type."""
    try:
        return value if make is None else make(value)
    except ValueError as error:
        raise ValueError(f"column '{one_line(column, 40)}': {one_line(error, 200)}; correct the value") from error


def _unreadable(row: Any, error: Exception) -> str:
    """Which column of a row has a value that Python does not take."""
    for name, column in zip(row.schema.names, row.columns, strict=True):
        try:
            column.to_pylist()
        except Exception as result:
            kind = one_line(column.type, 100)
            return f"column '{one_line(name)}' ({kind}) has a value that cannot be read: {one_line(result, 200)}"
    return f"it cannot be read: {one_line(error, 200)}"


def maker(kind: Any) -> Make | None:
    """What makes of a value that pyarrow gives of this type (pyarrow.DataType) the object that it is for; None: nothing
    is to be made. ValueError of it where a value is none of its type.

    A struct loses the fields that are null, since columnar files give each all that any row has. A map becomes an
    object, and JSON (`arrow.json`, which `datasets` uses for mixed types) what it holds.
    """
    import pyarrow.types as types

    if getattr(kind, "extension_name", None) == "arrow.json":
        return _or_none(parse_json)
    if types.is_dictionary(kind):
        return maker(kind.value_type)
    if types.is_struct(kind):
        fields = {kind.field(i).name: maker(kind.field(i).type) for i in range(kind.num_fields)}
        return _or_none(lambda value: _struct(value, fields))
    if types.is_map(kind):
        item = maker(kind.item_type)
        return _or_none(lambda value: _map(value, item))
    if hasattr(kind, "value_type") and (item := maker(kind.value_type)) is not None:  # a list of any sort
        make = item
        return _or_none(lambda value: [make(one) for one in value])
    return None


def _or_none(make: Make) -> Make:
    return lambda value: None if value is None else make(value)


def _struct(value: dict[str, Any], fields: dict[str, Make | None]) -> dict[str, Any]:
    return {
        name: item if (make := fields[name]) is None else make(item) for name, item in value.items() if item is not None
    }


def _map(pairs: list[tuple[Any, Any]], make: Make | None) -> dict[Any, Any]:
    try:
        items = unique_names(pairs)
    except ValueError as error:
        raise ValueError(f"the key {error}") from None
    return items if make is None else {key: make(item) for key, item in items.items()}


class Bounded:
    """A file of which nobody asks for more bytes than it has: so many would be allocated first."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._size = stream, os.fstat(stream.fileno()).st_size
        self.seek, self.tell, self.close = stream.seek, stream.tell, stream.close
        self.readable, self.seekable, self.writable = stream.readable, stream.seekable, stream.writable

    @property
    def closed(self) -> bool:
        return self._stream.closed

    def read(self, count: int = -1) -> bytes:
        return self._stream.read(min(count, max(0, self._size - self._stream.tell())))


@contextmanager
def whole(file: Path) -> Iterator[None]:
    """What pyarrow raises, and Python of what it gave, is a UserError: the file is damaged, or none of its kind."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{printable(file)}: not a whole {file.suffix} file ({one_line(error, 200) or type(error).__name__}); copy "
            "or download it again"
        ) from error
