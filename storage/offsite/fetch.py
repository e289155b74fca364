"""A generation's way back from a place off the machine: found by its name, checked chunk by chunk, to any drives."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.storage.files.disk import (
    disk_error,
    fsync_dir,
    make_folder,
    publish,
    require_writable,
    write_file,
)
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import one_line
from penstock.storage.generations import ownership
from penstock.storage.offsite.files import file_bytes, read_files
from penstock.storage.offsite.index import (
    FILES,
    INDEX,
    Index,
    array_folder,
    read_index,
    read_manifest,
    read_tokens,
    write_tokens,
)
from penstock.storage.offsite.link import Job, OffsiteError, Pieces, PlaceLink, Told
from penstock.storage.offsite.place import Place
from penstock.storage.tier import manifest
from penstock.storage.tier.arrays import Array
from penstock.storage.tier.chunk import ChunkFormat
from penstock.storage.tier.drives import Locks, distinct, record, require_room, stripe
from penstock.storage.tier.layout import part_numel_even
from penstock.storage.tier.manifest import ArraySpec, Manifest, Stored

_MOST_SMALL_BYTES = 1 << 24
_MOST_FILES_BYTES = 1 << 46


@dataclass(frozen=True, slots=True)
class Found:
    """A generation at a place."""

    place: Place
    """Where its index is, or would be."""
    folder: str
    name: str
    index: Index | None
    manifest: Manifest
    files: Mapping[str, Pieces]
    """Path within the run directory -> what it consists of."""

    @property
    def num_bytes(self) -> int:
        """Of state and files."""
        sizes = (len(stored.crcs) * _form(spec).file_bytes for spec, stored in self.manifest.arrays.items())
        return sum(sizes) + sum(map(file_bytes, self.files.values()))


def _form(spec: ArraySpec) -> ChunkFormat:
    return ChunkFormat(part_numel_even(spec.numel, spec.part_numel) * spec.item_bytes)


def find(open_link: Callable[[Place], PlaceLink], place: Place, name: str | None) -> tuple[PlaceLink, Found]:
    """The newest generation at `place`, or the one called `name`, or the one that `place` itself ends in the name of.

    Returns an open link to where its index is. UserError where there is none, or it is damaged.
    """
    link = open_link(place)
    try:
        seen = read_index(link)
        if seen.index is None and (above := place.parent()) is not None and name is None:
            link.close()
            link = open_link(above[0])
            return link, _find_below(link, above[0], above[1], place)
        if seen.index is None:
            raise _nothing(place)
        return link, _chosen(link, place, seen.index, name)
    except BaseException:
        link.close()
        raise


def _find_below(link: PlaceLink, place: Place, name: str, asked: Place) -> Found:
    """The generation `name` of the index at `place`; of one that cannot be read, or was not copied, its folder."""
    try:
        index = read_index(link).index
    except OffsiteError:
        index = None
    if index is not None and any(name in (entry.name, entry.folder) for entry in index.entries):
        return _chosen(link, place, index, name)
    found = read_manifest(link, name)
    if found is None:
        raise _nothing(asked)
    return Found(place, name, found.checkpoint or name, None, found, read_files(link, name))


def _nothing(place: Place) -> UserError:
    return UserError(
        f"{place}: holds no state: neither {INDEX} nor a generation was found; check the name, and for a store other "
        "than AWS set AWS_ENDPOINT_URL"
    )


def _chosen(link: PlaceLink, place: Place, index: Index, name: str | None) -> Found:
    if not index.entries:
        raise UserError(f"{place}: holds {index.words}, so there is nothing to resume from")
    entry = index.entries[-1]
    if name is not None:
        named = [entry for entry in index.entries if name in (entry.name, entry.folder)]
        if not named:
            there = ", ".join(entry.name for entry in index.entries)
            raise UserError(f"{place}: has no generation '{one_line(name, 80)}'; it has {there}")
        entry = named[-1]
    found = read_manifest(link, entry.folder)
    if found is None or found.store != index.store or found.generation != entry.generation:
        what = "has no manifest" if found is None else "has the manifest of another generation"
        raise UserError(f"{place}/{entry.folder}: {what}; choose another with --checkpoint NAME")
    return Found(place, entry.folder, entry.name, index, found, read_files(link, entry.folder))


def read_small(link: PlaceLink, found: Found, name: str, folder: Path) -> bytes:
    """The content of one of a run's small files, through `folder`. UserError where there is none, or it is large."""
    pieces = found.files.get(name)
    if pieces is None or file_bytes(pieces) > _MOST_SMALL_BYTES:
        raise UserError(f"{found.place}/{found.folder}: lacks {name}; choose another with --checkpoint NAME")
    path = folder / f"fetched-{uuid.uuid4().hex[:8]}"
    try:
        link.get_files({path: pieces}, FILES, lambda moved: None)
        return path.read_bytes()
    finally:
        path.unlink(missing_ok=True)


