"""Folders of safetensors as Hugging Face writes them, read and written one tensor at a time.

Nothing is memory-mapped: a mapped 14 GB shard counts as resident memory of the process page by page.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from msgspec import Meta, Struct

from penstock.storage.files import disk, model_folder
from penstock.storage.files.disk import reporting
from penstock.storage.files.errors import UserError, ensure
from penstock.storage.files.model_folder import INDEX_NAME, MOST_HEADER_BYTES, SINGLE_NAME, open_model_file
from penstock.storage.files.untrusted import Size, one_line, parse_object, typed

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_NAMES = {str(dtype).removeprefix("torch."): name for name, dtype in _DTYPES.items()}
_MOST_DIMENSIONS = 64
Tensors = Sequence[tuple[str, str, tuple[int, ...]]]
"""(name, torch dtype name, shape) of each."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where one tensor is: bytes [start, start + nbytes) of a file."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int


class CheckpointReader:
    """The tensors of a folder that holds model.safetensors, or shards and their index, whichever transformers would
    read (model_folder.py: weights_file); or of one file called `single`.

    The folder may come from anybody. Before the first tensor is read, every shard must be a regular file in it, of the
    size that its header states, which tensors fill without overlaps and gaps: UserError names the file.
    """

    def __init__(self, folder: Path, *, single: str | None = None):
        self.folder = Path(folder)
        file = model_folder.weights_file(self.folder) if single is None else single
        if file is None:
            raise UserError(f"{self.folder}: has neither {SINGLE_NAME} nor {INDEX_NAME}; give a model folder")
        weight_map = self._weight_map(file) if file.endswith(".json") else {}
        shards = sorted(set(weight_map.values())) or [file]
        missing = [name for name in shards if not model_folder.has_model_file(self.folder, name)]
        if missing:
            raise UserError(
                f"{self.folder}: {len(missing)} of {len(shards)} shards are missing, the first is {missing[0]}; "
                "copy or download the checkpoint again"
            )
        self._entries: dict[str, _Entry] = {}
        for shard in shards:
            for name, entry in _read_header(self.folder, shard).items():
                if name not in self._entries or weight_map.get(name) == shard:
                    self._entries[name] = entry
        for name, shard in weight_map.items():
            if name not in self._entries or self._entries[name].path.name != shard:
                raise UserError(f"{self.folder / shard}: tensor '{name}' is in the index but not in this shard")
        self.tensors: dict[str, tuple[str, tuple[int, ...]]] = {
            name: (str(entry.dtype).removeprefix("torch."), entry.shape) for name, entry in self._entries.items()
        }
        """Name -> (torch dtype name such as bfloat16, shape)."""

    def file(self, name: str) -> Path:
        """The file that holds tensor `name`, for messages."""
        return self._entries[name].path

    def stored_bytes(self, name: str) -> int:
        """Bytes of the files that tensor `name` is read from."""
        return self._entries[name].nbytes

    def read(self, name: str) -> torch.Tensor:
        """A new tensor with the stored dtype, shape and bytes. UserError when the file cannot be read."""
        entry = self._entries[name]
        out = torch.empty(entry.shape, dtype=entry.dtype)
        self.read_into(name, out)
        return out

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Read into `out`, a contiguous CPU tensor of the stored dtype and number of elements."""
        entry = self._entries[name]
        ensure(out.dtype == entry.dtype, f"{(name, out.dtype, entry.dtype)}")
        ensure(out.numel() == math.prod(entry.shape), f"{(name, tuple(out.shape), entry.shape)}")
        doing = f"reading tensor '{name}'"
        with reporting(entry.path, doing), disk.held(open_model_file(self.folder, entry.path.name)) as fd:
            if not disk.read_all(fd, [_bytes_of(out)], entry.start):
                raise UserError(f"{entry.path}: became shorter while tensor '{name}' was read")

    def _weight_map(self, index: str) -> dict[str, str]:
        """Tensor name -> shard name from the index."""
        content = model_folder.read_model_file(self.folder, index, MOST_HEADER_BYTES)
        try:
            weight_map = parse_object(content, unique=True).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise ValueError("weight_map is empty or not a map of names")
            for name, shard in weight_map.items():
                if not model_folder.is_plain_name(shard) or not shard.endswith(".safetensors"):
                    raise ValueError(f"shard {one_line(shard)!r} of '{name}' is not the name of a *.safetensors file")
        except ValueError as error:
            raise UserError(
                f"{self.folder / index}: not a readable index ({error}); copy or download it again"
            ) from error
        return weight_map


class CheckpointWriter:
    """Writes a safetensors folder tensor by tensor, in any order, without holding any of it.

    The files get their names in `close`, the index last. As a context manager it closes on success, and removes what it
    wrote when the block raises.
    """

    def __init__(self, folder: Path, tensors: Tensors, max_shard_bytes: int = 5 * 10**9, *, single: str = SINGLE_NAME):
        """Reserve `tensors` as (name, torch dtype name, shape) in shards of at most `max_shard_bytes` of data.

        A tensor larger than that gets a shard of its own; with another `single` all are in that one file. UserError
        when the folder cannot be written, already holds a checkpoint, or the disk lacks the room.
        """
        self.folder = Path(folder)
        disk.require_writable(self.folder)
        present = sorted(self.folder.glob(f"{single.partition('.')[0]}*.safetensors*"))
        if present:
            raise UserError(f"{self.folder}: already holds {present[0].name}; choose an empty folder")
        self.total_bytes = sum(_nbytes(dtype, shape) for _, dtype, shape in tensors)
        disk.require_free(self.folder, self.total_bytes + 2**20, "the exported model")
        self._entries: dict[str, _Entry] = {}
        self._missing = {name for name, _, _ in tensors}
        ensure(len(self._missing) == len(tensors), "a tensor is listed twice")
        shards = _split(tensors, max_shard_bytes) if single == SINGLE_NAME else [[*tensors]]
        numbers = range(1, len(shards) + 1)
        self._names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in numbers]
        self._names = [single] if len(shards) == 1 else self._names
        try:
            for name, shard in zip(self._names, shards, strict=True):
                self._entries |= _write_header(self._temporary(name), shard)
        except OSError as error:
            self.abort()
            raise disk.disk_error(error, self.folder, "writing the safetensors headers") from error

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor with the dtype and shape that were announced. UserError when the disk is full or fails."""
        entry = self._entries[name]
        ensure(tensor.dtype == entry.dtype, f"{(name, tensor.dtype, entry.dtype)}")
        ensure(tuple(tensor.shape) == entry.shape, f"{(name, tuple(tensor.shape), entry.shape)}")
        data = _bytes_of(tensor.detach().cpu().contiguous())
        doing = f"writing {entry.nbytes:,} bytes of tensor '{name}'"
        with reporting(entry.path, doing), disk.held(os.open(entry.path, os.O_WRONLY | os.O_CLOEXEC)) as fd:
            disk.write_all(fd, [data], entry.start)
        self._missing.discard(name)

    def close(self) -> None:
        """Sync everything and give the files their names; every announced tensor must have been written."""
        ensure(not self._missing, f"{len(self._missing)} tensors were not written, e.g. {sorted(self._missing)[:1]}")
        with reporting(self.folder, "completing the checkpoint"):
            for name in self._names:
                disk.fsync_file(self._temporary(name))
            for name in self._names:
                os.replace(self._temporary(name), self.folder / name)
            disk.fsync_dir(self.folder)
        if len(self._names) > 1:
            weight_map = {
                name: entry.path.name.removeprefix(".").removesuffix(".tmp") for name, entry in self._entries.items()
            }
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
            disk.atomic_write(self.folder / INDEX_NAME, json.dumps(index, indent=2, sort_keys=True) + "\n")

    def abort(self) -> None:
        for name in self._names:
            self._temporary(name).unlink(missing_ok=True)

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:
            self.abort()

    def _temporary(self, name: str) -> Path:
        return self.folder / f".{name}.tmp"


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    ensure(tensor.is_contiguous(), "needs a contiguous tensor")
    data: memoryview = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
    return data


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * _DTYPES[_NAMES[dtype]].itemsize


