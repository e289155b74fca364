"""What this machine is, what works on it, and the few rates that everything else rests on.

Prints each finding at once as a JSON object. What raises is a finding too: not measured, and why. `--small` takes
operands that any machine computes with in seconds.
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

from penstock.app.bench.process import nvidia_smi

if TYPE_CHECKING:
    import torch

    from penstock.engine.machine.probe_compute import Sizes

SMALL = "--small" in sys.argv
PACKAGES = "torch triton transformers tensorstore crc32c kvikio-cu13 flash-attn flash-attn-3 flash-attn-4"
PACKAGES += " nvidia-cudnn-cu13 pytest"
_SAMPLE_S = 0.05 if SMALL else 0.6
_LONG_S = 5.0
_NODES = Path("/sys/devices/system/node")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def device() -> torch.device:
    from penstock.engine.config import TrainConfig
    from penstock.engine.machine.device import resolve_device

    return resolve_device(TrainConfig())


def sizes(**more: Any) -> Sizes:
    from penstock.engine.machine.probe_compute import CPU_SIZES, GPU_SIZES

    return replace(CPU_SIZES, rows=64, copy_bytes=1 << 20) if SMALL else replace(GPU_SIZES, **more)


def packages() -> dict[str, str]:
    """Versions."""
    found = {"python": platform.python_version()}
    for name in PACKAGES.split():
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def machine() -> dict[str, Any]:
    """GPU, driver, CUDA, compilers, cores, NUMA nodes."""
    import torch

    found: dict[str, Any] = {}
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        found = {"gpu": gpu.name, "gpu_bytes": gpu.total_memory, "capability": f"{gpu.major}.{gpu.minor}"}
    return found | {
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


def memory() -> dict[str, int]:
    """What this process may take of RAM."""
    from penstock.engine.machine.limits import free_memory, machine_memory

    return {"ram_bytes": machine_memory(), "ram_available_bytes": free_memory().free_bytes}


def matmul_flops() -> float:
    """FLOP/s of a layer's products in bfloat16."""
    from penstock.engine.machine import probe_compute

    return probe_compute.matmul_flops(device(), sizes(rows=8192), _SAMPLE_S)


def links() -> dict[str, float]:
    """Bytes/s between pinned RAM and the GPU, each way alone and the share of their sum at once."""
    from penstock.engine.machine.probe_compute import link_rates

    rates = link_rates(device(), sizes(copy_bytes=64 << 20), _SAMPLE_S)
    return {"h2d_bytes_per_s": rates.h2d, "d2h_bytes_per_s": rates.d2h, "duplex_share": rates.duplex_share}


def attention() -> dict[str, Any]:
    """TFLOP/s of every attention kernel that loads and is right, and why the others are not, by direction."""
    import torch

    from penstock.engine.attention import chunk

    layer = chunk.Attends(heads=32, kv_heads=8, qk_dim=128, v_dim=128, chunk=8192, total=32768)
    if SMALL:
        layer = chunk.Attends(heads=4, kv_heads=2, qk_dim=64, v_dim=64, chunk=128, total=512)
    chunk.prepare(device(), torch.bfloat16, [layer])
    found: dict[str, Any] = {}
    for direction in ("forward", "backward"):
        # Of all kinds the one with the most keys is where time goes.
        kinds = [kind for kind in chunk.attention_report() if kind["direction"] == direction]
        kind = max(kinds, key=lambda k: (k["keys"], not k["causal"]))
        found[direction] = {name: kind[name] for name in ("chosen", "tflops", "refused", "queries", "keys")}
    return found


def reads() -> dict[str, Any]:
    """Which reader serves GPU memory, and why no better one."""
    from penstock.storage.tier.readers import select_readers

    readers = select_readers("auto", device(), [Path.cwd()])
    gpu = readers.device.name if readers.device is not None else "none"
    return {"host": readers.host.name, "device": gpu, "warning": readers.warning or "none"}


def pinned() -> dict[str, Any]:
    """The most that was pinned, doubled up to a fourth of what is free while it is quick, and what it took."""
    from penstock.engine.machine.limits import free_memory
    from penstock.storage.files.errors import BudgetError
    from penstock.storage.tier.arena import HostArena

    size, found = (64 << 20) if SMALL else (512 << 20), dict[str, Any]()
    most = size if SMALL else free_memory().free_bytes // 4
    while size <= most and found.get("took_s", 0.0) < _LONG_S:
        arena, begun = HostArena(size, budget_bytes=size), time.perf_counter()
        arena.slot("all", size)
        try:
            arena.pin()
        except BudgetError as error:
            return found | {"refused": str(error)}
        found = {"most_bytes": size, "took_s": time.perf_counter() - begun}
        arena.close()
        size *= 2
    return found


def compile_s() -> dict[str, float]:
    """Seconds to compile and run a pass over memory, on the GPU and on the CPU."""
    import torch

    took = {}
    for kind in ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",):
        begun = time.perf_counter()
        torch.compile(lambda x: (x * 2 + 1).sqrt())(torch.ones(4096, device=kind)).cpu()
        took[kind] = time.perf_counter() - begun
    return took


def drives() -> Any:
    """What the drive of the current folder gives. Raises UserError."""
    import msgspec

    from penstock.engine.machine.probe_drives import probe_drives

    rates = probe_drives([Path.cwd()], 1.0 if SMALL else 12.0, say=lambda text: print(text, file=sys.stderr))
    return msgspec.to_builtins(rates)["drives"]


FINDINGS: tuple[Callable[[], Any], ...]
FINDINGS = (machine, packages, memory, matmul_flops, links, attention, reads, pinned, compile_s)
"""In order of weight."""


def main() -> None:
    """All findings; `--drive`: that of the drive alone, which fails where it cannot be measured."""
    if "--drive" in sys.argv:
        print(json.dumps({"drives": drives()}))
        return
    for find in FINDINGS:
        try:
            value = find()
        except Exception as error:  # what does not work here is what this is for
            value = f"not measured: {type(error).__name__}: {' '.join(str(error).split())[:500]}"
        print(json.dumps({find.__name__: value}), flush=True)


if __name__ == "__main__":
    main()
