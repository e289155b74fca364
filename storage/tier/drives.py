"""The folders that hold chunk files: one for each drive, known by an identity of its own and not by its path.

DRIVE/drive.json names the store and the drive. So a drive is found wherever it is mounted, an empty mount point is not
taken for the drive, and the folder of another run is refused.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

from penstock.storage.files.disk import atomic_write, disk_bytes, fsync_ancestors, lock_folder, reporting, require_free
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import parse_object, read_regular, typed
from penstock.storage.tier import chunk
from penstock.storage.tier.filesystem import check_folder, filesystem_id
from penstock.storage.tier.manifest import DriveRecord, Manifest

IDENTITY_NAME = "drive.json"
SCRATCH = "scratch"
CHECKPOINTS = "checkpoints"
FREE_MARGIN = 1.05
"""Free disk that is required, times what is needed: file systems use some space themselves."""
READ_THREADS = 8
WRITE_THREADS = 8
"""Chunk files in flight in each direction on each drive. The kernel splits each call into a deep queue, but a thread
that computes a checksum has no request in flight: four are too few on busy cores (docs/decisions/nvme-io.md)."""

OnThreadStart = Callable[[], None]
"""What a thread that moves chunk files calls before its first one, to bind itself to cores of its own. It must not
raise, as its pool would then do no work at all."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Content of drive.json."""

    store: str
    """Id of the store that the drive belongs to."""
    drive: str
    """Id of the drive; empty where the folder holds the store's manifest and no chunk files."""
    root: str
    """Folder of the store's manifest when the drive joined: for people, and to start again over an aborted start."""
    checkpoint: str | None
    """Name of the checkpoint where the folder is one on the drive, and not the drive's own."""
    inode: int
    """Of folder `root`: a renamed folder keeps it, and a copy has it only where the whole file system was copied."""
    filesystem: str
    """Of folder `root` (filesystem.filesystem_id); "" where it is not known."""

    @staticmethod
    def of(store: str, drive: str, root: Path, checkpoint: str | None = None) -> Identity:
        """The identity of a drive, or of a checkpoint on one, whose manifest is in `root`."""
        root = root.resolve()
        return Identity(store, drive, str(root), checkpoint, root.stat().st_ino, filesystem_id(root))

    @staticmethod
    def read(folder: Path) -> Identity | None:
        """What `folder` says that it is; None where it says nothing or is not there. UserError when unreadable."""
        path = folder / IDENTITY_NAME
        try:
            return typed(parse_object(read_regular(path, most_bytes=1 << 20)), Identity)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise UserError(
                f"{path}: not a readable drive identity ({type(error).__name__}: {error}); restore it from a copy, or "
                "choose an empty folder"
            ) from error

    def write(self, folder: Path) -> None:
        """Write drive.json durably where it does not say this already."""
        if Identity.read(folder) != self:
            atomic_write(folder / IDENTITY_NAME, json.dumps(asdict(self), indent=1) + "\n")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that went to and from a drive since the store was opened, padding and checksums included."""

    bytes_read: int = 0
    bytes_written: int = 0

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(self.bytes_read - earlier.bytes_read, self.bytes_written - earlier.bytes_written)


class Drive:
    """One folder of chunk files, with its own threads: a slow drive never keeps another one waiting."""

    def __init__(self, id: str, folder: Path, *, writable: bool, on_thread_start: OnThreadStart | None = None):
        self.id = id
        self.folder = folder
        self.direct = writable and chunk.supports_direct(folder)
        self.readers = _threads(READ_THREADS, "nvme-read", folder, on_thread_start)
        self.writers = _threads(WRITE_THREADS, "nvme-write", folder, on_thread_start)
        self._lock = threading.Lock()
        self.traffic = Traffic()

    def count(self, *, read: int = 0, written: int = 0) -> None:
        with self._lock:
            old = self.traffic
            self.traffic = Traffic(old.bytes_read + read, old.bytes_written + written)

    def close(self) -> None:
        self.readers.shutdown()
        self.writers.shutdown()


def _threads(count: int, name: str, folder: Path, on_thread_start: OnThreadStart | None) -> ThreadPoolExecutor:
    """A pool whose threads are called by `name` and `folder` in Python, and by `name` in top and perf."""

    def begin() -> None:
        with contextlib.suppress(OSError):
            Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
        if on_thread_start is not None:
            on_thread_start()

    return ThreadPoolExecutor(count, thread_name_prefix=f"{name} {folder}", initializer=begin)


class Locks:
    """Folders held for this process, each once, until `release` or the end of a block."""

    _here: ClassVar[set[Path]] = set()

    def __init__(self) -> None:
        self._held: dict[Path, int] = {}

    @classmethod
    def held_here(cls, folder: Path) -> bool:
        return folder.resolve() in cls._here

    def take(self, folder: Path) -> None:
        """Hold existing `folder`; UserError when another process has it, or it is held under another path (a mount)."""
        folder = folder.resolve()
        if folder in self._held:
            return
        for other in self._held:
            if os.path.samefile(folder, other):
                raise UserError(f"storage.nvme: {folder} and {other} are the same folder; name each drive once")
        self._held[folder] = lock_folder(folder)
        self._here.add(folder)

    def __enter__(self) -> Locks:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def release(self) -> None:
        while self._held:
            folder, fd = self._held.popitem()
            self._here.discard(folder)
            os.close(fd)


def distinct(folders: Iterable[Path]) -> list[Path]:
    """The folders as absolute paths; UserError when two of them are one and the same."""
    result: dict[Path, Path] = {}
    for folder in folders:
        path = Path(folder).expanduser().absolute()
        if path.resolve() in result:
            raise UserError(
                f"storage.nvme: {folder} is listed twice (as {result[path.resolve()]}); name each drive once"
            )
        result[path.resolve()] = path
    return list(result.values())


def locate(current: Manifest, root: Path, given: Sequence[Path]) -> dict[str, Path]:
    """Where the drives of a manifest in `root` are now: found by identity in `given`, else where they were.

    UserError when two given folders claim to be one drive, or one that holds state of the generation is missing.
    """
    result = present(current, root, given)
    require_present(current, root, result)
    return result


def present(current: Manifest, root: Path, given: Sequence[Path]) -> dict[str, Path]:
    """As `locate`, for those drives that are there."""
    result: dict[str, Path] = {}
    for folder in given:
        candidates = [folder] if current.checkpoint is None else [folder, folder / CHECKPOINTS / current.checkpoint]
        for candidate in candidates:
            id = _drive_of(candidate, current)
            if id in result:
                raise UserError(
                    f"storage.nvme: {candidate} and {result[id]} are copies of the same drive; name only one"
                )
            if id is not None:
                result[id] = candidate
    for record in current.drives:
        path = root / record.path  # a recorded absolute path stays what it is
        if record.id not in result and _drive_of(path, current) == record.id:
            result[record.id] = Path(os.path.normpath(path))
    return result


def _drive_of(folder: Path, current: Manifest) -> str | None:
    """Which drive of the manifest's store or checkpoint `folder` says that it is; None for none. UserError."""
    identity = Identity.read(folder)
    if identity is None or (identity.store, identity.checkpoint) != (current.store, current.checkpoint):
        return None
    return identity.drive or None


