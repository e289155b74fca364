"""One array of the store: its parts, where they are on the drives, and the zarr3 metadata that describes them.

DRIVE/BUFFER/KIND/SLOT/         a zarr3 array [parts, part elements]: zarr.json and the chunk files of this drive
DRIVE/scratch/BUFFER/KIND/0/    the same for arrays of no generation
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from penstock.storage.files.disk import fsync_dir, fsync_file, make_folder, reporting, write_file
from penstock.storage.files.errors import ensure
from penstock.storage.tier.chunk import ChunkFormat
from penstock.storage.tier.drives import CHECKPOINTS, SCRATCH, Drive
from penstock.storage.tier.layout import stripe
from penstock.storage.tier.manifest import ArraySpec, Stored
from penstock.storage.tier.scrub import ChunkFile

_DIMENSIONS = ["part", "element"]


@dataclass(slots=True, eq=False)
class Array:
    """An array and its state: one committed slot (none before the first commit) and one that is written to; a fixed
    array is written again only where it moves to other drives."""

    spec: ArraySpec
    number: int
    """Where striping starts."""
    target: tuple[Drive, ...]
    """Drives that the next slot is written to, in striping order."""
    scratch: bool = False
    slot: int | None = None
    """Committed slot; always None for scratch."""
    layout: tuple[Drive, ...] = ()
    """Drives of the committed slot, in striping order."""
    crcs: tuple[int, ...] = ()
    """CRC-32C of the committed parts."""
    written: MutableMapping[int, int] = field(default_factory=dict)
    """CRC-32C of the parts of the next slot written since the last commit."""
    form: ChunkFormat = field(init=False)
    parts: list[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        self.form, self.parts = self.spec.form, self.spec.parts()

    @property
    def name(self) -> str:
        return f"{self.spec.buffer}/{self.spec.kind}"

    @property
    def lasts(self) -> bool:
        """Whether what is committed is never written again."""
        return self.spec.fixed and self.slot is not None and self.layout == self.target

    def slots(self) -> tuple[int, ...]:
        """The slots that need room where `target` is."""
        if not self.scratch and not self.spec.fixed:
            return (0, 1)
        return (self.slot or 0,) if self.lasts else (self.next_slot(),)

    def next_slot(self) -> int:
        """The slot that no committed generation uses."""
        return 0 if self.slot is None else 1 - self.slot

    def folder(self, drive: Drive, slot: int) -> Path:
        """Where drive `drive` keeps its chunk files of a slot."""
        base = drive.folder / SCRATCH if self.scratch else drive.folder
        return base / self.spec.buffer / self.spec.kind / str(slot)

    def chunk(self, drives: tuple[Drive, ...], slot: int, part: int) -> tuple[Drive, Path]:
        """The drive and the chunk file of a part where the slot is striped over `drives`."""
        drive = drives[stripe(self.number, part, len(drives))]
        return drive, self.folder(drive, slot) / f"c.{part}.0"

    def committed(self, part: int) -> tuple[Drive, Path]:
        """The drive and the chunk file of a committed part."""
        if self.slot is None:
            raise AssertionError(f"{self.name} part {part} is read before it was ever written")
        return self.chunk(self.layout, self.slot, part)

    def next(self, part: int) -> tuple[Drive, Path]:
        """The drive and the chunk file that the part's next write goes to."""
        return self.chunk(self.target, self.next_slot(), part)

    def file(self, part: int, *, fresh: bool = False) -> ChunkFile:
        """The chunk file of a part as it is committed, or as it was written since where `fresh`."""
        drive, path = self.next(part) if fresh else self.committed(part)
        start, stop = self.parts[part]
        crc = self.written[part] if fresh else self.crcs[part]
        return ChunkFile(drive, path, self.form, (stop - start) * self.spec.item_bytes, crc)

    def payload(self, part: int, tensor: torch.Tensor) -> torch.Tensor:
        """The bytes of `tensor`, uint8, checked to be what the array holds as part number `part`."""
        start, stop = self.parts[part]
        ensure(str(tensor.dtype) == f"torch.{self.spec.dtype}", f"{(self.name, tensor.dtype, self.spec.dtype)}")
        ensure(tensor.shape == (stop - start,), f"{(self.name, part, tuple(tensor.shape), stop - start)}")
        ensure(tensor.is_contiguous(), self.name)
        return tensor.detach().view(torch.uint8)

    def stored(self) -> Stored:
        """The manifest's record when all that was written is committed."""
        if self.written:
            crcs = tuple(self.written[part] for part in range(len(self.parts)))
            return Stored(self.next_slot(), tuple(drive.id for drive in self.target), crcs)
        if self.slot is None:
            raise AssertionError(f"{self.name} was never written")
        return Stored(self.slot, tuple(drive.id for drive in self.layout), self.crcs)

    def disk_bytes(self) -> int:
        """Bytes on all drives: two slots, or one of scratch or where it is fixed."""
        return self.spec.slot_bytes * (1 if self.scratch or self.spec.fixed else 2)


def zarr_json(spec: ArraySpec) -> bytes:
    """The zarr3 metadata of one slot, the same on every drive; parts of other drives read as zeros there."""
    form, item_bytes = spec.form, spec.item_bytes
    metadata = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [len(spec.parts()), form.part_bytes // item_bytes],
        "data_type": spec.dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1, form.stored_bytes // item_bytes]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
        "fill_value": 0,
        "dimension_names": _DIMENSIONS,
    }
    return json.dumps(metadata, indent=1).encode()


def make_folders(arrays: Iterable[Array], drives: Iterable[Drive]) -> None:
    """Make what lacks of the arrays' slots on `drives`; durable, but for scratch. UserError when a drive fails."""
    drives, made = list(drives), set[Path]()
    for array in arrays:
        content = zarr_json(array.spec)
        for drive in drives:
            for slot in array.slots():
                folder = array.folder(drive, slot)
                path = folder / "zarr.json"
                with reporting(folder, "making the folder of an array"):
                    if path.is_file() and path.read_bytes() == content:
                        continue
                    make_folder(folder, inside=drive.folder)
                    write_file(path, content)
                    if not array.scratch:
                        fsync_file(path)
                        made |= {folder, folder.parent, folder.parent.parent, drive.folder}
    for folder in sorted(made, reverse=True):
        with reporting(folder, "syncing"):
            fsync_dir(folder)


def remove_arrays(folder: Path) -> None:
    """Remove all our arrays from a drive's folder and nothing else: no checkpoints, no scratch, no array of others."""
    for path in list(folder.glob("*/*/[01]/zarr.json")):
        ours = False
        with contextlib.suppress(OSError, ValueError, AttributeError):
            ours = json.loads(path.read_bytes()).get("dimension_names") == _DIMENSIONS
        if not ours or path.parts[-4] in (SCRATCH, CHECKPOINTS):
            continue
        shutil.rmtree(path.parent, ignore_errors=True)
        for parent in list(path.parents)[1:3]:
            with contextlib.suppress(OSError):  # not empty
                parent.rmdir()


def sweep_strays(array: Array, drives: Iterable[Drive]) -> None:
    """Remove chunk files of `array` where an earlier striping over other drives put them."""
    slots = [] if array.lasts else [array.next]
    slots += [] if array.slot is None else [array.committed]
    saved = {slot(part)[1] for slot in slots for part in range(len(array.parts))}
    for drive in drives:
        for slot in (0, 1):
            with contextlib.suppress(OSError):
                for path in array.folder(drive, slot).glob("c.*.0"):
                    if path not in saved:
                        path.unlink(missing_ok=True)
