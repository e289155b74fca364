"""How much a batch of Arrow's becomes as Python's objects: files of some kilobytes can hold gigabytes of repetition."""

from __future__ import annotations

from typing import Any

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
    """Bytes of all texts that the views in a pyarrow array lead to; many may lead to the same. Nothing need be sound
    but its buffers' lengths."""
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
