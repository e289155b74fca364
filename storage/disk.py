"""What a file system must give before anything is written to it, and durable writes of small files."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from storage.errors import UserError


def require_writable(path: Path) -> None:
    """Create folder `path` where it is missing and prove that a file can be made in it; UserError naming it if not."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path, prefix=".write-test-"):
            pass
    except OSError as error:
        raise UserError(
            f"{path}: not a writable folder ({error.strerror}); choose another folder or fix its permissions"
        ) from error


def require_free(path: Path, nbytes: int, what: str) -> None:
    """Raise UserError unless the file system of existing folder `path` has `nbytes` free for `what`."""
    free = shutil.disk_usage(path).free
    if free < nbytes:
        raise UserError(
            f"{path}: {what} needs {nbytes:,} bytes of disk and {free:,} are free; free some or choose another disk"
        )


def lock_folder(path: Path) -> int:
    """Take existing folder `path` for this process; UserError when another process holds it.

    Returns a descriptor; the folder is held until it is closed or the process ends, however it ends.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if error.errno != errno.EWOULDBLOCK:
            raise disk_error(error, path, "locking the folder") from error
        raise UserError(f"{path}: in use by another process; wait until it ends, or stop it") from error
    return fd


def disk_error(error: OSError, path: Path, doing: str) -> UserError:
    """The UserError for an operating system error met at `path` while `doing` something ("writing 4,096 bytes")."""
    hint = "free some space on this disk" if error.errno == errno.ENOSPC else "check the disk and the kernel's log"
    return UserError(f"{path}: {doing} failed: {error.strerror or error}; {hint}")


def fsync_file(path: Path) -> None:
    """Make the data and size of an existing file durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_dir(path: Path) -> None:
    """Make the entries of a folder durable: files created, renamed or removed in it."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def temporary_name(path: Path) -> Path:
    """Where atomic_write prepares `path`: hidden, beside it, one per process so that a crash leaves at most one."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def sweep_temporaries(path: Path) -> None:
    """Remove what processes killed inside atomic_write(path) left behind; nobody may be writing `path` now."""
    for leftover in path.parent.glob(f".{path.name}.*.tmp"):
        leftover.unlink()


def atomic_write(path: Path, content: bytes | str) -> None:
    """Replace file `path` by `content`, durably: after a crash it holds either the old or the new content, whole.

    Raises UserError naming the file when the disk is full or fails; the old content then stays.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = temporary_name(path)
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        fsync_dir(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise disk_error(error, path, f"writing {len(data):,} bytes") from error
