"""UTF-8 text, a document per file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from penstock.engine.data.formats.base import Piece, open_text
from penstock.storage.errors import UserError

NEEDS_PATH = True
_PIECE_CHARS = 8 * 2**20  # a longer file is tokenised in pieces of this size, cut at a line's end


def files(path: Path) -> list[Path]:
    """All files below."""
    return [file for file in path.rglob("*") if file.is_file()]


def read(file: Path) -> Iterator[Piece]:
    """One document, in pieces where it is long."""
    try:
        with open(open_text(file), encoding="utf-8", newline="") as stream:
            text = stream.read(_PIECE_CHARS)
            while text:
                text += stream.readline(_PIECE_CHARS) if len(text) == _PIECE_CHARS else ""
                following = stream.read(_PIECE_CHARS)
                yield Piece(str(file), text, not following)
                text = following
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file}: not UTF-8 text ({error.reason} at byte {error.start}); convert it or move it"
        ) from error