def require_present(current: Manifest, root: Path, result: Container[str]) -> None:
    """UserError unless every drive that holds state of the generation is in `result`."""
    needed = {drive for stored in current.arrays.values() for drive in stored.drives}
    for record in current.drives:
        path = root / record.path
        if record.id in needed and record.id not in result:
            what = f"checkpoint '{current.checkpoint}'" if current.checkpoint else f"generation {current.generation}"
            state = "it is not there" if not path.exists() else f"the folder lacks this drive's {IDENTITY_NAME}"
            raise UserError(
                f"{os.path.normpath(path)}: this drive holds part of {what} (listed in {root / 'manifest.json'}), and "
                f"{state}: is it mounted? If it has moved, set storage.nvme to its new path"
            )


class DriveSet:
    """The drives of an open store: the active ones are written to, others hold state from before a change of drives."""

    def __init__(
        self,
        root: Path,
        store: str,
        locks: Locks,
        folders: Mapping[str, Path],
        active: Sequence[str],
        *,
        writable: bool,
        on_thread_start: OnThreadStart | None = None,
    ):
        """`folders`: drive id -> existing folder; `active`: ids in striping order. `root`: folder of the manifest."""
        self.root, self.store, self.locks, self.writable = root, store, locks, writable
        self.by_id = {
            id: Drive(id, folder, writable=writable, on_thread_start=on_thread_start) for id, folder in folders.items()
        }
        self.active = tuple(self.by_id[id] for id in active)
        self._retired: dict[Path, Traffic] = {}

    def __iter__(self) -> Iterator[Drive]:
        return iter(self.by_id.values())

    def __len__(self) -> int:
        return len(self.by_id)

    @property
    def folders(self) -> list[Path]:
        return [drive.folder for drive in self.active]

    def warnings(self) -> list[str]:
        """What is doubtful about the active drives, one sentence each."""
        groups: dict[int, list[str]] = defaultdict(list)
        for folder in self.folders:
            groups[folder.stat().st_dev].append(str(folder))
        shared = [", ".join(group) for group in groups.values() if len(group) > 1]
        return [warning for folder in self.folders for warning in check_folder(folder)] + [
            f"storage.nvme: {group} are on one device, so striping over them is no faster" for group in shared
        ]

    def traffic(self) -> dict[Path, Traffic]:
        """Bytes moved, by folder; drives that were given up meanwhile included."""
        return self._retired | {drive.folder: drive.traffic for drive in self}

    def identify(self) -> None:
        """Write the identity of every drive, all of them this store's own, durably. UserError when a drive fails."""
        for drive in self:
            Identity.of(self.store, drive.id, self.root).write(drive.folder)
        if self.root.resolve() not in {drive.folder.resolve() for drive in self}:
            Identity.of(self.store, "", self.root).write(self.root)
        for folder in {self.root, *self.folders}:
            with reporting(folder, "syncing"):
                fsync_ancestors(folder)

    def records(self) -> tuple[DriveRecord, ...]:
        """The manifest's records: active drives in striping order, then the others."""
        ordered = dict.fromkeys([*self.active, *self])
        return tuple(DriveRecord.of(d.id, d.folder, self.root, self.root, active=d in self.active) for d in ordered)

    def retire(self, used: Container[Drive]) -> list[Path]:
        """Give up the inactive drives that are not `used`; returns their folders."""
        retired = [drive for drive in self if drive not in self.active and drive not in used]
        for drive in retired:
            drive.close()
            self._retired[drive.folder] = drive.traffic
            del self.by_id[drive.id]
        return [drive.folder for drive in retired]

    def sync(self, sync: Callable[[Path], None], paths: Iterable[tuple[Drive, Path]], doing: str = "syncing") -> None:
        """Call `sync` for every path on its drive's threads; when all have ended, UserError naming one that failed."""
        futures = [(path, drive.writers.submit(sync, path)) for drive, path in paths]
        wait([future for _, future in futures])
        for path, future in futures:
            with reporting(path, doing):
                future.result()

    def disk_bytes(self, without: Container[Path] = ()) -> int:
        """Bytes of disk of all folders and the manifest's, as `disk.disk_bytes` counts them."""
        return disk_bytes({self.root, *(drive.folder for drive in tuple(self))}, without)


def require_capacity(needs: Mapping[Path, int], what: str) -> None:
    """UserError unless every device has free what the folders on it need for `what`, in bytes, plus 5 %."""
    groups: dict[int, list[Path]] = defaultdict(list)
    for folder in needs:
        with reporting(folder, f"checking the free space for {what}"):
            groups[folder.stat().st_dev].append(folder)
    for folders in groups.values():
        also = "" if len(folders) == 1 else f" (with {', '.join(str(folder) for folder in folders[1:])})"
        require_free(folders[0], int(sum(needs[folder] for folder in folders) * FREE_MARGIN), what + also)
