"""Which CPUs a run's threads use on a machine with a GPU: those of the GPU's NUMA node, in three sets.

A lane's thread only hands out work, but where it is late the GPU stands still. So the lanes have a few cores to
themselves, the drives' threads, which compute checksums, some others, and the optimizer's the rest of the node.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.engine.machine.limits import lines_of

SYSFS = Path("/sys")

LANE_CORES = 4
"""Cores kept for the lanes, where that is no more than a quarter of the node's."""

DRIVE_CORES = 4
"""Cores kept for the drives' threads, where that is no more than an eighth of the node's; with fewer than eight cores
they use the optimizer's. A core reads and checks some 5 GB/s (docs/results/storage.md)."""


@dataclass(frozen=True, slots=True)
class Placement:
    """CPUs of a run's threads."""

    lanes: frozenset[int]
    """CPUs of the threads that hand out work."""
    drives: frozenset[int]
    """CPUs of the threads that read and write chunk files."""
    optimizer: frozenset[int]
    """CPUs of the optimizer's threads."""
    optimizer_threads: int
    """One for each core of `optimizer`."""

    def enter_lane(self, lane: str) -> None:
        """Bind the calling thread, which is the lane's. OpenMP's threads are made by whoever needs them and inherit."""
        os.sched_setaffinity(0, self.optimizer if lane == "optimizer" else self.lanes)
        if lane == "optimizer":
            # Counts for the calling thread, and for threads made later that do not ask for a number of their own.
            torch.set_num_threads(self.optimizer_threads)

    def enter_drive(self) -> None:
        """Bind the calling thread, which reads or writes chunk files."""
        os.sched_setaffinity(0, self.drives)

    @contextmanager
    def near_gpu(self) -> Iterator[None]:
        """Inside the block the calling thread runs on the GPU's node: pages it touches first are allocated there."""
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self.lanes | self.drives | self.optimizer)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)


def place_threads(device: torch.device, part: tuple[int, int] = (0, 1)) -> Placement | None:
    """Where the threads of a run on `device` go; None without a GPU, or with too few CPUs to share out. `part`: see
    `placement`."""
    if device.type != "cuda" or not hasattr(os, "sched_getaffinity"):
        return None
    return placement(_address(device), frozenset(os.sched_getaffinity(0)), part=part)


def gpu_node(device: torch.device) -> int:
    """NUMA node of a GPU; -1 where none is known."""
    return _node(_address(device), SYSFS)


def _address(device: torch.device) -> str:
    """On the PCI bus; empty where torch does not say."""
    gpu: Any = torch.cuda.get_device_properties(device)
    if not hasattr(gpu, "pci_bus_id"):
        return ""
    return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"


def placement(
    pci_address: str, allowed: frozenset[int], sysfs: Path = SYSFS, *, part: tuple[int, int] = (0, 1)
) -> Placement | None:
    """Share out the `allowed` CPUs on the node of the GPU at `pci_address` (0000:3b:00.0), or all of them if none is,
    by whole cores: hyperthreads of one are never split between lanes and optimizer. `part`: the number of this process,
    and of all that share these cores equally."""
    node = _node(pci_address, sysfs)
    near = allowed & parse_cpu_list(next(lines_of(sysfs / f"devices/system/node/node{node}/cpulist"), ""))
    cores = _cores(near or allowed, sysfs)
    number, of_all = part
    cores = cores[len(cores) * number // of_all : len(cores) * (number + 1) // of_all]
    count = min(LANE_CORES, len(cores) // 4)
    if count == 0:
        return None
    last = len(cores) - min(DRIVE_CORES, len(cores) // 8)
    lanes, rest = (frozenset[int]().union(*some) for some in (cores[:count], cores[count:last]))
    drives = frozenset[int]().union(*cores[last:]) or rest
    return Placement(lanes, drives, rest, last - count)


def _node(pci_address: str, sysfs: Path) -> int:
    return int(next(lines_of(sysfs / "bus/pci/devices" / pci_address / "numa_node"), -1))


def parse_cpu_list(text: str) -> frozenset[int]:
    """CPUs in the kernel's notation: `0-3,8,10-11`."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _cores(cpus: frozenset[int], sysfs: Path) -> list[frozenset[int]]:
    """`cpus` by physical core, in ascending order."""
    cores: list[frozenset[int]] = []
    left = set(cpus)
    while left:
        cpu = min(left)
        siblings = next(lines_of(sysfs / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"), "")
        core = parse_cpu_list(siblings) & left | {cpu}
        cores.append(core)
        left -= core
    return cores
