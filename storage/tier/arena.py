"""One allocation for all host memory that blocks live in, carved into slots."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from penstock.storage.files.errors import BudgetError
from penstock.storage.files.units import bytes_text

PAGE_BYTES = 4096
PIECE_BYTES = 64 << 30
"""Most of one registration, unless one slot is larger: few are quick to look up, one huge one fails as a whole."""
MOST_BYTES = 512 << 30
"""The driver refuses to register this much in one call, or more."""
_STEP_BYTES = 256 << 20
"""What one thread pages in at once."""
_PAGE_IN_THREADS = 16
_UNKNOWN_BYTES = 64
_MADV_POPULATE_WRITE = 23
RING_PIECE_BYTES = (8 << 20) - PAGE_BYTES
"""What is copied at once through the ring of an arena that is not pinned: a third of a millisecond of a PCIe 4 link.
Less a page, as torch's pinned allocator rounds up to a power of two."""

Progress = Callable[[int, int], None]
"""Told how many bytes of how many are done."""


class CudaRegistrar:
    """Makes ranges of host memory known to the GPU's driver, which pins them."""

    def register(self, address: int, nbytes: int) -> int:
        """Pin a range; 0, or the driver's error code."""
        code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
        if code != 0:
            with contextlib.suppress(RuntimeError):  # the thread's last error, or its next launch would seem to fail
                torch.zeros(1, device="cuda")
        return code

    def unregister(self, address: int) -> None:
        """Undo `register`."""
        torch.cuda.cudart().cudaHostUnregister(address)


