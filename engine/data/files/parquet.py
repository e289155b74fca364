"""Parquet: a row group's pages at a time, once their headers have said what they become.

A header is a struct in Thrift's compact protocol. Of its fields 2 is the uncompressed, 3 the compressed size in bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from penstock.engine.data.files import base
from penstock.engine.data.files.arrow import Bounded, require_modest, rows_of, whole
from penstock.engine.data.samples import BadRows, Row

_BATCH_ROWS = 256
_ONCE_BYTES = 256 << 20
_BOOLEANS, _BYTE, _NUMBERS, _DOUBLE, _BINARY, _LISTS, _STRUCT = (1, 2), 3, (4, 5, 6), 7, 8, (9, 10), 12
_HEADER_BYTES = (1 << 9, 1 << 20)
"""How much is read for a header: most are small, and statistics may be long."""
_MOST_DEPTH = 12


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


def page_bytes(stream: BinaryIO, size: int) -> Iterator[tuple[bool, int]]:
    """Of each page of a file of `size` bytes: whether it is a dictionary, which others repeat; its uncompressed bytes.

    What cannot be parsed is left out: the reader says what is wrong. pyarrow is not queried for a column's
    place, as that ends the process where the column's metadata is damaged.
    """
    stream.seek(max(0, size - 8))
    length = int.from_bytes(stream.read(4), "little")
    stream.seek(max(0, size - 8 - length))
    try:
        footer = _Thrift(stream.read(length)).struct(0)
        columns = [column[3] for group in footer[4] for column in group[1] if column.get(3)]
        places = [(column.get(11), column[9], column[7]) for column in columns]
    except (IndexError, KeyError, TypeError, ValueError, AttributeError):
        return
    for dictionary, data, count in places:
        if all(isinstance(at, int) for at in (dictionary or 0, data, count)):
            yield from _pages(stream, min(dictionary or data, data), count, bool(dictionary))


def _pages(stream: BinaryIO, at: int, count: int, dictionary: bool) -> Iterator[tuple[bool, int]]:
    end = at + count
    while 0 <= at < end:
        header = _header(stream, at)
        if header is None:
            return
        length, uncompressed, compressed = header
        yield dictionary, uncompressed
        dictionary = False
        if compressed < 0:
            return
        at += length + compressed


def _header(stream: BinaryIO, at: int) -> tuple[int, int, int] | None:
    """A header's length, and the two sizes; None where none begins there."""
    for count in _HEADER_BYTES:
        stream.seek(at)
        result = _Thrift(stream.read(count))
        try:
            fields = result.struct(0)
            return result.at, fields[2], fields[3]
        except IndexError:
            continue
        except (KeyError, ValueError):
            return None
    return None


class _Thrift:
    """Values one after the other, of which texts are passed over. IndexError where they are cut."""

    def __init__(self, content: bytes) -> None:
        self._content, self.at = content, 0

    def struct(self, depth: int) -> dict[int, Any]:
        """Whole numbers, lists and structs of a struct by their fields."""
        result: dict[int, Any] = {}
        field = 0
        while (byte := self._byte()) != 0:
            field = field + (byte >> 4) if byte >> 4 else self._zigzag()
            value = self._value(byte & 15, depth)
            if value is not None:
                result[field] = value
        return result

    def _value(self, kind: int, depth: int) -> Any:
        if depth > _MOST_DEPTH:
            raise ValueError("nested too deep")
        if kind in _NUMBERS:
            return self._zigzag()
        if kind in _LISTS:
            byte = self._byte()
            count = byte >> 4 if byte >> 4 < 15 else self._varint()
            of = _BYTE if byte & 15 in _BOOLEANS else byte & 15
            return [self._value(of, depth + 1) for _ in range(count)]
        if kind == _STRUCT:
            return self.struct(depth + 1)
        if kind in (_BYTE, _DOUBLE, _BINARY):
            count = {_BYTE: 1, _DOUBLE: 8}.get(kind) or self._varint()
            self.at += count
        elif kind not in _BOOLEANS:
            raise ValueError(f"type {kind}")
        return None

    def _byte(self) -> int:
        self.at += 1
        return self._content[self.at - 1]

    def _varint(self) -> int:
        value, shift = 0, 0
        while (byte := self._byte()) >= 0x80 and shift < 64:
            value |= (byte & 0x7F) << shift
            shift += 7
        return value | byte << shift

    def _zigzag(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
