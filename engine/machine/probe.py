"""This machine's profile, measured: what a plan's times are computed from."""

from __future__ import annotations

import math
import subprocess
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from penstock.engine.config import TrainConfig
from penstock.engine.machine.budgets import split_shared
from penstock.engine.machine.device import gpus_like, resolve_device
from penstock.engine.machine.limits import free_memory, total_memory
from penstock.engine.machine.platforms import gpu_memory, is_shared, usable_cpus
from penstock.engine.machine.probe_compute import (
    CPU_SIZES,
    GPU_SIZES,
    Sizes,
    all_links,
    attention_rates,
    link_rates,
    matmul_flops,
    optimizer_params_per_s,
    pass_bytes_per_s,
)
from penstock.engine.machine.probe_drives import BLOCK_BYTES, MOST_BYTES, check_folders, least_written, probe_drives
from penstock.engine.machine.profile import Machine
from penstock.storage.files.errors import UserError
from penstock.storage.files.units import size_text
from penstock.storage.files.untrusted import real_path

_WRITTEN_BYTES_PER_S = 1 << 30
"""Of the time given, as much is written to each drive at most where nobody says how much."""
_SPARE_BYTES = 512 << 20
"""Of RAM and GPU memory, free beside what is measured on."""
_SMI_S = 20
_NODES = Path("/sys/devices/system/node")


def planned_writes(
    paths: Sequence[Path], seconds: float, size: int | None = None, *, block_bytes: int = BLOCK_BYTES
) -> tuple[list[Path], int]:
    """The folders that `probe` measures in, and the bytes that it writes to each drive at most: `size`, where given.

    UserError for a folder that cannot be used, and for a size that is too small to measure with.
    """
    folders = _folders(paths)
    check_folders(folders, block_bytes)
    least = least_written(len(folders), block_bytes)
    if size is not None and size < least:
        raise UserError(f"--size {size_text(size)}: too small to measure with; give at least {size_text(least)}")
    return folders, max(least, int(seconds * _WRITTEN_BYTES_PER_S)) if size is None else size


def probe(
    paths: Sequence[Path],
    *,
    seconds: float = 50,
    size: int | None = None,
    sizes: Sizes | None = None,
    block_bytes: int = BLOCK_BYTES,
    most_bytes: int = MOST_BYTES,
    say: Callable[[str], None] = lambda text: None,
) -> Machine:
    """Measure this machine and the drives under `paths`, a folder on each, in about `seconds`.

    `sizes` of operands default to the device's; requests to drives are of `block_bytes`, files of at most `most_bytes`
    on each, to which `size` (see `planned_writes`) is written at most. `say` reports the progress. Nothing that is
    written is left. UserError for a folder that cannot be used, before anything is measured.
    """
    folders, written = planned_writes(paths, seconds, size, block_bytes=block_bytes)
    deadline = time.monotonic() + seconds
    device = resolve_device(TrainConfig())
    cpu = torch.device("cpu")
    if sizes is None:
        sizes = GPU_SIZES if device.type == "cuda" else CPU_SIZES
    _require_memory(device, sizes)
    # The optimizer first: compiling it takes its own time, and the drives get what is left.
    say("measuring the optimizer")
    updates = optimizer_params_per_s(device, sizes, seconds * 0.06)
    say("measuring matrix products and attention")
    products = matmul_flops(device, sizes, seconds * 0.08)
    attends = attention_rates(device, sizes, seconds * 0.14)
    say("measuring memory and links")
    links = link_rates(device, sizes, seconds * 0.09)
    alike = [torch.device("cuda", number) for number in gpus_like(device.index or 0)] if device.type == "cuda" else []
    of_all = all_links(alike, sizes, seconds * 0.06) if len(alike) > 1 else None
    ram_pass = pass_bytes_per_s(cpu, sizes, seconds * 0.04)
    gpu_pass = pass_bytes_per_s(device, sizes, seconds * 0.04) if device.type == "cuda" else ram_pass
    left = max(0.3 * seconds, deadline - time.monotonic())
    storage = probe_drives(folders, left, block_bytes=block_bytes, most_bytes=most_bytes, most_written=written, say=say)
    gpu, gpu_bytes, ram_bytes = memories(device)
    cores = usable_cpus()
    date = datetime.now(UTC).date().isoformat()
    return Machine(
        name=gpu or f"{cores} cores without a GPU",
        source=f"measured {date}; {storage.written_bytes / 1e9:.1f} GB written to drives meanwhile",
        gpu=gpu,
        gpu_bytes=gpu_bytes,
        ram_bytes=ram_bytes,
        cores=cores,
        numa_nodes=max(1, len(list(_NODES.glob("node[0-9]*")))),
        matmul_flops=products,
        attention=attends,
        h2d_bytes_per_s=links.h2d,
        d2h_bytes_per_s=links.d2h,
        duplex_share=links.duplex_share,
        gpu_copy_bytes_per_s=gpu_pass,
        ram_copy_bytes_per_s=ram_pass,
        drives=storage.drives,
        drives_share=storage.drives_share,
        drive_duplex_share=storage.drive_duplex_share,
        optimizer_params_per_s=updates,
        gpus=max(1, len(alike)),
        all_links_bytes_per_s=of_all,
        power_w=power_limit_w(device) if device.type == "cuda" else None,
    )


def _folders(paths: Sequence[Path]) -> list[Path]:
    """Absolute; the current folder where none is given. UserError for one given twice."""
    folders: list[Path] = []
    for path in paths or [Path.cwd()]:
        folder = real_path(path)
        if folder in folders:
            raise UserError(f"{path}: listed twice; give one folder on each drive")
        folders.append(folder)
    return folders


def _require_memory(device: torch.device, sizes: Sizes) -> None:
    needs = [("RAM", sizes.ram_bytes, free_memory().free_bytes)]
    if device.type == "cuda":
        needs.append(("GPU memory", sizes.gpu_bytes, gpu_memory(device)[0]))
    for what, need, free in needs:
        if free < need + _SPARE_BYTES:
            raise UserError(
                f"probe: measuring takes {need + _SPARE_BYTES:,} bytes of {what} and {free:,} are free; stop other "
                "programs and probe again"
            )


def memories(device: torch.device) -> tuple[str | None, int, int]:
    """The GPU's name, its memory and RAM in bytes; where both are one memory, or there is no GPU, each tier's part."""
    ram = total_memory()
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    name = None if properties is None else properties.name
    if properties is None or is_shared(device):
        return name, *split_shared(ram)
    return name, properties.total_memory, ram


def power_limit_w(device: torch.device) -> float | None:
    """Watts that the driver lets the GPU's board draw, as nvidia-smi says; None where it says none."""
    names = [f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}", "--query-gpu=power.limit"]
    try:
        said = subprocess.run(
            ["nvidia-smi", *names, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=_SMI_S
        )
        watts = float(said.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return watts if math.isfinite(watts) and watts > 0 else None
