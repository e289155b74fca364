"""What drives give, measured by direct reads and writes of whole blocks in files without a name.

The files are unlinked before their first byte is written, so nothing is left, however the process ends. They are filled
once; what is measured overwrites and reads extents that exist and are initialised, as training does.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from msgspec import structs

from penstock.engine.machine.limits import free_disk, free_memory
from penstock.engine.machine.profile import Drive, Machine
from penstock.storage.files.disk import read_all, reporting, require_writable, write_all
from penstock.storage.files.errors import UserError
from penstock.storage.tier.arena import HostArena
from penstock.storage.tier.drives import READ_THREADS, WRITE_THREADS
from penstock.storage.tier.filesystem import MEMORY, existing, mount_of

BLOCK_BYTES = 32 << 20
"""Of one request: as long as the store's chunk files."""
MOST_BYTES = 64 << 30
"""Written once to fill the files of one drive; measuring then overwrites them as long as there is time."""
_THREADS = max(READ_THREADS, WRITE_THREADS)
_LEAST_BLOCKS = 2 * _THREADS
_FILL_SHARE = 0.25
"""Of the time given; the rest is shared by what is measured."""
_FILL_BYTES_PER_S = 512 << 20
"""Of the time given, as much is filled on one drive at most: a file system gives extents back at about 1 GB/s, and that
is waited for."""
_LEAST_SHARE = 0.02
"""Of the time given, that one phase takes by itself however long the others took."""
BRIEF_S = 0.5
BRIEF_BYTES = 256 << 20
"""Time, and bytes written to each drive, of a first idea; more is written only where `least_written` is more."""


@dataclass(frozen=True, slots=True)
class DriveRates:
    """What was measured of a set of drives; the fields are engine.machine.profile.Machine's."""

    drives: tuple[Drive, ...]
    drives_share: float
    drive_duplex_share: float
    written_bytes: int
    """To all drives together, filling included."""


@dataclass(slots=True)
class _Files:
    """Two files for each thread on one drive: readers and writers at once have one each."""

    folder: Path
    most_blocks: int
    """Of all files."""
    left_blocks: int
    """That may still be written, overwriting included."""
    write_phases: int
    """Phases of writing that share them."""
    fds: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    """Filled so far, by file."""


@dataclass(slots=True)
class _Job:
    """One direction on one drive for some time."""

    files: _Files
    write: bool
    halves: tuple[int, ...]
    """Which of each thread's files are used."""
    more_blocks: int = 0
    """That it may still write, beside the first of each thread."""
    moved_bytes: int = 0
    end: float = 0.0


def least_written(num_drives: int, block_bytes: int = BLOCK_BYTES) -> int:
    """Bytes that are written to each of so many drives however short the time is."""
    return (_LEAST_BLOCKS + _write_phases(num_drives) * _THREADS) * block_bytes


def _write_phases(num_drives: int) -> int:
    """Writing alone, while reading, and to all drives at once."""
    return 3 if num_drives > 1 else 2


