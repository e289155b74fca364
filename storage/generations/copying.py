"""Gives a copied run directory a state of its own, where its manifests name drives of the run that it is a copy of."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from msgspec import structs

from penstock.storage.files.disk import fsync_dir, link_or_copy, make_folder, reporting
from penstock.storage.files.errors import UserError
from penstock.storage.files.units import Report, no_report
from penstock.storage.generations import ownership
from penstock.storage.tier import manifest
from penstock.storage.tier.drives import CHECKPOINTS, WRITE_THREADS, Identity, Locks, distinct, locate, require_capacity
from penstock.storage.tier.manifest import DriveRecord, Manifest


def copy_state(root: Path, drives: Sequence[Path], report: Report = no_report) -> int:
    """Copy what the manifest in `root`, and those of its checkpoints, name on drives of another run directory.

    The copies go to `drives`, as hard links where possible: whoever writes such a file leaves it to the other. `report`
    is given the share of a generation that is copied. Returns the bytes of state that were copied, 0 where all of it is
    this run directory's own. Crash safe: a second call does the rest. UserError when the state is in use, is older than
    what its drive holds, is not whole or finds no room.
    """
    root = Path(root).expanduser().absolute()
    targets = distinct(drives)
    with Locks() as locks, reporting(root, "copying the state", named=True):
        locks.take(root)
        current = Manifest.read(root)
        result, _ = ownership.find_drives(current, root, [], to_change=False)
        for folder in sorted(ownership.foreign(result.values(), root)):
            locks.take(folder)  # before the first checkpoint is copied
        ids: dict[str, Path] = {}
        linked: _Linked = {}
        total = 0
        # The state itself comes last: as long as it is another's, nothing is trained here.
        for path in (*sorted((root / CHECKPOINTS).glob(f"[!.]*/{manifest.FILE_NAME}")), root / manifest.FILE_NAME):
            content = Manifest.read(path.parent)
            result = locate(content, path.parent, [])
            foreign = sorted(ownership.foreign(result.values(), root))
            if not foreign:
                continue
            for folder in foreign:
                locks.take(folder)
            ids = ids or _claim(targets, foreign, content.store, root, locks)
            total += _copy(content, path.parent, root, result, ids, linked, report)
    return total


def _claim(targets: Sequence[Path], foreign: Sequence[Path], store: str, root: Path, locks: Locks) -> dict[str, Path]:
    """Drive id -> folder of the drives that the copies go to, each with its identity."""
    ids = {}
    for folder in targets:
        # Of a checkpoint, the drive is two folders up.
        if any(ownership.is_same(folder, above) for other in foreign for above in (other, other.parent.parent)):
            raise UserError(
                f"--copy-state: {folder} holds the state of the run that this one was copied from; choose other "
                "drives with --set storage.nvme=..., or rename this run directory"
            )
        ids[ownership.join(folder, store, root, locks)] = folder
    return ids


_Linked = dict[tuple[int, int, int], Path]
"""(device of the copy, device and inode of its source) -> the copy."""


def _copy(
    content: Manifest,
    where: Path,
    root: Path,
    result: Mapping[str, Path],
    ids: Mapping[str, Path],
    linked: _Linked,
    report: Report,
) -> int:
    """Copy all that `content`, the manifest in folder `where`, names, and name the copies there; their bytes.

    What generations share is copied once: `linked` has the copies so far, and gets these.
    """
    inner = Path() if content.checkpoint is None else Path(CHECKPOINTS, content.checkpoint)
    bases = {id: folder / inner for id, folder in ids.items()}
    records = tuple(DriveRecord.of(id, base, root, where) for id, base in bases.items())
    arrays = {spec: structs.replace(stored, drives=tuple(ids)) for spec, stored in content.arrays.items()}
    copied = replace(content, arrays=arrays, drives=records)
    jobs: dict[Path, Path] = {}
    total = 0
    for old, new in zip(content.chunks(result), copied.chunks(bases), strict=True):
        if not old.path.is_file() or old.path.stat().st_size != old.file_bytes:
            raise UserError(
                f"{old.path}: is missing or incomplete, so this state cannot be copied; scrub the original run"
            )
        jobs[new.path] = old.path
        total += old.file_bytes
    owners: dict[Path, Path] = {}
    for spec, stored in content.arrays.items():
        below = Path(spec.buffer, spec.kind, str(stored.slot))
        for id, base in bases.items():
            jobs[base / below / "zarr.json"] = result[stored.drives[0]] / below / "zarr.json"
            owners[base / below] = ids[id]
    needs = dict.fromkeys(ids.values(), 0)
    keys: dict[Path, tuple[int, int, int]] = {}
    for target, source in jobs.items():
        folder, status = owners[target.parent], source.stat()
        key = keys[target] = folder.stat().st_dev, status.st_dev, status.st_ino
        if key in linked:
            jobs[target] = linked[key]
        elif key[0] != key[1]:
            needs[folder] += status.st_size
    require_capacity(needs, "a copy of the state")
    _link(jobs, owners, report)
    linked.update((key, target) for target, key in keys.items())
    for id, base in bases.items():
        if content.checkpoint is not None:
            Identity.of(content.store, id, root, content.checkpoint).write(base)
    copied.write(where)
    copied.back_up({where, *bases.values()} if content.checkpoint is None else set(bases.values()) - {where})
    return total


def _link(jobs: Mapping[Path, Path], owners: Mapping[Path, Path], report: Report) -> None:
    """Make target -> source links or copies, durably; `owners` are the drives of their folders. OSError."""
    for parent, folder in owners.items():
        make_folder(parent, inside=folder)
    count = itertools.count(1)

    def one(target: Path) -> None:
        if not ownership.is_same(target, jobs[target]):
            target.unlink(missing_ok=True)
            link_or_copy(jobs[target], target)
        report(next(count) / len(jobs), f"of {len(jobs):,} files")

    with ThreadPoolExecutor(WRITE_THREADS, thread_name_prefix="copy-state") as threads:
        list(threads.map(one, jobs))
    # Up to a drive's folder: checkpoints/NAME/BUFFER/KIND/SLOT.
    for folder in sorted({above for parent in owners for above in (parent, *list(parent.parents)[:5])}, reverse=True):
        if os.access(folder, os.R_OK):
            fsync_dir(folder)
