"""Whose state is on a drive: the run directory that owns it may change it, and a copy of that directory may not.

A drive names the folder of the manifest that owns it (drive.json), and that names the drive back. A copied manifest
names a drive that names another folder: while that folder names the drive back it is the owner. A folder is known by
path, file system and inode, none of which is enough: a moved one has another path, one from a backup another inode, and
a clone of a file system repeats inodes and UUID; but a folder was renamed only within one mounted file system. Where
the named folder is gone the run directory has moved, or came back as a copy; where it names another folder as this
drive, the drive's folder is a copy. Where it is not clear which of two it is, neither may have the drive.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from penstock.storage.files.disk import fsync_ancestors, reporting, require_writable
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import shell
from penstock.storage.tier import manifest
from penstock.storage.tier.drives import CHECKPOINTS, SCRATCH, Identity, Locks, present, require_present
from penstock.storage.tier.filesystem import existing, filesystem_id
from penstock.storage.tier.manifest import Manifest


def claim(folder: Path, store: str | None, root: Path) -> str | None:
    """The drive id that `folder` already has in store `store`; None where it is new to it. UserError where it is
    another's. With `store` None a new one is made in `root`, where an aborted start may have left something."""
    identity = Identity.read(folder)
    if identity is None:
        for name in (SCRATCH, CHECKPOINTS):
            if (folder / name).exists():
                raise UserError(f"{folder / name}: does not belong to Penstock; choose an empty folder")
        return None
    if identity.checkpoint is not None:
        raise UserError(f"{folder}: is checkpoint '{identity.checkpoint}' of a run; choose another folder")
    if identity.store == store:
        return identity.drive or None
    if store is None and is_aborted_start(folder, identity, root):
        return None
    raise UserError(
        f"{folder}: holds the state of another run (its manifest was in {identity.root}); choose another folder, or "
        "remove this one if that run is no longer needed"
    )


def is_aborted_start(folder: Path, identity: Identity, root: Path) -> bool:
    """Whether a start in `root`, which holds no manifest, has left `folder` behind before its first generation: of a
    run that was moved away, the drive has a copy of the manifest."""
    if manifest.has_backup(folder) or (folder / CHECKPOINTS).exists():
        return False
    return is_same(Path(identity.root), root) or is_same(folder, root)


def find_drives(
    current: Manifest, root: Path, given: Sequence[Path], *, to_change: bool
) -> tuple[dict[str, Path], list[str]]:
    """The drives of the store in `root`, by id, as `drives.locate` finds them, and what `take_over` has to say.

    What is missing comes last: an older run directory names drives that have been given up since.
    """
    result = present(current, root, given)
    said = take_over(result.values(), root) if to_change else []
    if current.checkpoint is None:
        require_newest(current, root, result.values())
    require_present(current, root, result)
    return result, said


def take_over(folders: Iterable[Path], root: Path) -> list[str]:
    """What is to be said before the store in `root` changes drives `folders`: where its run directory has come from.

    UserError when another run directory owns one of them; nothing has been changed then.
    """
    said = {}
    for folder in folders:
        identity = Identity.read(folder)
        if identity is None:
            continue
        if (other := owner(folder, identity, root)) is not None:
            if is_same(Path(identity.root), root) and _inode(other) != identity.inode:
                what = f"is one of two run directories that list the state on {folder}; the other is {other}. It is "
                what += "not clear which of them owns it. Remove the one that you do not need"
            elif not other.exists():
                what = f"lies on a copy of the file system on which the owner of the state on {folder} was, {other}, "
                what += "and that file system is mounted as well. If the run was renamed there, resume it there; if "
                what += "this one replaces it, unmount that file system"
            else:
                what = f"is a copy of {other}, which still exists and owns the state on {folder}. Resume that run"
            raise UserError(
                f"{root}: {what}, or give this one its own state: `penstock resume RUN --copy-state` copies it; or "
                "set storage.nvme to drives that hold a copy. Nothing was changed"
            )
        if not is_same(Path(identity.root), root) and not folder.resolve().is_relative_to(root.resolve()):
            said[identity.root] = (
                f"{root}: was moved here from {identity.root}; its state on {folder} now belongs to this path"
            )
    return list(said.values())


def join(folder: Path, store: str, root: Path, locks: Locks) -> str:
    """Make `folder` a drive of the store in `root`, durably, and hold it; its id. UserError where it is another's."""
    id = claim(folder, store, root) or uuid.uuid4().hex
    require_writable(folder)
    take_over([folder], root)
    locks.take(folder)
    Identity.of(store, id, root).write(folder)
    fsync_ancestors(folder)
    return id


def require_plain(folders: Iterable[Path]) -> None:
    """UserError where anything below the drives' `folders` is neither a file nor a folder: a link leads elsewhere."""
    left = [str(folder) for folder in folders]
    while left:
        folder = left.pop()
        with reporting(Path(folder), "looking for links"), os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    left.append(entry.path)
                elif not entry.is_file(follow_symlinks=False):
                    what = "a link" if entry.is_symlink() else "neither a file nor a folder"
                    raise UserError(
                        f"{entry.path}: is {what}, which a state never contains; remove it (use storage.nvme to name "
                        "other drives)"
                    )