def _split(tensors: Tensors, max_shard_bytes: int) -> Sequence[Tensors]:
    """Cut the sequence into shards, in order."""
    shards: list[list[tuple[str, str, tuple[int, ...]]]] = [[]]
    size = 0
    for tensor in tensors:
        nbytes = _nbytes(tensor[1], tensor[2])
        if shards[-1] and size + nbytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += nbytes
    return shards


def _write_header(path: Path, tensors: Tensors) -> dict[str, _Entry]:
    """Make file `path` of its final size with its header; returns where each tensor goes."""
    # Wide items first: each tensor then starts at a multiple of its item size without gaps, which the format forbids.
    tensors = sorted(tensors, key=lambda tensor: -_DTYPES[_NAMES[tensor[1]]].itemsize)
    header: dict[str, Any] = {}
    offset = 0
    for name, dtype, shape in tensors:
        stop = offset + _nbytes(dtype, shape)
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    data_start = 8 + len(text)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(data_start + offset)
    return {name: _entry(path, data_start, name, item) for name, item in header.items()}


def _read_header(folder: Path, shard: str) -> dict[str, _Entry]:
    """The tensors of one file, checked against its size; UserError naming the file."""
    path = folder / shard
    try:
        with open(open_model_file(folder, shard), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            header_bytes = int.from_bytes(file.read(8), "little")
            data_start = 8 + header_bytes
            if size < 8 or (data_start > size and header_bytes <= MOST_HEADER_BYTES):
                raise UserError(
                    f"{path}: truncated: expected {max(data_start, 8):,} bytes for the header alone, found {size:,}; "
                    "copy or download it again"
                )
            if header_bytes > MOST_HEADER_BYTES:
                raise ValueError(f"the header claims to have {header_bytes:,} bytes")
            header = parse_object(file.read(header_bytes), unique=True)
        if not isinstance(header.pop("__metadata__", {}), dict):
            raise ValueError("__metadata__ is not an object")
        entries = {name: _entry(path, data_start, name, item) for name, item in header.items()}
        expected, before = data_start, "the header"
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].nbytes)):
            if entry.start != expected:
                what = "overlaps" if entry.start < expected else "leaves a gap after"
                raise ValueError(f"tensor '{name}' {what} {before}")
            expected, before = entry.start + entry.nbytes, f"'{name}'"
    except OSError as error:
        raise disk.disk_error(error, path, "reading the header") from error
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{path}: not a safetensors file ({error}); copy or download it again") from error
    if size != expected:
        state = "truncated" if size < expected else "longer than its header states"
        raise UserError(f"{path}: {state}: expected {expected:,} bytes, found {size:,}; copy or download it again")
    return entries


class _Item(Struct, forbid_unknown_fields=True):
    """A tensor in a header."""

    dtype: str
    shape: Annotated[tuple[Size, ...], Meta(max_length=_MOST_DIMENSIONS)]
    data_offsets: tuple[Size, Size]


def _entry(path: Path, data_start: int, name: str, item: Any) -> _Entry:
    """Where a tensor of the header is. ValueError for anything but a known dtype, a shape and offsets that agree."""
    try:
        result = typed(item, _Item)
    except ValueError as error:
        raise ValueError(f"tensor '{name}': {error}") from None
    if result.dtype not in _DTYPES:
        raise ValueError(f"dtype {one_line(result.dtype)} of tensor '{name}' is unknown")
    if math.prod(max(size, 1) for size in result.shape) >= 2**60:
        raise ValueError(f"shape {one_line(result.shape)} of tensor '{name}' is too large")
    start, end = result.data_offsets
    entry = _Entry(path, _DTYPES[result.dtype], result.shape, data_start + start, end - start)
    if entry.nbytes != math.prod(result.shape) * entry.dtype.itemsize:
        raise ValueError(f"tensor '{name}' of shape {result.shape} and dtype {result.dtype} has {entry.nbytes} bytes")
    return entry
