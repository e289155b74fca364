"""Reads of chunk files with errors that say what a user needs to know, and the scrub of a whole generation."""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict, deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.storage.files.disk import disk_error
from penstock.storage.files.errors import UserError
from penstock.storage.files.units import Report, bytes_text
from penstock.storage.tier.arena import empty_aligned
from penstock.storage.tier.chunk import ChunkError, ChunkFormat, check_chunk
from penstock.storage.tier.drives import READ_THREADS, Drive
from penstock.storage.tier.readers import Reader

_MOST_LISTED = 20


@dataclass(frozen=True, slots=True)
class ChunkFile:
    """A chunk file and what it should hold."""

    drive: Drive
    path: Path
    form: ChunkFormat
    payload_bytes: int
    """Bytes of the part, without padding and checksum."""
    crc: int
    """CRC-32C as the manifest has it, or as it was when the file was written."""


def read_chunk_file(reader: Reader, file: ChunkFile, out: torch.Tensor, origin: str) -> None:
    """Read the payload into `out` uint8 [payload_bytes]; UserError naming the file and `origin`, its generation."""
    with _reported(file, origin):
        reader.read(file.path, out, file.form, file.crc)
    file.drive.count(read=file.form.file_bytes)


@contextlib.contextmanager
def _reported(file: ChunkFile, origin: str) -> Iterator[None]:
    """Turn what can go wrong with a chunk file into a UserError."""
    try:
        yield
    except ChunkError as error:
        if not file.path.parent.is_dir():
            raise UserError(
                f"{file.path} ({origin}): the file is missing and so is its folder: is the drive still mounted?"
            ) from error
        raise UserError(
            f"{file.path} ({origin}): {error}; the drive or another program damaged the state; restore a checkpoint, "
            "or start a new run from an exported model"
        ) from error
    except OSError as error:
        raise disk_error(error, file.path, f"reading {file.payload_bytes:,} bytes of {origin}") from error


def scrub(files: Collection[ChunkFile], origin: str, report: Report) -> int:
    """Read the files, READ_THREADS at a time on every drive and all drives at once; returns the bytes read.

    Every byte of every file is checked, by direct I/O into memory of its own. UserError naming every file that is not
    what was written, the first 20 of them.
    """
    work: dict[Drive, deque[ChunkFile]] = defaultdict(deque)
    for file in files:
        work[file.drive].append(file)
    total, largest = sum(file.form.file_bytes for file in files), max((f.form.file_bytes for f in files), default=0)
    damaged: list[str] = []
    count = itertools.count(1)

    def run(queue: deque[ChunkFile]) -> None:
        memory = empty_aligned(largest, torch.uint8).numpy()
        while True:
            try:
                file = queue.popleft()
            except IndexError:
                return
            try:
                with _reported(file, origin):
                    check_chunk(file.path, memory[: file.form.file_bytes], file.form, file.crc)
                file.drive.count(read=file.form.file_bytes)
            except UserError as error:
                damaged.append(str(error))
            report(next(count) / len(files), f"of {bytes_text(total)}")

    futures = [drive.readers.submit(run, queue) for drive, queue in work.items() for _ in range(READ_THREADS)]
    for future in futures:
        future.result()
    if damaged:
        lines = [f"{len(damaged):,} chunk files of {origin} are damaged:"] if len(damaged) > 1 else []
        lines += sorted(damaged)[:_MOST_LISTED]
        lines += [f"... and {len(damaged) - _MOST_LISTED:,} more"] if len(damaged) > _MOST_LISTED else []
        raise UserError("\n".join(lines))
    return total
