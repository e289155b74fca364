"""Reads the files of a run directory, which anybody may have written, or damaged.

Regular files only, never through a link, never waiting, in bounded pieces; text is fit for a terminal. Damaged lines
are passed over and counted: one bad line neither ends nor blinds a run.
"""

from __future__ import annotations

import json
import math
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from penstock.engine.events import Span as Span
from penstock.storage.files.disk import prepare_file, publish
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import (
    is_whole,
    open_regular,
    parse_printable,
    printable_value,
    read_regular,
    refuse,
)

MOST_LINE_BYTES = 1 << 20
"""Longer lines are passed over: no writer of ours makes them, and they are not kept in memory."""

MOST_SECONDS = 1e11
"""Times beyond it, three thousand years, are none."""

_MOST = 1e30
"""Beyond all figures of a run; sums of such still are finite."""
_TAIL_BYTES = 1 << 16
_LONG_TAIL_BYTES = 1 << 22
"""Looked through where the tail holds no line."""
_COPY_BYTES = 1 << 20
_OBJECT_BYTES = 1 << 20
"""Far more than the small files of a run hold."""


def open_read(path: Path) -> BinaryIO:
    """Regular file `path` to read. OSError, without waiting, for anything else; see `open_regular`."""
    return open(open_regular(path), "rb")


def number(value: object) -> float | None:
    """A JSON value as a finite number of a size that something can have; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if -_MOST < value < _MOST else None


def whole(value: object) -> int | None:
    """A JSON value as a whole number of at most 63 bits; None for anything else."""
    return value if is_whole(value) else None


def local_time(unix_s: float) -> time.struct_time:
    """In this machine's time zone; 1970 for what no clock shows."""
    try:
        return time.localtime(unix_s)
    except (OverflowError, ValueError, OSError):
        return time.localtime(0)


def span_of(line: dict[str, Any]) -> Span | None:
    """The span of a line of spans.jsonl or predicted.jsonl; None where it is none."""
    lane, op, block = line.get("lane"), line.get("op"), line.get("block", "")
    start_s, end_s = number(line.get("start_s")), number(line.get("end_s"))
    if not (isinstance(lane, str) and isinstance(op, str) and isinstance(block, str)):
        return None
    if start_s is None or end_s is None or not -MOST_SECONDS < start_s <= end_s < MOST_SECONDS:
        return None
    chunk, size, step, id = (
        line.get(name, default) for name, default in (("chunk", -1), ("bytes", 0), ("step", 0), ("id", -1))
    )
    waited = line.get("waited", [])
    if not (isinstance(waited, list) and all(map(is_whole, (chunk, size, step, id, *waited)))):
        return None
    awaited = _awaited(line.get("awaited", []))
    if awaited is None:
        return None
    return Span(lane, op, block, chunk, start_s, end_s, size, step, id, tuple(waited), awaited)


def _awaited(given: Any) -> tuple[tuple[int, float], ...] | None:
    """Pairs of a GPU's number and seconds; None where it is none."""
    if not isinstance(given, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in given):
        return None
    pairs = [(gpu, number(seconds)) for gpu, seconds in given]
    if not all(is_whole(gpu) and seconds is not None and 0 <= seconds < MOST_SECONDS for gpu, seconds in pairs):
        return None
    return tuple((gpu, float(seconds)) for gpu, seconds in pairs if seconds is not None)


def whole_lines(file: BinaryIO) -> Iterator[bytes | None]:
    """The lines of a file from where it is, None for each that is too long; a torn last line is the end."""
    while line := file.readline(MOST_LINE_BYTES + 1):
        if line.endswith(b"\n"):
            yield line
        elif len(line) <= MOST_LINE_BYTES:
            return
        else:
            while line and not line.endswith(b"\n"):
                line = file.readline(MOST_LINE_BYTES)
            if not line:
                return
            yield None


def parse_line(line: bytes | None) -> dict[str, Any] | None:
    """The JSON object of a line; None for anything else."""
    try:
        return None if line is None else parse_printable(line)
    except ValueError:
        return None


