"""Checkpoints: generations saved under a name, beside the two that the store moves between.

    root/checkpoints/NAME/manifest.json             what the checkpoint holds; written last, so that it is whole
    DRIVE/checkpoints/NAME/drive.json, BUFFER/...   the chunk files: hard links where the file system has them

A checkpoint costs no time and, until the slots are written again, no room: its files are those of the committed
generation, and NvmeStore.write leaves a file with other links alone. NvmeStore.open reads a checkpoint like a store.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from penstock.storage.files.disk import fsync_dir, link_or_copy, make_folder, reporting, write_file
from penstock.storage.files.errors import UserError
from penstock.storage.generations.ownership import foreign, require_plain
from penstock.storage.tier import manifest
from penstock.storage.tier.arrays import Array, make_folders
from penstock.storage.tier.drives import CHECKPOINTS, IDENTITY_NAME, Drive, DriveSet, Identity, Locks, locate
from penstock.storage.tier.manifest import ArraySpec, DriveRecord, Manifest, Stored

CONSTANTS_NAME = "constants.safetensors"
"""File of the store's root that a checkpoint takes along, where it is there."""
_UNFINISHED = ".unfinished"
"""File in a checkpoint's folder on a drive while it is made or deleted: what bears it and is not listed may go."""


class Series(NamedTuple):
    """Checkpoints that are named after their steps."""

    prefix: str

    def name(self, step: int) -> str:
        return f"{self.prefix}-{step:06}"

    def step(self, name: str) -> int | None:
        """Of a checkpoint of this series; None for any other name."""
        match = re.fullmatch(rf"{self.prefix}-(\d{{6,}})", name)
        return None if match is None else int(match[1])

    def names(self, root: Path) -> list[str]:
        """Of the checkpoints that the store in `root` has, sorted."""
        return [name for name in checkpoint_names(root) if self.step(name) is not None]


AUTOMATIC = Series("step")
"""What storage.keep_last and storage.keep_every call for."""
GOOD, BEST = Series("good"), Series("best")
"""The newest of which are also called last-good and best."""
UPLOADED = Series("offsite")
"""What waits for its upload to storage.offsite."""
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{,199}")


def checkpoint_folder(root: Path, name: str) -> Path:
    """Folder of checkpoint `name` of the store in `root`, for NvmeStore.open. UserError where the name is none."""
    if not _NAME.fullmatch(name):
        raise UserError(
            f"checkpoint name '{name}': use at most 200 letters, digits, '.', '_' and '-', and do not begin with '.'"
        )
    return root / CHECKPOINTS / name


_MEANT = {
    "last-good": (
        GOOD,
        "no generation has been confirmed good yet: that takes a later step with a normal loss and a later commit "
        "(storage.keep_good)",
    ),
    "best": (BEST, "no generation was kept for its validation loss (storage.keep_best)"),
}
"""Name that stands for the newest of some checkpoints -> their names, and why there may be none."""


def resolve_checkpoint(root: Path, name: str) -> str:
    """The checkpoint that `name` stands for: itself, or of `last-good` and `best` the newest of those. UserError."""
    if name not in _MEANT:
        return name
    series, why = _MEANT[name]
    names = series.names(root)
    if not names and name in checkpoint_names(root):  # somebody's own of that name
        return name
    if not names:
        raise UserError(f"{root}: has no {name} checkpoint: {why}")
    return max(names, key=lambda other: Manifest.read(root / CHECKPOINTS / other).generation)


def checkpoint_names(root: Path) -> list[str]:
    """The complete checkpoints of the store in `root`, sorted; no manifest is read."""
    return sorted(path.parent.name for path in (root / CHECKPOINTS).glob(f"*/{manifest.FILE_NAME}"))


def list_checkpoints(root: Path) -> dict[str, Manifest]:
    """The complete checkpoints of the store in `root` by name, oldest generation first. UserError for a damaged one."""
    result = {name: Manifest.read(root / CHECKPOINTS / name) for name in checkpoint_names(root)}
    return dict(sorted(result.items(), key=lambda item: item[1].generation))


def read_checkpoint(root: Path, name: str) -> Manifest:
    """The manifest of checkpoint `name`; UserError with the names there are when there is no such."""
    folder = checkpoint_folder(root, name)
    if not (folder / manifest.FILE_NAME).exists():
        raise UserError(f"{root}: has no checkpoint '{name}'; it has {', '.join(checkpoint_names(root)) or 'none'}")
    return Manifest.read(folder)


