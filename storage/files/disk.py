"""What a file system must give before anything is written to it, and durable writes of small files."""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import resource
import shutil
import stat
import tempfile
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import RefusedFileError, is_real_folder, refuse


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
    with reporting(path, f"checking the free space for {what}"):
        free = shutil.disk_usage(path).free
    if free < nbytes:
        raise UserError(
            f"{path}: {what} needs {nbytes:,} bytes of disk and {free:,} are free; free some or choose another disk"
        )


def disk_bytes(folders: Iterable[Path], without: Container[Path] = ()) -> int:
    """Bytes of disk of the files below `folders`, but for those in the folders `without`; shared data counts once."""
    sizes: dict[tuple[int, int], int] = {}
    for top in folders:
        for folder, _, names in os.walk(top):
            for name in names if Path(folder) not in without else ():
                with suppress(OSError):  # another thread renames or removes files
                    status = os.lstat(os.path.join(folder, name))
                    sizes[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(sizes.values())


def lock_folder(path: Path) -> int:
    """A descriptor that holds existing folder `path` until it is closed. UserError when another process holds it."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if error.errno != errno.EWOULDBLOCK:
            raise disk_error(error, path, "locking the folder") from error
        raise UserError(f"{path}: in use by another process; wait until it ends, or stop it") from error
    return fd


_HINTS = {
    errno.ENOSPC: "free some space on this disk",
    errno.EDQUOT: "free some space: your quota on this disk is used up",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f)",
    errno.EACCES: "run as a user with write access, or change the permissions",
    errno.EPERM: "run as a user with write access, or change the permissions",
    errno.ENOENT: "the folder is gone: is the drive still mounted?",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "raise the machine's limit on open files (fs.file-max)",
    errno.EROFS: "the file system is mounted read-only: check the kernel log and the disk",
}


def disk_error(error: OSError, path: Path, doing: str) -> UserError:
    """The UserError for an operating system error met at `path` while `doing` something ("writing 4,096 bytes")."""
    if isinstance(error, RefusedFileError):
        return UserError(f"{error.filename}: {doing} failed: {error.strerror}; move it away")
    code = error.errno or 0
    if code == errno.EINVAL and resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
        code = errno.EFBIG  # what direct I/O makes of that limit
    hint = _HINTS.get(code, "check the disk and the kernel log")
    return UserError(f"{path}: {doing} failed: {error.strerror or error}; {hint}")


@contextmanager
def reporting(path: Path, doing: str, *, named: bool = False) -> Iterator[None]:
    """What the operating system refuses inside the block is `disk_error`: at `path`, or at the file `named` in it."""
    try:
        yield
    except OSError as error:
        where = error.filename if named and isinstance(error.filename, str) else path
        raise disk_error(error, Path(where), doing) from error


@contextmanager
def held(fd: int) -> Iterator[int]:
    """A descriptor that is closed when the block ends."""
    try:
        yield fd
    finally:
        os.close(fd)


def make_folder(path: Path, inside: Path) -> None:
    """Make folder `path` and what lacks above it, but never `inside` itself, as mkdir's `parents` would: that is a
    drive's folder, and the drive may have been unmounted. OSError."""
    folder = inside
    for part in path.relative_to(inside).parts:
        folder /= part
        try:
            folder.mkdir()
        except FileExistsError:
            if not stat.S_ISDIR(os.stat(folder).st_mode):  # ENOENT where the drive has gone since
                raise


def fsync_file(path: Path) -> None:
    """Make the data and size of an existing file durable; never waits for a pipe, never follows a link."""
    with held(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)) as fd:
        os.fsync(fd)


def fsync_dir(path: Path) -> None:
    """Make the entries of a folder durable (files created, renamed, removed), where its file system has such a call."""
    with held(os.open(path, os.O_RDONLY | os.O_DIRECTORY)) as fd:
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise


