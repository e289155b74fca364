"""How far into the files of a source its reader is, for whoever watches the preparation."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path

from penstock.engine import preparing

INDEXED = (".parquet", ".arrow", ".feather")
"""Endings of files that are not read from the first byte to the last, and are compressed inside if at all."""
_here = threading.local()


def opened(fd: int) -> None:
    """This thread now reads the file behind a descriptor, to its end or until another is opened."""
    _here.fd = fd


class Progress:
    """Of one source: reports to `preparing` the share of its bytes that has been read, and how many documents."""

    def __init__(self, what: str, sizes: Mapping[Path, int]) -> None:
        """`sizes` of all files in bytes; none: how much there is to read is not known."""
        self._what = what
        self._sizes = sizes
        self._total = sum(sizes.values())
        self._done = 0
        self._file: Path | None = None
        self.documents = 0

    def begin(self, file: Path) -> None:
        """The reader goes on to this file."""
        self._done += self._sizes.get(self._file, 0) if self._file is not None else 0
        self._file, _here.fd = file, None

    def report(self) -> None:
        fraction = None
        if self._total and self._file is not None:
            at = 0
            if (fd := getattr(_here, "fd", None)) is not None and self._file.suffix not in INDEXED:
                try:
                    at = os.lseek(fd, 0, os.SEEK_CUR)
                except OSError:  # closed meanwhile
                    _here.fd = None
            fraction = (self._done + min(at, self._sizes.get(self._file, 0))) / self._total
        preparing.report(fraction, f"{self._what}, {self.documents:,} documents read")
