"""What this machine is, what works on it, and the few rates that everything else rests on: for gpu-check.

Prints each finding at once as a JSON object. What raises is a finding too: not measured, and why.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.parts.process import nvidia_smi

if TYPE_CHECKING:
    import torch

    from penstock.engine.machine.probe_compute import Sizes

PACKAGES = "torch triton transformers tensorstore crc32c kvikio-cu13 flash-attn flash-attn-3 flash-attn-4"
PACKAGES += " nvidia-cudnn-cu13 pytest"
_LONG_S = 5.0
_NODES = Path("/sys/devices/system/node")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def main(small: bool = False, drive: bool = False) -> None:
    """All findings, or with --drive that of the drive alone, which fails where it cannot be measured.

    --small takes operands that any machine computes with in seconds.
    """
    if drive:
        print(json.dumps({"drives": drives(small)}))
        return
    for find in FINDINGS:
        try:
            value = find(small)
        except Exception as error:  # what does not work here is what this is for
            value = f"not measured: {type(error).__name__}: {' '.join(str(error).split())[:500]}"
        print(json.dumps({find.__name__: value}), flush=True)


def packages(small: bool) -> dict[str, str]:
    """Versions."""
    result = {"python": platform.python_version()}
    for name in PACKAGES.split():
        try:
            result[name] = version(name)
        except PackageNotFoundError:
            result[name] = "not installed"
    return result


def machine(small: bool) -> dict[str, Any]:
    """GPU, driver, CUDA, compilers, cores, NUMA nodes."""
    import torch

    result: dict[str, Any] = {}
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        result = {"gpu": gpu.name, "gpu_bytes": gpu.total_memory, "capability": f"{gpu.major}.{gpu.minor}"}
    return result | {
        "driver, PCIe generation, lanes": nvidia_smi("driver_version", "pcie.link.gen.max", "pcie.link.width.max"),
        "cuda": torch.version.cuda or "none",
        "cudnn": torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else "none",
        "compilers": [name for name in ("g++", "clang++", "gcc", "clang") if shutil.which(name)],
        "cores": len(os.sched_getaffinity(0)),
        "numa_nodes": len(list(_NODES.glob("node[0-9]*"))),
        "numa_nodes_with_cpus": sum(bool(node.read_text().strip()) for node in _NODES.glob("node[0-9]*/cpulist")),
        "kernel": platform.release(),
        "huge_pages": _HUGE_PAGES.read_text().strip() if _HUGE_PAGES.exists() else "none",
        "disk_free_bytes": shutil.disk_usage(Path.cwd()).free,
    }


def memory(small: bool) -> dict[str, int]:
    """What this process may take of RAM."""
    from penstock.engine.machine.limits import free_memory, machine_memory

    return {"ram_bytes": machine_memory(), "ram_available_bytes": free_memory().free_bytes}


def _probe(small: bool) -> tuple[torch.device, Sizes, float]:
    """The device, and what and how long engine.machine.probe_compute measures there."""
    from penstock.engine.config import TrainConfig
    from penstock.engine.machine.device import resolve_device
    from penstock.engine.machine.probe_compute import CPU_SIZES, GPU_SIZES

    sizes = replace(GPU_SIZES, rows=8192, copy_bytes=64 << 20)
    if small:
        sizes = replace(CPU_SIZES, rows=64, copy_bytes=1 << 20)
    return resolve_device(TrainConfig()), sizes, 0.05 if small else 0.6


def matmul_flops(small: bool) -> float:
    """FLOP/s of a layer's products in bfloat16."""
    from penstock.engine.machine import probe_compute

    return probe_compute.matmul_flops(*_probe(small))


def links(small: bool) -> dict[str, float]:
    """Bytes/s between pinned RAM and the GPU, each way alone and the share of their sum at once."""
    from penstock.engine.machine.probe_compute import link_rates

    rates = link_rates(*_probe(small))
    return {"h2d_bytes_per_s": rates.h2d, "d2h_bytes_per_s": rates.d2h, "duplex_share": rates.duplex_share}


def attention(small: bool) -> dict[str, Any]:
    """TFLOP/s of every attention kernel that loads and is right, and why the others are not, by direction."""
    import torch

    from penstock.engine.attention import chunk

    layer = chunk.Attends(heads=32, kv_heads=8, qk_dim=128, v_dim=128, chunk=8192, total=32768)
    if small:
        layer = chunk.Attends(heads=4, kv_heads=2, qk_dim=64, v_dim=64, chunk=128, total=512)
    chunk.prepare(_probe(small)[0], torch.bfloat16, [layer])
    result: dict[str, Any] = {}
    for direction in ("forward", "backward"):
        # Of all kinds the one with the most keys is where time goes.
        kinds = [kind for kind in chunk.attention_report() if kind["direction"] == direction]
        kind = max(kinds, key=lambda k: (k["keys"], not k["causal"]))
        result[direction] = {name: kind[name] for name in ("chosen", "tflops", "refused", "queries", "keys")}
    return result


def reads(small: bool) -> dict[str, Any]:
    """Which reader serves GPU memory, and why no better one."""
    from penstock.storage.tier.readers import select_readers

    readers = select_readers("auto", _probe(small)[0], [Path.cwd()])
    gpu = readers.device.name if readers.device is not None else "none"
    return {"host": readers.host.name, "device": gpu, "warning": readers.warning or "none"}


def pinned(small: bool) -> dict[str, Any]:
    """The most that was pinned, doubled up to a fourth of what is free while it is quick, and what it took."""
    from penstock.engine.machine.limits import free_memory
    from penstock.storage.files.errors import BudgetError
    from penstock.storage.tier.arena import HostArena

    size, result = (64 << 20) if small else (512 << 20), dict[str, Any]()
    most = size if small else free_memory().free_bytes // 4
    while size <= most and result.get("took_s", 0.0) < _LONG_S:
        arena, begun = HostArena(size, budget_bytes=size), time.perf_counter()
        arena.slot("all", size)
        try:
            arena.pin()
        except BudgetError as error:
            return result | {"refused": str(error)}
        result = {"most_bytes": size, "took_s": time.perf_counter() - begun}
        arena.close()
        size *= 2
    return result


def compile_s(small: bool) -> dict[str, float]:
    """Seconds to compile and run a pass over memory, on the GPU and on the CPU."""
    import torch

    took = {}
    for kind in ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",):
        begun = time.perf_counter()
        torch.compile(lambda x: (x * 2 + 1).sqrt())(torch.ones(4096, device=kind)).cpu()
        took[kind] = time.perf_counter() - begun
    return took


def drives(small: bool) -> Any:
    """What the drive of the current folder gives. Raises UserError."""
    import msgspec

    from penstock.engine.machine.probe_drives import probe_drives

    rates = probe_drives([Path.cwd()], 1.0 if small else 12.0, say=lambda text: print(text, file=sys.stderr))
    return msgspec.to_builtins(rates.drives)


FINDINGS: tuple[Callable[[bool], Any], ...]
FINDINGS = (machine, packages, memory, matmul_flops, links, attention, reads, pinned, compile_s)
"""In order of weight."""
