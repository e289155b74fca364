"""What of this machine a run may really use: memory, GPU memory and disk that are free, less a stated reserve.

RAM is the least of what the kernel calls available, of what every control group above this process leaves (batch
systems and containers), of what `ulimit -v` leaves and, where the kernel promises no more than it has, of its promise.
Memory of NUMA nodes without CPUs does not count: where GPU and CPU share an address space (GH200) the GPU's own memory
is such a node, and the kernel's sums contain it. Swap never counts: state that is swapped is slower than state on NVMe.
RLIMIT_MEMLOCK (`ulimit -l`) is not among them: it binds mlock, while CUDA's driver pins pages by its own means; where
that fails all the same, the arena says so.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from penstock.storage.files.errors import used_up
from penstock.storage.tier.filesystem import existing, mount_of

GIB = 2**30
ROOT = Path("/")
"""Where files of the kernel are read; tests read others."""

RAM_RESERVE = (2 * GIB, 0.08, 48 * GIB)
"""Least bytes, share of all RAM, most bytes left to the system, to this process itself and to its compilers."""
UNIFIED_RESERVE = (4 * GIB, 0.12, 24 * GIB)
"""The same where the GPU has no memory of its own: what it took cannot be swapped, and the machine would freeze."""
GPU_RESERVE = (768 * 2**20, 0.03, 4 * GIB)
"""Left for what CUDA loads later (kernels, libraries) and for what else uses this GPU."""
DISK_RESERVE = (1 * GIB, 0.02, 64 * GIB)
"""Left for logs, checkpoints of the tokenizer and the file system itself."""
GPU_TIER_SHARE = 0.4
"""Of memory that both tiers share: without a GPU, or with one that has no memory of its own."""

_NO_LIMIT = 2**62
"""Control groups of version 1 say this, or a page less, where they set no limit."""


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Memory that can still be allocated."""

    free_bytes: int
    total_bytes: int
    """Of whatever sets the limit."""
    where: str
    """What sets the limit, in words."""


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A control group that counts memory, of either version."""

    folder: Path
    version: int

    def limit_bytes(self) -> int | None:
        """What the group and all below it may use; None where it sets no limit."""
        names = ("memory.max", "memory.high") if self.version == 2 else ("memory.limit_in_bytes",)
        limits = [limit for name in names if (limit := _number(self.folder / name)) is not None and limit < _NO_LIMIT]
        return min(limits, default=None)

    def used_bytes(self) -> int:
        """What is charged to it, file cache included."""
        return _number(self.folder / ("memory.current" if self.version == 2 else "memory.usage_in_bytes")) or 0

    def cache_bytes(self) -> int:
        """Clean file cache in it, which the kernel takes back before it kills anything."""
        prefix, dirty = (
            ("", ("file_dirty", "file_writeback")) if self.version == 2 else ("total_", ("dirty", "writeback"))
        )
        values = _table(self.folder / "memory.stat")
        clean = values.get(f"{prefix}inactive_file", 0) + values.get(f"{prefix}active_file", 0)
        return max(0, clean - sum(values.get(prefix + name, 0) for name in dirty))


def memory_groups() -> list[MemoryGroup]:
    """The control groups that count this process's memory, its own first."""
    return [MemoryGroup(*group) for group in control_groups("memory", ("memory",))]


def control_groups(controller: str, mounts: Sequence[str]) -> list[tuple[Path, int]]:
    """(folder, version) of the control groups of this process that may limit what `controller` does, its own first;
    version 1 mounts it under the names `mounts`."""
    result: dict[Path, int] = {}
    for line in lines_of(ROOT / "proc/self/cgroup"):
        number, controllers, own = line.split(":", 2)
        is_second = number == "0" and not controllers
        for mount in ("",) if is_second else mounts if controller in controllers.split(",") else ():
            top = (ROOT / "sys/fs/cgroup" / mount).resolve()
            # A container may see its own group as the top, while the path is still the host's.
            inside = top.joinpath(own.lstrip("/")).resolve()
            folder = inside if inside.is_dir() and inside.is_relative_to(top) else top
            while folder.is_relative_to(top):
                result.setdefault(folder, 2 if is_second else 1)
                folder = folder.parent
    return list(result.items())


def free_memory(groups: list[MemoryGroup] | None = None, *, enough_bytes: int | None = None) -> FreeMemory:
    """Memory that this process can still allocate without swapping and without being killed.

    `groups`: what `memory_groups` found, where it is called often. `enough_bytes`: a group's file cache, which the
    kernel counts slowly, is looked at only where less than this is free without it.
    """
    result = list(_machine_memory())
    for group in memory_groups() if groups is None else groups:
        limit = group.limit_bytes()
        if limit is None:
            continue
        free = limit - group.used_bytes()
        if enough_bytes is None or free < enough_bytes:
            free += group.cache_bytes()
        result.append(FreeMemory(max(0, free), limit, f"the memory limit of control group {group.folder}"))
    return min(result, key=lambda each: each.free_bytes)


def total_memory() -> int:
    """RAM in bytes that this process could have with nothing else running: the machine's, or a group's limit."""
    limits = (group.limit_bytes() for group in memory_groups())
    return min([machine_memory(), *(limit for limit in limits if limit is not None)])