def owner(folder: Path, identity: Identity, root: Path) -> Path | None:
    """The folder, other than `root`, of the manifest that owns `folder`, which says of itself that it is `identity`.

    None where `root` may have it: it is the folder that is named, or that has gone and none beside it names this drive.
    Where two do, both are copies, and neither may have it.
    """
    named = Path(identity.root)
    own = _inode(root) == identity.inode
    if is_same(named, root):
        if own:
            return None
    elif _names(named, folder, identity):
        # Whoever has the inode was renamed, and what is in its place now is a copy.
        return None if own and _is_renamed(named, root, identity) else named
    others = [other for other in (named, *_beside(named)) if not is_same(other, root)]
    others.sort(key=lambda other: _inode(other) != identity.inode)
    other = next((other for other in others if _names(other, folder, identity)), None)
    if other is not None and (not own or _inode(other) == identity.inode):
        return other
    is_within = folder.resolve().is_relative_to(root.resolve())
    return named if not is_within and _is_cloned(named, root, identity) else None


def _is_renamed(named: Path, root: Path, identity: Identity) -> bool:
    """Whether `root`, which has the inode of folder `named` of `identity`, is that folder, and not one on a clone of
    its file system: `named` is another one now."""
    known = identity.filesystem in ("", filesystem_id(root))
    return known and _device(named) == _device(root) and _inode(named) != identity.inode


def _is_cloned(named: Path, root: Path, identity: Identity) -> bool:
    """Whether `root` is on a clone of the file system from which `named` has gone, or the other way round: both are
    mounted, and the owner may have another name there. One that is there, and has not claimed the drive, has its own.
    """
    with contextlib.suppress(UserError, OSError):
        if Manifest.read(named).store == identity.store:
            return False
    there = existing(named)
    same = identity.filesystem and {filesystem_id(root), filesystem_id(there)} == {identity.filesystem}
    return bool(same) and _device(there) != _device(root)


def _beside(root: Path) -> Iterator[Path]:
    """Where the state of a run directory beside that of `root` is, its own included."""
    with contextlib.suppress(OSError):
        for run in sorted(root.parent.parent.iterdir()):
            yield run / root.name


def _inode(folder: Path) -> int | None:
    return status.st_ino if (status := _status(folder)) else None


def _device(folder: Path) -> int | None:
    return status.st_dev if (status := _status(folder)) else None


def _status(folder: Path) -> os.stat_result | None:
    with contextlib.suppress(OSError):
        return folder.stat()
    return None


def _names(other: Path, folder: Path, identity: Identity) -> bool:
    """Whether the manifest in `other` names `folder` as its own. One that cannot be read owns what names it."""
    where = other if identity.checkpoint is None else other / CHECKPOINTS / identity.checkpoint
    try:
        if not (where / manifest.FILE_NAME).exists() and not manifest.has_backup(where):
            return False
        content = Manifest.read(where)
    except (UserError, PermissionError):
        return True
    if content.store != identity.store:
        return False
    for record in content.drives:
        if record.id == identity.drive:
            there = Path(os.path.normpath(where / record.path))
            with contextlib.suppress(UserError):
                result = Identity.read(there)
                if result is not None and (result.store, result.drive) == (identity.store, identity.drive):
                    return is_same(there, folder)  # else a copy of this drive
            return True
    return False


def require_newest(current: Manifest, root: Path, folders: Iterable[Path]) -> None:
    """UserError when one of the drives `folders`, or a drive that its newer manifest names, knows a newer generation of
    the store than `current`: `root` is then an older copy of the run directory."""
    newest, where = current, root
    left, seen = list(folders), set[Path]()
    while left:
        folder = left.pop()
        newer = manifest.read_backup(folder) if folder not in seen else None
        seen.add(folder)
        if newer is None or newer.store != current.store or newer.generation <= current.generation:
            continue
        if newer.generation > newest.generation:
            newest, where = newer, folder
        left += [Path(os.path.normpath(root / drive.path)) for drive in newer.drives]  # a drive may have been given up
    if newest is not current:
        raise UserError(
            f"{root / manifest.FILE_NAME}: holds generation {_named(current)}, but the drive {where} holds generation "
            f"{_named(newest)}: this is an older copy of the run directory. To resume from the newer generation: "
            f"{shell('cp', where / manifest.BACKUP_NAME, root / manifest.FILE_NAME)}. Nothing was changed"
        )


def _named(content: Manifest) -> str:
    return f"{content.generation}" + ("" if content.step is None else f" (step {content.step})")


def unlisted(root: Path, folders: Iterable[Path]) -> list[str]:
    """What is to be said of whole checkpoints on the drives that the store in `root` does not list."""
    said = []
    for folder in folders:
        for base in sorted((folder / CHECKPOINTS).glob("*")):
            where = root / CHECKPOINTS / base.name
            if (where / manifest.FILE_NAME).exists() or not manifest.has_backup(base):
                continue
            said.append(
                f"{base}: is a checkpoint that {root} does not list, as happens with an older copy of the run "
                f"directory. To list it: {shell('mkdir', '-p', where)} && "
                f"{shell('cp', base / manifest.BACKUP_NAME, where / manifest.FILE_NAME)}; to drop it, remove the folder"
            )
    return said


def is_same(first: Path, second: Path) -> bool:
    """Whether two paths lead to one folder that exists, or are equal."""
    try:
        return os.path.samefile(first, second)
    except OSError:
        return os.path.normpath(first) == os.path.normpath(second)


def foreign(folders: Iterable[Path], root: Path) -> set[Path]:
    """Of folders on drives those that another run directory than that of `root` owns."""
    named = {folder: identity for folder in folders if (identity := Identity.read(folder)) is not None}
    return {folder for folder, identity in named.items() if owner(folder, identity, root) is not None}