def check_folders(folders: Sequence[Path], block_bytes: int = BLOCK_BYTES) -> list[int]:
    """Bytes that each drive's files may take; UserError for a folder that cannot be used. Leaves nothing behind."""
    capacities = []
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder; give an existing folder on the drive to measure")
        require_writable(folder)
        capacity = min(MOST_BYTES, _fillable(folder, folders))
        if mount_of(folder).filesystem in MEMORY:
            capacity = min(capacity, free_memory().free_bytes // (4 * len(folders)))
        need = _LEAST_BLOCKS * block_bytes
        if capacity < need:
            raise UserError(
                f"{folder}: measuring needs {need:,} bytes of disk and {capacity:,} may be used; free some, or give a "
                "folder on another drive"
            )
        capacities.append(capacity)
    return capacities


def _fillable(folder: Path, folders: Sequence[Path]) -> int:
    """Bytes that a run may fill below `folder`, sharing its file system with the others there."""
    sharing = sum(os.stat(other).st_dev == os.stat(folder).st_dev for other in folders)
    return free_disk(folder) // sharing


def probe_drives(
    folders: Sequence[Path],
    seconds: float,
    *,
    block_bytes: int = BLOCK_BYTES,
    most_bytes: int = MOST_BYTES,
    most_written: int = sys.maxsize,
    say: Callable[[str], None] = lambda text: None,
) -> DriveRates:
    """Measure the drives under `folders`, one folder each, in about `seconds`; `say` reports the progress.

    Files take at most `most_bytes` of each, and `most_written` bytes, `least_written` at least, are written to each.
    Each alone: writes with the sync that makes them durable, reads, both at once; then all drives at once.
    """
    capacities = check_folders(folders, block_bytes)
    sizes = [_fillable(folder, folders) for folder in folders]
    count, filled = len(folders), max(_LEAST_BLOCKS * block_bytes, int(seconds * _FILL_BYTES_PER_S))
    filled, blocks = min(filled, max(_LEAST_BLOCKS * block_bytes, most_written // 2)), most_written // block_bytes
    with ExitStack() as cleanup:
        drives = [
            cleanup.enter_context(
                _opened(folder, min(capacity, most_bytes, filled) // block_bytes, blocks, _write_phases(count))
            )
            for folder, capacity in zip(folders, capacities, strict=True)
        ]
        bench = _Bench(max(count, 2) * _THREADS, block_bytes, seconds, phases=3 * count + (2 if count > 1 else 0))
        cleanup.callback(bench.close)
        say(f"filling files on {_names(folders)}")
        bench.fill(drives)
        alone = []
        for drive in drives:
            say(f"measuring {drive.folder}")
            alone.append(_alone(bench, drive))
        together = 1.0
        if count > 1:
            say(f"measuring {_names(folders)} at once")
            shares = []
            for write in (True, False):
                rates = bench.run([_Job(drive, write, (0, 1)) for drive in drives])
                shares.append(sum(rates) / sum(each.raw_write if write else each.read for each in alone))
            together = min(1.0, sum(shares) / len(shares))
    return DriveRates(
        drives=tuple(
            Drive(path=str(folder), size_bytes=size, read_bytes_per_s=each.read, write_bytes_per_s=each.synced_write)
            for folder, size, each in zip(folders, sizes, alone, strict=True)
        ),
        drives_share=together,
        drive_duplex_share=min(1.0, sum(each.duplex_share for each in alone) / count),
        written_bytes=bench.written_bytes,
    )


def with_measured_drives(machine: Machine, folders: Sequence[Path], block_bytes: int) -> Machine:
    """`machine` with what the drives give on which `folders` are, or will be, in about `BRIEF_S` for each.

    Raises UserError where they have no room for that.
    """
    existing_folders, seconds = [existing(folder) for folder in folders], BRIEF_S * len(folders)
    result = probe_drives(
        existing_folders, seconds, block_bytes=min(block_bytes, BLOCK_BYTES), most_written=BRIEF_BYTES
    )
    return structs.replace(
        machine,
        drives=result.drives,
        drives_share=result.drives_share,
        drive_duplex_share=result.drive_duplex_share,
    )


@dataclass(frozen=True, slots=True)
class _Alone:
    raw_write: float
    synced_write: float
    read: float
    duplex_share: float


def _alone(bench: _Bench, drive: _Files) -> _Alone:
    job = _Job(drive, True, (0, 1))
    start = time.perf_counter()
    (raw_write,) = bench.run([job])
    _sync(drive)
    synced_write = job.moved_bytes / (time.perf_counter() - start)
    (read,) = bench.run([_Job(drive, False, (0, 1))])
    both = bench.run([_Job(drive, False, (0,)), _Job(drive, True, (1,))])
    return _Alone(raw_write, synced_write, read, sum(both) / (read + raw_write))


class _Bench:
    """Threads, memory and time to move blocks with."""

    def __init__(self, threads: int, block_bytes: int, seconds: float, *, phases: int) -> None:
        """`phases` calls of `run`, one after another, and all else take about `seconds` together."""
        self.written_bytes = 0
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._phases = phases
        self._block_bytes = block_bytes
        size = threads * block_bytes
        self._arena = HostArena(size, budget_bytes=size)
        self._slots = [self._arena.slot(str(index), block_bytes) for index in range(threads)]
        self._slots[0].random_(generator=torch.Generator().manual_seed(0))  # a drive might compress
        for index, slot in enumerate(self._slots[1:], 1):
            torch.bitwise_xor(self._slots[0], index % 256, out=slot)
        self._stop = threading.Event()

    def close(self) -> None:
        self._slots.clear()
        self._arena.close()

    def fill(self, drives: Sequence[_Files]) -> None:
        """Append blocks to every drive's files, at least one to each file, and sync them."""
        deadline = time.perf_counter() + self._seconds * _FILL_SHARE

        def lane(drive: _Files, thread: int, slot: torch.Tensor) -> None:
            view, half = slot.numpy().data, 0
            most = max(1, drive.most_blocks // len(drive.fds))
            while not self._stop.is_set():
                number = 2 * thread + half
                block = drive.blocks[number]
                if block and (time.perf_counter() >= deadline or block >= most):
                    break
                _write(drive, number, view, block * self._block_bytes)
                drive.blocks[number] += 1
                half = 1 - half

        self._in_threads([(lane, (drive, thread)) for drive in drives for thread in range(_THREADS)])
        for drive in drives:
            drive.left_blocks -= sum(drive.blocks)
            self.written_bytes += sum(drive.blocks) * self._block_bytes
            _sync(drive)

    def run(self, jobs: Sequence[_Job]) -> list[float]:
        """Bytes/s of each job, all at once for this phase's part of the time; every thread moves a block at least.

        The phase is over sooner where one of them has written what it may.
        """
        left = (self._deadline - time.monotonic()) / self._phases  # syncing takes its time too
        seconds, self._phases = max(_LEAST_SHARE * self._seconds, left), self._phases - 1
        start = time.perf_counter()
        lock, over = threading.Lock(), threading.Event()
        for job in jobs:
            if job.write:
                job.more_blocks = max(0, job.files.left_blocks // max(1, job.files.write_phases) - _THREADS)
                job.files.write_phases -= 1

        def goes_on(job: _Job) -> bool:
            """Whether a thread may move another block."""
            if time.perf_counter() >= start + seconds or over.is_set():
                return False
            with lock:
                if job.write and job.more_blocks == 0:
                    over.set()
                    return False
                job.more_blocks -= job.write
            return True

        def lane(job: _Job, thread: int, slot: torch.Tensor) -> None:
            view, moved, turn = slot.numpy().data, 0, 0
            move = _write if job.write else _read
            while not self._stop.is_set() and (turn == 0 or goes_on(job)):
                number = 2 * thread + job.halves[turn % len(job.halves)]
                block = turn // len(job.halves) % job.files.blocks[number]
                move(job.files, number, view, block * self._block_bytes)
                turn, moved = turn + 1, moved + len(view)
            with lock:
                job.moved_bytes += moved
                job.end = max(job.end, time.perf_counter())

        self._in_threads([(lane, (job, thread)) for job in jobs for thread in range(_THREADS)])
        for job in jobs:
            if job.write:
                job.files.left_blocks -= job.moved_bytes // self._block_bytes
                self.written_bytes += job.moved_bytes
        return [job.moved_bytes / (job.end - start) for job in jobs]

    def _in_threads(self, lanes: Sequence[tuple[Callable[..., None], tuple[object, ...]]]) -> None:
        """Run all at once, each with memory of its own; an exception of one, or Ctrl-C, ends the others soon."""
        with ThreadPoolExecutor(len(lanes)) as pool:
            futures = [pool.submit(lane, *args, slot) for (lane, args), slot in zip(lanes, self._slots, strict=False)]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                self._stop.set()
                raise


@contextmanager
def _opened(folder: Path, most_blocks: int, left_blocks: int, write_phases: int) -> Iterator[_Files]:
    """The files of one drive, open for direct I/O where its file system has that, and without a name."""
    files = _Files(folder, most_blocks, left_blocks, write_phases)
    try:
        with reporting(folder, "making files to measure with"):
            for _ in range(2 * _THREADS):
                files.fds.append(_nameless(folder))
                files.blocks.append(0)
        yield files
    finally:
        # Giving the extents of gigabytes back takes seconds one after another.
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(os.close, files.fds))


def _nameless(folder: Path) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC
    for more in (os.O_TMPFILE | os.O_DIRECT, os.O_TMPFILE):
        try:
            return os.open(folder, flags | more, 0o600)
        except OSError as error:
            # Which of these means that the file system lacks it depends on the file system.
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
                raise
    path = folder / f".penstock-probe-{uuid.uuid4().hex}"
    try:
        try:
            return os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
        except OSError:  # some make the file and then refuse direct I/O
            return os.open(path, flags | os.O_CREAT, 0o600)
    finally:
        path.unlink(missing_ok=True)


def _write(drive: _Files, number: int, data: memoryview, offset: int) -> None:
    with reporting(drive.folder, f"writing {len(data):,} bytes"):
        write_all(drive.fds[number], [data], offset)


def _read(drive: _Files, number: int, out: memoryview, offset: int) -> None:
    with reporting(drive.folder, f"reading {len(out):,} bytes"):
        assert read_all(drive.fds[number], [out], offset), "the file became shorter after it was written"


def _sync(drive: _Files) -> None:
    for fd in drive.fds:
        with reporting(drive.folder, "syncing"):
            os.fsync(fd)


def _names(folders: Sequence[Path]) -> str:
    return ", ".join(str(folder) for folder in folders)
