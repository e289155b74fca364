"""Comma- and tab-separated values whose first line names the columns; every value is text.

A `.csv` whose first line holds semicolons and no comma is separated by those, as many spreadsheets write it.
"""

from __future__ import annotations

import csv
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from penstock.engine.data.files import base
from penstock.engine.data.samples import BadRows, Row, RowError
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import one_line, printable

_MOST_COLUMNS = 10_000


def read(file: Path, bad: BadRows) -> Iterator[Row]:
    csv.field_size_limit(base.LINE_BYTES)
    name = printable(file)
    with base.open_utf8(file) as stream:
        numbered = base.numbered_lines(stream, name)
        first = list(itertools.islice(numbered, 1))
        tabs = base.bare_name(file).suffix.lower() == ".tsv"
        separator = "\t" if tabs else ";" if any(b";" in line and b"," not in line for _, line in first) else ","
        lines = csv.reader(_decoded(itertools.chain(first, numbered)), delimiter=separator, strict=True)
        columns = _next(lines, name)
        if columns is None:
            return
        if len(columns) > _MOST_COLUMNS:
            raise UserError(f"{name}:1: {len(columns):,} columns; the most is {_MOST_COLUMNS:,}")
        twice = next((column for column, count in Counter(columns).items() if column and count > 1), None)
        if twice is not None:
            raise UserError(f"{name}:1: the column '{one_line(twice)}' appears twice; name each column once")
        while True:
            where = f"{name}:{lines.line_num + 1}"
            values = _next(lines, name)
            if values is None:
                return
            if not values:
                continue
            if len(values) != len(columns):
                bad.add(
                    RowError(
                        f"{where}: {len(values)} values for {len(columns)} columns; put values that contain the "
                        "separator or a line break in double quotes"
                    )
                )
                continue
            yield Row(where, {key: value for key, value in zip(columns, values, strict=True) if key})


def _next(lines: Iterator[list[str]], name: str) -> list[str] | None:
    """None at the end. A quote that is out of place makes all that follows it uncertain."""
    try:
        return next(lines, None)
    except csv.Error as error:
        at = getattr(lines, "line_num", 0)
        raise UserError(f"{name}:{at}: not a row of values ({one_line(error)}); check its double quotes") from error


def _decoded(lines: Iterable[tuple[str, bytes]]) -> Iterator[str]:
    for where, line in lines:
        if len(line) > base.LINE_BYTES:
            raise UserError(f"{where}: a line of more than {base.LINE_BYTES >> 20} MiB; split it")
        try:
            yield base.decode_line(line, where)
        except RowError as error:  # a quoted value may go on behind it
            raise UserError(str(error)) from error