def write_checkpoint(name: str, current: Manifest, drives: DriveSet, arrays: Sequence[Array]) -> None:
    """Keep generation `current` of `arrays` as checkpoint `name`, durably; UserError leaves nothing of it."""
    root = drives.root
    folder = checkpoint_folder(root, name)
    used = list(dict.fromkeys(drive for array in arrays for drive in array.layout))
    bases = {drive: drive.folder / CHECKPOINTS / name for drive in used}
    for path in filter(_is_whole, {folder, *bases.values()}):
        raise UserError(
            f"{path}: holds a checkpoint that this run does not list, perhaps from a newer copy of its run directory; "
            "choose another name, or remove the folder"
        )
    files = [chunk for array in arrays for chunk in _files(array)]
    jobs = [(drive, path, bases[drive] / path.relative_to(drive.folder)) for drive, path in files]
    tops = {base.parent for base in bases.values()} | {drive.folder for drive in used} | {folder.parent, root}
    inner = {parent for _, _, target in jobs for parent in list(target.parents)[:3]}
    records = tuple(DriveRecord.of(drive.id, base, root, folder) for drive, base in bases.items())
    content = replace(current, drives=records, checkpoint=name)
    try:
        with reporting(folder, f"making checkpoint '{name}' of generation {current.generation}", named=True):
            for path in {folder, *bases.values()}:
                remove(path)  # what an attempt before may have left
                path.parent.mkdir(exist_ok=True)
                path.mkdir()
                _mark(path)
            link_files(drives, jobs)
            if (root / CONSTANTS_NAME).exists():
                link_or_copy(root / CONSTANTS_NAME, folder / CONSTANTS_NAME)
            for drive, base in bases.items():
                Identity.of(current.store, drive.id, root, name).write(base)
            for path in (*sorted(inner, reverse=True), *bases.values(), folder, *sorted(tops, reverse=True)):
                fsync_dir(path)
            content.write(folder)
            content.back_up(set(bases.values()) - {folder})
            for path in {folder, *bases.values()}:
                _unmark(path)
            _tombstone(root, name).unlink(missing_ok=True)
    except BaseException:
        with contextlib.suppress(OSError):  # as far as the disk lets; where the manifest stays, it may be listed
            (folder / manifest.FILE_NAME).unlink(missing_ok=True)
            for path in {folder, *bases.values()}:
                with contextlib.suppress(OSError):
                    remove(path)
        raise


def link_files(drives: DriveSet, jobs: Sequence[tuple[Drive, Path, Path]]) -> None:
    """Make (drive, source, target) hard links or copies on the drives' threads; folders are not synced."""
    sources = {target: (drive, source) for drive, source, target in jobs}
    for folder, drive in {target.parent: drive for target, (drive, _) in sources.items()}.items():
        with reporting(folder, "making a folder for chunk files"):
            make_folder(folder, inside=drive.folder)

    def one(target: Path) -> None:
        drive, source = sources[target]
        target.unlink(missing_ok=True)
        copied_bytes = link_or_copy(source, target)
        drive.count(read=copied_bytes, written=copied_bytes)

    drives.sync(one, [(drive, target) for drive, _, target in jobs], "making a link or copy of a chunk file")


def link_restored(
    name: str, saved: Manifest, drives: DriveSet, arrays: Mapping[ArraySpec, Array]
) -> tuple[dict[ArraySpec, Stored], list[tuple[Drive, Path]]]:
    """Put the files of checkpoint `name`, of manifest `saved`, into the slots that no generation uses; not synced.

    Returns where the arrays then are, and the files. They stay on their drives where the store has those, for links;
    fixed arrays stay as they are. UserError when a file or a drive is missing, or the disk fails.
    """
    folder = drives.root / CHECKPOINTS / name
    found = locate(saved, folder, [drive.folder for drive in drives])
    stay = all(id in drives.by_id for stored in saved.arrays.values() for id in stored.drives)
    result: dict[ArraySpec, Stored] = {}
    jobs: list[tuple[Drive, Path, Path]] = []
    for spec, group in itertools.groupby(saved.chunks(found), key=lambda chunk: chunk.spec):
        array, stored = arrays[spec], saved.arrays[spec]
        if spec.fixed:
            if stored.crcs != array.crcs:
                raise UserError(
                    f"checkpoint '{name}' (generation {saved.generation}): array {array.name}, which is written only "
                    "once, belongs to another run; restore the checkpoint into the run that made it"
                )
            result[spec] = array.stored()
            continue
        layout = tuple(drives.by_id[id] for id in stored.drives) if stay else array.target
        result[spec] = Stored(array.next_slot(), tuple(drive.id for drive in layout), stored.crcs)
        for part, chunk in enumerate(group):
            size = chunk.path.stat().st_size if chunk.path.exists() else None
            if size != chunk.file_bytes:
                what = "the file is missing" if size is None else f"the file has {size:,} bytes"
                raise UserError(
                    f"{chunk.path} (checkpoint '{name}', generation {saved.generation}): {what}; the checkpoint is "
                    "damaged: restore another one"
                )
            drive, target = array.chunk(layout, array.next_slot(), part)
            jobs.append((drive, chunk.path, target))
    make_folders(arrays.values(), {drive for drive, _, _ in jobs})
    link_files(drives, jobs)
    return result, [(drive, target) for drive, _, target in jobs]


