"""Where each document of a corpus comes from: a file and the row or line in it, eight bytes a document.

origins.bin    int64 [num_documents]: a name's number, whether rows are counted, and the number in the file
origins.json   the names
"""

from __future__ import annotations

import json
import re

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from penstock.storage.files.untrusted import parse_object, printable, typed

_MOST_NAMES = 1 << 17
"""Files whose names are stored; the origin of documents of further files is unknown."""
_ROW_BIT, _NAME_BIT = 1 << 40, 41
_UNKNOWN = -1
_PLACE = re.compile(r"(?s)(.*):(row )?([0-9]{1,12})")


class OriginsWriter:
    """Takes the `where` of samples, as `file:12` or `file:row 12`, in the order of the documents."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._packed: list[int] = []

    def add(self, where: str) -> None:
        match = _PLACE.fullmatch(where)
        name, row, at = (match[1], match[2], int(match[3])) if match else (where, None, -1)
        if len(self._names) < _MOST_NAMES:
            self._names.setdefault(name, len(self._names))
        number = self._names.get(name)
        known = number is not None and at + 1 < _ROW_BIT
        self._packed.append(((number or 0) << _NAME_BIT) | (_ROW_BIT if row else 0) | (at + 1) if known else _UNKNOWN)

    def finish(self) -> tuple[bytes, bytes]:
        """The content of the two files."""
        names = json.dumps({"names": [printable(name) for name in self._names]})
        return np.asarray(self._packed, dtype="<i8").tobytes(), names.encode()


class _Names(Struct):
    names: list[str]


class Origins:
    """Reads them."""

    def __init__(self, packed: NDArray[np.int64], names: bytes) -> None:
        """`names`: the content of origins.json. ValueError where it holds none."""
        self._packed, self._names = packed, typed(parse_object(names), _Names).names

    def where(self, document: int) -> str | None:
        """`file:12`, `file:row 12` or the file alone; None where that is unknown."""
        value = int(self._packed[document])
        name = value >> _NAME_BIT
        if value < 0 or name >= len(self._names):
            return None
        at = (value & (_ROW_BIT - 1)) - 1
        return self._names[name] + ("" if at < 0 else f":{'row ' if value & _ROW_BIT else ''}{at}")
