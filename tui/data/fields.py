"""Figures out of JSON that anybody may have written: right or absent, never an exception."""

from __future__ import annotations

from typing import Any

from penstock.app.runs import files


def get(value: Any, *keys: str) -> Any:
    """The value under nested keys; None where there is none."""
    for key in keys:
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value


def number(value: Any, *keys: str) -> float | None:
    """A finite number under nested keys, of a size that something can have; None where there is none."""
    return files.number(get(value, *keys))


def whole(value: Any, *keys: str) -> int | None:
    """A whole number under nested keys; None where there is none."""
    result = number(value, *keys)
    return None if result is None else int(result)


def text(value: Any, *keys: str) -> str | None:
    """A string under nested keys; None where there is none."""
    result = get(value, *keys)
    return result if isinstance(result, str) else None


def objects(value: Any, *keys: str) -> list[dict[str, Any]]:
    """The objects of a list under nested keys."""
    result = get(value, *keys)
    return [item for item in result if isinstance(item, dict)] if isinstance(result, list) else []