def temporary_name(path: Path) -> Path:
    """Where atomic_write prepares `path`: hidden, beside it, one per process so that a crash leaves at most one."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def sweep_temporaries(path: Path) -> None:
    """Remove regular files that processes killed inside atomic_write(path) left; nobody may be writing `path` now."""
    for leftover in path.parent.glob(f".{path.name}.*.tmp"):
        if stat.S_ISREG(os.lstat(leftover).st_mode):
            leftover.unlink()


def prepare_file(path: Path, data: bytes | Iterable[bytes]) -> Path:
    """Write and sync `data`, whole or in pieces, as the file that `publish` will make `path`: always a new one, so that
    no link is written through. OSError leaves nothing behind."""
    temporary = temporary_name(path)
    if os.path.lexists(temporary):  # left by a killed process of the same number
        if not stat.S_ISREG(os.lstat(temporary).st_mode):
            refuse(temporary, "in the way of a temporary file, and is not a file")
        temporary.unlink()
    try:
        with held(_new(temporary)) as fd:
            offset = 0
            for piece in (data,) if isinstance(data, bytes) else data:
                write_all(fd, [memoryview(piece)], offset)
                offset += len(piece)
            os.fsync(fd)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def write_file(path: Path, content: bytes) -> None:
    """Replace a small file, neither synced nor atomically. OSError."""
    path.unlink(missing_ok=True)
    with held(_new(path)) as fd:
        write_all(fd, [memoryview(content)], 0)


def _new(path: Path) -> int:
    """A descriptor of new file `path`, for writing."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)


def write_all(fd: int, data: list[memoryview], offset: int) -> None:
    """Write the views of `data` one behind the other to the file at `offset`. OSError."""
    while data := [view for view in data if view]:
        count = os.pwritev(fd, data, offset)
        if count == 0:
            raise OSError(errno.EIO, "the drive accepted no data")
        data, offset = _behind(data, count), offset + count


def read_all(fd: int, out: list[memoryview], offset: int) -> bool:
    """Fill the views of `out` one behind the other from the file's bytes at `offset`; False where it ends before."""
    while out := [view for view in out if view]:
        count = os.preadv(fd, out, offset)
        if count == 0:
            return False
        out, offset = _behind(out, count), offset + count
    return True


def _behind(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left of the views behind their first `count` bytes."""
    left = []
    for view in views:
        left.append(view[count:])
        count -= min(count, len(view))
    return left


def publish(temporary: Path, path: Path) -> None:
    """Make the prepared file `path`, durably. After an OSError either content may be the one that stays."""
    try:
        os.replace(temporary, path)
        fsync_dir(path.parent)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def atomic_write(path: Path, content: bytes | str) -> None:
    """Replace file `path` by `content`, durably: after a crash it holds either the old or the new content, whole.
    UserError naming the file when the disk is full or fails; the old content then stays."""
    data = content.encode() if isinstance(content, str) else content
    with reporting(path, f"writing {len(data):,} bytes"):
        publish(prepare_file(path, data), path)


def fsync_ancestors(path: Path) -> None:
    """Make the entries of the folders above existing folder `path` durable, as far as this user may read them."""
    device = path.stat().st_dev
    for folder in path.resolve().parents:
        if folder.stat().st_dev != device:
            break  # another file system, and long there
        try:
            fsync_dir(folder)
        except PermissionError:
            break


_NO_LINK = {errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES, errno.EINVAL}
_COPY_BYTES = 8 << 20


def link_or_copy(source: Path, target: Path) -> int:
    """Make new file `target` with the content of `source`: a hard link, else a copy, which is synced; the bytes that
    were copied. Folders are the caller's to sync. OSError."""
    try:
        os.link(source, target)
        return 0
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
    offset = 0
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with held(os.open(source, flags)) as fd_in, held(_new(target)) as fd_out:
        while data := os.pread(fd_in, _COPY_BYTES, offset):
            write_all(fd_out, [memoryview(data)], offset)
            offset += len(data)
        os.fsync(fd_out)
    return offset


@contextmanager
def build_folder(folder: Path) -> Iterator[Path]:
    """A new folder to fill; it takes the place of `folder` when the block ends, and vanishes when the block fails.

    Nobody else may be building `folder`: what killed processes left is removed. UserError when it cannot be made or
    filled, or what is no folder of ours, a link say, is in its place.
    """
    temporary = folder.with_name(f"{folder.name}.building-{os.getpid()}")
    for leftover in folder.parent.glob(f"{glob.escape(folder.name)}.building-*"):
        shutil.rmtree(leftover, ignore_errors=True)  # none through a link
    for target, fine in ((temporary, False), (folder, is_real_folder(folder))):
        if os.path.lexists(target) and not fine:
            raise UserError(f"{target}: is where a folder has to be made; move it away")
    require_writable(temporary)
    try:
        with reporting(temporary, f"making {folder.name}", named=True):
            yield temporary
            if folder.exists():
                shutil.rmtree(folder)
            os.replace(temporary, folder)
            fsync_dir(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