def fetch_files(link: PlaceLink, found: Found, targets: Mapping[str, Path], inside: Path, told: Told) -> None:
    """Make files of the run, `targets` by their names, in folders that are made below `inside`."""
    wanted = {path: found.files[name] for name, path in targets.items()}
    size = sum(map(file_bytes, wanted.values()))
    if size > _MOST_FILES_BYTES:
        raise UserError(f"{found.place}/{found.folder}: its files add up to {size:,} bytes, more than any run has")
    require_room({inside: size}, "the run's files")
    for path in wanted:
        try:
            make_folder(path.parent, inside)
        except OSError as error:
            raise disk_error(error, path.parent, "making a folder") from error
    link.get_files({path: pieces for path, pieces in wanted.items() if pieces}, FILES, told)
    for path, pieces in wanted.items():
        if not pieces:
            write_file(path, b"")


def fetch_state(link: PlaceLink, found: Found, root: Path, drives: Sequence[Path], told: Told) -> None:
    """Make the store of generation `found`, its manifest in `root` and its chunk files striped over `drives`.

    Each chunk is compared with the manifest's checksum. The manifest is written last: until then there is no store, and
    a second call keeps what is whole. UserError where a folder holds another run's state, or there is no room.
    """
    root = root.absolute()
    folders = distinct(drives)
    require_writable(root)
    locks = Locks()
    try:
        locks.take(root)
        if (root / manifest.FILE_NAME).exists():
            raise UserError(f"{root}: already holds a state; choose another --run-dir")
        ids = {ownership.join(folder, found.manifest.store, root, locks): folder for folder in folders}
        order = tuple(ids)
        jobs, arrays = _jobs(found, ids)
        _require_room(found, folders)
        for spec in arrays:
            content = Array.make(spec, 0, (), scratch=False).zarr_json()
            for folder in folders:
                below = folder / spec.buffer / spec.kind / "0"
                make_folder(below, folder)
                write_file(below / "zarr.json", content)
        ownership.require_plain({root, *folders})
        link.get(jobs, told)
        for folder in folders:
            for spec in arrays:
                inner = folder / spec.buffer / spec.kind / "0"
                for path in (inner, inner.parent, inner.parent.parent):
                    fsync_dir(path)
            fsync_dir(folder)
        if found.index is not None:
            write_tokens(root, str(found.place), [*read_tokens(root, str(found.place)), found.index.token])
        records = tuple(record(id, ids[id], root, root, active=True) for id in order)
        content_now = replace(found.manifest, arrays=arrays, drives=records, checkpoint=None)
        publish(content_now.prepare(root), root / manifest.FILE_NAME)
        content_now.back_up({root, *folders})
    except OSError as error:
        raise disk_error(error, Path(error.filename or root), "writing the fetched state") from error
    finally:
        locks.release()


def _jobs(found: Found, ids: Mapping[str, Path]) -> tuple[list[Job], dict[ArraySpec, Stored]]:
    """What is to be read where to, striped over the drives, and where the arrays lie then."""
    order, jobs, arrays = tuple(ids), [], {}
    for number, (spec, stored) in enumerate(found.manifest.arrays.items()):
        arrays[spec] = Stored(0, order, stored.crcs)
        source = array_folder(found.folder, spec.buffer, spec.kind, fixed=spec.fixed)
        for part, crc in enumerate(stored.crcs):
            drive = ids[order[stripe(number, part, len(order))]]
            target = drive / spec.buffer / spec.kind / "0" / f"c.{part}.0"
            jobs.append((f"{source}/{target.name}", target, _form(spec).file_bytes, crc))
    return jobs, arrays


def _require_room(found: Found, folders: Sequence[Path]) -> None:
    """UserError unless the drives hold two generations, less what an earlier try has left there."""
    slots = {spec: 1 if spec.fixed else 2 for spec in found.manifest.arrays}
    need = sum(
        slots[spec] * len(stored.crcs) * _form(spec).file_bytes for spec, stored in found.manifest.arrays.items()
    )
    there = sum(path.stat().st_blocks * 512 for folder in folders for path in folder.glob("*/*/0/c.*.0"))
    require_room(dict.fromkeys(folders, max(0, need - there) // len(folders)), "two generations of the state")
