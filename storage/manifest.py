"""The manifest: the one small file that says which chunk files make up the committed generation.

Its content is JSON. `crc32c` at its end is the checksum of everything else, so that a flipped digit is found, and
every chunk's checksum is recorded, so that a whole chunk file of another generation is found.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from storage.crc import checksum
from storage.disk import prepare_file, write_file
from storage.errors import UserError
from storage.layout import ALIGN_NUMEL, part_numel_even, part_ranges
from storage.untrusted import is_whole, parse_object, read_regular

FILE_NAME = "manifest.json"
BACKUP_NAME = "manifest.backup.json"
_FORMAT = "penstock-state"
_VERSION = 2
_ITEM_BYTES = {"float32": 4, "bfloat16": 2}
_RESERVED = ("", ".", "..", "scratch", "checkpoints")
_CRC = re.compile("[0-9a-f]{8}")


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One kind of state of one flat buffer, as it is kept on disk."""

    buffer: str
    """Name of the flat buffer, for example layers.0; also a folder name."""
    kind: str
    """weights, master, exp_avg, exp_avg_sq or gradient; also a folder name."""
    numel: int
    """Elements of the flat buffer."""
    dtype: str
    """float32 or bfloat16."""
    part_numel: int
    """Most elements of one part (one chunk file), a multiple of layout.ALIGN_NUMEL."""

    def __post_init__(self) -> None:
        assert self.dtype in _ITEM_BYTES, self.dtype
        for name in (self.buffer, self.kind):
            assert name not in _RESERVED, name
            assert not set(name) & {"/", "\0"}, name
            assert not name.startswith("."), name

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return _ITEM_BYTES[self.dtype]

    def parts(self) -> list[tuple[int, int]]:
        """The parts as (start, stop) in elements, the same as FlatLayout.parts(part_numel)."""
        return part_ranges(self.numel, self.part_numel)


@dataclass(frozen=True, slots=True)
class Stored:
    """Where the committed state of one array lies."""

    slot: int
    """0 or 1."""
    drives: tuple[str, ...]
    """Ids of the drives, in striping order."""
    crcs: tuple[int, ...]
    """CRC-32C of each part's chunk file without its last four bytes, which hold the same value."""


@dataclass(frozen=True, slots=True)
class DriveRecord:
    """A folder that holds chunk files."""

    id: str
    """As in the folder's own drive.json: the folder is known by it wherever it is mounted."""
    path: str
    """Where it was; relative to the manifest's folder where it lies inside the store's."""
    active: bool
    """Whether new state is written to it; the others hold state from before the run changed drives."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """A committed generation: where each array lies, and what the engine keeps beside the arrays."""

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

    def prepare(self, root: Path) -> Path:
        """Write and sync the file that `disk.publish` makes root/manifest.json; OSError leaves the old one alone."""
        return prepare_file(root / FILE_NAME, self.encode())

    def back_up(self, folders: Iterable[Path]) -> None:
        """Leave copies: in the manifest's folder, for the day on which somebody damages it; on the drives, so that they
        know their newest generation. Neither synced nor an error where it fails."""
        content = self.encode()
        for folder in folders:
            with contextlib.suppress(OSError):
                temporary = folder / f".{BACKUP_NAME}.{os.getpid()}.tmp"
                write_file(temporary, content)
                os.replace(temporary, folder / BACKUP_NAME)

    def encode(self) -> bytes:
        """The file's content."""
        content = {
            "format": _FORMAT,
            "version": _VERSION,
            "store": self.store,
            "checkpoint": self.checkpoint,
            "generation": self.generation,
            "meta": self.meta,
            "drives": [asdict(drive) for drive in self.drives],
            "arrays": [
                {
                    **asdict(spec),
                    "shape": [len(spec.parts()), part_numel_even(spec.numel, spec.part_numel)],
                    "slot": stored.slot,
                    "drives": stored.drives,
                    "checksum": "crc32c",
                    "crc32c": [f"{crc:08x}" for crc in stored.crcs],
                }
                for spec, stored in self.arrays.items()
            ],
        }
        return json.dumps({**content, "crc32c": _own_checksum(content)}, indent=1).encode()

    @staticmethod
    def read(root: Path) -> Manifest:
        """Read root/manifest.json; UserError naming the file when it is missing, damaged, old or of another version."""
        path = root / FILE_NAME
        backup = read_backup(root)
        try:
            manifest = _decode(read_regular(path))
        except FileNotFoundError as error:
            if backup is None:
                raise UserError(
                    f"{path}: no such file: no generation was ever committed here, or its drive is not mounted; "
                    "start a new run, or mount it"
                ) from error
            raise UserError(f"{path}: the file is missing; {_hint(root, backup)}") from error
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}); {_hint(root, backup)}") from error
        except ValueError as error:
            raise UserError(f"{path}: not a readable manifest ({error}); {_hint(root, backup)}") from error
        if backup is not None and backup.store == manifest.store and backup.generation > manifest.generation:
            raise UserError(
                f"{path}: holds generation {manifest.generation}, but generation {backup.generation} was committed: "
                f"an older manifest was put in its place; {_hint(root, backup)}"
            )
        return manifest


