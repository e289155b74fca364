"""JSON lines, each an object: a row per line; empty lines are none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from penstock.engine.data.files import base
from penstock.engine.data.samples import BadRows, Row, RowError
from penstock.storage.files.untrusted import parse_json, printable

COMPRESSED = True


def read(file: Path, bad: BadRows) -> Iterator[Row]:
    with base.open_utf8(file) as stream:
        for where, line in base.numbered_lines(stream, printable(file)):
            try:
                row = _row(line, where)
            except RowError as error:
                bad.add(error)
                continue
            if row is not None:
                yield row


def _row(line: bytes, where: str) -> Row | None:
    """None for an empty line. RowError naming `where` for what is no object."""
    if len(line) > base.LINE_BYTES:
        raise RowError(f"{where}: a line of more than {base.LINE_BYTES >> 20} MiB; split it into several documents")
    if not line.strip():
        return None
    try:
        record = parse_json(base.decode_line(line, where), unique=True)
    except RowError:
        raise
    except json.JSONDecodeError as error:
        raise RowError(
            f"{where}: not a JSON object: {error.msg}, column {error.pos + 1:,}; each line must be one"
        ) from error
    except ValueError as error:
        raise RowError(f"{where}: not a JSON object: {error}; each line must be one") from error
    if not isinstance(record, dict):
        hint = "; put a list of rows in a .json file" if isinstance(record, list) else ""
        raise RowError(f"{where}: not a JSON object, as each line must be{hint}")
    return Row(where, record)
