"""Machines on which memory, cores or the GPU are not what they seem: WSL2, unified memory, containers, AMD's GPUs.

What of this was ever tried stands in docs/where-it-runs.md. A GPU is judged by the properties that its driver reports.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.engine.machine import limits
from penstock.engine.machine.limits import control_groups, free_memory, lines_of
from penstock.storage.files.untrusted import one_line

if TYPE_CHECKING:
    import torch

WSL_PINNED_SHARE = 0.5
"""Of its RAM that WSL2 can pin: Windows lets a GPU share about half of its memory, and WSL2 has no more to give."""

_UNIFIED = re.compile(r"\b(GB10|Orin|Thor)\b")
"""GPUs without memory of their own, by name, should a driver not call them integrated."""


def is_wsl() -> bool:
    """Whether the kernel is that of the Windows Subsystem for Linux, which Microsoft builds."""
    files = (limits.ROOT / name for name in ("proc/sys/kernel/osrelease", "proc/version"))
    return any("microsoft" in line.lower() for file in files for line in lines_of(file))


def shares_memory(properties: Any) -> bool:
    """Whether a GPU has no memory of its own: what it takes, the host lacks. `properties`: torch's of the device."""
    integrated = bool(getattr(properties, "is_integrated", False))
    return integrated or _UNIFIED.search(str(getattr(properties, "name", ""))) is not None


def is_shared(device: torch.device) -> bool:
    """Whether the gpu tier is in the machine's own memory: there is no GPU, or it has none."""
    if device.type != "cuda":
        return True
    import torch

    return shares_memory(torch.cuda.get_device_properties(device))


def gpu_memory(device: torch.device) -> tuple[int, int]:
    """(free, total) bytes of a GPU's memory, what torch's allocator holds and does not use not among the free.

    Where it is the host's, the driver calls memory taken that holds file cache, which the kernel gives back on demand:
    the host's own word on what is free counts there, up to the total.
    """
    import torch

    free, total = torch.cuda.mem_get_info(device)
    if is_shared(device):
        free = min(max(free, free_memory().free_bytes), total)
    return free, total


def cpu_quota() -> float | None:
    """CPUs' worth of time that the control groups of this process leave it; None where they set no limit. A container
    still sees all CPUs of its host, and threads for all of them stand still together for most of each period."""
    quotas = []
    for folder, version in control_groups("cpu", ("cpu", "cpu,cpuacct")):
        words = _words(folder / ("cpu.max" if version == 2 else "cpu.cfs_quota_us"))
        period = words[1:] if version == 2 else _words(folder / "cpu.cfs_period_us")
        if words[:1] and words[0].isdigit() and period and period[0].isdigit() and int(period[0]):
            quotas.append(int(words[0]) / int(period[0]))
    return min(quotas, default=None)


def usable_cpus() -> int:
    """CPUs that threads of this process can keep busy: those that it may run on, no more than its quota."""
    own, quota = len(os.sched_getaffinity(0)), cpu_quota()
    return own if quota is None else max(1, min(own, math.ceil(quota)))


def remarks(device: torch.device) -> list[str]:
    """What a run on this platform should say of it."""
    import torch

    result = []
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        if torch.version.hip is not None:
            result.append(
                f"{name} is an AMD GPU (ROCm {torch.version.hip}), on which Penstock has never been tested; kernels "
                "are checked against a float32 reference before they are used"
            )
        if is_wsl():
            result.append(
                "WSL2 can pin about half of its RAM at most: the RAM tier takes no more, unless budgets.ram says "
                "otherwise"
            )
        if is_shared(device):
            result.append(f"{one_line(name, 80)} has no memory of its own: both tiers share the machine's")
    cpus, own = usable_cpus(), len(os.sched_getaffinity(0))
    if cpus < own:
        result.append(f"a control group limits this process to {cpus} of the {own} CPUs that it sees; {cpus} are used")
    return result


def _words(path: Path) -> list[str]:
    return next(lines_of(path), "").split()
