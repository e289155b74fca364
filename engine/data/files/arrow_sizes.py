"""How much files of Arrow's become: some kilobytes can hold gigabytes of repetition.

A batch as Python's objects, and compressed messages before memory is allocated for them. In Arrow's IPC format a
message is a length, a FlatBuffers table and a body, whose compressed buffers begin with their uncompressed length.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

from penstock.storage.files.errors import UserError

_OBJECT_BYTES = 50
"""About what a text or a list takes beside its content."""
_NUMBER_BYTES = 16
ROW_BYTES = 50
"""What a row takes beside its columns."""
_ENOUGH_BYTES = 1 << 34
"""More than anybody takes: nothing that large is looked into."""
_TEXTS = "string large_string binary large_binary"

_END = b"\xff\xff\xff\xff"
_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3  # kinds of a message
_METADATA_BYTES = 1 << 28


def _is(kind: Any, names: str) -> bool:
    """Whether a pyarrow type is one of these."""
    from pyarrow import types

    return any(getattr(types, f"is_{name}")(kind) for name in names.split())


def object_bytes(array: Any) -> int:
    """About how many bytes the values of a valid pyarrow array take as Python's objects. Nothing is copied for it.

    Raises UserError for types that no data set for language models has: unions, views of lists, run-end encoding.
    """
    from pyarrow import BaseExtensionType, compute

    kind, own = array.type, len(array) * _OBJECT_BYTES
    if isinstance(kind, BaseExtensionType):
        return object_bytes(array.storage)
    if _is(kind, f"{_TEXTS} fixed_size_binary"):
        return own + _sum(compute.binary_length(array))
    if _is(kind, "string_view binary_view"):
        return own + _view_bytes(array)
    if _is(kind, "list large_list fixed_size_list"):
        small = 8 * _sum(compute.list_value_length(array)) < _ENOUGH_BYTES
        return own + (object_bytes(array.flatten()) if small else _ENOUGH_BYTES)
    if _is(kind, "map"):
        return own + _map_bytes(array)
    if _is(kind, "struct"):
        return own + sum(map(object_bytes, array.flatten()))
    if _is(kind, "dictionary"):
        return own + _dictionary_bytes(array)
    if _is(kind, "union list_view large_list_view run_end_encoded"):
        raise UserError(f"values of type {kind} cannot be read; write the column as texts, numbers, lists or structs")
    return len(array) * _NUMBER_BYTES


def _sum(lengths: Any) -> int:
    from pyarrow import compute

    return int(compute.sum(compute.cast(lengths, "int64")).as_py() or 0)


def _view_bytes(array: Any) -> int:
    """A view is 16 bytes, of which the first four are the text's length."""
    views = array.buffers()[1]
    if views is None or len(array) == 0:
        return 0
    lengths = np.frombuffer(views, "<i4")[4 * array.offset : 4 * (array.offset + len(array)) : 4]
    return int(lengths.sum(dtype=np.int64, where=array.is_valid().to_numpy(zero_copy_only=False)))


def viewed_bytes(array: Any) -> int:
    """Bytes of all texts that the views in a pyarrow array, of sound buffers, lead to; many may lead to the same."""
    from pyarrow import BaseExtensionType, types

    kind = array.type
    if _is(kind, "string_view binary_view"):
        return _view_bytes(array)
    if isinstance(kind, BaseExtensionType):
        return viewed_bytes(array.storage)
    if types.is_struct(kind):
        return sum(viewed_bytes(array.field(index)) for index in range(kind.num_fields))
    if types.is_map(kind):
        return viewed_bytes(array.keys) + viewed_bytes(array.items)
    if types.is_dictionary(kind):
        return viewed_bytes(array.dictionary)
    return viewed_bytes(array.values) if types.is_nested(kind) and hasattr(array, "values") else 0


def _map_bytes(array: Any) -> int:
    if len(array) == 0:
        return 0
    begin, end = (array.offsets[at].as_py() for at in (0, -1))
    if (end - begin) * 8 >= _ENOUGH_BYTES:
        return _ENOUGH_BYTES
    return sum(object_bytes(part.slice(begin, end - begin)) for part in (array.keys, array.items))


def _dictionary_bytes(array: Any) -> int:
    """Each value of the dictionary counts as often as it is used."""
    from pyarrow import compute

    counts = np.bincount(array.indices.drop_null().to_numpy(zero_copy_only=False))
    used = np.flatnonzero(counts)
    values = array.dictionary.take(used)
    if _is(array.type.value_type, _TEXTS):
        sizes = compute.fill_null(compute.binary_length(values), 0).to_numpy(zero_copy_only=False)
    else:
        sizes = [object_bytes(values.slice(at, 1)) for at in range(len(values))]
    return int(np.dot(counts[used], np.asarray(sizes, np.float64)))


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
    end = body + table.number(3, "<q")
    if end < body:
        raise ValueError("a body that ends before it begins")
    return claimed, end


def _compressed(message: _Table) -> list[tuple[int, int]]:
    """Where the compressed buffers of a message's body begin, and how many bytes each has."""
    kind, batch = message.number(1, "<B"), message.table(2)
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
        return cls(content, cls(content, 0)._number("<I", 0))

    def number(self, field: int, kind: str) -> int:
        """`kind`: as of the module struct."""
        at = self._find(field)
        return self._number(kind, at) if at else 0

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
