"""JSON objects that carry a checksum of their own, so that a file that was damaged or edited is known."""

from __future__ import annotations

import json
from collections.abc import Mapping
from mmap import mmap
from typing import Any, NamedTuple

from penstock.storage.files.crc import checksum

KEY = "crc32c"
"""Where the checksum is: CRC-32C of all other keys, as compact JSON with sorted keys."""


class Unsealed(NamedTuple):
    """What a sealed object holds but for its checksum, and whether there was one."""

    content: dict[str, Any]
    sealed: bool


class ChangedError(ValueError):
    """The checksum of an object is another one's: it was changed, or damaged."""


def seal(content: Mapping[str, Any]) -> dict[str, Any]:
    """`content` with its checksum behind it."""
    assert KEY not in content
    return {**content, KEY: _crc(content)}


def unseal(value: Mapping[str, Any]) -> Unsealed:
    """What `seal` was given, of an object read back; one without a checksum is taken as it is. ChangedError."""
    content = {key: item for key, item in value.items() if key != KEY}
    if KEY in value and value[KEY] != (result := _crc(content)):
        raise ChangedError(f"its content has CRC-32C {result}, but it records {value[KEY]!r:.40}")
    return Unsealed(content, KEY in value)


def hex_crc(data: bytes | mmap) -> str:
    """CRC-32C in the form that is written to JSON."""
    return f"{checksum(memoryview(data)):08x}"


def _crc(content: Mapping[str, Any]) -> str:
    return hex_crc(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
