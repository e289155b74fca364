"""The NVMe tier: arrays in two slots each, of which a committed generation uses one.

    root/manifest.json                      the committed generation (tier/manifest.py)
    DRIVE/drive.json                        the drive's identity (tier/drives.py)
    DRIVE/BUFFER/KIND/SLOT/                 a zarr3 array [parts, part elements], one file per part (tier/arrays.py)
    DRIVE/scratch/                          what belongs to no generation, wiped when the store is opened

A drive is a folder; `root` is the only one unless others are given, and parts are striped over them.
"""

from __future__ import annotations

import shutil
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from penstock.storage.files.disk import fsync_dir, fsync_file, prepare_file, publish, reporting, require_writable
from penstock.storage.files.errors import UserError, ensure
from penstock.storage.files.units import Report, no_report
from penstock.storage.generations import checkpoints, ownership
from penstock.storage.generations.members import Members, SharedChecksums
from penstock.storage.generations.tidy import sweep, tidy
from penstock.storage.tier import chunk, manifest
from penstock.storage.tier.arena import empty_aligned
from penstock.storage.tier.arrays import Array, make_folders, remove_arrays
from penstock.storage.tier.capacity import Capacity
from penstock.storage.tier.drives import SCRATCH, Drive, DriveSet, Identity, Locks, OnThreadStart, Traffic, distinct
from penstock.storage.tier.manifest import ArraySpec, Manifest
from penstock.storage.tier.readers import DirectReader, Readers
from penstock.storage.tier.scrub import read_chunk_file, scrub
from penstock.storage.tier.spill import Spill