class JsonLines:
    """The objects of a file of JSON lines, to be iterated over once; a missing file holds none, UserError for one that
    cannot be read. Damaged lines are passed over and counted, and those that whoever iterates `reject`s."""

    def __init__(self, path: Path, extent: tuple[int, int] | None = None) -> None:
        """`extent`: the bytes that are read, from the beginning of a line; None: all."""
        self.path = path
        self.damaged = 0
        self._extent = extent
        self._line = 0
        self._first_damaged = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        start, end = self._extent or (0, math.inf)
        try:
            with open_read(self.path) as file:
                file.seek(start)
                for line in whole_lines(file):
                    self._line += 1
                    value = parse_line(line)
                    if value is None:
                        self.reject()
                    else:
                        yield value
                    if self._extent is not None and file.tell() >= end:
                        return
        except FileNotFoundError:
            return
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read: {error.strerror}; restore it, or move it away") from None

    def reject(self) -> None:
        """The object that came last is none that belongs here."""
        self.damaged += 1
        self._first_damaged = self._first_damaged or self._line

    def spans(self) -> Iterator[Span]:
        """The spans among them; the others are rejected."""
        for line in self:
            span = span_of(line)
            if span is None:
                self.reject()
            else:
                yield span

    def steps(self) -> Iterator[dict[str, Any]]:
        """Those with a `step`, as the lines of metrics and validations have one; the others are rejected."""
        for line in self:
            if is_whole(line.get("step")):
                yield line
            else:
                self.reject()

    def warning(self) -> str | None:
        """How many lines were passed over, and where; None without any."""
        if not self.damaged:
            return None
        many = f"{self.damaged:,} damaged lines are" if self.damaged > 1 else "a damaged line is"
        if self._extent is not None:
            return f"{self.path}: {many} skipped"
        first = "the first is " if self.damaged > 1 else ""
        return f"{self.path}: {many} skipped; {first}line {self._first_damaged:,}"


def read_tail(path: Path, tail_bytes: int = _TAIL_BYTES) -> list[dict[str, Any]]:
    """The objects of the end of a file of JSON lines: cheap on a file of any size; [] when it cannot be read."""
    return list(_backwards(path, tail_bytes))[::-1]


def read_last(path: Path) -> dict[str, Any] | None:
    """The last object of a file of JSON lines; None without one."""
    return next(_backwards(path, _TAIL_BYTES), None) or next(_backwards(path, _LONG_TAIL_BYTES), None)


def _backwards(path: Path, tail_bytes: int) -> Iterator[dict[str, Any]]:
    try:
        with open_read(path) as file:
            start = max(0, file.seek(0, os.SEEK_END) - tail_bytes)
            file.seek(start)
            lines = file.read(tail_bytes).split(b"\n")
    except OSError:
        return
    for line in reversed(lines[1 if start else 0 : -1]):  # the first may be cut, the last is torn or empty
        value = parse_line(line)
        if value is not None:
            yield value


def read_object(path: Path, most_bytes: int = _OBJECT_BYTES, *, below: Path | None = None) -> dict[str, Any] | None:
    """The JSON object that a file holds; None where it is missing, unreadable, of more bytes, or anything else."""
    return examine_object(path, most_bytes, below=below)[0]


def examine_object(
    path: Path, most_bytes: int = _OBJECT_BYTES, *, below: Path | None = None
) -> tuple[dict[str, Any] | None, str | None]:
    """The JSON object of a file, or None and what is wrong with it; (None, None) where there is no file."""
    try:
        content = read_regular(path, below=below, most_bytes=most_bytes)
    except (FileNotFoundError, NotADirectoryError):
        return None, None
    except OSError as error:
        return None, f"{path.name} cannot be read: {error.strerror}"
    except ValueError:
        return None, f"{path.name} is larger than anything a run writes"
    try:
        return parse_printable(content), None
    except ValueError as error:
        return None, f"{path.name} is damaged: {str(error).partition(';')[0]}"


def json_text(value: Any, *, indent: int | None = None) -> str:
    """`value` as a line, or lines, of JSON that `parse_printable` takes: names of files may be no text at all."""
    text = json.dumps(value, indent=indent)
    return (text if "\\ud" not in text else json.dumps(printable_value(value), indent=indent)) + "\n"


def open_append(path: Path) -> int:
    """A descriptor that appends to regular file `path`, made where it is missing; one with other hard links, as a
    backup's, is left to them and replaced by a copy. OSError."""
    fd = open_regular(path, flags=os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    if os.fstat(fd).st_nlink == 1:
        return fd
    os.close(fd)
    with open_read(path) as old:
        publish(prepare_file(path, iter(lambda: old.read(_COPY_BYTES), b"")), path)
    return open_regular(path, flags=os.O_WRONLY | os.O_APPEND)


def remove_own(path: Path) -> None:
    """Remove a file of ours, if it is there. OSError; what is no regular file is refused, and stays."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        refuse(path, "not a regular file")
    path.unlink(missing_ok=True)
