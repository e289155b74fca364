"""The NVMe tier: arrays in two slots each, of which a committed generation uses one.

    root/manifest.json                      the committed generation (storage.manifest)
    root/<buffer>/<kind>/<slot 0|1>/        a zarr3 array [parts, part elements]: zarr.json and one chunk file per part
    root/scratch/<buffer>/<kind>/0/         arrays of no generation, wiped when the store is opened

Any zarr3 reader opens the arrays. Reads and writes here bypass tensorstore's data path: chunk files move by direct I/O
between the drive and the caller's memory with no copy (storage.chunk); tensorstore makes the arrays.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tensorstore as ts
import torch

from storage import chunk, manifest
from storage.arena import empty_aligned
from storage.disk import (
    disk_error,
    fsync_dir,
    fsync_file,
    lock_folder,
    require_free,
    require_writable,
    sweep_temporaries,
)
from storage.errors import BudgetError, UserError
from storage.layout import part_numel_even
from storage.manifest import ArraySpec, Manifest

__all__ = ["ArraySpec", "NvmeStore"]

READ_THREADS = 4
WRITE_THREADS = 4
"""Chunk files in flight in each direction. Each call is a blocking read or write of a whole chunk file, which the
kernel splits into a deep queue: a few suffice, and they also spread the checksums over the cores."""
_FREE_MARGIN = 1.05


@dataclass(slots=True)
class _Array:
    spec: ArraySpec
    form: chunk.ChunkFormat
    parts: list[tuple[int, int]]
    folder: Path
    scratch: bool
    slot: int | None  # committed; None before the first commit, always None for scratch
    written: set[int] = field(default_factory=set)  # parts of the other slot written since the last commit

    def next_slot(self) -> int:
        return 0 if self.slot is None else 1 - self.slot

    def path(self, slot: int, part: int) -> Path:
        return self.folder / str(slot) / f"c.{part}.0"

    def disk_bytes(self) -> int:
        return len(self.parts) * self.form.file_bytes * (1 if self.scratch else 2)


class NvmeStore:
    """State on disk that never tears: whatever happens, `open` finds the last committed generation, bit for bit.

    Writes go to the slot that the committed generation does not use; `commit` makes them durable and moves the
    manifest. Every method may be called from any thread. The caller orders operations on one part: reading a part
    while it is written, or the other way round, is an assertion error.
    """

    def __init__(self, root: Path, lock: int, current: Manifest, specs: Sequence[ArraySpec], budget_bytes: int | None):
        """Use `create` or `open`. `lock` is the descriptor that holds `root` for this process."""
        self.root = root
        self._root_lock = lock
        self.bytes_read = 0
        self.bytes_written = 0
        self._manifest = current
        self._budget_bytes = budget_bytes
        self._arrays = {(spec.buffer, spec.kind): self._array(spec, scratch=False) for spec in specs}
        assert len(self._arrays) == len(specs), "an array is listed twice"
        self._lock = threading.Lock()
        self._reading: Counter[Path] = Counter()
        self._writing: set[Path] = set()
        self._committing = False
        self._sync_failed = False
        self._direct = chunk.supports_direct(root)
        self._readers = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="nvme-read")
        self._writers = ThreadPoolExecutor(WRITE_THREADS, thread_name_prefix="nvme-write")

    @staticmethod
    def create(root: Path, arrays: Sequence[ArraySpec], *, budget_bytes: int | None) -> NvmeStore:
        """Make an empty store in folder `root`; nothing is committed yet (generation 0).

        Before the first byte of state it is checked that the folder can be written and holds no generation, and that
        two generations of all arrays, plus 5 %, fit the budget and the free disk. UserError says what does not.
        """
        require_writable(root)
        lock = lock_folder(root)
        try:
            if (root / manifest.FILE_NAME).exists():
                raise UserError(f"{root}: holds the state of another run; resume that run, or choose another folder")
            shutil.rmtree(root / "scratch", ignore_errors=True)
            store = NvmeStore(root, lock, Manifest(0, {}, {}), arrays, budget_bytes)
            added = list(store._arrays.values())
            store._require_room(added, "two generations of the state")
            for array in added:
                _create_zarr(array, slots=2)
            store._sync_folders(added)
        except BaseException:
            os.close(lock)
            raise
        return store

    @staticmethod
    def open(root: Path, *, budget_bytes: int | None = None) -> NvmeStore:
        """Open the last committed generation of `root`; what was written after it is ignored and overwritten.

        UserError when there is none, when its manifest is unreadable, or when another process has the store open.
        """
        Manifest.read(root)
        require_writable(root)
        lock = lock_folder(root)
        try:
            current = Manifest.read(root)  # again: it may have moved before the lock was ours
            sweep_temporaries(root / manifest.FILE_NAME)
            shutil.rmtree(root / "scratch", ignore_errors=True)
            store = NvmeStore(root, lock, current, list(current.slots), budget_bytes)
            for spec, slot in current.slots.items():
                store._arrays[spec.buffer, spec.kind].slot = slot
        except BaseException:
            os.close(lock)
            raise
        return store

    def add_scratch(self, arrays: Sequence[ArraySpec]) -> None:
        """Add arrays of no generation: one slot, never synced, wiped on open. UserError when out of room."""
        added = [self._array(spec, scratch=True) for spec in arrays]
        self._require_room(added, "scratch space")
        for array in added:
            key = (array.spec.buffer, array.spec.kind)
            assert key not in self._arrays, f"array {key} exists"
            _create_zarr(array, slots=1)
            self._arrays[key] = array

    @property
    def generation(self) -> int:
        """Number of the committed generation; 0 before the first commit."""
        return self._manifest.generation

    @property
    def meta(self) -> dict[str, Any]:
        """What was given to the commit of this generation."""
        return self._manifest.meta

    def arrays(self) -> list[ArraySpec]:
        """All arrays but scratch."""
        return [array.spec for array in self._arrays.values() if not array.scratch]

    def read(self, buffer: str, kind: str, part: int, out: torch.Tensor) -> Future[None]:
        """Read the latest state of a part into `out`, a contiguous CPU tensor of the part's dtype and length.

        Latest: what was written since the last commit, else the committed generation. The read is direct, with no copy,
        where `out` starts at a 4 KiB address (arena slots do). The future raises UserError naming file and generation
        when the chunk file is missing, truncated, damaged or unreadable.
        """
        array = self._arrays[buffer, kind]
        data = _payload(array, part, out)
        with self._lock:
            fresh = part in array.written
            assert fresh or array.slot is not None, f"{buffer}/{kind} part {part} is read before it was ever written"
            slot = array.next_slot() if fresh or array.slot is None else array.slot
            path = array.path(slot, part)
            assert path not in self._writing, f"{path} is read while it is written"
            self._reading[path] += 1
        origin = "uncommitted state" if fresh else f"generation {self.generation}"

        def work() -> None:
            try:
                self._read_chunk(array, path, data, origin)
            finally:
                with self._lock:
                    self._reading[path] -= 1
                    if not self._reading[path]:
                        del self._reading[path]

        return self._readers.submit(work)

    def write(self, buffer: str, kind: str, part: int, src: torch.Tensor) -> Future[None]:
        """Write a part to the slot that the committed generation does not use; not durable before `commit`.

        `src` is a contiguous CPU tensor of the part's dtype and length and must not change until the future is done;
        direct and without a copy where it starts at a 4 KiB address. The future raises UserError naming the file and
        the need when the disk is full or fails; the committed generation stays readable.
        """
        array = self._arrays[buffer, kind]
        data = _payload(array, part, src)
        with self._lock:
            assert array.scratch or not self._committing, f"{buffer}/{kind} is written during a commit"
            path = array.path(array.next_slot(), part)
            assert path not in self._writing, f"{path} is written twice at once"
            assert path not in self._reading, f"{path} is written while it is read"
            self._writing.add(path)

        def work() -> None:
            written = False
            try:
                chunk.write_chunk(path, data, array.form, direct=self._direct)
                written = True
            except OSError as error:
                raise disk_error(error, path, f"writing {array.form.file_bytes:,} bytes") from error
            finally:
                with self._lock:
                    self._writing.remove(path)
                    array.written.discard(part)
                    if written:
                        array.written.add(part)
                        self.bytes_written += data.size

        return self._writers.submit(work)

    def commit(self, meta: dict[str, Any]) -> int:
        """Make everything written since the last commit the new generation; returns its number.

        Every array written since must have been written whole, and the first commit needs every array. Files, their
        folders and the manifest are synced in this order, so that a crash at any moment leaves the old or the new
        generation. UserError when the disk fails; the old generation then stays the committed one.
        """
        with self._lock:
            assert not self._committing, "two commits at once"
            dirty = [array for array in self._arrays.values() if not array.scratch and array.written]
            for array in self._arrays.values():
                needed = array.written or (array.slot is None and not array.scratch)
                missing = set(range(len(array.parts))) - array.written if needed and not array.scratch else None
                assert not missing, f"commit: {array.folder} lacks parts {sorted(missing or ())[:8]}"
            pending = [path for path in self._writing if (self.root / "scratch") not in path.parents]
            assert not pending, f"commit while {pending[0]} is written"
            self._committing = True
        try:
            if self._sync_failed:
                # The kernel reports a lost write once: a second fsync of the same file may succeed with the data gone.
                raise UserError(f"{self.root}: an earlier sync failed, so this state cannot be trusted; resume the run")
            self._sync_written(dirty)
            slots = {a.spec: a.next_slot() if a.written else a.slot for a in self._arrays.values() if not a.scratch}
            successor = Manifest(self.generation + 1, {k: s for k, s in slots.items() if s is not None}, meta)
            successor.write(self.root)
            with self._lock:
                for array in dirty:
                    array.slot = array.next_slot()
                    array.written.clear()
                self._manifest = successor
        finally:
            self._committing = False
        return self.generation

    def verify(self) -> None:
        """Read all of the committed generation; UserError on the first chunk file that is not what was written."""
        origin = f"generation {self.generation}"
        committed = [array for array in self._arrays.values() if array.slot is not None]
        largest = max((array.form.part_bytes for array in committed), default=1)
        slots = [empty_aligned(largest, torch.uint8).numpy() for _ in range(READ_THREADS)]
        pending: deque[Future[None]] = deque()
        count = 0
        for array in committed:
            assert array.slot is not None
            for part, (start, stop) in enumerate(array.parts):
                if len(pending) == len(slots):
                    pending.popleft().result()
                out = slots[count % len(slots)][: (stop - start) * array.spec.item_bytes]
                path = array.path(array.slot, part)
                pending.append(self._readers.submit(self._read_chunk, array, path, out, origin))
                count += 1
        for future in pending:
            future.result()

    def disk_bytes(self) -> int:
        """Bytes of disk that both slots, scratch and the manifest take now."""
        total = 0
        for folder, _, names in os.walk(self.root):
            for name in names:
                with contextlib.suppress(FileNotFoundError):  # a commit in another thread renames its manifest
                    total += os.stat(os.path.join(folder, name)).st_blocks * 512
        return total

    def close(self) -> None:
        """Wait for operations in flight and let the folder go. What was not committed is lost, as after a crash."""
        self._readers.shutdown()
        self._writers.shutdown()
        if self._root_lock >= 0:
            os.close(self._root_lock)
            self._root_lock = -1

    def _array(self, spec: ArraySpec, *, scratch: bool) -> _Array:
        form = chunk.ChunkFormat(part_numel_even(spec.numel, spec.part_numel) * spec.item_bytes)
        base = self.root / "scratch" if scratch else self.root
        return _Array(spec, form, spec.parts(), base / spec.buffer / spec.kind, scratch, None)

    def _require_room(self, added: list[_Array], what: str) -> None:
        need = int(sum(array.disk_bytes() for array in added) * _FREE_MARGIN)
        held = sum(array.disk_bytes() for array in self._arrays.values() if array not in added)
        if self._budget_bytes is not None and held + need > self._budget_bytes:
            raise BudgetError(
                f"budgets.nvme: {what} in {self.root} needs {need:,} bytes beside {held:,} already given out, and the "
                f"budget is {self._budget_bytes:,}; raise budgets.nvme or keep more blocks in RAM"
            )
        require_free(self.root, need, what)

    def _read_chunk(self, array: _Array, path: Path, out: chunk.Bytes, origin: str) -> None:
        try:
            chunk.read_chunk(path, out, array.form, direct=self._direct)
        except chunk.ChunkError as error:
            raise UserError(
                f"{path} ({origin}): {error}; the drive or another program damaged the state: start again from an "
                "exported checkpoint"
            ) from error
        except OSError as error:
            raise disk_error(error, path, f"reading {out.size:,} bytes of {origin}") from error
        with self._lock:
            self.bytes_read += out.size

    def _sync_written(self, dirty: list[_Array]) -> None:
        paths = [array.path(array.next_slot(), part) for array in dirty for part in sorted(array.written)]
        folders = sorted({path.parent for path in paths})
        self._sync(fsync_file, paths)
        self._sync(fsync_dir, folders)

    def _sync_folders(self, arrays: list[_Array]) -> None:
        slots = [array.folder / str(slot) for array in arrays for slot in (0, 1)]
        self._sync(fsync_file, [slot / "zarr.json" for slot in slots])
        self._sync(fsync_dir, slots)
        parents = {array.folder for array in arrays} | {array.folder.parent for array in arrays}
        self._sync(fsync_dir, [*sorted(parents), self.root, self.root.parent])

    def _sync(self, sync: Callable[[Path], None], paths: Sequence[Path]) -> None:
        futures = [(path, self._writers.submit(sync, path)) for path in paths]
        for path, future in futures:
            try:
                future.result()
            except OSError as error:
                self._sync_failed = True
                raise disk_error(error, path, "syncing") from error


def _payload(array: _Array, part: int, tensor: torch.Tensor) -> chunk.Bytes:
    """The bytes of `tensor`, checked to be what the array holds as part number `part`."""
    start, stop = array.parts[part]
    assert str(tensor.dtype) == f"torch.{array.spec.dtype}", (array.folder, tensor.dtype, array.spec.dtype)
    assert tensor.shape == (stop - start,), (array.folder, part, tuple(tensor.shape), stop - start)
    assert tensor.is_contiguous(), array.folder
    assert tensor.device.type == "cpu", array.folder
    data: chunk.Bytes = tensor.detach().view(torch.uint8).numpy()
    return data


def _create_zarr(array: _Array, *, slots: int) -> None:
    """Make the empty zarr3 arrays [parts, elements of a part] of one array, replacing remains of an aborted start."""
    item_bytes = array.spec.item_bytes
    metadata = {
        "shape": [len(array.parts), array.form.part_bytes // item_bytes],
        "data_type": array.spec.dtype,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": [1, array.form.stored_bytes // item_bytes]},
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
        "fill_value": 0,
        "dimension_names": ["part", "element"],
    }
    for slot in range(slots):
        folder = array.folder / str(slot)
        kvstore = {"driver": "file", "path": f"{folder}/"}
        spec = {"driver": "zarr3", "kvstore": kvstore, "metadata": metadata}
        context = ts.Context({"file_io_sync": False})
        try:
            ts.open(spec, create=True, delete_existing=True, context=context).result()
        except ValueError as error:
            raise UserError(f"{folder}: the array cannot be made ({error}); check the disk and the folder") from error