def step_of(meta: Mapping[str, Any]) -> int | None:
    """The step in an engine's record; None where it has none."""
    step = meta.get("step")
    return step if is_whole(step) else None


def has_backup(root: Path) -> bool:
    """Whether folder `root` holds a copy of a manifest: a generation was committed there, even if that is gone."""
    return (root / BACKUP_NAME).exists()


def _decode(data: bytes) -> Manifest:
    """The manifest of a file's content. ValueError for anything that `Manifest.encode` does not write."""
    content = parse_object(data)
    if content.get("format") != _FORMAT:
        raise ValueError(f"format is {content.get('format')!r}, not {_FORMAT!r}")
    if content.get("version") != _VERSION:
        raise ValueError(f"version {content.get('version')} is not the version {_VERSION} that this Penstock reads")
    stored, found = content.pop("crc32c", None), _own_checksum(content)
    if stored != found:
        raise ValueError(f"checksum mismatch: the content has CRC-32C {found}, the file says {stored}")
    # The checksum finds accidents; whoever writes a manifest can write that as well.
    _require(_is_text(content.get("store")), "store is no name")
    _require(is_whole(content.get("generation")) and content["generation"] >= 1, "generation is no number from 1 on")
    _require(content.get("checkpoint") is None or _is_text(content["checkpoint"]), "checkpoint is no name")
    _require(isinstance(content.get("meta"), dict), "meta is no object")
    drives = tuple(_drive(item) for item in _list_of(content, "drives"))
    known = {drive.id for drive in drives}
    _require(len(known) == len(drives), "a drive is there twice")
    arrays = dict(_array(item, known) for item in _list_of(content, "arrays"))
    _require(len(arrays) == len(content["arrays"]), "an array is there twice")
    return Manifest(content["store"], content["generation"], arrays, drives, content["meta"], content.get("checkpoint"))


def _require(ok: bool, what: str) -> None:
    if not ok:
        raise ValueError(what)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != "" and "\0" not in value


def _is_crc(value: object) -> bool:
    return isinstance(value, str) and _CRC.fullmatch(value) is not None


def _list_of(content: dict[str, Any], name: str) -> list[dict[str, Any]]:
    items = content.get(name)
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise ValueError(f"{name} is no list of objects")
    return items


def _drive(item: dict[str, Any]) -> DriveRecord:
    _require(item.keys() == {"id", "path", "active"}, "a drive needs id, path and active, and nothing else")
    _require(_is_text(item["id"]) and _is_text(item["path"]), "a drive's id or path is no text")
    _require(isinstance(item["active"], bool), "a drive's active is neither true nor false")
    return DriveRecord(**item)


def _array(item: dict[str, Any], drives: set[str]) -> tuple[ArraySpec, Stored]:
    names, sizes = ("buffer", "kind"), ("numel", "part_numel")
    for name in names:
        value = item.get(name)
        plain = isinstance(value, str) and value not in _RESERVED and not set(value) & {"/", "\0"}
        _require(plain and not str(value).startswith("."), f"an array's {name} is no name of a folder")
    where = f"array {item['buffer']}/{item['kind']}"
    _require(isinstance(item.get("dtype"), str) and item["dtype"] in _ITEM_BYTES, f"{where} has an unknown dtype")
    for name in sizes:
        _require(is_whole(item.get(name)) and item[name] >= 1, f"{where}: {name} is no size")
    _require(item["part_numel"] % ALIGN_NUMEL == 0, f"{where}: part_numel is no multiple of {ALIGN_NUMEL}")
    crcs, on = item.get("crc32c"), item.get("drives")
    parts = -(-item["numel"] // part_numel_even(item["numel"], item["part_numel"]))
    sound = isinstance(crcs, list) and len(crcs) == parts and all(map(_is_crc, crcs))
    listed = isinstance(on, list) and len(on) > 0 and all(isinstance(drive, str) and drive in drives for drive in on)
    slotted = is_whole(item.get("slot")) and item["slot"] in (0, 1)
    _require(slotted and listed and sound, f"{where} has a bad slot, drive or checksum")
    spec = ArraySpec(**{name: item[name] for name in (*names, "numel", "dtype", "part_numel")})
    return spec, Stored(item["slot"], tuple(item["drives"]), tuple(int(crc, 16) for crc in item["crc32c"]))


def _own_checksum(content: dict[str, Any]) -> str:
    text = json.dumps(content, separators=(",", ":"))
    return f"{checksum(memoryview(text.encode()), 0):08x}"


def read_backup(root: Path) -> Manifest | None:
    """The copy of a manifest in folder `root`; None where there is none that can be read."""
    try:
        return _decode(read_regular(root / BACKUP_NAME))
    except (OSError, ValueError):
        return None


def _hint(root: Path, backup: Manifest | None) -> str:
    if backup is None:
        return "restore it from a copy, or start a new run"
    return f"{root / BACKUP_NAME} holds generation {backup.generation}: copy it to {FILE_NAME} and resume"
