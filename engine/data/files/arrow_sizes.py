"""How much a batch of Arrow's becomes as Python's objects: files of some kilobytes can hold gigabytes of repetition."""

from __future__ import annotations

from collections.abc import Callable
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


def object_bytes(array: Any) -> int:
    """About how many bytes the values of a valid pyarrow array take as Python's objects. Nothing is copied for it.

    Raises UserError for types that no data set for language models has: unions, views of lists, run-end encoding.
    """
    from pyarrow import BaseExtensionType, types

    kind = array.type
    if isinstance(kind, BaseExtensionType):
        return object_bytes(array.storage)
    for fits, measure in _measures(types):
        if fits(kind):
            return len(array) * _OBJECT_BYTES + measure(array)
    if (
        types.is_union(kind)
        or types.is_list_view(kind)
        or types.is_large_list_view(kind)
        or types.is_run_end_encoded(kind)
    ):
        raise UserError(f"values of type {kind} cannot be read; write the column as texts, numbers, lists or structs")
    return len(array) * _NUMBER_BYTES


def _measures(types: Any) -> list[tuple[Callable[[Any], bool], Callable[[Any], int]]]:
    """Which types have content beside their objects, and how much."""
    texts = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    return [
        *((fits, _text_bytes) for fits in (*texts, types.is_fixed_size_binary)),
        *((fits, _view_bytes) for fits in (types.is_string_view, types.is_binary_view)),
        *((fits, _list_bytes) for fits in (types.is_list, types.is_large_list, types.is_fixed_size_list)),
        (types.is_map, _map_bytes),
        (types.is_struct, lambda array: sum(map(object_bytes, array.flatten()))),
        (types.is_dictionary, _dictionary_bytes),
    ]


def _text_bytes(array: Any) -> int:
    from pyarrow import compute

    return int(compute.sum(compute.cast(compute.binary_length(array), "int64")).as_py() or 0)


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
    if types.is_string_view(kind) or types.is_binary_view(kind):
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


def _list_bytes(array: Any) -> int:
    from pyarrow import compute

    count = int(compute.sum(compute.cast(compute.list_value_length(array), "int64")).as_py() or 0)
    return object_bytes(array.flatten()) if count * 8 < _ENOUGH_BYTES else _ENOUGH_BYTES


def _map_bytes(array: Any) -> int:
    if len(array) == 0:
        return 0
    begin, end = (array.offsets[at].as_py() for at in (0, -1))
    if (end - begin) * 8 >= _ENOUGH_BYTES:
        return _ENOUGH_BYTES
    return sum(object_bytes(part.slice(begin, end - begin)) for part in (array.keys, array.items))


def _dictionary_bytes(array: Any) -> int:
    """Each value of the dictionary counts as often as it is used."""
    from pyarrow import compute, types

    counts = np.bincount(array.indices.drop_null().to_numpy(zero_copy_only=False))
    used = np.flatnonzero(counts)
    values, kind = array.dictionary.take(used), array.type.value_type
    if types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind):
        sizes = compute.fill_null(compute.binary_length(values), 0).to_numpy(zero_copy_only=False)
    else:
        sizes = [object_bytes(values.slice(at, 1)) for at in range(len(values))]
    return int(np.dot(counts[used], np.asarray(sizes, np.float64)))
