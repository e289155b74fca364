"""Uploads of a checkpoint to a location off the machine: all of its objects, each seen to be there, then the manifest,
then the index; and what may go afterwards."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from penstock.storage.files.disk import require_free
from penstock.storage.files.errors import UserError
from penstock.storage.files.sealed import hex_crc
from penstock.storage.generations.checkpoints import checkpoint_folder, read_checkpoint
from penstock.storage.offsite import index as at
from penstock.storage.offsite.index import Claim, Entry, Index
from penstock.storage.offsite.link import Job, LocationChangedError, OffsiteError, Report
from penstock.storage.offsite.location import may_be_named
from penstock.storage.tier.arrays import zarr_json
from penstock.storage.tier.drives import locate
from penstock.storage.tier.filesystem import existing
from penstock.storage.tier.manifest import ArraySpec, DriveRecord, Manifest, Stored

_DRIVE = "offsite"
"""Id of the one drive that a manifest at a location has."""


class Sent(NamedTuple):
    """What became of an upload."""

    entry: Entry
    moved_bytes: int
    """That went over the wire; 0 where the generation was there already."""


class Load(NamedTuple):
    """What is to be written for a checkpoint."""

    manifest: Manifest
    """As it will be at the location."""
    small: list[tuple[str, bytes]]
    """(key, content) of zarr.json files."""
    chunks: list[Job]
    fixed: dict[str, str]
    """BUFFER/KIND of fixed arrays that are among them -> CRC-32C of their checksums."""


def send_checkpoint(
    claim: Claim,
    root: Path,
    drives: Sequence[Path],
    checkpoint: str,
    files: Mapping[str, Path],
    *,
    name: str,
    automatic: bool = False,
    keep: int | None = None,
    bytes_per_s: float | None = None,
    waits: Callable[[], None] = lambda: None,
    begins: Report = lambda total: None,
    report: Report = lambda moved: None,
) -> Sent:
    """Write checkpoint `checkpoint` of the store in `root` to the claim's location as `name`, with the run's `files`.

    `drives`: where its drives may be now. `automatic`: one that `keep` counts, so many of which stay at the location.
    `begins` is given all bytes that will move, `report` those that have. Nothing is listed there before all of it
    was seen to be there. OffsiteError where the location refuses, UserError where the checkpoint is not whole; the
    newest generation at the location then stays the newest.
    """
    saved = read_checkpoint(root, checkpoint)
    with at.one_at_a_time(root, waits):
        if claim.look() is None:
            claim.take()
        there = next((entry for entry in claim.index.entries if entry.name == name), None)
        if there is not None and _is_same(claim, there, saved):
            return Sent(there, 0)
        if there is not None and not automatic:
            raise UserError(
                f"{claim.link.location}: has a checkpoint '{name}' of step {there.step} already; choose another name"
            )
        _sweep(claim)
        folder = f"{name}.{uuid.uuid4().hex[:8]}"
        claim.change(lambda now: structs.replace(now, going=(*now.going, folder)))
        load = _load(saved, checkpoint_folder(root, checkpoint), drives, folder, name, claim.index.fixed)
        moved = _write(claim, load, folder, files, bytes_per_s, begins, report)
        manifest = load.manifest.encode()
        claim.link.write(f"{folder}/{at.MANIFEST}", manifest)
        crc = hex_crc(manifest)
        entry = Entry(name, folder, saved.generation, saved.step, moved, time.time(), crc, automatic)
        try:
            claim.change(lambda now: _with_entry(now, entry, load.fixed, keep))
        except LocationChangedError:
            with contextlib.suppress(OffsiteError):  # nobody else knows of it any more
                claim.link.delete(claim.link.keys(f"{folder}/"))
            raise
        _sweep(claim)
        return Sent(entry, moved)


def _load(
    saved: Manifest, base: Path, drives: Sequence[Path], folder: str, name: str, there: Mapping[str, str]
) -> Load:
    """What is written to `folder` for manifest `saved` of the checkpoint in `base`; `there`: fixed arrays that are
    whole at the location. UserError where a drive is missing, or a fixed array there is another one."""
    result = locate(saved, base, drives)
    arrays: dict[ArraySpec, Stored] = {}
    fixed: dict[str, str] = {}
    to: dict[ArraySpec, str] = {}
    for spec, stored in saved.arrays.items():
        arrays[spec] = Stored(0, (_DRIVE,), stored.crcs)
        if spec.fixed:
            label = f"{spec.buffer}/{spec.kind}"
            digest = hex_crc(b"".join(crc.to_bytes(4, "little") for crc in stored.crcs))
            if there.get(label) == digest:
                continue
            if label in there:
                what = "which is written only once, differs from the one already there"
                raise UserError(f"{base}: array {label}, {what}")
            fixed[label] = digest
        to[spec] = at.array_folder(folder, spec)
    small = [(f"{below}/zarr.json", zarr_json(spec)) for spec, below in to.items()]
    chunks = [
        (f"{to[c.spec]}/{c.path.name}", c.path, c.file_bytes, c.crc) for c in saved.chunks(result) if c.spec in to
    ]
    manifest = replace(saved, arrays=arrays, drives=(DriveRecord(_DRIVE, ".", True),), checkpoint=name)
    return Load(manifest, small, chunks, fixed)


def _is_same(claim: Claim, entry: Entry, saved: Manifest) -> bool:
    there = at.read_manifest(claim.link, entry.folder)
    return there is not None and (there.store, there.generation, there.meta) == (
        saved.store,
        saved.generation,
        saved.meta,
    )


def _write(
    claim: Claim,
    load: Load,
    folder: str,
    files: Mapping[str, Path],
    bytes_per_s: float | None,
    begins: Report,
    report: Report,
) -> int:
    """Write all but the manifest; the bytes that moved."""
    link, size = claim.link, sum(size for _, _, size, _ in load.chunks)
    have = _listed_pieces(claim)
    small = {name: path for name, path in files.items() if may_be_named(name) and path.is_file()}
    begins(size + sum(path.stat().st_size for path in small.values()))
    if link.location.driver == "file":
        require_free(existing(Path(link.location.path)), size, "the upload")
    result = link.put_files(small, have, at.FILES, bytes_per_s, report)
    link.write(f"{folder}/{at.RUN_FILES}", at.encode_files(result))
    for key, content in load.small:
        link.write(key, content)
    new = {digest: size for pieces in result.values() for digest, size in pieces if digest not in have}
    return link.put(load.chunks, bytes_per_s, report) + sum(new.values())


def _with_entry(index: Index, entry: Entry, fixed: Mapping[str, str], keep: int | None) -> Index:
    """The index with a generation, without one of its name and without automatic ones beyond `keep`."""
    entries = [other for other in index.entries if other.name != entry.name]
    automatic = [other for other in (*entries, entry) if other.automatic]
    gone = set() if keep is None else {other.folder for other in automatic[:-keep]}
    gone |= {other.folder for other in index.entries if other.name == entry.name}
    stay = tuple(other for other in (*entries, entry) if other.folder not in gone)
    going = tuple(sorted({*index.going, *gone} - {entry.folder}))
    return structs.replace(index, entries=stay, going=going, fixed={**index.fixed, **fixed})


def _sweep(claim: Claim) -> None:
    """Remove what the index says is going, and pieces of files and fixed arrays that nothing needs."""
    going, link = claim.index.going, claim.link
    if not going:
        return
    for folder in going:
        link.delete(link.keys(f"{folder}/"))
    needed = {f"{at.FILES}/{digest}" for digest in _listed_pieces(claim)}
    link.delete([key for key in link.keys(f"{at.FILES}/") if key not in needed])
    fixed = tuple(f"{at.FIXED}/{label}/" for label in claim.index.fixed)
    link.delete([key for key in link.keys(f"{at.FIXED}/") if not key.startswith(fixed)])
    claim.change(lambda now: structs.replace(now, going=()))


def _listed_pieces(claim: Claim) -> set[str]:
    """SHA-256 of the pieces of all files of the generations at the location."""
    files = [pieces for entry in claim.index.entries for pieces in at.read_files(claim.link, entry.folder).values()]
    return {digest for pieces in files for digest, _ in pieces}
