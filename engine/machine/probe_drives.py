"""What drives give, measured by direct reads and writes of whole blocks in files without a name.

The files are unlinked before their first byte is written, so nothing is left, however the process ends. They are filled
once; what is measured overwrites and reads extents that exist and are initialised, as training does.
"""

from __future__ import annotations

import errno
import itertools
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
from typing import Any, NamedTuple, TypeVar

import torch
from msgspec import structs

from penstock.engine.machine.limits import free_disk, free_memory
from penstock.engine.machine.profile import Drive, Machine
from penstock.storage.files.disk import read_all, reporting, require_writable, write_all
from penstock.storage.files.errors import UserError
from penstock.storage.tier.arena import HostArena
from penstock.storage.tier.drives import READ_THREADS, WRITE_THREADS
from penstock.storage.tier.filesystem import MEMORY, existing, mount_of

T = TypeVar("T")
BLOCK_BYTES = 32 << 20
"""Of one request: as long as the store's chunk files."""
MOST_BYTES = 64 << 30
"""Written once to fill the files of one drive; measuring then overwrites them as long as there is time."""
_THREADS = max(READ_THREADS, WRITE_THREADS)
_LEAST_BLOCKS = 2 * _THREADS
_FILL_SHARE = 0.25
"""Of the time given; the rest is shared by what is measured."""
_FILL_BYTES_PER_S = 512 << 20
"""Of the time given, as much is filled on a drive at most: giving extents back, which is waited for, takes 1 s a GB."""
_LEAST_SHARE = 0.02
"""Of the time given, that one phase takes by itself however long the others took."""
BRIEF_S = 0.5
BRIEF_BYTES = 256 << 20
"""Time, and bytes written to each drive, of a first idea; more is written only where `least_written` is more."""


class DriveRates(NamedTuple):
    """What was measured of a set of drives; the first three fields are engine.machine.profile.Machine's."""

    drives: tuple[Drive, ...]
    drives_share: float
    drive_duplex_share: float
    written_bytes: int
    """To all drives together, filling included."""


@dataclass(slots=True, eq=False)
class _Drive:
    """Two files for each thread on one drive: readers and writers at once have one each."""

    folder: Path
    left_blocks: int
    """That may still be written, overwriting included."""
    write_phases: int
    """Phases of writing that share them."""
    fds: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    """Filled so far, by file."""

    def write(self, number: int, data: memoryview, offset: int) -> None:
        with reporting(self.folder, f"writing {len(data):,} bytes"):
            write_all(self.fds[number], [data], offset)

    def read(self, number: int, out: memoryview, offset: int) -> None:
        with reporting(self.folder, f"reading {len(out):,} bytes"):
            assert read_all(self.fds[number], [out], offset), "the file became shorter after it was written"

    def sync(self) -> None:
        for fd in self.fds:
            with reporting(self.folder, "syncing"):
                os.fsync(fd)


