"""JSON lines, each an object with a string `text`: a document per line."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from penstock.engine.data.formats.base import Piece, open_text
from penstock.storage.errors import UserError
from penstock.storage.untrusted import parse_json

NEEDS_PATH = True
_LINE_BYTES = 64 << 20  # of a line of JSON, which is held whole


def files(path: Path) -> list[Path]:
    """All `.jsonl` files below."""
    return [file for file in path.rglob("*.jsonl") if file.is_file()]


def read(file: Path) -> Iterator[Piece]:
    """A document per line; empty ones are skipped."""
    with open(open_text(file), "rb") as stream:
        for number in itertools.count(1):
            line = stream.readline(_LINE_BYTES + 1)
            if not line:
                return
            if text := _text_of(line, f"{file}:{number}"):
                yield Piece(f"{file}:{number}", text, True)


def _text_of(line: bytes, where: str) -> str:
    """The text of a line; empty for an empty line. Raises UserError naming `where` for anything but a text."""
    if len(line) > _LINE_BYTES:
        raise UserError(f"{where}: a line of more than {_LINE_BYTES >> 20} MiB; split it into several documents")
    if not line.strip():
        return ""
    try:
        record = parse_json(line)
    except ValueError as error:
        raise UserError(f"{where}: not a JSON object: {error}; each line needs one, with a `text` field") from error
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise UserError(f'{where}: no `text` field that is a string; write {{"text": "..."}}')
    return text
