"""Removes from a store's own drives what belongs to no generation and no checkpoint of it."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path

from penstock.storage.files.disk import sweep_temporaries
from penstock.storage.generations import ownership
from penstock.storage.generations.checkpoints import sweep_incomplete
from penstock.storage.tier import drives, manifest
from penstock.storage.tier.arrays import Array, remove_arrays, sweep_strays
from penstock.storage.tier.drives import CHECKPOINTS, SCRATCH, DriveSet
from penstock.storage.tier.manifest import Manifest


def sweep(root: Path, drive_set: DriveSet, arrays: Collection[Array], committed: Manifest) -> None:
    """Remove what a process that ended badly left behind. The drives must have been taken over (ownership)."""
    sweep_temporaries(root / manifest.FILE_NAME)
    sweep_temporaries(root / manifest.BACKUP_NAME)
    for drive in drive_set:
        sweep_temporaries(drive.folder / drives.IDENTITY_NAME)
        sweep_temporaries(drive.folder / manifest.BACKUP_NAME)
        shutil.rmtree(drive.folder / SCRATCH, ignore_errors=True)
    sweep_incomplete(root, [drive.folder for drive in drive_set])
    if len(drive_set) > 1:
        tidy(root, drive_set, arrays, arrays, committed)


def remove_store(root: Path, folders: Iterable[Path]) -> None:
    """Remove a closed store, whose manifest is in `root`, from its drives' `folders`, and those that are empty then.

    A folder that is another store's, or nobody's, stays as it is: also where `root` is the place from which that
    other one has moved. UserError where one does not say whose it is.
    """
    own = drives.Identity.read(root)
    for folder in folders:
        identity = drives.Identity.read(folder)
        if identity is None or not ownership.is_same(Path(identity.root), root):
            continue
        if own is None and not ownership.is_aborted_start(folder, identity, root):
            continue
        if own is not None and (own.store != identity.store or ownership.owner(folder, identity, root) is not None):
            continue
        _clear(folder)
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
        with contextlib.suppress(OSError):
            _forget(folder)
            folder.rmdir()


def tidy(
    root: Path, drive_set: DriveSet, arrays: Collection[Array], moved: Collection[Array], committed: Manifest
) -> None:
    """Remove chunk files where an older striping put those of `moved`, and all of ours from drives no longer used. A
    drive that new state no longer goes to is one of these from the first commit without it on."""
    for array in moved:
        sweep_strays(array, drive_set)
    used = {drive for array in arrays for drive in array.layout}
    listed = {record.id for record in committed.drives if record.active}
    used |= {drive for drive in drive_set if drive.id in listed}
    for folder in drive_set.retire(used):
        _clear(folder)
        if not (folder / CHECKPOINTS).exists() and folder != root:
            _forget(folder)


def _clear(folder: Path) -> None:
    remove_arrays(folder)
    shutil.rmtree(folder / SCRATCH, ignore_errors=True)


def _forget(folder: Path) -> None:
    """Remove what says whose drive `folder` is. OSError."""
    for name in (manifest.BACKUP_NAME, drives.IDENTITY_NAME):
        (folder / name).unlink(missing_ok=True)
