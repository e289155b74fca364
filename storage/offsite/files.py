"""The small files of a run at a location off the machine: which there may be, and the pieces that they consist of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct, to_builtins

from penstock.storage.files import sealed
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import one_line, parse_object, typed
from penstock.storage.offsite.index import RUN_FILES
from penstock.storage.offsite.link import Link, Pieces
from penstock.storage.offsite.location import PIECE_BYTES, may_be_named

_MOST_BYTES = 1 << 28
_Piece = tuple[Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")], Annotated[int, Meta(ge=1, le=PIECE_BYTES)]]


class _Files(Struct, forbid_unknown_fields=True):
    format: Literal["penstock-run-files"]
    files: dict[str, list[_Piece]]
    """Path within the run directory -> (SHA-256, bytes) of each piece."""


def encode_files(files: Mapping[str, Pieces]) -> bytes:
    """run.json of files, by their paths within the run directory."""
    content = to_builtins(_Files("penstock-run-files", dict(files)))
    return (json.dumps(sealed.seal(content), indent=1) + "\n").encode()


def read_files(link: Link, folder: str) -> dict[str, Pieces]:
    """The files that run.json of a generation's folder lists. UserError where it is damaged or names what none is."""
    content, _ = link.read(f"{folder}/{RUN_FILES}", _MOST_BYTES)
    try:
        if content is None:
            raise ValueError("it is not there")
        files = typed(sealed.unseal(parse_object(content, most_bytes=_MOST_BYTES)).content, _Files).files
        for name in files:
            if not may_be_named(name):
                raise ValueError(f"it names '{one_line(name, 80)}', which is not a file of a run")
        return files
    except ValueError as error:
        raise UserError(
            f"{link.location}/{folder}/{RUN_FILES}: cannot be read ({error}); choose another with --checkpoint NAME"
        ) from None


def file_bytes(pieces: Pieces) -> int:
    return sum(size for _, size in pieces)


def existing(files: Mapping[str, Path]) -> dict[str, Path]:
    """Those of `files` that are there and can be uploaded."""
    return {name: path for name, path in files.items() if may_be_named(name) and path.is_file()}