class NvmeStore:
    """State on disk that never tears: whatever happens, `open` finds the last committed generation, bit for bit.

    Writes go to the slot that the committed generation does not use; `commit` makes them durable and moves the
    manifest. Every method may be called from any thread. The caller orders operations on one part: reading a part
    while it is written, or the other way round, is an assertion error.
    """

    def __init__(self, drives: DriveSet, current: Manifest, budget_bytes: int | None, readers: Readers | None):
        """Use `create` or `open`."""
        self.root, self._drives, self._manifest = drives.root, drives, current
        self.warnings = drives.warnings() if drives.writable else []
        """What is doubtful about the drives, one sentence each."""
        self._capacity = Capacity(drives, budget_bytes)
        self._readers = readers or Readers(DirectReader(), None)
        self.spilled = Spill(self._drives)
        """Activations that do not fit RAM."""
        self._owner = True
        """Whether this process holds the drives, makes their folders and tidies them."""
        self._arrays: dict[tuple[str, str], Array] = {}
        for spec, stored in current.arrays.items():
            array = self._add(spec)
            array.slot, array.crcs = stored.slot, stored.crcs
            array.layout = tuple(self._drives.by_id[id] for id in stored.drives)
        self._lock = threading.Lock()
        self._exclusive = threading.Lock()  # one at a time of commit, checkpoint, restore
        self._reading: Counter[Path] = Counter()
        self._writing: dict[Path, Array] = {}
        self._committing = False
        self._unsynced: set[tuple[Array, int]] = set()
        """Parts that this process has written since the last commit."""
        self._members: Members | None = None
        self._broken = ""  # why nothing more may be written
        self._closed = False

    @staticmethod
    def create(
        root: Path,
        arrays: Sequence[ArraySpec],
        *,
        budget_bytes: int | None,
        drives: Sequence[Path] | None = None,
        readers: Readers | None = None,
        on_thread_start: OnThreadStart | None = None,
    ) -> NvmeStore:
        """Make an empty store with its manifest in folder `root` and chunk files on `drives` (default: in `root`).

        Nothing is committed yet (generation 0). UserError where a folder cannot be written or holds other state, or two
        generations of all arrays, plus 5 %, do not fit the budget or the free disk. `readers` defaults to direct I/O;
        `on_thread_start` is called by each thread that moves chunk files, before its first one.
        """
        root = Path(root).expanduser().absolute()
        folders = distinct(drives or [root])
        require_writable(root)
        with ExitStack() as stack:
            locks = stack.enter_context(Locks())
            locks.take(root)
            if (root / manifest.FILE_NAME).exists() or manifest.has_backup(root):
                Manifest.read(root)  # says so where it is damaged or gone
                raise UserError(f"{root}: holds the state of another run; resume that run, or choose another folder")
            for folder in folders:
                require_writable(folder)
                locks.take(folder)
                ownership.claim(folder, None, root)
                ownership.require_plain([folder])
            store_id = uuid.uuid4().hex
            ids = {uuid.uuid4().hex: folder for folder in folders}
            empty = Manifest(store_id, 0, {}, (), {})
            chosen = DriveSet(root, store_id, locks, ids, list(ids), writable=True, on_thread_start=on_thread_start)
            store = NvmeStore(chosen, empty, budget_bytes, readers)
            added = [store._add(spec) for spec in arrays]
            store._capacity.require_new(added, [], "two generations of the state")
            for folder in folders:
                if Identity.read(folder) is not None:  # an aborted start
                    remove_arrays(folder)
                    shutil.rmtree(folder / SCRATCH, ignore_errors=True)
            store._settle()
            stack.pop_all()  # held until `close`
        return store

    @staticmethod
    def open(
        root: Path,
        *,
        budget_bytes: int | None = None,
        drives: Sequence[Path] | None = None,
        readers: Readers | None = None,
        on_thread_start: OnThreadStart | None = None,
        read_only: bool = False,
        held: bool = False,
    ) -> NvmeStore:
        """Open the last committed generation of `root`; what was written after it is ignored and overwritten.

        `drives`: folders that new state goes to, where they differ from the recorded ones; state elsewhere is read from
        there until it is written anew. `read_only`, as always with a checkpoint's folder as `root`: nothing is changed,
        and `drives` are where the recorded ones may be now. `held`: only to read, while another process of the same
        program has it open. The others as in `create`. UserError when there is no
        generation, its manifest is unreadable, a drive that holds part of it is missing, a drive knows a newer one,
        another run directory owns a drive that would be changed, or another process has the store open.
        """
        root = Path(root).expanduser().absolute()
        given = distinct(drives or [])
        read_only = Manifest.read(root).checkpoint is not None or read_only
        with ExitStack() as stack:
            locks = stack.enter_context(Locks())
            if not held:
                locks.take(root)
            current = Manifest.read(root)  # again: it may have moved before the lock was ours
            result, said = ownership.find_drives(current, root, given, to_change=not read_only)
            active = [drive.id for drive in current.drives if drive.active and drive.id in result] or list(result)
            if not read_only:
                require_writable(root)
                ids = [ownership.claim(folder, current.store, root) or uuid.uuid4().hex for folder in given]
                for id, folder in zip(ids, given, strict=True):
                    require_writable(folder)
                    result[id] = folder
                active = ids or active
                ownership.require_plain({root, *result.values()})
            for folder in () if held else result.values():
                locks.take(folder)
            if not read_only:
                ownership.take_over(result.values(), root)  # again: another run directory may have had them meanwhile
                ownership.require_newest(current, root, result.values())
            chosen = DriveSet(
                root, current.store, locks, result, active, writable=not read_only, on_thread_start=on_thread_start
            )
            store = NvmeStore(chosen, current, budget_bytes, readers)
            if not read_only:
                sweep(root, store._drives, store._arrays.values(), current)
                if any(array.layout != array.target for array in store._arrays.values()):
                    store._capacity.require_to_write(store._arrays.values(), "the state that moves there", shared=False)
                current.back_up({drive.folder for drive in store._drives} - {root})
                if said:
                    checkpoints.identify(root)
                store._settle()
                store._move_fixed()
                store.warnings += said + ownership.unlisted(root, [drive.folder for drive in store._drives])
            stack.pop_all()  # held until `close`
        return store

    @staticmethod
    def join(
        root: Path,
        drives: Mapping[str, Path],
        active: Sequence[str],
        rank: int,
        *,
        readers: Readers | None = None,
        on_thread_start: OnThreadStart | None = None,
    ) -> NvmeStore:
        """The store that another process holds open, for a process that works with it: see `share`. `drives`, `active`:
        as the other's `drives_by_id` says; `rank`: above 0."""
        root, current = Path(root).expanduser().absolute(), Manifest.read(root)
        chosen = DriveSet(root, current.store, Locks(), drives, active, writable=True, on_thread_start=on_thread_start)
        store = NvmeStore(chosen, current, None, readers)
        store.spilled, store._owner = Spill(chosen, rank), False
        return store

    @property
    def drives_by_id(self) -> tuple[dict[str, Path], list[str]]:
        """Id -> folder of all drives, and the ids of those that are written to, in striping order."""
        return {drive.id: drive.folder for drive in self._drives}, [drive.id for drive in self._drives.active]

    def num_parts(self) -> int:
        """Of all arrays, scratch included."""
        return sum(len(array.parts) for array in self._arrays.values())

    def share(self, members: Members, table: torch.Tensor) -> None:
        """From here on `members` write it together, each parts of its own, and commit together. `table`: int64 [2,
        `num_parts`], zeros in memory that they share, with the same arrays in each process. Nobody writes meanwhile."""
        self._members, first = members, 0
        for array in self._arrays.values():
            shared = SharedChecksums(table[:, first : first + len(array.parts)])
            first += len(array.parts)
            shared.update(array.written)
            array.written = shared

    def add_scratch(self, arrays: Sequence[ArraySpec]) -> None:
        """Add arrays of no generation: one slot, never synced, wiped on open. UserError when out of room."""
        if not self._owner:
            for spec in arrays:
                self._add(spec, scratch=True)
            return
        added = [Array(spec, 0, self._drives.active, scratch=True) for spec in arrays]
        self._capacity.require_new(added, self._arrays.values(), "scratch space")
        make_folders([self._add(spec, scratch=True) for spec in arrays], self._drives.active)

    def reserve_spill(self, num_bytes: int) -> None:
        """Reserve `num_bytes` for spilled activations, over all drives. UserError when out of room."""
        if num_bytes and self._owner:
            self._capacity.reserve_spill(num_bytes, self._arrays.values())

    @property
    def generation(self) -> int:
        """Number of the committed generation; 0 before the first commit."""
        return self._manifest.generation

    @property
    def id(self) -> str:
        """Of the store, the same in every generation, checkpoint and copy of it."""
        return self._manifest.store

    @property
    def meta(self) -> dict[str, Any]:
        """What was given to the commit of this generation."""
        return self._manifest.meta

    @property
    def drives(self) -> list[Path]:
        """Folders that new state is written to, in striping order."""
        return self._drives.folders

    def arrays(self) -> list[ArraySpec]:
        return [array.spec for array in self._arrays.values() if not array.scratch]

    def checksums(self) -> dict[ArraySpec, tuple[int, ...]]:
        """CRC-32C of each part of the committed generation's arrays, padding included: equal for equal values."""
        with self._lock:
            return {array.spec: array.crcs for array in self._committable()}

    def traffic(self) -> dict[Path, Traffic]:
        """Bytes moved since the store was opened, by drive folder; padding and checksums included."""
        return self._drives.traffic()

    def read(self, buffer: str, kind: str, part: int, out: torch.Tensor) -> Future[None]:
        """Read the latest state of a part, committed or not, into `out`, a contiguous tensor of its dtype and length.

        Host memory is filled by `readers.host`, with no copy where `out` starts at a 4 KiB address (arena slots do);
        memory of the compute device by `readers.device`. The future raises UserError naming file and generation when
        the chunk file is missing, truncated, damaged, of another generation or unreadable.
        """
        array = self._arrays[buffer, kind]
        data = array.payload(part, out)
        reader = self._readers.host if out.device.type == "cpu" else self._readers.device
        assert reader is not None, f"no reader for memory of {out.device}"
        with self._lock:
            fresh = part in array.written
            file = array.file(part, fresh=fresh)
            ensure(file.path not in self._writing, f"{file.path} is read while it is written")
            self._reading[file.path] += 1
        origin = "uncommitted state" if fresh else f"generation {self.generation}"

        def work() -> None:
            try:
                read_chunk_file(reader, file, data, origin)
            finally:
                with self._lock:
                    self._reading[file.path] -= 1

        return file.drive.readers.submit(work)

    def write(
        self, buffer: str, kind: str, part: int, src: torch.Tensor, *, check: Callable[[], None] | None = None
    ) -> Future[None]:
        """Write a part to the slot that the committed generation does not use; not durable before `commit`.

        `src` is a contiguous CPU tensor of the part's dtype and length and must not change until the future is done;
        direct and without a copy where it starts at a 4 KiB address. `check` comes first, in the writing thread: where
        it raises, nothing is written. The future raises UserError naming file and need when the disk is full or fails.
        """
        array = self._arrays[buffer, kind]
        ensure(src.device.type == "cpu", array.name)
        data = array.payload(part, src).numpy()
        with self._lock:
            self._require_sound()
            ensure(array.scratch or not self._committing, f"{array.name} is written during a commit")
            ensure(not array.lasts, f"{array.name} is written once")
            drive, path = array.next(part)
            ensure(path not in self._writing, f"{path} is written twice at once")
            ensure(not self._reading[path], f"{path} is written while it is read")
            self._writing[path] = array

        def work() -> None:
            crc: int | None = None
            try:
                if check is not None:
                    check()
                with reporting(path, f"writing {array.form.file_bytes:,} bytes"):
                    crc = chunk.write_chunk(path, data, array.form, direct=drive.direct)
            finally:
                with self._lock:
                    del self._writing[path]
                    array.written.pop(part, None)
                    if crc is not None:
                        array.written[part] = crc
                        if not array.scratch:
                            self._unsynced.add((array, part))
            drive.count(written=array.form.file_bytes)

        return drive.writers.submit(work)

    def commit(self, meta: dict[str, Any]) -> int:
        """Make everything written since the last commit the new generation; returns its number.

        Every array written since must have been written whole, and the first commit needs every array. A crash at any
        moment leaves the old or the new generation. UserError when the disk fails; the old one then stays committed.
        """
        with self._lock:
            ensure(not self._committing, "two commits at once")
            if self._members is None:
                self._require_whole()
            pending = [path for path, array in self._writing.items() if not array.scratch]
            ensure(not pending, f"commit while {pending[:1]} is written")
            self._committing = True
        try:
            with self._exclusive:
                self._require_sound()
                self._sync([array.next(part) for array, part in self._unsynced])
                self._agree()  # all of it is durable
                if self._owner:
                    self._require_whole()
                    for array in self._committable():
                        if isinstance(array.written, SharedChecksums):
                            array.written.forget()
                    self._publish({array.spec: array.stored() for array in self._committable()}, meta)
                    self._agree()
                else:
                    self._agree()
                    self._adopt(Manifest.read(self.root))
                self._unsynced.clear()
        finally:
            self._committing = False
        return self.generation

    def _agree(self) -> None:
        if self._members is not None:
            self._members.agree()

    def _require_whole(self) -> None:
        for array in self._committable():
            missing = set(range(len(array.parts))) - array.written.keys()
            needed = array.written or array.slot is None
            ensure(not (needed and missing), f"commit: {array.name} lacks parts {sorted(missing)[:8]}")

    def verify(self, report: Report = no_report) -> int:
        """Read and check all of the committed generation (`scrub`); returns the bytes read. UserError."""
        with self._lock:
            committed = [array for array in self._committable() if array.slot is not None]
            files = [array.file(part) for array in committed for part in range(len(array.parts))]
        return scrub(files, f"generation {self.generation}", report)

    def checkpoint(self, name: str) -> None:
        """Keep the committed generation as checkpoint `name` (checkpoints.py): a link for each chunk file.

        Reads and writes may go on meanwhile; a commit waits. UserError when the name is taken or is none, there is no
        room for the generation that the slots no longer share with it, or the disk fails.
        """
        with self._exclusive:
            self._require_sound()
            ensure(self.generation > 0, "nothing is committed yet")
            folder = checkpoints.checkpoint_folder(self.root, name)
            if (folder / manifest.FILE_NAME).exists():
                raise UserError(f"{folder}: there is a checkpoint '{name}' already; choose another name, or delete it")
            arrays = self._committable()
            count = len(checkpoints.checkpoint_names(self.root))
            self._capacity.require_checkpoint(self._arrays.values(), count, f"checkpoint '{name}'")
            checkpoints.write_checkpoint(name, self._manifest, self._drives, arrays)

    def restore(self, name: str) -> int:
        """Commit a generation with the content and meta of checkpoint `name`; returns its number. What was not
        committed is dropped. UserError when it is not there or not whole, or the disk fails: the old generation stays.
        """
        with self._exclusive:
            self._require_sound()
            ensure(not self._writing, "restore while something is written")
            saved = checkpoints.read_checkpoint(self.root, name)
            arrays = {array.spec: array for array in self._committable()}
            checkpoints.require_same_arrays(name, saved, arrays)
            with self._lock:
                for array in arrays.values():
                    array.written.clear()
                self._unsynced.clear()
            stored, chunks = checkpoints.link_restored(name, saved, self._drives, arrays)
            self._sync(chunks)
            self._publish(stored, saved.meta)
        return self.generation

    def disk_bytes(self) -> int:
        """Bytes of disk that the store takes now: slots, scratch, checkpoints, manifest; shared files count once."""
        return self._drives.disk_bytes()

    def peak_disk_bytes(self) -> int:
        """The same with as many spilled activations as there were at once at most. Any thread may ask, at any time."""
        return self._drives.disk_bytes(without=self.spilled.folders()) + self.spilled.peak_bytes

    def close(self) -> None:
        """Wait for operations in flight and let the folders go. What was not committed is lost, as after a crash."""
        for drive in self._drives:
            drive.close()
            if not self._closed and self._drives.writable and self._owner:
                shutil.rmtree(drive.folder / SCRATCH, ignore_errors=True)
        self._closed = True
        self._drives.locks.release()

    # ---------------------------------------------------------------- inside

    def _add(self, spec: ArraySpec, *, scratch: bool = False) -> Array:
        ensure((spec.buffer, spec.kind) not in self._arrays, f"array {spec.buffer}/{spec.kind} is listed twice")
        array = Array(spec, len(self._arrays), self._drives.active, scratch)
        self._arrays[spec.buffer, spec.kind] = array
        return array

    def _committable(self) -> list[Array]:
        return [array for array in self._arrays.values() if not array.scratch]

    def _require_sound(self) -> None:
        ensure(self._drives.writable, "opened for reading")
        if self._broken:
            raise UserError(f"{self.root}: {self._broken}, so the state in memory cannot be trusted; resume the run")

    def _settle(self) -> None:
        """Give the arrays their folders on every active drive, and every drive its identity, durably."""
        make_folders(self._arrays.values(), self._drives.active)
        self._drives.identify()

    def _move_fixed(self) -> None:
        """Write what is fixed and is on other drives than new state; the next commit finds it there."""
        for array in self._committable():
            for part, (start, stop) in enumerate(array.parts if array.spec.fixed and not array.lasts else ()):
                values = empty_aligned(stop - start, getattr(torch, array.spec.dtype))
                self.read(array.spec.buffer, array.spec.kind, part, values).result()
                self.write(array.spec.buffer, array.spec.kind, part, values).result()

    def _sync(self, chunks: Iterable[tuple[Drive, Path]]) -> None:
        """Make chunk files durable: first their data, then the entries of their folders."""
        chunks = sorted(chunks, key=lambda chunk: chunk[1])
        folders = {path.parent: drive for drive, path in chunks}
        try:
            self._drives.sync(fsync_file, chunks)
            self._drives.sync(fsync_dir, [(drive, folder) for folder, drive in folders.items()])
        except UserError:
            # The kernel reports a lost write once: a second sync of the file may succeed with the data gone.
            self._broken = self._broken or "an earlier sync failed"
            raise

    def _publish(self, arrays: Mapping[ArraySpec, manifest.Stored], meta: dict[str, Any]) -> None:
        """Commit: from here on, the next generation consists of `arrays`, whose chunk files are durable."""
        successor = Manifest(self._manifest.store, self.generation + 1, arrays, self._drives.records(), meta)
        path = self.root / manifest.FILE_NAME
        with reporting(path, f"writing the manifest of generation {successor.generation}"):
            temporary = prepare_file(path, successor.encode())
            try:
                publish(temporary, path)
            except OSError:
                # Either generation may be the one on disk: its chunk files must not be written any more.
                self._broken = "the manifest could not be replaced"
                raise
        moved = self._adopt(successor)
        successor.back_up({self.root, *(drive.folder for drive in self._drives)})
        tidy(self.root, self._drives, self._arrays.values(), moved, successor)

    def _adopt(self, current: Manifest) -> list[Array]:
        """Take a manifest that has been published for the committed one; arrays that were on other drives before."""
        moved = []
        with self._lock:
            for array in self._committable():
                stored = current.arrays[array.spec]
                layout = tuple(self._drives.by_id[id] for id in stored.drives)
                if layout != array.layout and array.layout:
                    moved.append(array)
                array.slot, array.layout, array.crcs = stored.slot, layout, stored.crcs
                array.written.clear()
            self._manifest = current
        return moved
