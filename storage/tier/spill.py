"""Activations that do not fit RAM: chunk files that are written once, read once, in no generation and never synced.

    DRIVE/scratch/spill/KEY     (spill1 and so on: of another process that trains the same run)

The checksum stays in memory: a file that outlives its process is useless and is removed on opening.
"""

from __future__ import annotations

import itertools
import os
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.storage.files.disk import make_folder, reporting
from penstock.storage.files.errors import UserError, ensure
from penstock.storage.files.model_folder import is_plain_name
from penstock.storage.tier.chunk import ChunkError, ChunkFormat, read_chunk, write_chunk
from penstock.storage.tier.drives import SCRATCH, Drive, DriveSet

_FOLDER = "spill{}"


@dataclass(slots=True)
class _Entry:
    drive: Drive
    path: Path
    form: ChunkFormat
    crc: int | None = None
    """None while it is written."""


class Spill:
    """Byte strings by key on the drives, round robin. Every method may be called from any thread."""

    def __init__(self, drives: DriveSet, rank: int = 0) -> None:
        """`rank`: of this process, of those that write to the drives together."""
        self._drives, self._folder = drives, _FOLDER.format(rank or "")
        self._entries: dict[str, _Entry] = {}
        self._count = itertools.count()
        self._lock = threading.Lock()
        self._live_bytes = 0
        self.peak_bytes = 0
        """Most that was on the drives at once."""

    def folders(self) -> set[Path]:
        return {drive.folder / SCRATCH / self._folder for drive in tuple(self._drives)}

    def write(self, key: str, src: torch.Tensor) -> Future[None]:
        """Write `src`, uint8 [n] on the CPU, which must not change until the future is done; not synced.

        Direct where it starts at a 4 KiB address. The future raises UserError when the disk is full or fails.
        """
        ensure(is_plain_name(key), key)
        data = _bytes(src)
        drive = self._drives.active[next(self._count) % len(self._drives.active)]
        entry = _Entry(drive, drive.folder / SCRATCH / self._folder / key, ChunkFormat(src.numel()))
        with self._lock:
            ensure(key not in self._entries, f"{key} is spilled twice")
            self._entries[key] = entry
            self._live_bytes += entry.form.file_bytes
            self.peak_bytes = max(self.peak_bytes, self._live_bytes)

        def work() -> None:
            with reporting(entry.path, f"writing {entry.form.part_bytes:,} bytes of activations"):
                make_folder(entry.path.parent, inside=drive.folder)
                entry.crc = write_chunk(entry.path, data, entry.form, direct=drive.direct)
            drive.count(written=entry.form.file_bytes)

        return drive.writers.submit(work)

    def read(self, key: str, out: torch.Tensor, *, keep: bool = False) -> Future[None]:
        """Read what was written as `key` into `out`, uint8 [n] on the CPU, and remove it from disk unless `keep`.

        The future raises UserError when the file is damaged, missing or unreadable.
        """
        data = _bytes(out)
        entry = self._entries[key] if keep else self._pop(key)
        ensure(entry.crc is not None, f"{key} is read before it is written")
        ensure(entry.form.part_bytes == out.numel(), f"{(key, entry.form.part_bytes, out.numel())}")

        def work() -> None:
            doing = f"reading {entry.form.part_bytes:,} bytes of activations"
            try:
                with reporting(entry.path, doing):
                    read_chunk(entry.path, data, entry.form, direct=entry.drive.direct, expected=entry.crc)
                    if not keep:
                        os.unlink(entry.path)
            except ChunkError as error:
                raise UserError(f"{entry.path}: {doing}: {error}; check the disk and resume the run") from error
            entry.drive.count(read=entry.form.file_bytes)

        return entry.drive.readers.submit(work)

    def discard(self, key: str) -> Future[None]:
        """Remove what was written as `key` without reading it."""
        entry = self._pop(key)

        def work() -> None:
            with reporting(entry.path, "removing activations"):
                os.unlink(entry.path)

        return entry.drive.readers.submit(work)

    def _pop(self, key: str) -> _Entry:
        with self._lock:
            entry = self._entries.pop(key)
            self._live_bytes -= entry.form.file_bytes
        return entry


def _bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    is_plain = tensor.dtype == torch.uint8 and tensor.dim() == 1 and tensor.is_contiguous()
    ensure(is_plain and tensor.device.type == "cpu", f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}")
    return tensor.detach().numpy()
