"""Activations that find no room in RAM: written once, read once, in no generation and never synced.

    DRIVE/scratch/spill/KEY     the bytes, then zeros up to a multiple of 4 KiB

The checksum stays in memory: a file that outlives its process is of no use to anybody and is swept on opening.
"""

from __future__ import annotations

import itertools
import os
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.storage.files.crc import checksum
from penstock.storage.files.disk import held, make_folder, read_all, reporting, write_all
from penstock.storage.files.errors import UserError, ensure
from penstock.storage.tier.chunk import BLOCK_BYTES, own_page
from penstock.storage.tier.drives import SCRATCH, Drive, DriveSet

_FOLDER = "spill"


@dataclass(slots=True)
class _Entry:
    drive: Drive
    path: Path
    num_bytes: int
    crc: int | None = None
    """CRC-32C of the payload; None while it is written."""


class Spill:
    """Byte strings by key on the drives, round robin. Every method may be called from any thread."""

    def __init__(self, drives: DriveSet) -> None:
        self._drives = drives
        self._entries: dict[str, _Entry] = {}
        self._count = itertools.count()
        self._lock = threading.Lock()
        self._live_bytes = 0
        self.peak_bytes = 0
        """Most that was on the drives at once."""

    def folders(self) -> set[Path]:
        return {drive.folder / SCRATCH / _FOLDER for drive in tuple(self._drives)}

    def write(self, key: str, src: torch.Tensor) -> Future[None]:
        """See NvmeStore.spill."""
        ensure(key not in ("", ".", ".."), key)
        ensure(not set(key) & {"/", "\0"}, key)
        _require_bytes(src)
        drive = self._drives.active[next(self._count) % len(self._drives.active)]
        entry = _Entry(drive, drive.folder / SCRATCH / _FOLDER / key, src.numel())
        with self._lock:
            ensure(key not in self._entries, f"{key} is spilled twice")
            self._entries[key] = entry
            self._live_bytes += _padded(entry.num_bytes)
            self.peak_bytes = max(self.peak_bytes, self._live_bytes)

        def work() -> None:
            with reporting(entry.path, f"writing {entry.num_bytes:,} bytes of activations"):
                crc = _write_file(entry.path, src, drive)
            drive.count(written=_padded(entry.num_bytes))
            entry.crc = crc

        return drive.writers.submit(work)

    def read(self, key: str, out: torch.Tensor, *, keep: bool = False) -> Future[None]:
        """See NvmeStore.unspill."""
        _require_bytes(out)
        with self._lock:
            entry = self._entries[key] if keep else self._entries.pop(key)
            self._live_bytes -= 0 if keep else _padded(entry.num_bytes)
        ensure(entry.crc is not None, f"{key} is read before it is written")
        ensure(entry.num_bytes == out.numel(), f"{(key, entry.num_bytes, out.numel())}")

        def work() -> None:
            doing = f"reading {entry.num_bytes:,} bytes of activations"
            with reporting(entry.path, doing):
                found = _read_file(entry.path, out, direct=entry.drive.direct)
                if not keep:
                    os.unlink(entry.path)
            if found != entry.crc:
                raise UserError(
                    f"{entry.path}: {doing}: checksum mismatch: the bytes have CRC-32C {found or 0:08x} instead of "
                    f"{entry.crc:08x} as written; check the disk and resume the run"
                )
            entry.drive.count(read=_padded(entry.num_bytes))

        return entry.drive.readers.submit(work)

    def discard(self, key: str) -> Future[None]:
        with self._lock:
            entry = self._entries.pop(key)
            self._live_bytes -= _padded(entry.num_bytes)

        def work() -> None:
            with reporting(entry.path, "removing activations"):
                os.unlink(entry.path)

        return entry.drive.readers.submit(work)


def _require_bytes(tensor: torch.Tensor) -> None:
    ensure(tensor.dtype == torch.uint8, f"{tensor.dtype}")
    ensure(tensor.dim() == 1, f"{tensor.shape}")
    ensure(tensor.is_contiguous(), "needs a contiguous tensor")
    ensure(tensor.device.type == "cpu", f"{tensor.device}")


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def _split(tensor: torch.Tensor) -> tuple[memoryview, memoryview]:
    """The whole blocks of `tensor` and its tail, which direct I/O cannot move from or to where it is."""
    data: memoryview = tensor.detach().numpy().data
    whole = len(data) // BLOCK_BYTES * BLOCK_BYTES
    return data[:whole], data[whole:]


def _open(path: Path, flags: int, tensor: torch.Tensor, *, direct: bool) -> int:
    aligned = tensor.data_ptr() % BLOCK_BYTES == 0
    return os.open(path, flags | os.O_CLOEXEC | (os.O_DIRECT if direct and aligned else 0), 0o644)


def _write_file(path: Path, src: torch.Tensor, drive: Drive) -> int:
    blocks, tail = _split(src)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        fd = _open(path, flags, src, direct=drive.direct)
    except FileNotFoundError:  # the first one on this drive
        make_folder(path.parent, inside=drive.folder)
        fd = _open(path, flags, src, direct=drive.direct)
    try:
        views = [blocks]
        if tail:
            page = own_page()
            page[: len(tail)] = tail
            page[len(tail) :] = bytes(BLOCK_BYTES - len(tail))
            views.append(page)
        write_all(fd, views, 0)
    finally:
        os.close(fd)
    return checksum(src.detach().numpy().data)


def _read_file(path: Path, out: torch.Tensor, *, direct: bool) -> int | None:
    """Read the file; the checksum of its payload, or None where the file is too short."""
    blocks, tail = _split(out)
    with held(_open(path, os.O_RDONLY, out, direct=direct)) as fd:
        if not read_all(fd, [blocks, own_page()] if tail else [blocks], 0):
            return None
        if tail:
            tail[:] = own_page()[: len(tail)]
    return checksum(out.detach().numpy().data)
