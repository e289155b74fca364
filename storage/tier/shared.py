"""Memory that processes of one machine share, and counters in it by which they wait for each other.

It is a memfd: a file without a name, so that nothing is left of it however its processes end.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from penstock.storage.files.errors import BudgetError, UserError
from penstock.storage.files.units import bytes_text

LOOK_S = 0.2
"""Between two looks of a process that waits at whether waiting is of any use."""
_FUTEX = {"x86_64": 202, "aarch64": 98}
"""Number of the system call futex."""
_WAIT, _WAKE = 0, 1
_MBIND = {"x86_64": 237, "aarch64": 235}
"""Number of the system call mbind."""
_INTERLEAVE = 3


class SharedMemory:
    """`nbytes` of zeros at first, mapped by each of its processes. Close it."""

    def __init__(self, fd: int, nbytes: int) -> None:
        """Use `create` or `open`."""
        self.fd, self.nbytes = fd, nbytes
        self.map = mmap.mmap(fd, os.fstat(fd).st_size)
        with contextlib.suppress(OSError):  # a kernel built without them
            self.map.madvise(mmap.MADV_HUGEPAGE)

    @staticmethod
    def create(nbytes: int) -> SharedMemory:
        """In huge pages where enough are reserved (vm.nr_hugepages), and on all NUMA nodes in turns. BudgetError where
        the machine has not so much memory left, of which it takes all at once."""
        with contextlib.suppress(OSError):  # others may take the pages meanwhile
            if size := _in_huge_pages(nbytes):
                return SharedMemory._filled(os.memfd_create("penstock", os.MFD_CLOEXEC | os.MFD_HUGETLB), nbytes, size)
        try:
            if nbytes > (left := _meminfo().get("MemAvailable", 1 << 62)):  # taking it would make the kernel kill
                raise OSError(errno.ENOMEM, f"{bytes_text(left)} are available")
            return SharedMemory._filled(os.memfd_create("penstock", os.MFD_CLOEXEC), nbytes, nbytes)
        except OSError as error:
            raise BudgetError(
                f"budgets.ram: {bytes_text(nbytes)} of memory that GPUs share cannot be had ({error.strerror}); lower "
                "budgets.ram, or stop other programs"
            ) from error

    @staticmethod
    def _filled(fd: int, nbytes: int, size: int) -> SharedMemory:
        """Memory of a file whose `size` is taken at once. Raises OSError."""
        try:
            os.ftruncate(fd, size)
            memory = SharedMemory(fd, nbytes)
            if len(nodes := memory_nodes()) > 1:
                interleave(memory.map, nodes)
            os.posix_fallocate(fd, 0, size)
            return memory
        except OSError:
            os.close(fd)
            raise

    @property
    def name(self) -> str:
        """By which another process of the same user can open it while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    @staticmethod
    def open(name: str, nbytes: int) -> SharedMemory:
        try:
            return SharedMemory(os.open(name, os.O_RDWR | os.O_CLOEXEC), nbytes)
        except OSError as error:
            raise UserError(
                f"{name}: the memory that GPUs share cannot be opened ({error.strerror}); processes of one user must "
                "be able to open each other's files there"
            ) from error

    def close(self) -> None:
        """Views of it that live on stay valid; the memory is free with the last of them."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _meminfo() -> dict[str, int]:
    """Bytes, or numbers of pages, by the kernel's names."""
    found = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        number, _, unit = value.strip().partition(" ")
        found[name] = int(number) * (1024 if unit == "kB" else 1)
    return found


def _in_huge_pages(nbytes: int) -> int:
    """`nbytes` in whole huge pages, where so many are reserved and free; else 0."""
    known = _meminfo()
    page, free = known.get("Hugepagesize", 0), known.get("HugePages_Free", 0) - known.get("HugePages_Rsvd", 0)
    pages = -(-nbytes // page) if page else 0
    return pages * page if 0 < pages <= free else 0


def memory_nodes() -> list[int]:
    """NUMA nodes with memory."""
    try:
        parts = Path("/sys/devices/system/node/has_memory").read_text().strip().split(",")
    except OSError:
        return []
    ends = [(first, last or first) for first, _, last in (part.partition("-") for part in parts) if first]
    return [node for first, last in ends for node in range(int(first), int(last) + 1)]


def interleave(memory: mmap.mmap, nodes: list[int]) -> bool:
    """Have the pages of `memory` that are taken from now on come from all `nodes` in turns: each GPU reads all of it,
    and that of one node would be as fast as that alone. Whether the kernel does so."""
    number = _MBIND.get(platform.machine())
    if number is None or not nodes:
        return False
    words = (ctypes.c_ulong * (max(nodes) // 64 + 1))()
    for node in nodes:
        words[node // 64] |= 1 << node % 64
    view = (ctypes.c_char * len(memory)).from_buffer(memory)
    call, length = ctypes.CDLL(None, use_errno=True).syscall, ctypes.c_ulong(len(memory))
    bits = ctypes.c_ulong(64 * len(words) + 1)
    return bool(call(number, ctypes.byref(view), length, _INTERLEAVE, words, bits, 0) == 0)


class Counters:
    """Counters in shared memory that only ever rise, each written by one process at a time. Any thread may use them."""

    def __init__(self, memory: torch.Tensor, check: Callable[[], None]) -> None:
        """`memory`: uint8, a multiple of eight bytes; `check` raises where there is nothing more to wait for."""
        self._memory, self._check = memory, check
        self._words = (ctypes.c_int64 * (memory.numel() // 8)).from_address(memory.data_ptr())
        self._number = _FUTEX.get(platform.machine())
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        self._fence = threading.Lock()

    def __getitem__(self, index: int) -> int:
        value = int(self._words[index])
        with self._fence:  # what is read from here on was written before the counter was
            return value

    def post(self, index: int, value: int) -> None:
        """Set a counter and wake who waits for it; what was written before can be seen by then."""
        with self._fence:
            pass
        self._words[index] = value
        if self._number is not None:
            self._call(self._number, self._address(index), _WAKE, 2**31 - 1, None, None, 0)

    def wait(self, index: int, value: int) -> None:
        """Return once a counter is no less than `value`; raises what `check` does."""
        while (now := self[index]) < value:
            self._check()
            self._sleep(index, now)

    def _sleep(self, index: int, seen: int) -> None:
        """Return when the counter is no longer `seen`, or after LOOK_S, or for no reason."""
        if self._number is None:
            threading.Event().wait(0.001)
            return
        limit = (ctypes.c_long * 2)(0, int(LOOK_S * 1e9))
        # The lower half of a word changes with it; all machines of the table are little-endian.
        expected = ctypes.c_int32(seen & 0xFFFFFFFF)
        self._call(self._number, self._address(index), _WAIT, expected, ctypes.byref(limit), None, 0)

    def _address(self, index: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(ctypes.addressof(self._words) + 8 * index)
