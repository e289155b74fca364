"""How chunk files reach memory: one protocol, three readers.

`direct` is our own direct I/O into host memory (storage/tier/chunk.py), two to four times as fast as tensorstore's
(docs/decisions/nvme-io.md). `kvikio` reads into CUDA tensors with no host memory of ours in between. `tensorstore`
reads the same files as the zarr3 chunks that they are, wherever it runs.
"""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from penstock.storage.files.crc import checksum
from penstock.storage.files.errors import UserError
from penstock.storage.tier import chunk
from penstock.storage.tier.drives import READ_THREADS
from penstock.storage.tier.filesystem import existing

CHOICES = ("auto", "kvikio", "direct", "tensorstore")


class Reader(Protocol):
    """Reads one chunk file; called from several threads at once."""

    name: str
    """direct, kvikio or tensorstore."""

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

    def pinned_bytes(self, num_drives: int) -> int:
        """Pinned host memory that the device's reader may take for itself, beside any arena."""
        return self.device.pinned_bytes(num_drives) if isinstance(self.device, KvikioReader) else 0

    def confirm(
        self, out: torch.Tensor, folders: Sequence[Path], on_thread_start: Callable[[], None] | None = None
    ) -> Readers:
        """These readers, or without the device's where it cannot read into `out` here: `warning` then says why.

        `out` is memory that the run itself will read into, uint8 [bytes of a part], as what can be read into depends on
        its allocator; its content is lost. A file of that size is written to each of `folders`, or the nearest folder
        above it, and read back by a thread that calls `on_thread_start` first: threads that the reader keeps are begun
        there and inherit its cores.
        """
        reader = self.device
        if reader is None or reader is self.host:
            return self
        form = chunk.ChunkFormat(out.numel())
        data = torch.arange(-(-out.numel() // 4), dtype=torch.int32).view(torch.uint8)[: out.numel()]  # nothing repeats
        try:
            with ThreadPoolExecutor(1, thread_name_prefix="nvme-probe", initializer=on_thread_start) as thread:
                for folder in folders:
                    path = existing(folder) / f".probe-{os.getpid()}.tmp"
                    try:
                        chunk.write_chunk(path, data.numpy(), form, direct=False)
                        out.zero_()
                        if out.is_cuda:
                            torch.cuda.synchronize(out.device)  # the zeros must not arrive after the data
                        thread.submit(reader.read, path, out, form, None).result()
                        if not torch.equal(out.cpu(), data):
                            raise OSError(errno.EIO, "a test file was read back with different bytes", str(path))
                    finally:
                        path.unlink(missing_ok=True)
        except Exception as error:  # of a library or driver, out of room, no permission: each has its own type
            return _without_device(self.host, error)
        return self


class DirectReader:
    """Our own direct I/O into host memory: no copy, checksum in hardware."""

    name = "direct"

    def read(self, path: Path, out: torch.Tensor, form: chunk.ChunkFormat, expected: int | None) -> None:
        """See Reader; direct where `out` starts at a 4 KiB address and the file system allows it."""
        chunk.read_chunk(path, out.numpy(), form, direct=True, expected=expected)


class TensorstoreReader:
    """tensorstore's zarr3 driver, whose `crc32c` codec checks the payload."""

    name = "tensorstore"

    def __init__(self) -> None:
        import tensorstore

        self._ts: Any = tensorstore
        self._context = tensorstore.Context(
            {
                "file_io_concurrency": {"limit": READ_THREADS},  # one chunk file is one request
                "file_io_mode": {"mode": "direct"},  # possible because every file is a whole number of blocks
                "cache_pool": {"total_bytes_limit": 0},  # a chunk is read once, and would count against no budget
            }
        )

    def read(self, path: Path, out: torch.Tensor, form: chunk.ChunkFormat, expected: int | None) -> None:
        """See Reader. `path` is c.P.0 in the folder of an array, beside its zarr.json."""
        stored = chunk.stored_checksum(path, form, out.numel())
        kvstore = {"driver": "file", "path": f"{path.parent}/"}
        spec = {"driver": "zarr3", "kvstore": kvstore, "fill_missing_data_reads": False}
        try:
            array = self._ts.open(spec, open=True, read=True, context=self._context).result()
            target = out.numpy().view(array.dtype.numpy_dtype)
            if (array.chunk_layout.read_chunk.shape or ())[1:] != (form.stored_bytes // target.itemsize,):
                raise chunk.ChunkError(f"{path.parent / 'zarr.json'} describes another array")
            self._ts.array(target).write(array[int(path.name.split(".")[1]), : target.size]).result()
        except ValueError as error:  # its only type, whether the system refused or the data is damaged
            text = _first_line(error).split(" [tensorstore_spec=")[0]
            if code := re.search(r"os_error_code='(\d+)'", str(error)):
                raise OSError(int(code[1]), text) from error
            what = "checksum mismatch" if "Digest mismatch" in text else "damaged"
            raise chunk.ChunkError(f"{what} ({text})") from error
        chunk.require_expected(stored, expected)  # the codec has compared the payload with `stored`


class KvikioReader:
    """kvikio's CuFile: from the drive into CUDA memory, by GPUDirect Storage where the machine has it.

    Elsewhere kvikio's compatibility mode reads into small pinned buffers of its own and copies from there. A read
    returns when the data has arrived, on whatever stream; the caller sees to it that `out` is free. The data is copied
    back through a small pinned piece of host memory for its checksum, so that the read itself finds damage.
    """

    name = "kvikio"
    num_threads = 16
    """Tasks in flight (for each drive): the queue depth that an NVMe drive wants with tasks of this size."""
    task_bytes = 4 << 20
    """Most bytes of one task, and size of the pinned buffer that it passes through in compatibility mode."""
    checked_bytes = 1 << 20
    """What is copied back at once for its checksum, by each of the threads that read."""

    def __init__(self) -> None:
        """Raises whatever importing kvikio raises where it is missing or finds no CUDA."""
        # Only from the environment, and read once, when the library is loaded.
        os.environ.setdefault("KVIKIO_THREAD_POOL_PER_BLOCK_DEVICE", "1")
        import kvikio
        import kvikio.defaults

        self._kvikio: Any = kvikio
        self._own = threading.local()
        self._kvikio.defaults.set(
            {
                "num_threads": self.num_threads,
                "task_size": self.task_bytes,
                "bounce_buffer_size": self.task_bytes,
                "auto_direct_io_read": True,
            }
        )

    @property
    def gpudirect(self) -> bool:
        """Whether data goes from drive to GPU without passing through host memory."""
        return not self._kvikio.defaults.is_compat_mode_preferred()

    def pinned_bytes(self, num_drives: int) -> int:
        """Pinned host memory beside any arena: for checksums, and without GPUDirect what kvikio takes for itself."""
        bounced = 0 if self.gpudirect else self.num_threads * self.task_bytes
        return num_drives * (READ_THREADS * self.checked_bytes + bounced)

    def read(self, path: Path, out: torch.Tensor, form: chunk.ChunkFormat, expected: int | None) -> None:
        """See Reader; `out` may also be host memory, which needs CUDA all the same."""
        stored = chunk.stored_checksum(path, form, out.numel())
        buffer: Any = out if out.is_cuda else out.numpy()
        try:
            with self._kvikio.CuFile(str(path), "r") as file:
                count = file.pread(buffer, out.numel(), 0).get()
        except RuntimeError as error:  # kvikio's only type, whatever failed
            text = re.sub(r"\S*\.[ch]pp:\d+: ", "", _first_line(error))  # its own source line
            raise OSError(errno.EIO, f"kvikio: {text}", str(path)) from error
        if count != out.numel():
            raise chunk.ChunkError(f"the read ended after {count:,} of {out.numel():,} bytes")
        if not hasattr(self._own, "piece"):  # this thread's
            self._own.piece = torch.empty(self.checked_bytes, dtype=torch.uint8, pin_memory=True)
            self._own.stream = torch.cuda.Stream(priority=-1)  # of another pool than the lanes' streams
        result = 0
        with torch.cuda.stream(self._own.stream):
            for part in out.split(self.checked_bytes):
                piece = self._own.piece[: part.numel()].copy_(part)
                result = checksum(piece.numpy().data, before=result)
        chunk.require_sum(checksum(memoryview(b""), form.stored_bytes - out.numel(), result), stored)
        chunk.require_expected(stored, expected)


def find_readers(choice: str, device: torch.device) -> Readers:
    """The readers for a run on `device`, as far as they can be known before it has memory there: `Readers.confirm`.

    `choice` is one of CHOICES (UserError). `auto` and `kvikio` read into CUDA memory with kvikio where it can be
    imported; where not, reads pass through host memory and `warning` says why.
    """
    if choice not in CHOICES:
        raise UserError(f"storage.reader: {choice!r} is not one of {', '.join(CHOICES)}")
    host: Reader = TensorstoreReader() if choice == "tensorstore" else DirectReader()
    if device.type == "cpu":
        why = "storage.reader: kvikio reads into CUDA memory, but this run computes on the CPU; using direct instead"
        return Readers(host, host, why if choice == "kvikio" else None)
    if choice not in ("auto", "kvikio"):
        return Readers(host, None)
    try:
        return Readers(host, KvikioReader())
    except Exception as error:  # a missing package or library: each has its own type
        return _without_device(host, error)


def select_readers(choice: str, device: torch.device, folders: Sequence[Path]) -> Readers:
    """What `find_readers` finds, confirmed in memory of its own: for measurements, whose allocator is torch's."""
    result = find_readers(choice, device)
    if result.device is None or result.device is result.host:
        return result
    try:
        memory = torch.empty(1 << 20, dtype=torch.uint8, device=device)
    except Exception as error:  # no such device, no memory left
        return _without_device(result.host, error)
    return result.confirm(memory, folders)


def _without_device(host: Reader, error: Exception) -> Readers:
    why = error.strerror if isinstance(error, OSError) and error.strerror else _first_line(error)
    why += "; install it with: pip install 'penstock[gpu]'" if isinstance(error, ImportError) else ""
    return Readers(host, None, f"kvikio is not used; reads to the GPU go through host memory ({host.name}): {why}")


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or "no message").splitlines()[0]
