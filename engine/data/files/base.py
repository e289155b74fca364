"""What a container of rows is to the rest, and files as streams of bytes: decompressed, UTF-8, line by line."""

from __future__ import annotations

import bz2
import codecs
import gzip
import importlib
import io
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from penstock.engine.data import position
from penstock.engine.data.rows import BadRows, Row, RowError
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import one_line, open_regular, printable, real_path


class Container(Protocol):
    """What the module of a container has."""

    COMPRESSED: bool
    """Whether it comes compressed as a whole, `.gz` say; otherwise it does that inside, or not at all."""

    def read(self, file: Path, bad: BadRows) -> Iterator[Row]:
        """The rows in order, of which only some are in memory at a time.

        What is wrong with one row goes to `bad`; UserError naming the file where no row after it can be read.
        """
        ...


CONTAINERS = {
    ".json": "penstock.engine.data.files.json_rows",
    ".jsonl": "penstock.engine.data.files.json_lines",
    ".ndjson": "penstock.engine.data.files.json_lines",
    ".csv": "penstock.engine.data.files.csv_rows",
    ".tsv": "penstock.engine.data.files.csv_rows",
    ".parquet": "penstock.engine.data.files.parquet",
    ".arrow": "penstock.engine.data.files.arrow",
    ".feather": "penstock.engine.data.files.arrow",
}
"""Ending of a file's name -> the module of its container."""

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
LINE_BYTES = 64 << 20
"""Most bytes of a line, or of a row, which is held whole."""

_MOST_EMPTY = 1_000_000
"""Empty lines in a row, which are passed over; more take seconds and hold nothing."""

MOST_TIMES = 250
FEW_BYTES = 256 << 20
"""A file that becomes more than so many times its size when it is decompressed, and more than so much, only repeats
itself: some kilobytes can be gigabytes."""

_FRAME_BYTES = 1 << 12  # decompressed at once, which may become some thousand times as much
_BROKEN = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)


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
    reader = cast(Container, importlib.import_module(CONTAINERS[ending]))
    if file.suffix.lower() in COMPRESSIONS and not reader.COMPRESSED:
        raise UserError(f"{printable(file)}: {ending} files cannot be read compressed; decompress it first")
    try:
        yield from reader.read(file, bad)
    except OSError as error:
        raise UserError(f"{printable(file)}: cannot be read: {error.strerror or error}") from error


def more_empty(before: int, line: bytes, where: str) -> int:
    """How many empty lines there are now in a row, `before` of them before this one. UserError for a million."""
    if not line.isspace():
        return 0
    if before >= _MOST_EMPTY:
        raise UserError(f"{where}: more than {_MOST_EMPTY:,} empty lines in a row; remove them")
    return before + 1


def open_bytes(file: Path) -> BinaryIO:
    """The content as bytes, decompressed by the ending of the name. UserError while it is read where that is broken.

    Links are followed, as data may lie anywhere; what would wait is refused.
    """
    raw = open(open_regular(real_path(file)), "rb")  # noqa: SIM115
    position.opened(raw.fileno())
    ending = file.suffix.lower()
    if ending not in COMPRESSIONS:
        return raw
    return cast(BinaryIO, io.BufferedReader(_Decompressed(raw, file, ending), 1 << 20))


class _Decompressed(io.RawIOBase):
    """The decompressed bytes of a file; what is wrong with it is a UserError."""

    def __init__(self, raw: BinaryIO, file: Path, ending: str) -> None:
        self._raw, self._file, self._ending = raw, file, ending
        self._errors: tuple[type[BaseException], ...] = _BROKEN
        self._given = 0
        self._stream: Any
        if ending == ".gz":
            self._stream = gzip.GzipFile(fileobj=raw)
        elif ending == ".bz2":
            self._stream, self._errors = bz2.BZ2File(raw), (*_BROKEN, OSError)
        elif ending == ".xz":
            self._stream = lzma.LZMAFile(raw)  # noqa: SIM115
        else:
            import zstandard

            self._stream = _Frames(raw)
            self._errors = (*_BROKEN, zstandard.ZstdError)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._stream.read(len(buffer))
        except self._errors as error:
            raise UserError(
                f"{printable(self._file)}: not a whole {self._ending} file ({one_line(error)}); copy or download it "
                "again"
            ) from error
        self._given += len(data)
        if self._given > FEW_BYTES + MOST_TIMES * self._raw.tell():
            raise UserError(
                f"{printable(self._file)}: becomes more than {MOST_TIMES} times as large when it is decompressed; "
                "if that is right, decompress it yourself"
            )
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Frames:
    """The content of zstandard's frames; its own reader takes half a frame for a whole one."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw, self._frame = raw, self._next()
        self._given, self._content = b"", b""

    @staticmethod
    def _next() -> Any:
        import zstandard

        return zstandard.ZstdDecompressor().decompressobj()

    def read(self, count: int) -> bytes:
        """At most `count` bytes; none at the end. EOFError where that is within a frame."""
        while not self._content:
            data = self._frame.unused_data or self._raw.read(_FRAME_BYTES)
            if self._frame.eof and data:
                self._frame, self._given = self._next(), b""
            if not data:
                if self._given and not self._frame.eof:
                    raise EOFError("it ends within a frame")
                return b""
            self._given = data
            self._content = self._frame.decompress(data)
        taken, self._content = self._content[:count], self._content[count:]
        return taken


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
        return cast(BinaryIO, io.BufferedReader(_FromUtf16(stream, file), 1 << 20))
    elif (unmarked := _UNMARKED.get(tuple(byte == 0 for byte in start))) is not None:
        raise UserError(
            f"{printable(file)}: {unmarked} text without a byte-order mark; convert it: iconv -f {unmarked} -t UTF-8 "
            "OLD > NEW"
        )
    return stream


_UNMARKED = {(False, True, False, True): "UTF-16LE", (True, False, True, False): "UTF-16BE"}
"""Which of the first bytes are zero where a text begins with two characters of ASCII."""


class _FromUtf16(io.RawIOBase):
    """UTF-16 with a byte-order mark, as UTF-8."""

    def __init__(self, stream: BinaryIO, file: Path) -> None:
        self._stream, self._file = stream, file
        self._decoder = codecs.getincrementaldecoder("utf-16")()
        self._ready, self._read = b"", 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = self._stream.read(1 << 16)
            try:
                self._ready = self._decoder.decode(data, final=not data).encode()
            except UnicodeError as error:
                at = self._read + getattr(error, "start", 0)
                raise UserError(
                    f"{printable(self._file)}: not UTF-16 text around byte {at:,}, although it starts as such; save "
                    "it as UTF-8"
                ) from error
            self._read += len(data)
            if not data:
                break
        taken, self._ready = self._ready[: len(buffer)], self._ready[len(buffer) :]
        buffer[: len(taken)] = taken
        return len(taken)

    def close(self) -> None:
        self._stream.close()
        super().close()


def decode_line(line: bytes, where: str) -> str:
    """The text of a line. RowError naming the byte that is not UTF-8, and how to convert the file."""
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowError(
            f"{where}: not UTF-8 text (byte 0x{line[error.start]:02x} at {error.start + 1:,} of the line); convert "
            "the file, for example from Latin-1: iconv -f LATIN1 -t UTF-8 OLD > NEW"
        ) from error
