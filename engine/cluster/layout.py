"""A run's state as a torch.distributed.checkpoint (DCP): what it is called there, and the record beside it.

    STEP/penstock.json     recipe, step, data position: what a run's generation records, sealed
    STEP/__R_T.distcp      tensors, by whatever rank wrote them
    STEP/.metadata         torch's index of them
    STEP/checksums.json    size and CRC-32C of these, of which torch keeps none

A parameter goes by its state-dict name in transformers, float32 where it is trained; what AdamW keeps of it by
`optimizer.state.NAME.exp_avg`, `.exp_avg_sq` and `.step`, as torchtitan calls it. The index is a pickle, in which
anybody may have put anything: `DcpReader` loads none but the classes of such an index.
"""

from __future__ import annotations

import contextlib
import io
import json
import mmap
import os
import pickle
import pickletools
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from msgspec import Struct, structs
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, Metadata, SavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata

from penstock.engine.config import Recipe
from penstock.engine.model.spec import ModelSpec
from penstock.engine.optim.base import MASTER
from penstock.engine.runtime.sources import WEIGHTS
from penstock.storage.files import sealed
from penstock.storage.files.disk import atomic_write, fsync_dir, fsync_file
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import is_whole, one_line, open_regular, parse_object, read_regular, typed
from penstock.storage.tier.layout import ParamSpec

RECORD_NAME = "penstock.json"
CHECKSUMS_NAME = "checksums.json"
INDEX_NAME = ".metadata"
_RECORD_BYTES = 1 << 26
_INDEX_BYTES = 1 << 30
_WRITERS = 2
"""Threads of a process that writes alone; as many parameters are in memory at once."""

State = dict[str, torch.Tensor]
T = TypeVar("T")


class Location(NamedTuple):
    """Where a tensor of a checkpoint is in a run's state."""

    buffer: str
    kind: str
    param: ParamSpec


def moment(name: str, kind: str) -> str:
    """What the optimizer's state `kind` of parameter `name` is called; `kind` may be `step`."""
    return f"optimizer.state.{name}.{kind}"


def locations(spec: ModelSpec, kinds: Sequence[str]) -> dict[str, Location]:
    """Name in a checkpoint -> location, for all parameters and their optimizer's `kinds` (master weights left out)."""
    result: dict[str, Location] = {}
    for name, buffer in spec.buffers.items():
        for param in buffer.params:
            result[param.name] = Location(name, WEIGHTS if buffer.frozen else MASTER, param)
            if not buffer.frozen:
                result |= {moment(param.name, kind): Location(name, kind, param) for kind in kinds}
    return result


def trained_names(spec: ModelSpec) -> list[str]:
    """Names of the parameters that have an optimizer's state."""
    return [param.name for buffer in spec.trained.values() for param in buffer.params]


# ------------------------------------------------------------------ folders


def partial_folder(folder: Path) -> Path:
    """Where a checkpoint is written before it gets its name."""
    return folder.with_name(f".{folder.name}.partial")


def begin_folder(folder: Path, recipe: Recipe, meta: Mapping[str, Any]) -> Path:
    """An empty folder to write a checkpoint to, that `end_folder` makes `folder`, with its record: the recipe, and
    `meta`, what a generation records. OSError."""
    partial = partial_folder(folder)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    record = Record("penstock-dcp", 1, asdict(recipe), dict(meta))
    atomic_write(partial / RECORD_NAME, json.dumps(sealed.seal(structs.asdict(record)), indent=1) + "\n")
    return partial


def end_folder(folder: Path, checksums: Mapping[str, tuple[int, str]]) -> None:
    """Give a written checkpoint its name, durably, with what `checksums_of` its files; an older one there goes."""
    partial = partial_folder(folder)
    content = sealed.seal({"files": dict(checksums)})
    atomic_write(partial / CHECKSUMS_NAME, json.dumps(content, indent=1) + "\n")
    _name(folder)


def bring(folder: Path, to: Path) -> None:
    """Copy a whole checkpoint to `to`, durably, whole or not at all. OSError."""
    partial = partial_folder(to)
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(folder, partial)
    for path in partial.iterdir():
        fsync_file(path)
    _name(to)


