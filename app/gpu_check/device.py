"""Stage `device`: what this machine is, what works on it, and the few rates that estimates need; about 20 s.

Runs in a process of its own and hands over each finding at once. What raises is a finding too.
"""

from __future__ import annotations

import ctypes.util
import importlib.util
import json
import os
import platform
import shutil
import sysconfig
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from penstock.app.bench.process import nvidia_smi
from penstock.app.gpu_check.found import tell

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "tensorstore",
    "crc32c",
    "kvikio-cu13",
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "nvidia-cudnn-cu13",
    "pytest",
)
_SAMPLE_S = 0.6
_NODES = Path("/sys/devices/system/node")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def machine() -> dict[str, Any]:
    """GPU, driver, CUDA, cores, NUMA nodes, memory, limits."""
    import torch

    from penstock.engine.machine.limits import free_memory, machine_memory

    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "gpu_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "driver, PCIe generation and lanes": nvidia_smi("driver_version", "pcie.link.gen.max", "pcie.link.width.max"),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None,
        "cores": len(os.sched_getaffinity(0)),
        "numa_nodes": len(list(_NODES.glob("node[0-9]*"))),
        "numa_nodes_with_cpus": sum(bool(node.read_text().strip()) for node in _NODES.glob("node[0-9]*/cpulist")),
        "ram_bytes": machine_memory(),
        "ram_available_bytes": free_memory().free_bytes,
        "kernel": platform.release(),
        "huge_pages": _HUGE_PAGES.read_text().strip() if _HUGE_PAGES.exists() else None,
        "disk_free_bytes": shutil.disk_usage(Path.cwd()).free,
    }


def packages() -> dict[str, str | None]:
    """Versions; None where a package is missing."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def toolchain() -> dict[str, Any]:
    """What compiling needs: present or not."""
    return {
        "c++": next((name for name in ("g++", "clang++", "c++") if shutil.which(name)), None),
        "c": next((name for name in ("gcc", "clang", "cc") if shutil.which(name)), None),
        "Python.h": (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file(),
        "triton": importlib.util.find_spec("triton") is not None,
        "libcufile": ctypes.util.find_library("cufile"),
    }


def compiles() -> dict[str, float]:
    """Seconds to compile and run a pass over memory, on the GPU and on the CPU."""
    import torch

    took = {}
    for device in ("cuda", "cpu"):
        begun = time.perf_counter()
        x = torch.ones(4096, device=device)
        torch.compile(lambda x: (x * 2 + 1).sqrt())(x)
        if device == "cuda":
            torch.cuda.synchronize()
        took[device] = time.perf_counter() - begun
    return took


def reads() -> dict[str, Any]:
    """Which reader serves GPU memory, and why no better one."""
    import torch

    from penstock.storage.readers import select_readers

    readers = select_readers("auto", torch.device("cuda", 0), [Path.cwd()])
    return {
        "host": readers.host.name,
        "device": readers.device.name if readers.device is not None else None,
        "warning": readers.warning,
    }


def links() -> dict[str, float]:
    """Bytes/s between pinned RAM and the GPU, each way alone and the share of their sum at once."""
    import torch

    from penstock.engine.machine.probe_compute import GPU_SIZES, link_rates

    rates = link_rates(torch.device("cuda", 0), replace(GPU_SIZES, copy_bytes=64 << 20), _SAMPLE_S)
    return {"h2d_bytes_per_s": rates.h2d, "d2h_bytes_per_s": rates.d2h, "duplex_share": rates.duplex_share}


def products() -> float:
    """FLOP/s of a layer's products in bfloat16."""
    import torch

    from penstock.engine.machine.probe_compute import GPU_SIZES, matmul_flops

    return matmul_flops(torch.device("cuda", 0), replace(GPU_SIZES, rows=8192), _SAMPLE_S)


def attends() -> dict[str, Any]:
    """TFLOP/s of every attention kernel that loads and is right, and why the others are not, by direction."""
    import torch

    from penstock.engine.attention import chunk as attention

    shape = {"heads": 32, "kv_heads": 8, "qk_dim": 128, "v_dim": 128, "chunk": 8192, "total": 32768}
    attention.measure(torch.device("cuda", 0), torch.bfloat16, **shape)
    kernels = [kind for kind in attention.attention_report() if kind["device"].startswith("cuda")]
    found: dict[str, Any] = {}
    for direction in ("forward", "backward"):
        # Of all kinds the one with the most keys is where time goes.
        kind = max((k for k in kernels if k["direction"] == direction), key=lambda k: (k["keys"], not k["causal"]))
        found[direction] = {name: kind[name] for name in ("chosen", "tflops", "refused", "queries", "keys")}
    return found


FINDINGS: Mapping[str, Callable[[], Any]] = {
    "packages": packages,
    "toolchain": toolchain,
    "machine": machine,
    "matmul_flops": products,
    "links": links,
    "attention": attends,
    "reads": reads,
    "compile_s": compiles,
}
"""In order of weight."""


def look() -> None:
    """Look at everything, handing over each finding at once."""
    for name, find in FINDINGS.items():
        try:
            value = find()
        except Exception as error:  # what does not work here is what this stage is for
            value = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}
        tell({name: value})
        print(name, json.dumps(value), flush=True)


def drive(folder: str, seconds: float) -> None:
    """What the drive of a folder gives, measured for about so many seconds. Raises UserError."""
    from penstock.engine.machine.probe_drives import probe_drives

    tell(msgspec.to_builtins(probe_drives([Path(folder)], seconds, say=print)))