def delete_checkpoint(root: Path, name: str) -> None:
    """Delete checkpoint `name` of the store in `root`. What another run directory owns on drives stays, and so does a
    checkpoint of this name that was made after `root` was backed up.

    UserError when there is no such checkpoint, or another process uses it or the store.
    """
    root = Path(root).expanduser().absolute()
    folder = checkpoint_folder(root, name)
    path = folder / manifest.FILE_NAME
    if not path.exists():
        read_checkpoint(root, name)  # says which there are
    with Locks() as locks, reporting(folder, "deleting the checkpoint"):
        if not Locks.held_here(root):
            locks.take(root)
        require_plain([root / CHECKPOINTS])
        locks.take(folder)
        bases = _bases(root, name)
        if not bases.issuperset(_recorded(folder)):
            write_file(_tombstone(root, name), b"")
        bases -= {base for base in bases - {folder} if _is_another(base, folder)}
        for base in bases:
            _mark(base)
        path.unlink(missing_ok=True)
        fsync_dir(folder)  # before the first chunk file goes: a checkpoint that is listed is whole
        for base in bases:
            remove(base)


def identify(root: Path) -> None:
    """Have the checkpoints on drives name `root` as the folder of their owner, which has moved. UserError."""
    for name in checkpoint_names(root):
        for base in _bases(root, name) - {root / CHECKPOINTS / name}:
            if (identity := Identity.read(base)) is not None:
                Identity.of(identity.store, identity.drive, root, name).write(base)


def sweep_incomplete(root: Path, folders: Iterable[Path]) -> None:
    """Remove from the drives' `folders`, the store's own, checkpoints that were not finished or not deleted. A whole
    one that the store neither lists nor has deleted stays: `root` may be older than it."""
    for folder in {root, *folders}:
        for path in (folder / CHECKPOINTS).glob("[!.]*"):
            if (root / CHECKPOINTS / path.name / manifest.FILE_NAME).exists():
                _unmark(path)
            elif not _is_whole(path) or _tombstone(root, path.name).exists():
                with contextlib.suppress(OSError):
                    remove(path)


def _is_whole(base: Path) -> bool:
    return (base / IDENTITY_NAME).exists() and not (base / _UNFINISHED).exists()


def _tombstone(root: Path, name: str) -> Path:
    """The file that says that checkpoint `name` was deleted while a drive of it was away."""
    return root / CHECKPOINTS / f".deleted-{name}"


def _unmark(folder: Path) -> None:
    with contextlib.suppress(OSError):
        (folder / _UNFINISHED).unlink(missing_ok=True)


def _mark(folder: Path) -> None:
    """Mark a checkpoint's folder, durably, as one that may go unless it is listed. OSError."""
    write_file(folder / _UNFINISHED, b"")
    fsync_dir(folder)


def remove(folder: Path) -> None:
    """Remove a checkpoint's folder, if it is there: first what says that it is one. OSError."""
    (folder / IDENTITY_NAME).unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)


def require_same_arrays(name: str, saved: Manifest, arrays: Mapping[ArraySpec, Array]) -> None:
    """UserError unless the checkpoint holds exactly the arrays of the store."""
    differing = saved.arrays.keys() ^ arrays.keys()
    if differing:
        one = next(iter(differing))
        raise UserError(
            f"checkpoint '{name}': holds other state than this run: array {one.buffer}/{one.kind} differs; restore it "
            "into the run that made it"
        )


def _files(array: Array) -> Iterable[tuple[Drive, Path]]:
    """The committed files of an array, and the metadata beside them."""
    assert array.slot is not None, array.name
    for part in range(len(array.parts)):
        yield array.committed(part)
    for drive in array.layout:
        yield drive, array.folder(drive, array.slot) / "zarr.json"


def _bases(root: Path, name: str) -> set[Path]:
    """The folders of a checkpoint on all drives that are there (others are swept when they are back), but for those
    that another run directory owns."""
    folder = root / CHECKPOINTS / name
    result = {folder} | _recorded(folder)
    with contextlib.suppress(UserError):
        result |= {root / drive.path / CHECKPOINTS / name for drive in Manifest.read(root).drives}
    identities = {base: Identity.read(base) for base in result - {folder}}
    named = {base for base, identity in identities.items() if identity is not None and identity.checkpoint == name}
    mine = named - foreign(named, root)
    # Of a run directory that has moved since only the drive itself knows.
    others = foreign({base.parent.parent for base in mine}, root)
    return {folder} | {base for base in mine if base.parent.parent not in others}


def _is_another(base: Path, folder: Path) -> bool:
    """Whether `base` on a drive holds another generation than the checkpoint that `folder` lists."""
    there = manifest.read_backup(base)
    with contextlib.suppress(UserError):
        return there is not None and there.generation != Manifest.read(folder).generation
    return False


def _recorded(folder: Path) -> set[Path]:
    """The folders on drives that the manifest of the checkpoint in `folder` names."""
    with contextlib.suppress(UserError):
        return {Path(os.path.normpath(folder / drive.path)) for drive in Manifest.read(folder).drives}
    return set()
