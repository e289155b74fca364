"""Values of Arrow's columns as the objects that a JSON file would have given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.storage.files.untrusted import one_line, parse_json

Make = Callable[[Any], Any]


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
    result = {key: item if make is None else make(item) for key, item in pairs}
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key '{one_line(twice, 40)}' appears twice")
    return result
