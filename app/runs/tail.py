"""Reads a growing file of JSON lines a piece at a time, whatever happens to the file meanwhile."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from penstock.app.runs.files import MOST_LINE_BYTES, open_read, parse_line

READ_BYTES = MOST_LINE_BYTES
"""Most bytes that one call reads: what it parses takes a few hundredths of a second. No line is longer."""

_MARK_BYTES = 64


class JsonTail:
    """What has come to a .jsonl file since the last call, whole lines only: a resumed run may cut off the torn last
    one. A file that was replaced, or cut shorter than what was read, is read again from its start: see `began_anew`."""

    def __init__(self, path: Path, *, start_bytes: int | None = None) -> None:
        self.path = path
        self.damaged = 0
        """Lines skipped, since reading began, that were no JSON object or too long."""
        self.began_anew = False
        """Whether the last call did: what was read before is void."""
        self.behind = False
        """Whether the file held more than the last call read."""
        self.left_out_bytes = 0
        """Bytes before the place where reading began: see `start_bytes`."""
        self._start_bytes = start_bytes
        """Begin at most so far before the file's end; None: at its beginning."""
        self._seen: tuple[int, ...] | None = None
        self._file: tuple[int, int] | None = None
        self._offset = 0
        """All lines before it have been read."""
        self._mark = b""
        """The bytes before `_offset`: they are others in another file."""
        self._within_line = False
        """Whether reading began within a line, or what was read of one is too long: its rest is passed over."""

    @property
    def share_read(self) -> float:
        """Of the file as it was at the last call, 0..1."""
        if not self.behind or self._seen is None:
            return 1.0
        return min(1.0, (self._offset - self.left_out_bytes) / max(1, self._seen[2] - self.left_out_bytes))

    def read(self) -> list[dict[str, Any]]:
        """The objects of the lines completed since, of at most READ_BYTES; [] without a file. Check `began_anew` after
        it. Never raises for what the file is or contains."""
        self.began_anew = False
        try:
            stat = self.path.stat()
            seen = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
            if seen == self._seen and not self.behind:
                return []
            with open_read(self.path) as file:
                data = self._bytes(file.fileno())
        except (OSError, ValueError):
            self.behind = False
            return []
        self._seen = seen
        return self._objects(data)

    def _bytes(self, fd: int) -> bytes:
        stat = os.fstat(fd)
        if self._file is None:
            self._begin(stat.st_size)
        elif self._file != (stat.st_dev, stat.st_ino) or not self._is_same(fd, stat.st_size):
            self.began_anew = True
            self.damaged = 0
            self._begin(stat.st_size)
        self._file = (stat.st_dev, stat.st_ino)
        data = os.pread(fd, READ_BYTES, self._offset)
        self.behind = self._offset + len(data) < stat.st_size
        return data

    def _begin(self, size: int) -> None:
        start = 0 if self._start_bytes is None else max(0, size - self._start_bytes)
        self.left_out_bytes = start
        self._offset, self._mark, self._within_line = start, b"", start > 0

    def _is_same(self, fd: int, size: int) -> bool:
        if size < self._offset:
            return False
        return os.pread(fd, len(self._mark), self._offset - len(self._mark)) == self._mark

    def _objects(self, data: bytes) -> list[dict[str, Any]]:
        end = data.rfind(b"\n") + 1
        if end == 0:  # a piece of a line: its end is waited for, or it is passed over where it is too long already
            if self._within_line or len(data) >= READ_BYTES:
                self.damaged += not self._within_line
                self._within_line = True
                self._advance(data)
            return []
        self._advance(data[:end])
        lines = data[: end - 1].split(b"\n")
        if self._within_line:
            del lines[0]
        self._within_line = False
        result = []
        for line in lines:
            if (value := parse_line(line)) is None:
                self.damaged += 1
            else:
                result.append(value)
        return result

    def _advance(self, data: bytes) -> None:
        self._offset += len(data)
        self._mark = (self._mark + data[-_MARK_BYTES:])[-_MARK_BYTES:]