def _name(folder: Path) -> None:
    """Give a partial folder, whose files are durable, its name; an older one there goes."""
    partial = partial_folder(folder)
    fsync_dir(partial)
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)
    fsync_dir(folder.parent)


def checksums_of(folder: Path, share: tuple[int, int] = (0, 1)) -> dict[str, tuple[int, str]]:
    """Name -> bytes and CRC-32C of a written checkpoint's files; with `share` (i, n) of the i-th of n equal shares."""
    names = sorted(path.name for path in folder.iterdir() if path.name not in (RECORD_NAME, CHECKSUMS_NAME))
    return {name: _checksum(folder / name) for name in names[share[0] :: share[1]]}


def _checksum(path: Path) -> tuple[int, str]:
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            return 0, sealed.hex_crc(b"")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return size, sealed.hex_crc(content)


# ------------------------------------------------------------------ reading


def require_intact(folder: Path, share: tuple[int, int] = (0, 1)) -> None:
    """UserError unless a checkpoint's files are as they were written; `share` as of `checksums_of`."""
    files = _read_sealed(folder / CHECKSUMS_NAME, _Checksums).files
    for name in sorted(files)[share[0] :: share[1]]:
        file = folder / Path(name).name
        try:
            now = _checksum(file)
        except OSError as error:
            raise UserError(f"{file}: cannot be read ({error.strerror}); restore it from a copy") from None
        if now != files[name]:
            raise UserError(
                f"{file}: differs from what was written; restore it from a copy, or use an older checkpoint"
            )


class _Checksums(Struct):
    """Content of checksums.json."""

    files: dict[str, tuple[int, str]]
    """Name -> bytes and CRC-32C."""


class Record(Struct):
    """What stands beside a checkpoint's tensors: content of penstock.json."""

    format: Literal["penstock-dcp"]
    version: Literal[1]
    recipe: dict[str, Any]
    """As recipe.json has it."""
    meta: dict[str, Any]
    """What the generation records: step, tokens, cursor, fields."""

    @property
    def step(self) -> int:
        return int(self.meta["step"])


def read_record(folder: Path) -> Record:
    """The record of a checkpoint. UserError where `folder` is none of a run, or its record is damaged."""
    path = folder / RECORD_NAME
    if not (folder / INDEX_NAME).is_file():
        what = (
            "does not exist" if not folder.exists() else f"has no {INDEX_NAME}, so it is not a complete DCP checkpoint"
        )
        raise UserError(
            f"{folder}: {what}; give a folder such as RUN/dcp/step-000100, or one written by penstock export --format "
            "dcp"
        )
    if not os.path.lexists(path):
        raise UserError(
            f"{path}: is missing: this DCP checkpoint was not written by Penstock and does not record the position in "
            "its data; export it as a Hugging Face folder with the program that wrote it, and start a new run from that"
        )
    record = _read_sealed(path, Record)
    why = ""
    if not all(is_whole(record.meta.get(name)) and record.meta[name] >= 0 for name in ("step", "tokens")):
        why = "does not say which step it is from"
    if not isinstance(record.meta.get("cursor"), dict):
        why = "does not record the position in the data"
    if why:
        raise UserError(f"{path}: {why}; restore it from a copy")
    return record


def _read_sealed(path: Path, wanted: type[T]) -> T:
    """The content of a sealed JSON file. UserError where it cannot be read, or is something else."""
    try:
        return typed(sealed.unseal(parse_object(read_regular(path, most_bytes=_RECORD_BYTES))).content, wanted)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); restore it from a copy") from None
    except ValueError as error:
        raise UserError(f"{path}: {error}; restore it from a copy") from None


_ALLOWED = {
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib._local", "PosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
            *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
        )
    ),
}
"""Classes and functions of an index that torch itself writes; of `torch`, dtypes as well."""


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"names {one_line(f'{module}.{name}', 80)}, which no index of tensors has")
        return super().find_class(module, name)


