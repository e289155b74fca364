"""The manifest: the one small JSON file that says which chunk files make up the committed generation.

`crc32c` at its end is the checksum of everything else; every chunk's checksum is recorded, so that a whole chunk file
of another generation is found.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from msgspec import Meta, Struct, to_builtins

from penstock.storage.files.disk import prepare_file, publish, temporary_name, write_file
from penstock.storage.files.errors import UserError
from penstock.storage.files.sealed import hex_crc
from penstock.storage.files.untrusted import MOST_WHOLE, Count, is_whole, parse_object, read_regular, typed
from penstock.storage.tier.chunk import ChunkFormat
from penstock.storage.tier.layout import ALIGN_NUMEL, part_numel_even, part_ranges, stripe

FILE_NAME = "manifest.json"
BACKUP_NAME = "manifest.backup.json"
_FORMAT = "penstock-state"
_VERSION = 3
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "int16": 2}
_NAME = r"\A(?!(scratch|checkpoints)\Z)[^./\0][^/\0]*\Z"
"""Of a folder beside our own ones."""
_Name = Annotated[str, Meta(pattern=_NAME)]
_Text = Annotated[str, Meta(pattern=r"\A[^\0]+\Z")]


class ArraySpec(Struct, frozen=True, omit_defaults=True):
    """One kind of state of one flat buffer, as it is stored on disk."""

    buffer: _Name
    """Name of the flat buffer, for example layers.0; also a folder name."""
    kind: _Name
    """weights, master, exp_avg, exp_avg_sq or gradient; also a folder name."""
    numel: Count
    """Elements of the flat buffer."""
    dtype: Annotated[str, Meta(pattern=r"\A(float32|bfloat16|int16)\Z")]
    part_numel: Annotated[int, Meta(ge=1, le=MOST_WHOLE, multiple_of=ALIGN_NUMEL)]
    """Most elements of one part (one chunk file), a multiple of layout.ALIGN_NUMEL."""
    fixed: bool = False
    """Whether it is written for the first generation and never again, so that all generations share one slot."""

    def __post_init__(self) -> None:
        assert self.dtype in _ITEM_BYTES, self.dtype
        assert all(re.match(_NAME, name) for name in (self.buffer, self.kind)), (self.buffer, self.kind)

    @property
    def item_bytes(self) -> int:
        return _ITEM_BYTES[self.dtype]

    @property
    def form(self) -> ChunkFormat:
        """Sizes of its chunk files."""
        return ChunkFormat(part_numel_even(self.numel, self.part_numel) * self.item_bytes)

    def parts(self) -> list[tuple[int, int]]:
        """The parts as (start, stop) in elements."""
        return part_ranges(self.numel, self.part_numel)

    @property
    def slot_bytes(self) -> int:
        """Bytes of its chunk files, on all drives."""
        return len(self.parts()) * self.form.file_bytes


class Stored(Struct, frozen=True):
    """Where the committed state of one array is."""

    slot: Annotated[int, Meta(ge=0, le=1)]
    drives: Annotated[tuple[str, ...], Meta(min_length=1)]
    """Ids of the drives, in striping order."""
    crcs: tuple[Annotated[int, Meta(ge=0, lt=2**32)], ...]
    """CRC-32C of each part's chunk file without its last four bytes, which hold the same value."""


class DriveRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """A folder that holds chunk files."""

    id: _Text
    """As in the folder's own drive.json: the folder is known by it wherever it is mounted."""
    path: _Text
    """Where it was; relative to the manifest's folder where it is inside the store's."""
    active: bool
    """Whether new state is written to it; the others hold state from before the run changed drives."""

    @staticmethod
    def of(id: str, folder: Path, base: Path, root: Path, *, active: bool = True) -> DriveRecord:
        """The record of a drive in the manifest in `root`: its path is relative where it is in `base`."""
        folder, base = folder.resolve(), base.resolve()
        path = os.path.relpath(folder, root.resolve()) if folder.is_relative_to(base) else str(folder)
        return DriveRecord(id, path, active)


class _File(Struct):
    """What the file holds beside format, version and checksum."""

    store: _Text
    generation: Count
    meta: dict[str, Any]
    drives: tuple[DriveRecord, ...]
    arrays: list[dict[str, Any]]
    """The fields of ArraySpec and Stored."""
    checkpoint: _Text | None = None