class _Job(NamedTuple):
    """One direction on one drive for some time."""

    drive: _Drive
    write: bool
    halves: tuple[int, ...] = (0, 1)
    """Which of each thread's files are used."""


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
        drives = [cleanup.enter_context(_opened(folder, blocks, _write_phases(count))) for folder in folders]
        bench = _Bench(max(count, 2) * _THREADS, block_bytes, seconds, phases=3 * count + (2 if count > 1 else 0))
        cleanup.callback(bench.close)
        say(f"filling files on {_names(folders)}")
        bench.fill(drives, [min(capacity, most_bytes, filled) // block_bytes for capacity in capacities])
        alone = []
        for drive in drives:
            say(f"measuring {drive.folder}")
            alone.append(_alone(bench, drive))
        together = 1.0
        if count > 1:
            say(f"measuring {_names(folders)} at once")
            shares = []
            for write in (True, False):
                rates = bench.rates([_Job(drive, write) for drive in drives])
                shares.append(sum(rates) / sum(each.raw_write if write else each.read for each in alone))
            together = min(1.0, sum(shares) / len(shares))
    return DriveRates(
        drives=tuple(
            Drive(path=str(folder), size_bytes=size, read_bytes_per_s=each.read, write_bytes_per_s=each.synced_write)
            for folder, size, each in zip(folders, sizes, alone, strict=True)
        ),
        drives_share=together,
        drive_duplex_share=min(1.0, sum(each.duplex_share for each in alone) / count),
        written_bytes=sum(blocks - drive.left_blocks for drive in drives) * block_bytes,
    )


def with_measured_drives(machine: Machine, folders: Sequence[Path], block_bytes: int) -> Machine:
    """`machine` with what the drives give on which `folders` are or will be, in about `BRIEF_S` for each. UserError."""
    existing_folders, seconds = [existing(folder) for folder in folders], BRIEF_S * len(folders)
    size = min(block_bytes, BLOCK_BYTES)
    drives, share, duplex, _ = probe_drives(existing_folders, seconds, block_bytes=size, most_written=BRIEF_BYTES)
    return structs.replace(machine, drives=drives, drives_share=share, drive_duplex_share=duplex)


class _Alone(NamedTuple):
    raw_write: float
    synced_write: float
    read: float
    duplex_share: float


def _alone(bench: _Bench, drive: _Drive) -> _Alone:
    before, start = drive.left_blocks, time.perf_counter()
    (raw_write,) = bench.rates([_Job(drive, True)])
    drive.sync()
    synced_write = (before - drive.left_blocks) * bench.block_bytes / (time.perf_counter() - start)
    (read,) = bench.rates([_Job(drive, False)])
    both = bench.rates([_Job(drive, False, (0,)), _Job(drive, True, (1,))])
    return _Alone(raw_write, synced_write, read, sum(both) / (read + raw_write))


class _Bench:
    """Threads, memory and time to move blocks with."""

    def __init__(self, threads: int, block_bytes: int, seconds: float, *, phases: int) -> None:
        """`phases` calls of `rates`, one after another, and all else take about `seconds` together."""
        self.block_bytes = block_bytes
        self._seconds = seconds
        self._deadline = time.perf_counter() + seconds
        self._phases = phases
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

    def fill(self, drives: Sequence[_Drive], most_blocks: Sequence[int]) -> None:
        """Append so many blocks to every drive's files, at least one to each file, and sync them."""
        deadline = time.perf_counter() + self._seconds * _FILL_SHARE

        def lane(drive: _Drive, most: int, thread: int, slot: torch.Tensor) -> None:
            for turn in itertools.count():
                number = 2 * thread + turn % 2
                block = drive.blocks[number]
                if self._stop.is_set() or (block and (time.perf_counter() >= deadline or block >= most)):
                    break
                drive.write(number, slot.numpy().data, block * self.block_bytes)
                drive.blocks[number] += 1

        most_each = [max(1, most // (2 * _THREADS)) for most in most_blocks]
        self._in_threads(lane, list(zip(drives, most_each, strict=True)))
        for drive in drives:
            drive.left_blocks -= sum(drive.blocks)
            drive.sync()

    def rates(self, jobs: Sequence[_Job]) -> list[float]:
        """Bytes/s of each job, all at once for this phase's part of the time, or until one of them has written what it
        may; every thread moves a block at least."""
        left = (self._deadline - time.perf_counter()) / self._phases  # syncing takes its time too
        seconds, self._phases = max(_LEAST_SHARE * self._seconds, left), self._phases - 1
        over, more_blocks = threading.Event(), dict[_Job, threading.Semaphore]()
        for job in jobs:
            if job.write:  # beside the first block of each thread
                share = job.drive.left_blocks // max(1, job.drive.write_phases)
                more_blocks[job] = threading.Semaphore(max(0, share - _THREADS))
                job.drive.write_phases -= 1
        start = time.perf_counter()

        def goes_on(job: _Job) -> bool:
            """Whether a thread may move another block."""
            if job.write and not over.is_set() and not more_blocks[job].acquire(blocking=False):
                over.set()
            return time.perf_counter() < start + seconds and not over.is_set()

        def lane(job: _Job, thread: int, slot: torch.Tensor) -> tuple[int, float]:
            """Blocks that were moved, and when the last one was."""
            move, turn = job.drive.write if job.write else job.drive.read, 0
            while not self._stop.is_set() and (turn == 0 or goes_on(job)):
                number = 2 * thread + job.halves[turn % len(job.halves)]
                block = turn // len(job.halves) % job.drive.blocks[number]
                move(number, slot.numpy().data, block * self.block_bytes)
                turn += 1
            return turn, time.perf_counter()

        result = []
        for job, lanes in zip(jobs, self._in_threads(lane, [(job,) for job in jobs]), strict=True):
            moved = sum(blocks for blocks, _ in lanes)
            job.drive.left_blocks -= moved * job.write
            result.append(moved * self.block_bytes / (max(end for _, end in lanes) - start))
        return result

    def _in_threads(self, lane: Callable[..., T], tasks: Sequence[tuple[Any, ...]]) -> list[list[T]]:
        """What `lane` returns to each of a task's threads, all at once, each with memory of its own; an exception of
        one, or Ctrl-C, ends the others soon."""
        slots = iter(self._slots)
        with ThreadPoolExecutor(len(tasks) * _THREADS) as pool:
            futures = [[pool.submit(lane, *task, thread, next(slots)) for thread in range(_THREADS)] for task in tasks]
            try:
                return [[future.result() for future in each] for each in futures]
            except BaseException:
                self._stop.set()
                raise


@contextmanager
def _opened(folder: Path, left_blocks: int, write_phases: int) -> Iterator[_Drive]:
    """The files of one drive, open for direct I/O where its file system has that, and without a name."""
    drive = _Drive(folder, left_blocks, write_phases)
    try:
        with reporting(folder, "making files to measure with"):
            for _ in range(2 * _THREADS):
                drive.fds.append(_nameless(folder))
                drive.blocks.append(0)
        yield drive
    finally:
        # Giving the extents of gigabytes back takes seconds one after another.
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(os.close, drive.fds))


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


def _names(folders: Sequence[Path]) -> str:
    return ", ".join(str(folder) for folder in folders)
