"""What drives give without Penstock: direct writes and reads of existing files."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.storage.files.disk import fsync_file, write_file
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

    def path(self, index: int) -> Path:
        return self.folder / f"raw.{index}"

    def paths(self) -> list[Path]:
        return [self.path(index) for index in range(self.count)]

    @property
    def total_bytes(self) -> int:
        return self.count * self.file_bytes

    def create(self, data: torch.Tensor) -> None:
        """Write all files, `data` uint8 [file_bytes] in each: from then on their extents exist and are initialised."""
        self.folder.mkdir(parents=True)
        content = data.numpy().tobytes()
        for path in self.paths():
            write_file(path, content)
            fsync_file(path)


class RawLoop:
    """Threads that each write or read one whole file at a time, as many for a drive as the store uses."""

    def __init__(self, slots: Sequence[torch.Tensor]):
        """`slots` uint8 [file_bytes] each, from an arena: LOOP_THREADS for each drive are written from and read into.

        Memory matters: without the arena's huge pages the kernel cuts requests four times smaller.
        """
        self._slots = slots

    def run(self, drives: Sequence[RawFiles], *, write: bool) -> Timed:
        """Overwrite or read every file, all drives at once, unsynced; cached where there is no direct I/O."""
        flags = (os.O_WRONLY if write else os.O_RDONLY) | os.O_CLOEXEC

        def lane(drive: RawFiles, thread: int, slot: torch.Tensor) -> None:
            view = slot.numpy().data
            for index in range(thread, drive.count, LOOP_THREADS):
                fd = _open_direct(drive.path(index), flags)
                try:
                    if write:
                        _write(fd, view)
                    else:
                        _read(fd, view)
                finally:
                    os.close(fd)

        with ThreadPoolExecutor(len(drives) * LOOP_THREADS) as pool:

            def work() -> None:
                slots = iter(self._slots)
                lanes = [
                    pool.submit(lane, drive, thread, next(slots)) for drive in drives for thread in range(LOOP_THREADS)
                ]
                for future in lanes:
                    future.result()

            return timed(sum(drive.total_bytes for drive in drives), work)


def sync_files(paths: Sequence[Path]) -> float:
    """Make the files durable, as the store's commit does; returns the seconds that it took."""
    start = time.perf_counter()
    with ThreadPoolExecutor(LOOP_THREADS) as pool:
        list(pool.map(fsync_file, paths))
    return time.perf_counter() - start


def drop_cached(paths: Sequence[Path]) -> None:
    """Ask the kernel to forget the cached pages of synced files, so that a read through the page cache is cold."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _open_direct(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_DIRECT)
    except OSError:
        return os.open(path, flags)


def _write(fd: int, data: memoryview) -> None:
    offset = 0
    while offset < len(data):
        offset += os.pwrite(fd, data[offset:], offset)


def _read(fd: int, out: memoryview) -> None:
    offset = 0
    while offset < len(out):
        count = os.preadv(fd, [out[offset:]], offset)
        assert count, "the file is shorter than it was written"
        offset += count