class StoredChunk(NamedTuple):
    """A chunk file of a generation."""

    spec: ArraySpec
    path: Path
    file_bytes: int
    crc: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """A committed generation: where each array is, and what the engine records beside the arrays."""

    store: str
    """Id of the store, the same in every drive's drive.json."""
    generation: int
    """1 for the first commit."""
    arrays: Mapping[ArraySpec, Stored]
    drives: tuple[DriveRecord, ...]
    """Active drives in striping order, then the others."""
    meta: dict[str, Any]
    """The engine's own JSON object: step, data cursor, random state, versions."""
    checkpoint: str | None = None
    """Name of the checkpoint; None for a store."""

    @property
    def step(self) -> int | None:
        """The run's step, where the engine's record has one."""
        return step_of(self.meta)

    def chunks(self, folders: Mapping[str, Path]) -> Iterator[StoredChunk]:
        """All chunk files, array by array, where its drives (by id) are in `folders`."""
        for number, (spec, stored) in enumerate(self.arrays.items()):
            below, file_bytes = Path(spec.buffer, spec.kind, str(stored.slot)), spec.form.file_bytes
            for part, crc in enumerate(stored.crcs):
                drive = folders[stored.drives[stripe(number, part, len(stored.drives))]]
                yield StoredChunk(spec, drive / below / f"c.{part}.0", file_bytes, crc)

    def write(self, root: Path) -> None:
        """Make it root/manifest.json, durably. OSError."""
        publish(prepare_file(root / FILE_NAME, self.encode()), root / FILE_NAME)

    def back_up(self, folders: Iterable[Path]) -> None:
        """Leave copies, not synced, where that does not fail: beside the manifest, in case somebody damages it, and on
        drives, which so know their newest generation."""
        content = self.encode()
        for folder in folders:
            with contextlib.suppress(OSError):
                write_file(temporary_name(folder / BACKUP_NAME), content)
                os.replace(temporary_name(folder / BACKUP_NAME), folder / BACKUP_NAME)

    def encode(self) -> bytes:
        content = {
            "format": _FORMAT,
            "version": _VERSION,
            "store": self.store,
            "checkpoint": self.checkpoint,
            "generation": self.generation,
            "meta": self.meta,
            "drives": to_builtins(self.drives),
            "arrays": [to_builtins(spec) | to_builtins(stored) for spec, stored in self.arrays.items()],
        }
        return json.dumps({**content, "crc32c": _own_checksum(content)}, indent=1).encode()

    @staticmethod
    def read(root: Path) -> Manifest:
        """Read root/manifest.json; UserError naming the file when it is missing, damaged, old or of another version."""
        path = root / FILE_NAME
        backup = read_backup(root)
        hint = "restore it from a copy, or start a new run"
        if backup is not None:
            hint = f"{root / BACKUP_NAME} holds generation {backup.generation}: copy it to {FILE_NAME} and resume"
        try:
            manifest = decode(read_regular(path))
        except FileNotFoundError as error:
            if backup is not None:
                raise UserError(f"{path}: the file is missing; {hint}") from error
            raise UserError(
                f"{path}: no such file: no generation was committed here, or the drive is not mounted; mount it, or "
                "start a new run"
            ) from error
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}); {hint}") from error
        except ValueError as error:
            raise UserError(f"{path}: not a readable manifest ({error}); {hint}") from error
        if backup is not None and backup.store == manifest.store and backup.generation > manifest.generation:
            raise UserError(
                f"{path}: holds generation {manifest.generation}, but generation {backup.generation} was committed: "
                f"the file was replaced by an older manifest; {hint}"
            )
        return manifest


def step_of(meta: Mapping[str, Any]) -> int | None:
    """The step in an engine's record; None where it has none."""
    step = meta.get("step")
    return step if is_whole(step) else None


def has_backup(root: Path) -> bool:
    """Whether folder `root` holds a copy of a manifest: a generation was committed there, even if that is gone."""
    return (root / BACKUP_NAME).exists()


def decode(data: bytes) -> Manifest:
    """The manifest of a file's content. ValueError for anything that `Manifest.encode` does not write."""
    content = parse_object(data)
    if content.get("format") != _FORMAT:
        raise ValueError(f"format is {content.get('format')!r}, not {_FORMAT!r}")
    if content.get("version") != _VERSION:
        raise ValueError(f"version {content.get('version')} is not version {_VERSION}, which this Penstock reads")
    stored, result = content.pop("crc32c", None), _own_checksum(content)
    if stored != result:
        raise ValueError(f"checksum mismatch: the content has CRC-32C {result}, the file records {stored}")
    # The checksum finds accidents; whoever writes a manifest can write that as well.
    file = typed(content, _File)
    known = {drive.id for drive in file.drives}
    if len(known) < len(file.drives):
        raise ValueError("a drive is listed twice")
    arrays = {typed(item, ArraySpec): typed(item, Stored) for item in file.arrays}
    if len(arrays) < len(file.arrays):
        raise ValueError("an array is listed twice")
    for spec, stored in arrays.items():
        parts = -(-spec.numel // part_numel_even(spec.numel, spec.part_numel))
        if not known.issuperset(stored.drives) or len(stored.crcs) != parts:
            what = "is on an unknown drive, or does not have one checksum per part"
            raise ValueError(f"array {spec.buffer}/{spec.kind} {what}")
    return Manifest(file.store, file.generation, arrays, file.drives, file.meta, file.checkpoint)


def _own_checksum(content: dict[str, Any]) -> str:
    return hex_crc(json.dumps(content, separators=(",", ":")).encode())


def read_backup(root: Path) -> Manifest | None:
    """The copy of a manifest in folder `root`; None where there is none that can be read."""
    try:
        return decode(read_regular(root / BACKUP_NAME))
    except (OSError, ValueError):
        return None
