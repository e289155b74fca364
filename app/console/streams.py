"""Standard streams that nobody may be at: a closed descriptor, a pipe whose reader is gone, a full disk. What cannot be
printed is dropped; the first error but a reader's leave is kept, for the command to report at its end."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
import sys


class _Surviving(io.RawIOBase):
    """Writes to a descriptor until that fails, and then nowhere."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def write(self, data: object) -> int:
        view = memoryview(data)  # type: ignore[arg-type]
        if self.error is None:
            try:
                return os.write(self._fd, view)
            except BlockingIOError:
                raise
            except OSError as error:
                self.error = error
        return view.nbytes


_kept: list[_Surviving] = []


def open_standard_streams() -> None:
    """Make standard output and error survive whatever reads them; closed descriptors lead to /dev/null from now on, so
    that of a closed standard input an end is read, and it is no terminal.

    A file that took the number of a closed one would get what is printed. Streams that somebody else has put in the
    place of Python's stay.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            if opened != fd:
                os.dup2(opened, fd)
                os.close(opened)
            os.set_inheritable(fd, True)
    if sys.stdin is None or getattr(sys.stdin, "closed", False):
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream, own = getattr(sys, name), getattr(sys, f"__{name}__")
        if stream is None or (stream is own and isinstance(stream, io.TextIOWrapper)):
            setattr(sys, name, _surviving(stream, fd))


def _surviving(stream: io.TextIOWrapper | None, fd: int) -> io.TextIOWrapper:
    if stream is not None:
        with contextlib.suppress(OSError):
            stream.flush()
    raw = _Surviving(fd)
    _kept.append(raw)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding="utf-8" if stream is None else stream.encoding,
        errors="backslashreplace",  # a terminal of few characters shows their numbers
        line_buffering=fd == 2 or (stream is not None and stream.line_buffering),
        write_through=stream is not None and stream.write_through,
    )


def print_failure() -> str | None:
    """Why not all of standard output was printed; None where it was, or where its reader or its terminal is gone."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    error = next((raw.error for raw in _kept if raw.fileno() == 1 and raw.error is not None), None)
    if error is None or error.errno == errno.EPIPE or (error.errno == errno.EIO and stat.S_ISCHR(os.fstat(1).st_mode)):
        return None
    return error.strerror
