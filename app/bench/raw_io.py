"""What drives give without Penstock: direct writes and reads of existing files."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.storage.files.disk import fsync_file, held, read_all, write_all, write_file
from penstock.storage.tier.drives import READ_THREADS, WRITE_THREADS

LOOP_THREADS = max(READ_THREADS, WRITE_THREADS)
"""Files that are in flight on each drive: as many as the store keeps."""


@dataclass(frozen=True, slots=True)
class Timed:
    num_bytes: int
    seconds: float
    cpu_s: float
    """CPU time of the process that did it, all threads."""

    @property
    def gbps(self) -> float:
        """10^9 bytes per second."""
        return self.num_bytes / self.seconds / 1e9


def timed(num_bytes: int, work: Callable[[], object]) -> Timed:
    """Run `work`, which moves `num_bytes` in this process, and time it."""
    start, cpu = time.perf_counter(), time.process_time()
    work()
    return Timed(num_bytes, time.perf_counter() - start, time.process_time() - cpu)


@dataclass(frozen=True, slots=True)
class RawFiles:
    """Files of one size on one drive, as many bytes as the store's chunk files there."""

    folder: Path
    count: int
    file_bytes: int

    def paths(self) -> list[Path]:
        return [self.folder / f"raw.{index}" for index in range(self.count)]

    def create(self, data: torch.Tensor) -> None:
        """Write all files, `data` uint8 [file_bytes] in each: from then on their extents exist and are initialised."""
        self.folder.mkdir(parents=True)
        content = data.numpy().tobytes()
        for path in self.paths():
            write_file(path, content)
            fsync_file(path)


def move_files(drives: Sequence[RawFiles], slots: Sequence[torch.Tensor], *, write: bool) -> Timed:
    """Overwrite or read every file, all drives at once, unsynced; cached where there is no direct I/O.

    Threads each move one whole file at a time, as many for a drive as the store uses. `slots`: uint8 [file_bytes] each,
    LOOP_THREADS for each drive, from an arena: without its huge pages the kernel cuts requests four times smaller.
    """
    flags = (os.O_WRONLY if write else os.O_RDONLY) | os.O_CLOEXEC

    def lane(paths: Sequence[Path], slot: torch.Tensor) -> None:
        view = slot.numpy().data
        for path in paths:
            with held(_open_direct(path, flags)) as fd:
                if write:
                    write_all(fd, [view], 0)
                else:
                    assert read_all(fd, [view], 0), "the file is shorter than it was written"

    lanes = [drive.paths()[thread::LOOP_THREADS] for drive in drives for thread in range(LOOP_THREADS)]
    with ThreadPoolExecutor(len(lanes)) as pool:
        num_bytes = sum(drive.count * drive.file_bytes for drive in drives)
        return timed(num_bytes, lambda: list(pool.map(lane, lanes, slots)))


def sync_files(paths: Sequence[Path]) -> float:
    """Make the files durable, as the store's commit does; returns the seconds that it took."""
    start = time.perf_counter()
    with ThreadPoolExecutor(LOOP_THREADS) as pool:
        list(pool.map(fsync_file, paths))
    return time.perf_counter() - start


def drop_cached(paths: Sequence[Path]) -> None:
    """Ask the kernel to forget the cached pages of synced files, so that a read through the page cache is cold."""
    for path in paths:
        with held(os.open(path, os.O_RDONLY)) as fd:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _open_direct(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_DIRECT)
    except OSError:
        return os.open(path, flags)
