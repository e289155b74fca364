"""The small files of a run at a place off the machine: which there may be, and the pieces that they consist of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from penstock.storage.files import sealed
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import Count, one_line, parse_object, typed
from penstock.storage.offsite.index import RUN_FILES
from penstock.storage.offsite.link import Pieces, PlaceLink
from penstock.storage.offsite.place import PIECE_BYTES, may_be_named

_MOST_BYTES = 1 << 28
_FORMAT = "penstock-run-files"


class _Piece(Struct, forbid_unknown_fields=True):
    sha256: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    bytes: Annotated[int, Meta(ge=1, le=PIECE_BYTES)]


class _File(Struct, forbid_unknown_fields=True):
    path: str
    pieces: tuple[_Piece, ...]


class _Files(Struct, forbid_unknown_fields=True):
    format: str
    pieces_bytes: Count
    files: tuple[_File, ...]


def encode_files(files: Mapping[str, Pieces]) -> str:
    """run.json of files, by their paths within the run directory."""
    content = {
        "format": _FORMAT,
        "pieces_bytes": PIECE_BYTES,
        "files": [
            {"path": name, "pieces": [{"sha256": digest, "bytes": size} for digest, size in pieces]}
            for name, pieces in files.items()
        ],
    }
    return json.dumps(sealed.seal(content), indent=1) + "\n"


def read_files(link: PlaceLink, folder: str) -> dict[str, Pieces]:
    """The files that run.json of a generation's folder lists. UserError where it is damaged or names what none is."""
    text, _ = link.read(f"{folder}/{RUN_FILES}", _MOST_BYTES)
    try:
        if text is None:
            raise ValueError("it is not there")
        found = typed(sealed.unseal(parse_object(text.encode(), most_bytes=_MOST_BYTES)).content, _Files)
        if found.format != _FORMAT:
            raise ValueError(f"its format is {one_line(found.format, 40)}")
        for file in found.files:
            if not may_be_named(file.path):
                raise ValueError(f"it names '{one_line(file.path, 80)}', which is not a file of a run")
        return {file.path: [(piece.sha256, piece.bytes) for piece in file.pieces] for file in found.files}
    except ValueError as error:
        raise UserError(
            f"{link.place}/{folder}/{RUN_FILES}: cannot be read ({error}); choose another with --checkpoint NAME"
        ) from None


def file_bytes(pieces: Pieces) -> int:
    return sum(size for _, size in pieces)


def existing(files: Mapping[str, Path]) -> dict[str, Path]:
    """Those of `files` that are there and can be kept."""
    return {name: path for name, path in files.items() if may_be_named(name) and path.is_file()}
