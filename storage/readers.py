"""How chunk files reach memory: one protocol, several readers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from storage import chunk


class Reader(Protocol):
    """Reads one chunk file; called from several threads at once."""

    name: str
    """direct, tensorstore or kvikio."""

    def read(self, path: Path, out: torch.Tensor, form: chunk.ChunkFormat, expected: int | None) -> None:
        """Read the payload of chunk file `path` into `out` uint8 [payload bytes], contiguous; returns when it is there.

        `expected` is the chunk's CRC-32C where the manifest knows it. ChunkError on a missing, truncated, damaged or
        stale file (`out` then holds garbage), OSError on a failing disk.
        """
        ...


@dataclass(frozen=True, slots=True)
class Readers:
    """Which reader serves which memory."""

    host: Reader
    device: Reader | None
    """Straight into tensors of the compute device; None where reads must pass through host memory."""
    warning: str | None = None
    """Why a better reader is not used."""


class DirectReader:
    """Our own direct I/O into host memory: no copy, checksum in hardware."""

    name = "direct"

    def __init__(self, *, direct: bool) -> None:
        self._direct = direct

    def read(self, path: Path, out: torch.Tensor, form: chunk.ChunkFormat, expected: int | None) -> None:
        """See Reader; direct where `out` starts at a 4 KiB address."""
        chunk.read_chunk(path, out.numpy(), form, direct=self._direct, expected=expected)
