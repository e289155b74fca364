"""A `text` field per row: a document each, whatever file the rows come in."""

from __future__ import annotations

from typing import Any

from penstock.engine.data.formats.base import text_field
from penstock.engine.data.samples import Text

FIELDS = ("text",)


def matches(fields: dict[str, Any]) -> bool:
    return isinstance(fields.get("text"), str)


def convert(fields: dict[str, Any], where: str) -> Text | None:
    """An empty text is none."""
    text = text_field(fields, "text", where)
    return Text(where, text) if text else None