def machine_memory() -> int:
    """RAM in bytes that the machine has: all but what NUMA nodes without CPUs hold, whoever may use how much of it."""
    total = _table(ROOT / "proc/meminfo")["MemTotal"] * 1024
    return total - sum(node["MemTotal"] for node in _nodes_without_cpus())


def _nodes_without_cpus() -> list[dict[str, int]]:
    """What the kernel says of each NUMA node that has memory and no CPU, in bytes; none where all have none."""
    return [_node_memory(folder) for folder in _folders_without_cpus(ROOT)]


@cache
def _folders_without_cpus(root: Path) -> tuple[Path, ...]:
    """The sysfs folders of those nodes: listed once, as memory is looked at while a run runs."""
    bare, others = list[Path](), 0
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        if not _node_memory(folder).get("MemTotal"):
            continue
        if (folder / "cpulist").is_file() and not any(lines_of(folder / "cpulist")):
            bare.append(folder)
        else:
            others += 1
    return tuple(bare) if others else ()


def _node_memory(folder: Path) -> dict[str, int]:
    rows = (line.split(maxsplit=2)[-1] for line in lines_of(folder / "meminfo"))  # Node 0 MemTotal:   123 kB
    return {name: kib * 1024 for name, kib in _pairs(rows).items()}


_AVAILABLE = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
"""What MemAvailable is made of, less some of it that the kernel keeps."""


def _machine_memory() -> Iterator[FreeMemory]:
    values = {name: kib * 1024 for name, kib in _table(ROOT / "proc/meminfo").items()}
    total, free, where = values["MemTotal"], values["MemAvailable"], "this machine's memory"
    if bare := _nodes_without_cpus():
        total -= sum(node["MemTotal"] for node in bare)
        free = max(0, free - sum(node.get(name, 0) for node in bare for name in _AVAILABLE))
        where += f" without the NUMA node{'s' if len(bare) > 1 else ''} that no CPU is on"
    yield FreeMemory(free, total, where)
    if _number(ROOT / "proc/sys/vm/overcommit_memory") == 2:
        promise = values["CommitLimit"]
        yield FreeMemory(max(0, promise - values["Committed_AS"]), promise, "vm.overcommit_memory=2 (CommitLimit)")
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        pages = int(next(lines_of(ROOT / "proc/self/statm")).split()[0])
        yield FreeMemory(max(0, limit - pages * resource.getpagesize()), limit, "ulimit -v")


def reserve_bytes(reserve: tuple[int, float, int], total_bytes: int, free_bytes: int) -> int:
    """What is left unused of `free_bytes`: a share of the total between two bounds, and never more than half."""
    least, share, most = reserve
    return min(max(least, int(total_bytes * share)), most, free_bytes // 2)


def free_disk(folder: Path) -> int:
    """Bytes that this user can still write below `folder` (or its nearest existing parent), less a reserve: free
    blocks, user's and group's quota; projects' quotas (XFS, ext4) are in the file system's own answer."""
    folder_path = existing(folder.expanduser())
    status = os.statvfs(folder_path)
    free = status.f_bavail * status.f_frsize
    device = mount_of(folder_path).source
    info = os.stat(folder_path)
    owners = ((_USER, os.geteuid()), (_GROUP, info.st_gid if info.st_mode & 0o2000 else os.getegid()))
    for kind, owner in owners:
        left = _quota_left(device, kind, owner)
        free = free if left is None else min(free, left)
    return free - reserve_bytes(DISK_RESERVE, status.f_blocks * status.f_frsize, free)


_USER, _GROUP = 0, 1
_GET_QUOTA = 0x800007
_QUOTA_BYTES, _QUOTA_BLOCK_BYTES = 72, 1024
"""Of the struct if_dqblk of quotactl(2): hard and soft limit in such blocks, bytes used, and what is not needed."""


def give_back_memory() -> None:
    """Let the kernel have what this process has freed, cycles of objects included, where the C library can."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _quota_left(device: str, kind: int, owner: int) -> int | None:
    """Bytes left of an owner's quota on a block device; None where there is none, or none that one may ask for."""
    quota = ctypes.create_string_buffer(_QUOTA_BYTES)
    try:
        call = ctypes.CDLL(None).quotactl
    except (OSError, AttributeError):
        return None
    command = ctypes.c_int(_GET_QUOTA << 8 | kind)
    if call(command, os.fsencode(device), ctypes.c_int(owner), quota) != 0:
        return None
    *blocks, used_bytes = struct.unpack_from("3Q", quota)
    limits = [limit * _QUOTA_BLOCK_BYTES for limit in blocks if limit]
    return max(0, min(limits) - used_bytes) if limits else None


def lines_of(path: Path) -> Iterator[str]:
    """None where the kernel has no such file; OSError where it may have one, and no file can be opened any more."""
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        if used_up(error) is not None:
            raise
        return
    yield from filter(None, text.splitlines())


def _number(path: Path) -> int | None:
    """The number that a file of the kernel holds; None where it is missing or holds a word (max)."""
    text = next(lines_of(path), "").strip()
    return int(text) if text.isdigit() else None


def _table(path: Path) -> dict[str, int]:
    """Lines of `name value` or `name: value kB`."""
    return _pairs(lines_of(path))


def _pairs(lines: Iterable[str]) -> dict[str, int]:
    rows = (line.split() for line in lines)
    return {row[0].rstrip(":"): int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
