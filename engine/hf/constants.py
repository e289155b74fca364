"""The model's constants on disk: persistent buffers that are not trained. Each generation keeps their checksum."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import load, save
from torch import Tensor

from penstock.storage.files.disk import atomic_write
from penstock.storage.files.errors import UserError
from penstock.storage.files.sealed import hex_crc
from penstock.storage.files.untrusted import printable, read_regular

CONSTANTS_FILE = "constants.safetensors"
"""Beside the generations."""


def write_constants(path: Path, tensors: dict[str, Tensor]) -> str:
    """Write the constants, durably; the CRC-32C of the file, for `read_constants_file`."""
    content = save(tensors)
    atomic_write(path, content)
    return hex_crc(content)


def read_constants_file(path: Path, crc: object, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The constants of a model whose constants have those `shapes`; `crc` is what `write_constants` gave.

    Raises UserError naming the file when it is missing, damaged, or another model's.
    """
    with _damaged(path):
        tensors = load(_checked(path, crc))
        if (result := {name: tuple(tensor.shape) for name, tensor in tensors.items()}).items() - shapes.items():
            raise ValueError(f"it holds {_words(result)}, but the model has {_words(shapes)}")
        return tensors


def verify_constants(path: Path, crc: object) -> int:
    """Read the file and check it against its checksum; its bytes. Raises UserError naming it."""
    with _damaged(path):
        return len(_checked(path, crc))


@contextmanager
def _damaged(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # safetensors raises what it likes
        why = "the file is missing" if isinstance(error, FileNotFoundError) else str(error)
        raise UserError(f"{path}: damaged: {why}; restore the file, or start a new run") from None


def _checked(path: Path, crc: object) -> bytes:
    content = read_regular(path)
    if (result := hex_crc(content)) != crc:
        raise ValueError(f"it has CRC-32C {result} instead of {crc!r:.20} as written")
    return content


def _words(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return printable(", ".join(f"{name} {list(shape)}" for name, shape in sorted(shapes.items())) or "nothing")
