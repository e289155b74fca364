"""One allocation for all host memory that blocks live in, carved into slots."""

from __future__ import annotations

import contextlib
import mmap
from typing import Any

import torch

from storage.errors import BudgetError

PAGE_BYTES = 4096
_REGISTER_BYTES = 1 << 30
"""Pinning goes in pieces of this size: one huge registration blocks the driver for seconds and fails as a whole."""


class HostArena:
    """A private anonymous mapping of `capacity_bytes`, pinned for the GPU when `pin`.

    Slots are carved once and live as long as the arena. torch's own pinned allocator rounds every allocation up to a
    power of two; here a slot costs its size rounded up to a page. Nothing is resident before it is touched (unless
    pinned), and nothing here touches it.
    """

    def __init__(self, capacity_bytes: int, *, budget_bytes: int, pin: bool):
        """Map the arena; BudgetError when `capacity_bytes` exceeds `budget_bytes`."""
        if capacity_bytes > budget_bytes:
            raise BudgetError(
                f"budgets.ram: the host arena needs {capacity_bytes:,} bytes and the budget is {budget_bytes:,}; "
                "raise budgets.ram, or let more blocks live on NVMe"
            )
        assert capacity_bytes > 0, capacity_bytes
        self.capacity_bytes = _page_up(capacity_bytes)
        self.slots: dict[str, int] = {}
        self._offset = 0
        self._map = _map_memory(self.capacity_bytes)
        self._bytes: torch.Tensor | None = torch.frombuffer(self._map, dtype=torch.uint8)
        self._registered: list[int] = []
        if pin:
            self._register()

    @property
    def used_bytes(self) -> int:
        """Bytes carved so far, page padding included."""
        return self._offset

    @property
    def pinned(self) -> bool:
        """Whether the arena is registered with CUDA."""
        return bool(self._registered)

    def slot(self, name: str, nbytes: int) -> torch.Tensor:
        """Carve a slot: uint8 [nbytes], its address a multiple of 4 KiB. BudgetError when the arena is full.

        Each slot is a storage of its own to torch: autograd and torch.compile take tensors that share a storage for
        views of one another.
        """
        assert self._bytes is not None, "the arena is closed"
        assert name not in self.slots, f"slot {name} carved twice"
        assert nbytes > 0, (name, nbytes)
        free = self.capacity_bytes - self._offset
        if nbytes > free:
            raise BudgetError(
                f"host arena: slot '{name}' needs {nbytes:,} bytes and {free:,} of {self.capacity_bytes:,} are free; "
                "raise budgets.ram"
            )
        start = self._offset
        self._offset += _page_up(nbytes)
        self.slots[name] = nbytes
        return torch.frombuffer(self._map, dtype=torch.uint8, offset=start, count=nbytes)

    def close(self) -> None:
        """Unpin the arena and give its memory back; what slots held is lost.

        The address range itself goes when the last slot's tensor does, so a view that outlives the arena reads zeros
        and cannot crash the process.
        """
        if self._bytes is None:
            return
        for address in self._registered:
            _cudart().cudaHostUnregister(address)
        self._registered.clear()
        self._map.madvise(mmap.MADV_DONTNEED)
        self._bytes = None

    def _register(self) -> None:
        assert self._bytes is not None
        base = self._bytes.data_ptr()
        for offset in range(0, self.capacity_bytes, _REGISTER_BYTES):
            size = min(_REGISTER_BYTES, self.capacity_bytes - offset)
            code = int(_cudart().cudaHostRegister(base + offset, size, 0))
            if code != 0:
                self.close()
                raise BudgetError(
                    f"cannot pin {self.capacity_bytes:,} bytes of RAM (cudaHostRegister error {code} after "
                    f"{offset:,} bytes); raise the memlock limit (ulimit -l) or lower budgets.ram"
                )
            self._registered.append(base + offset)


def empty_aligned(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor [numel] that starts at a 4 KiB address, outside any arena and its budget.

    torch.empty does not align to pages, and direct I/O needs it. For what happens once: import, export, verification.
    """
    memory = _map_memory(max(numel * dtype.itemsize, 1))
    return torch.frombuffer(memory, dtype=dtype, count=numel) if numel else torch.empty(0, dtype=dtype)


def _map_memory(nbytes: int) -> mmap.mmap:
    """Private anonymous memory, in huge pages where the kernel has them.

    Direct I/O reads into huge pages twice as fast (docs/results/storage.md): a request is a list of memory segments of
    limited length, and with pages of 4 KiB it holds 1 MiB at most.
    """
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _page_up(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def _cudart() -> Any:
    return torch.cuda.cudart()
