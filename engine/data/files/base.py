"""What a container of rows is to the rest, and files as streams of bytes: decompressed, UTF-8, line by line."""

from __future__ import annotations

import bz2
import codecs
import gzip
import importlib
import io
import itertools
import lzma
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

from penstock.engine import preparing
from penstock.engine.data.samples import BadRows, Row, RowError
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import one_line, open_regular, printable, real_path

Read = Callable[[Path, BadRows], Iterator[Row]]
"""What the module of a container has, `read`: the rows of a file in order, of which only some are in memory at a time.

What is wrong with one row goes to the BadRows; UserError naming the file where no row after it can be read.
"""

CONTAINERS = {
    ".json": "json_rows",
    ".jsonl": "json_rows",
    ".ndjson": "json_rows",
    ".csv": "csv_rows",
    ".tsv": "csv_rows",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
"""Ending of a file's name -> the module of this folder for its container."""

_INDEXED = (".parquet", ".arrow", ".feather")
"""Endings of files that are not read from the first byte to the last, and are compressed inside if at all."""
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
LINE_BYTES = 64 << 20
"""Most bytes of a line, or of a row, which is held whole."""

_MOST_EMPTY = 1_000_000
"""Empty lines in a row, which are passed over; more take seconds and hold nothing."""

MOST_TIMES = 250
FEW_BYTES = 256 << 20
"""What becomes so many times larger than its file, and more than so much, only repeats itself."""

_PIECE_BYTES = 1 << 20
_here = threading.local()
"""`fd`: of the file that this thread reads, to its end or until another is opened."""
_BROKEN = (EOFError, OSError, zlib.error, lzma.LZMAError)


def bare_name(file: Path) -> Path:
    """The name without the ending of a compression."""
    return file.with_suffix("") if file.suffix.lower() in COMPRESSIONS else file


def container_of(file: Path) -> str | None:
    """The ending by which `CONTAINERS` knows a file; None for one that holds no rows."""
    ending = bare_name(file).suffix.lower()
    return ending if ending in CONTAINERS else None


def read_rows(file: Path, bad: BadRows) -> Iterator[Row]:
    """The rows of a file in order, by the ending of its name. UserError for an ending that is unknown."""
    ending = container_of(file)
    if ending is None:
        raise UserError(
            f"{printable(file)}: not a file of rows: its name must end in one of {', '.join(CONTAINERS)} (followed by "
            f"{', '.join(COMPRESSIONS)} if compressed)"
        )
    if file.suffix.lower() in COMPRESSIONS and ending in _INDEXED:
        raise UserError(f"{printable(file)}: {ending} files cannot be read compressed; decompress it first")
    read: Read = importlib.import_module(f"{__package__}.{CONTAINERS[ending]}").read
    try:
        yield from read(file, bad)
    except OSError as error:
        raise UserError(f"{printable(file)}: cannot be read: {error.strerror or error}") from error


def numbered_lines(stream: BinaryIO, name: str) -> Iterator[tuple[str, bytes]]:
    """The lines of a stream, each behind its `name:number`; of one longer than LINE_BYTES a byte more than that.

    UserError for a million empty ones in a row.
    """
    empty = 0
    for number in itertools.count(1):
        line = stream.readline(LINE_BYTES + 1)
        if not line:
            return
        empty = empty + 1 if line.isspace() else 0
        if empty > _MOST_EMPTY:
            raise UserError(f"{name}:{number}: more than {_MOST_EMPTY:,} empty lines in a row; remove them")
        yield f"{name}:{number}", line
        while len(line) > LINE_BYTES and not line.endswith(b"\n"):  # the rest of a long line
            line = stream.readline(LINE_BYTES + 1) or b"\n"


def open_bytes(file: Path) -> BinaryIO:
    """The content as bytes, decompressed by the ending of the name. UserError while it is read where that is broken.

    Links are followed, as data may lie anywhere; what would wait is refused.
    """
    raw = open(open_regular(real_path(file)), "rb")  # noqa: SIM115
    _here.fd = raw.fileno()
    return _Made.stream(raw, _decompressed(raw, file)) if file.suffix.lower() in COMPRESSIONS else raw


class _Made(io.RawIOBase):
    """The bytes of `pieces`, none of them empty, that are made of those of another stream, which is closed with it."""

    def __init__(self, source: BinaryIO, pieces: Iterator[bytes]) -> None:
        self._source, self._pieces, self._ready = source, pieces, b""

    @classmethod
    def stream(cls, source: BinaryIO, pieces: Iterator[bytes]) -> BinaryIO:
        return cast(BinaryIO, io.BufferedReader(cls(source, pieces), _PIECE_BYTES))

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._ready = self._ready or next(self._pieces, b"")
        taken, self._ready = self._ready[: len(buffer)], self._ready[len(buffer) :]
        buffer[: len(taken)] = taken
        return len(taken)

    def close(self) -> None:
        self._source.close()
        super().close()


def _decompressed(raw: BinaryIO, file: Path) -> Iterator[bytes]:
    ending, total = file.suffix.lower(), 0
    stream = _decompressor(raw, ending)
    while True:
        try:
            data = stream.read(_PIECE_BYTES)
        except _BROKEN as error:
            raise UserError(
                f"{printable(file)}: not a whole {ending} file ({one_line(error)}); copy or download it again"
            ) from error
        if not data:
            return
        total += len(data)
        if total > FEW_BYTES + MOST_TIMES * raw.tell():
            raise UserError(
                f"{printable(file)}: becomes more than {MOST_TIMES} times as large when it is decompressed; "
                "if that is right, decompress it yourself"
            )
        yield data


def _decompressor(raw: BinaryIO, ending: str) -> Any:
    if ending == ".gz":
        return gzip.GzipFile(fileobj=raw)
    if ending == ".bz2":
        return bz2.BZ2File(raw)
    if ending == ".xz":
        return lzma.LZMAFile(raw)
    import pyarrow

    return pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd")


def open_utf8(file: Path) -> BinaryIO:
    """`open_bytes` of a text, without its byte-order mark; UTF-16 with a mark becomes UTF-8."""
    stream = open_bytes(file)
    try:
        start = stream.peek(4)[:4]  # type: ignore[attr-defined]
    except BaseException:
        stream.close()
        raise
    if start.startswith(codecs.BOM_UTF8):
        stream.read(3)
    elif start in (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE):
        raise UserError(f"{printable(file)}: UTF-32 text; convert it: iconv -f UTF-32 -t UTF-8 OLD > NEW")
    elif start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return _Made.stream(stream, _from_utf16(stream, file))
    elif (unmarked := _UNMARKED.get(tuple(byte == 0 for byte in start))) is not None:
        raise UserError(
            f"{printable(file)}: {unmarked} text without a byte-order mark; convert it: iconv -f {unmarked} -t UTF-8 "
            "OLD > NEW"
        )
    return stream


_UNMARKED = {(False, True, False, True): "UTF-16LE", (True, False, True, False): "UTF-16BE"}
"""Which of the first bytes are zero where a text begins with two characters of ASCII."""


def _from_utf16(stream: BinaryIO, file: Path) -> Iterator[bytes]:
    decoder, done, data = codecs.getincrementaldecoder("utf-16")(), 0, b"\0"
    while data:
        data = stream.read(_PIECE_BYTES)
        try:
            text = decoder.decode(data, final=not data)
        except UnicodeError as error:
            at = done + getattr(error, "start", 0)
            raise UserError(
                f"{printable(file)}: not UTF-16 text around byte {at:,}, although it starts as such; save it as UTF-8"
            ) from error
        done += len(data)
        if text:
            yield text.encode()


def decode_line(line: bytes, where: str) -> str:
    """The text of a line. RowError naming the byte that is not UTF-8, and how to convert the file."""
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowError(
            f"{where}: not UTF-8 text (byte 0x{line[error.start]:02x} at {error.start + 1:,} of the line); convert "
            "the file, for example from Latin-1: iconv -f LATIN1 -t UTF-8 OLD > NEW"
        ) from error


class Progress:
    """How far into its files a source's reader is: reports to `preparing` the share of bytes, and the documents."""

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
            if (fd := getattr(_here, "fd", None)) is not None and self._file.suffix not in _INDEXED:
                try:
                    at = os.lseek(fd, 0, os.SEEK_CUR)
                except OSError:  # closed meanwhile
                    _here.fd = None
            fraction = (self._done + min(at, self._sizes.get(self._file, 0))) / self._total
        preparing.report(fraction, f"{self._what}, {self.documents:,} documents read")