class HostArena:
    """A mapping of `capacity_bytes`, carved into slots, then pinned for the GPU by `pin`: private and anonymous, or
    memory that processes share, each of which carves the same slots.

    Slots live as long as the arena. One costs its size rounded up to a page; torch's pinned allocator rounds up to a
    power of two. Nothing is resident before it is touched or pinned.
    """

    def __init__(self, capacity_bytes: int, *, budget_bytes: int, memory: mmap.mmap | None = None):
        """Map the arena, unless it is to be in `memory`; BudgetError when `capacity_bytes` exceeds `budget_bytes`."""
        if capacity_bytes > budget_bytes:
            raise BudgetError(
                f"budgets.ram: pinned RAM needs {capacity_bytes:,} bytes and the budget is {budget_bytes:,}; "
                "raise budgets.ram, or keep more blocks on NVMe"
            )
        assert capacity_bytes > 0, capacity_bytes
        self.capacity_bytes = page_up(capacity_bytes)
        self.slots: dict[str, int] = {}
        self.used_bytes = 0
        """Bytes carved so far, page padding included."""
        self._map = memory or _map_memory(self.capacity_bytes)
        self._bytes: torch.Tensor | None = torch.frombuffer(self._map, dtype=torch.uint8)
        self._registrar: CudaRegistrar | None = None
        self._registered: list[int] = []
        self._ring: tuple[_Ring, _Ring] | None = None
        """To the GPU and from it, where the arena could not be pinned."""
        self.remark: str | None = None
        """What the user should know about pinning."""

    @property
    def pinned(self) -> bool:
        return bool(self._registered)

    def slot(self, name: str, nbytes: int) -> torch.Tensor:
        """Carve a slot: uint8 [nbytes], its address a multiple of 4 KiB. BudgetError when the arena is full.

        Each is a storage of its own: autograd and torch.compile take tensors that share one for views of one another.
        """
        assert self._bytes is not None, "the arena is closed"
        assert not self._registered, "the arena is pinned already"
        assert name not in self.slots, f"slot {name} carved twice"
        assert nbytes > 0, (name, nbytes)
        start = self.used_bytes
        free = self.capacity_bytes - start
        if nbytes > free:
            raise BudgetError(
                f"host arena: slot '{name}' needs {nbytes:,} bytes and {free:,} of {self.capacity_bytes:,} are free; "
                "raise budgets.ram"
            )
        self.used_bytes += page_up(nbytes)
        self.slots[name] = nbytes
        return torch.frombuffer(self._map, dtype=torch.uint8, offset=start, count=nbytes)

    def pin(self, registrar: CudaRegistrar | None = None, on_progress: Progress | None = None) -> None:
        """Page all slots in and register them, once all are carved; or make the ring, where the driver refuses that.

        Paging in takes long, so it is done from as many threads as the calling one has cores, on its NUMA node.
        """
        assert self._bytes is not None, "the arena is closed"
        assert not self._registered, "pinned twice"
        self._registrar = registrar or CudaRegistrar()
        base, total = self._bytes.data_ptr(), self.used_bytes
        try:
            with _paging(base, total, on_progress) as wait:
                for offset, nbytes in cut_pieces([page_up(nbytes) for nbytes in self.slots.values()]):
                    wait(offset + nbytes)
                    code = self._registrar.register(base + offset, nbytes)
                    if code != 0:
                        wait(total)
                        self._make_ring(code, offset)
                        break
                    self._registered.append(base + offset)
        except BaseException:
            self.close()
            raise

    def _make_ring(self, code: int, pinned_bytes: int) -> None:
        """Pieces for `copy`, in place of `pinned_bytes` that the driver has pinned before it refused the rest."""
        self._unpin()
        piece_bytes = min(RING_PIECE_BYTES, page_up(max(self.slots.values())))
        try:
            self._ring = _Ring(piece_bytes), _Ring(piece_bytes)
        except RuntimeError as error:
            raise BudgetError(
                f"cannot pin even {bytes_text(4 * piece_bytes)} of RAM (cudaHostRegister error {code}; "
                f"{str(error).partition(chr(10))[0]}): end what else uses this GPU"
            ) from error
        self.remark = (
            f"the driver cannot pin {bytes_text(self.used_bytes)} of RAM (cudaHostRegister error {code} after "
            f"{bytes_text(pinned_bytes)}): copies between RAM and GPU go through {bytes_text(4 * piece_bytes)} of "
            "pinned memory, slower than planned and with more work for the CPU; a lower budget of RAM (budgets.ram, "
            "--ram) may fit what can be pinned"
        )

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy to or from slots in the order of the calling thread's stream: copy_(non_blocking=True) where they are
        pinned. Through the ring the host's side of it is over when this returns; tensors are contiguous, of one dtype.
        """
        if self._ring is not None and self.holds(target):
            self._ring[1].to_host(_flat(target), _flat(source))
        elif self._ring is not None and self.holds(source):
            self._ring[0].to_gpu(_flat(target), _flat(source))
        else:
            target.copy_(source, non_blocking=True)

    def holds(self, tensor: torch.Tensor) -> bool:
        assert self._bytes is not None, "the arena is closed"
        return 0 <= tensor.data_ptr() - self._bytes.data_ptr() < self.capacity_bytes

    def _unpin(self) -> None:
        for address in self._registered:
            assert self._registrar is not None
            self._registrar.unregister(address)
        self._registered.clear()

    def close(self) -> None:
        """Unpin the arena and give its memory back. A view that outlives it reads zeros and crashes nothing."""
        if self._bytes is None:
            return
        self._unpin()
        self._ring = None
        self._map.madvise(mmap.MADV_DONTNEED)
        self._bytes = None


def cut_pieces(slot_bytes: Sequence[int]) -> list[tuple[int, int]]:
    """(offset, bytes) of the ranges in which slots of these sizes, end to end, are registered with the GPU's driver.

    A copy whose host range spans two registrations fails ("invalid argument"), so a range ends only where a slot ends.
    BudgetError for a slot that no registration can hold.
    """
    pieces: list[tuple[int, int]] = []
    start = end = 0
    for nbytes in slot_bytes:
        if nbytes >= MOST_BYTES:
            raise BudgetError(
                f"one slot of host memory needs {nbytes:,} bytes, and CUDA pins less than {MOST_BYTES:,} at once; "
                "lower train.chunk_tokens or data.sequence_length, or keep this block on NVMe"
            )
        if end > start and end + nbytes - start > PIECE_BYTES:
            pieces.append((start, end - start))
            start = end
        end += nbytes
    return [*pieces, (start, end - start)] if end > start else pieces


class _Ring:
    """Two pinned pieces, through which bytes of pageable memory go one way: while the link carries one, the host fills
    or empties the other."""

    def __init__(self, piece_bytes: int) -> None:
        self._lock, self._size = threading.Lock(), piece_bytes
        self._pieces = [pinned_empty(piece_bytes, torch.uint8) for _ in range(2)]
        self._over: list[torch.cuda.Event | None] = [None, None]
        """The last copy of each piece, on whichever stream it was."""

    def to_gpu(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """uint8 [n] each; `source` has been read when this returns."""
        with self._lock:
            for i, (there, here) in enumerate(zip(target.split(self._size), source.split(self._size), strict=True)):
                self._wait(i % 2)
                there.copy_(self._pieces[i % 2][: here.numel()].copy_(here), non_blocking=True)
                self._mark(i % 2)

    def to_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """uint8 [n] each; `target` is complete when this returns."""
        with self._lock:
            targets = target.split(self._size)
            for i, here in enumerate((*source.split(self._size), None)):
                if here is not None:
                    self._pieces[i % 2][: here.numel()].copy_(here, non_blocking=True)
                    self._mark(i % 2)
                if i:  # the one before, meanwhile
                    self._wait(1 - i % 2)
                    targets[i - 1].copy_(self._pieces[1 - i % 2][: targets[i - 1].numel()])

    def _wait(self, piece: int) -> None:
        if (over := self._over[piece]) is not None:
            over.synchronize()

    def _mark(self, piece: int) -> None:
        over = self._over[piece] = self._over[piece] or torch.cuda.Event(blocking=True)
        over.record()


@contextlib.contextmanager
def _paging(address: int, nbytes: int, on_progress: Progress | None) -> Iterator[Callable[[int], None]]:
    """Makes a fresh mapping resident, in ascending order; gives a function that waits until so many bytes are."""
    reached = 0

    def wait(end: int) -> None:
        nonlocal reached
        while reached < end:
            left.popleft().result()
            reached = min(reached + _STEP_BYTES, nbytes)
            if on_progress is not None:
                on_progress(reached, nbytes)

    threads = min(_PAGE_IN_THREADS, len(os.sched_getaffinity(0)))
    pool = ThreadPoolExecutor(threads, thread_name_prefix="page-in")
    steps = range(0, nbytes, _STEP_BYTES)
    left = deque(pool.submit(_page_in, address + start, min(_STEP_BYTES, nbytes - start)) for start in steps)
    try:
        yield wait
    finally:
        pool.shutdown(cancel_futures=True)


def _page_in(address: int, nbytes: int) -> None:
    """Make fresh memory resident without holding the interpreter's lock. BudgetError where there is none left."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _MADV_POPULATE_WRITE) == 0:
        return
    code = ctypes.get_errno()
    if code == errno.ENOMEM:
        raise BudgetError(
            f"no RAM is left that can be pinned ({os.strerror(code)}); lower budgets.ram, or stop other programs"
        )
    ctypes.memset(address, 0, nbytes)  # a kernel before 5.14


def pinned_empty(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor [numel] of pinned memory, outside any arena. Who frees it has waited for its copies.

    It begins behind the start of torch's allocation, by which torch would know it, note its copies, and ask the GPU
    about them when it is freed; where the GPU has failed by then, that ends the process.
    """
    whole = torch.empty(_UNKNOWN_BYTES + numel * dtype.itemsize, dtype=torch.uint8, pin_memory=True)
    return torch.from_numpy(whole.numpy()[_UNKNOWN_BYTES:]).view(dtype)


def empty_aligned(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor [numel], outside any arena and its budget, at a 4 KiB address as direct I/O wants it."""
    memory = _map_memory(max(numel * dtype.itemsize, 1))
    return torch.frombuffer(memory, dtype=dtype, count=numel) if numel else torch.empty(0, dtype=dtype)


def _map_memory(nbytes: int) -> mmap.mmap:
    """Private anonymous memory, in huge pages where the kernel has them: direct I/O reads into those twice as fast
    (docs/results/storage.md), as a request is a list of segments of limited length."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def page_up(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