class DcpReader(FileSystemReader):
    """torch's reader, of an index and tensors only: nothing in the files is carried out."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        index = read_index(Path(self.path))
        if index.storage_meta is None:
            index.storage_meta = StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index


def read_index(folder: Path) -> Metadata:
    """torch's index of a checkpoint's tensors. UserError where it is damaged, or leads out of its folder."""
    path = folder / INDEX_NAME
    try:
        content = read_regular(path, most_bytes=_INDEX_BYTES)
        for code, argument, _ in pickletools.genops(content):
            if code.name == "LONG_BINPUT" and (argument or 0) > len(content):  # so many would be allocated first
                raise ValueError("numbers more values than it has")
        index = _IndexUnpickler(io.BytesIO(content)).load()
        if not isinstance(index, Metadata):
            raise ValueError("holds something else")
        files = {info.relative_path for info in (index.storage_data or {}).values()}
        if any(Path(file).name != file for file in files):
            raise ValueError("names files elsewhere")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); restore it from a copy") from None
    except Exception as error:  # an index that was damaged fails anyhow
        raise UserError(f"{path}: is not an index of a DCP checkpoint ({error}); restore it from a copy") from None
    return index


def require_same_model(folder: Path, spec: ModelSpec, kinds: Sequence[str]) -> None:
    """UserError unless the checkpoint in `folder` holds the state of exactly this model."""
    held = {name: tuple(result.size) for name, result in held_tensors(folder).items()}
    wanted = {name: tuple(location.param.shape) for name, location in locations(spec, kinds).items()} | spec.constants
    wanted |= {moment(name, "step"): () for name in trained_names(spec)}
    for name, shape in wanted.items():
        if name not in held:
            raise _other(folder, spec, f"it has no '{name}'")
        if held[name] != shape:
            raise _other(folder, spec, f"'{name}' is {_shape(held[name])} there and {_shape(shape)} in the recipe's")
    for name in held.keys() - wanted.keys():
        raise _other(folder, spec, f"it has '{one_line(name, 80)}', which the recipe's model lacks")


def _other(folder: Path, spec: ModelSpec, why: str) -> UserError:
    return UserError(
        f"{folder}: holds the state of a model other than the recipe's ({spec.model_type}): {why}; restore the "
        "recipe's model, or choose another run directory"
    )


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(f"{n:,}" for n in shape) or "a scalar"


def held_tensors(folder: Path) -> dict[str, TensorStorageMetadata]:
    """The tensors of a checkpoint by name. UserError as of `read_index`."""
    held = read_index(folder).state_dict_metadata
    return {name: result for name, result in held.items() if isinstance(result, TensorStorageMetadata)}


def save(folder: Path, tensors: Mapping[str, torch.Tensor], planner: SavePlanner | None = None) -> None:
    """Write a checkpoint's tensors to `folder`: all ranks together, or with a `planner` this process alone.

    Raises UserError, on all ranks, where the disk does not take them.
    """
    writer = FileSystemWriter(folder, thread_count=1 if planner is None else _WRITERS)
    try:
        with alone():
            dcp.save(dict(tensors), storage_writer=writer, planner=planner, no_dist=planner is not None)
    except CheckpointException as error:
        raise _failed(error, f"{folder}: cannot be written", "free some disk space, or choose another disk") from error


def load(folder: Path, tensors: Mapping[str, torch.Tensor], *, no_dist: bool = False) -> None:
    """Fill tensors from a checkpoint, by their names there: all ranks together, or with `no_dist` this process alone.

    Raises UserError, on all ranks, where a file is damaged or missing.
    """
    try:
        with alone():
            dcp.load(dict(tensors), storage_reader=DcpReader(folder), no_dist=no_dist)
    except CheckpointException as error:
        raise _failed(error, f"{folder}: cannot be read", "restore it from a copy, or use an older one") from error


def _failed(error: CheckpointException, what: str, fix: str) -> UserError:
    """What the first rank that failed has met."""
    rank, (reason, _) = min(error.failures.items())
    if isinstance(reason, UserError):
        return reason
    return UserError(f"{what}: rank {rank}: {type(reason).__name__}: {one_line(str(reason), 200)}; {fix}")


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """While a single process saves or loads, of which torch warns each time."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
