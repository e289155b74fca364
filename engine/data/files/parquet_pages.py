"""What the pages of a Parquet file become, before anything makes room for them: their headers say it.

A header is a struct in Thrift's compact protocol. Of its fields 2 is the uncompressed, 3 the compressed size in bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO

_BOOLEANS, _BYTE, _NUMBERS, _DOUBLE, _BINARY, _LISTS, _STRUCT = (1, 2), 3, (4, 5, 6), 7, 8, (9, 10), 12
_HEADER_BYTES = (1 << 9, 1 << 20)
"""How much is read for a header: most are small, and statistics may be long."""
_MOST_DEPTH = 8


def page_bytes(metadata: Any, stream: BinaryIO) -> Iterator[tuple[bool, int]]:
    """Of each page, whether it is a dictionary, which others repeat, and its uncompressed bytes.

    `metadata`: pyarrow's of the file. Pages of a column that cannot be made out are left out: the
    reader says what is wrong.
    """
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for index in range(metadata.num_columns):
            column = group.column(index)
            dictionary = column.dictionary_page_offset if column.has_dictionary_page else None
            begin = column.data_page_offset if dictionary is None else min(dictionary, column.data_page_offset)
            yield from _pages(stream, begin, column.total_compressed_size, dictionary is not None)


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
        found = _Thrift(stream.read(count))
        try:
            fields = found.struct(0)
            return found.at, fields[2], fields[3]
        except IndexError:
            continue
        except (KeyError, ValueError):
            return None
    return None


class _Thrift:
    """Values one after the other, of which only whole numbers are kept. IndexError where they are cut."""

    def __init__(self, content: bytes) -> None:
        self._content, self.at = content, 0

    def struct(self, depth: int) -> dict[int, int]:
        """The whole numbers of a struct by their fields."""
        found, field = {}, 0
        while (byte := self._byte()) != 0:
            field = field + (byte >> 4) if byte >> 4 else self._zigzag()
            value = self._value(byte & 15, depth)
            if value is not None:
                found[field] = value
        return found

    def _value(self, kind: int, depth: int) -> int | None:
        if depth > _MOST_DEPTH:
            raise ValueError("nested too deep")
        if kind in _NUMBERS:
            return self._zigzag()
        if kind in _LISTS:
            byte = self._byte()
            for _ in range(byte >> 4 if byte >> 4 < 15 else self._varint()):
                self._value(_BYTE if byte & 15 in _BOOLEANS else byte & 15, depth + 1)
        elif kind == _STRUCT:
            self.struct(depth + 1)
        elif kind in (_BYTE, _DOUBLE, _BINARY):
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
