"""Downloads of a generation from a location off the machine: found by name, checked chunk by chunk, to any drives."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.storage.files.disk import fsync_dir, make_folder, reporting, require_writable, write_file
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import one_line
from penstock.storage.generations import ownership
from penstock.storage.offsite import index as at
from penstock.storage.offsite.index import FILES, Index, file_bytes, read_files, read_index, read_manifest
from penstock.storage.offsite.link import Link, OffsiteError, Pieces, Report
from penstock.storage.offsite.location import Location
from penstock.storage.tier import manifest
from penstock.storage.tier.arrays import zarr_json
from penstock.storage.tier.drives import Locks, distinct, require_capacity
from penstock.storage.tier.manifest import DriveRecord, Manifest, Stored

_MOST_SMALL_BYTES = 1 << 24
_MOST_FILES_BYTES = 1 << 46


@dataclass(frozen=True, slots=True)
class Remote:
    """A generation at a location."""

    location: Location
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
        return sum(spec.slot_bytes for spec in self.manifest.arrays) + sum(map(file_bytes, self.files.values()))


def find(open_link: Callable[[Location], Link], location: Location, name: str | None) -> tuple[Link, Remote]:
    """The newest generation at `location`, or the one called `name`, or the one whose name `location` itself ends in,
    and an open link to where its index is. UserError where there is none, or it is damaged."""
    link = open_link(location)
    try:
        index = read_index(link).index
        if index is not None:
            return link, _chosen(link, location, index, name)
        if name is None and (above := location.parent()) is not None:
            link.close()
            link = open_link(above[0])
            if (result := _find_below(link, *above)) is not None:
                return link, result
        raise UserError(
            f"{location}: holds no state: neither {at.INDEX} nor a generation was found; check the name, and for a "
            "store other than AWS set AWS_ENDPOINT_URL"
        )
    except BaseException:
        link.close()
        raise


def _find_below(link: Link, location: Location, name: str) -> Remote | None:
    """The generation `name` of the index at `location`; of one that cannot be read, or was not copied, its folder."""
    index = None
    with contextlib.suppress(OffsiteError):
        index = read_index(link).index
    if index is not None and any(name in (entry.name, entry.folder) for entry in index.entries):
        return _chosen(link, location, index, name)
    if (result := read_manifest(link, name)) is None:
        return None
    return Remote(location, name, result.checkpoint or name, None, result, read_files(link, name))


def _chosen(link: Link, location: Location, index: Index, name: str | None) -> Remote:
    if not index.entries:
        raise UserError(f"{location}: holds {index.words}, so there is nothing to resume from")
    named = [entry for entry in index.entries if name is None or name in (entry.name, entry.folder)]
    if not named:
        there = ", ".join(entry.name for entry in index.entries)
        raise UserError(f"{location}: has no generation '{one_line(name, 80)}'; it has {there}")
    entry = named[-1]
    result = read_manifest(link, entry.folder)
    if result is None or result.store != index.store or result.generation != entry.generation:
        what = "has no manifest" if result is None else "has the manifest of another generation"
        raise UserError(f"{location}/{entry.folder}: {what}; choose another with --checkpoint NAME")
    return Remote(location, entry.folder, entry.name, index, result, read_files(link, entry.folder))


def read_small(link: Link, result: Remote, name: str, folder: Path) -> bytes:
    """The content of one of a run's small files, through `folder`. UserError where there is none, or it is large."""
    pieces = result.files.get(name)
    if pieces is None or file_bytes(pieces) > _MOST_SMALL_BYTES:
        raise UserError(f"{result.location}/{result.folder}: lacks {name}; choose another with --checkpoint NAME")
    path = folder / f"fetched-{uuid.uuid4().hex[:8]}"
    try:
        link.get_files({path: pieces}, FILES, lambda moved: None)
        return path.read_bytes()
    finally:
        path.unlink(missing_ok=True)


def fetch_files(link: Link, result: Remote, targets: Mapping[str, Path], inside: Path, report: Report) -> None:
    """Make files of the run, `targets` by their names, in folders that are made below `inside`."""
    wanted = {path: result.files[name] for name, path in targets.items()}
    size = sum(map(file_bytes, wanted.values()))
    if size > _MOST_FILES_BYTES:
        raise UserError(f"{result.location}/{result.folder}: its files add up to {size:,} bytes, more than any run has")
    require_capacity({inside: size}, "the run's files")
    for path in wanted:
        with reporting(path.parent, "making a folder"):
            make_folder(path.parent, inside)
    link.get_files({path: pieces for path, pieces in wanted.items() if pieces}, FILES, report)
    for path, pieces in wanted.items():
        if not pieces:
            write_file(path, b"")


def fetch_state(link: Link, result: Remote, root: Path, drives: Sequence[Path], report: Report) -> None:
    """Make the store of generation `result`, its manifest in `root` and its chunk files striped over `drives`.

    Chunks are checked; the manifest is written last: until then there is no store, and a second call keeps what is
    whole. UserError where a folder holds another run's state, or there is no room.
    """
    root = root.absolute()
    folders = distinct(drives)
    require_writable(root)
    with Locks() as locks, reporting(root, "writing the fetched state", named=True):
        locks.take(root)
        if (root / manifest.FILE_NAME).exists():
            raise UserError(f"{root}: already holds a state; choose another --run-dir")
        ids = {ownership.join(folder, result.manifest.store, root, locks): folder for folder in folders}
        arrays = {spec: Stored(0, tuple(ids), stored.crcs) for spec, stored in result.manifest.arrays.items()}
        records = tuple(DriveRecord.of(id, folder, root, root) for id, folder in ids.items())
        fetched = replace(result.manifest, arrays=arrays, drives=records, checkpoint=None)
        _require_capacity(result, folders)
        below = {folder / spec.buffer / spec.kind / "0": (folder, spec) for folder in folders for spec in arrays}
        for inner, (folder, spec) in below.items():
            make_folder(inner, folder)
            write_file(inner / "zarr.json", zarr_json(spec))
        ownership.require_plain({root, *folders})
        chunks = [
            (f"{at.array_folder(result.folder, spec)}/{path.name}", path, size, crc)
            for spec, path, size, crc in fetched.chunks(ids)
        ]
        link.get(chunks, report)
        for path in sorted({above for inner in below for above in (inner, *list(inner.parents)[:3])}, reverse=True):
            fsync_dir(path)
        if result.index is not None:
            location = str(result.location)
            at.write_tokens(root, location, [*at.read_tokens(root, location), result.index.token])
        fetched.write(root)
        fetched.back_up({root, *folders})


def _require_capacity(result: Remote, folders: Sequence[Path]) -> None:
    """UserError unless the drives hold two generations, less what an earlier try has left there."""
    need = sum(spec.slot_bytes * (1 if spec.fixed else 2) for spec in result.manifest.arrays)
    there = sum(path.stat().st_blocks * 512 for folder in folders for path in folder.glob("*/*/0/c.*.0"))
    require_capacity(dict.fromkeys(folders, max(0, need - there) // len(folders)), "two generations of the state")
