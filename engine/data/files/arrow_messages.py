"""What the compressed messages of an Arrow file become, before any memory is allocated for it.

The layout is that of Arrow's IPC format: a message is a length, a FlatBuffers table of so many bytes, and a body; each
compressed buffer of the body begins with its uncompressed length.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO

_END = b"\xff\xff\xff\xff"
_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3  # kinds of a message
_METADATA_BYTES = 1 << 28


def uncompressed_bytes(stream: BinaryIO, at: int) -> Iterator[int]:
    """For each message of the stream of messages from byte `at` on: how many bytes its body has uncompressed; 0 where
    nothing is compressed. What is no message ends it: the reader says what is wrong."""
    try:
        while True:
            claimed, at = _message(stream, at)
            yield claimed
    except (struct.error, ValueError, OverflowError):
        return


def _message(stream: BinaryIO, at: int) -> tuple[int, int]:
    """What the message that begins at a byte takes uncompressed, and where it ends. ValueError at the end of all."""
    length = _read(stream, at, 4)
    at += 4
    if length == _END:
        length = _read(stream, at, 4)
        at += 4
    (count,) = struct.unpack("<i", length)
    if not 0 < count <= _METADATA_BYTES:
        raise ValueError("no message")
    table = _Table.root(_read(stream, at, count))
    body = at + count
    claimed = 0
    for begin, stored in _compressed(table):
        if stored >= 8:
            (result,) = struct.unpack("<q", _read(stream, body + begin, 8))
            claimed += stored if result == -1 else max(0, result)
    end = body + table.long(3)
    if end < body:
        raise ValueError("a body that ends before it begins")
    return claimed, end


def _compressed(message: _Table) -> list[tuple[int, int]]:
    """Where the compressed buffers of a message's body begin, and how many bytes each has."""
    kind, batch = message.byte(1), message.table(2)
    if kind == _DICTIONARY_BATCH and batch is not None:
        batch = batch.table(1)
    if batch is None or kind not in (_DICTIONARY_BATCH, _RECORD_BATCH) or batch.table(3) is None:
        return []
    return [(begin, stored) for begin, stored in struct.iter_unpack("<qq", batch.structs(2, 16))]


def _read(stream: BinaryIO, at: int, count: int) -> bytes:
    if at < 0 or count < 0:
        raise ValueError("before the file")
    stream.seek(at)
    return stream.read(count)


class _Table:
    """A table of FlatBuffers. Its fields are by their numbers; one that is left out is 0, empty or None."""

    def __init__(self, content: bytes, at: int) -> None:
        self._content, self._at = content, at

    @classmethod
    def root(cls, content: bytes) -> _Table:
        table = cls(content, 0)
        table._at = table._number("<I", 0)
        return table

    def byte(self, field: int) -> int:
        at = self._find(field)
        return self._number("<B", at) if at else 0

    def long(self, field: int) -> int:
        at = self._find(field)
        return self._number("<q", at) if at else 0

    def table(self, field: int) -> _Table | None:
        at = self._find(field)
        return _Table(self._content, at + self._number("<I", at)) if at else None

    def structs(self, field: int, size: int) -> bytes:
        """All structs of a vector, of `size` bytes each."""
        at = self._find(field)
        if not at:
            return b""
        at += self._number("<I", at)
        count = self._number("<I", at) * size
        result = self._content[at + 4 : at + 4 + count]
        if len(result) < count:
            raise ValueError("a vector that is cut")
        return result

    def _find(self, field: int) -> int:
        names = self._at - self._number("<i", self._at)
        if 4 + 2 * field >= self._number("<H", names):
            return 0
        offset = self._number("<H", names + 4 + 2 * field)
        return self._at + offset if offset else 0

    def _number(self, kind: str, at: int) -> int:
        if at < 0:
            raise ValueError("before the table")
        result: int = struct.unpack_from(kind, self._content, at)[0]
        return result
