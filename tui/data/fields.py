"""Figures out of JSON that anybody may have written: right or absent, never an exception."""

from __future__ import annotations

import math
from typing import Any


def get(value: Any, *keys: str) -> Any:
    """The value under nested keys; None where there is none."""
    for key in keys:
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value


def number(value: Any, *keys: str) -> float | None:
    """A finite number under nested keys; None where there is none."""
    found = get(value, *keys)
    if isinstance(found, bool) or not isinstance(found, int | float):
        return None
    try:
        return float(found) if math.isfinite(found) else None
    except OverflowError:
        return None


def whole(value: Any, *keys: str) -> int | None:
    """A whole number under nested keys; None where there is none."""
    found = number(value, *keys)
    return None if found is None else int(found)


def text(value: Any, *keys: str) -> str | None:
    """A string under nested keys, fit for a terminal; None where there is none."""
    found = get(value, *keys)
    return printable(found) if isinstance(found, str) else None


def printable(found: str) -> str:
    """Without what a terminal would take for a command; line ends stay."""
    return found if found.isprintable() else "".join(c if c.isprintable() or c == "\n" else "?" for c in found)


def objects(value: Any, *keys: str) -> list[dict[str, Any]]:
    """The objects of a list under nested keys."""
    found = get(value, *keys)
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []
