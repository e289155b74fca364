"""The manifest: the one small file that says which chunk files make up the committed generation."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from storage.disk import atomic_write
from storage.errors import UserError
from storage.layout import part_ranges

FILE_NAME = "manifest.json"
_FORMAT = "penstock-state"
_VERSION = 1
_ITEM_BYTES = {"float32": 4, "bfloat16": 2}


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
            assert name not in ("", ".", "..", "scratch"), name
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
class Manifest:
    """A committed generation: which of its two slots each array uses, and what the engine keeps beside the arrays."""

    generation: int
    """1 for the first commit."""
    slots: dict[ArraySpec, int]
    """Committed slot, 0 or 1, of every array."""
    meta: dict[str, Any]
    """The engine's own JSON object: step, data cursor, random state, versions."""

    def write(self, root: Path) -> None:
        """Replace root/manifest.json atomically and durably: from then on this generation is the committed one."""
        arrays = [{**asdict(spec), "slot": slot, "checksum": "crc32c"} for spec, slot in self.slots.items()]
        content = {
            "format": _FORMAT,
            "version": _VERSION,
            "generation": self.generation,
            "meta": self.meta,
            "arrays": arrays,
        }
        atomic_write(root / FILE_NAME, json.dumps(content, indent=1))

    @staticmethod
    def read(root: Path) -> Manifest:
        """Read root/manifest.json; UserError naming the file when it is missing, unreadable or of another version."""
        path = root / FILE_NAME
        try:
            content = json.loads(path.read_text())
            if content["format"] != _FORMAT:
                raise ValueError(f"format is {content['format']!r}, not {_FORMAT!r}")
            if content["version"] != _VERSION:
                raise ValueError(f"version {content['version']} is not the version {_VERSION} that this Penstock reads")
            fields = ("buffer", "kind", "numel", "dtype", "part_numel")
            slots = {ArraySpec(**{name: item[name] for name in fields}): item["slot"] for item in content["arrays"]}
            if not set(slots.values()) <= {0, 1}:
                raise ValueError("a slot is neither 0 nor 1")
            return Manifest(int(content["generation"]), slots, dict(content["meta"]))
        except FileNotFoundError as error:
            raise UserError(f"{path}: no such file: no generation was ever committed here; start a new run") from error
        except (OSError, ValueError, LookupError, TypeError, AssertionError) as error:
            raise UserError(
                f"{path}: not a readable manifest ({type(error).__name__}: {error}); restore it from a copy, "
                "or start a new run"
            ) from error
