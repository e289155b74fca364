"""UTF-8 text, a document per file, compressed or not."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

from penstock.engine.data.files.base import decode_line, open_utf8
from penstock.engine.data.samples import Text
from penstock.storage.files.errors import UserError
from penstock.storage.files.links import below_data
from penstock.storage.files.untrusted import printable

_PIECE_CHARS = 8 * 2**20  # a longer file is tokenised in pieces of this size, cut at a line's end


def files(path: Path) -> list[Path]:
    """All files below."""
    return [file for file in below_data(path) if file.is_file()]


def read(file: Path) -> Iterator[Text]:
    """One document, in pieces where it is long. A byte-order mark is no part of it."""
    try:
        with io.TextIOWrapper(open_utf8(file), encoding="utf-8", newline="") as stream:
            text, first = stream.read(_PIECE_CHARS), True
            while text:
                text += stream.readline(_PIECE_CHARS) if len(text) == _PIECE_CHARS else ""
                following = stream.read(_PIECE_CHARS)
                yield Text(str(file), text, not following, first)
                text, first = following, False
    except UnicodeDecodeError as error:
        with open_utf8(file) as lines:
            for number, line in enumerate(lines, start=1):
                decode_line(line, f"{printable(file)}:{number}")
        raise UserError(f"{printable(file)}: not UTF-8 text ({error.reason}); convert it, or move it") from error
