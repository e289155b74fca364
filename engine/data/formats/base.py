"""What a format is to the rest: a module with `NEEDS_PATH`, `files` and `read`, named in `FORMATS`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol, cast

from penstock.storage.errors import UserError
from penstock.storage.untrusted import open_regular, real_path


class Piece(NamedTuple):
    """Text of a document, or of a part of it when it is long."""

    document: str
    """Where it comes from: a path, or `file:line`."""
    text: str
    last: bool
    """The document ends here."""


class Format(Protocol):
    """What the module of a format has."""

    NEEDS_PATH: bool
    """Whether data.path says what is read."""

    def files(self, path: Path) -> list[Path]:
        """The files to read in the folder `path`; a file is read itself."""
        ...

    def read(self, file: Path) -> Iterator[Piece]:
        """The documents of a file in order. Raises UserError naming the file (and line) that cannot be read."""
        ...


FORMATS = {
    "python_stdlib": "penstock.engine.data.formats.python_stdlib",
    "text": "penstock.engine.data.formats.text",
    "jsonl": "penstock.engine.data.formats.jsonl",
}
"""data.source -> the module of its format; `random` has no files."""


def find_format(source: str) -> Format:
    """The format of `source`. Raises UserError for one that there is not."""
    if source not in FORMATS:
        raise UserError(f"data.source: '{source}' is unknown; valid names: {', '.join([*FORMATS, 'random'])}")
    return cast(Format, importlib.import_module(FORMATS[source]))


def open_text(file: Path) -> int:
    """A descriptor of a file of texts. Links are followed, as data may lie anywhere; what would wait is refused."""
    return open_regular(real_path(file))
