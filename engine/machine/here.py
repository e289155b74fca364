"""This machine with nothing else running: by its profile, else its real sizes with assumed rates."""

from __future__ import annotations

import os
from pathlib import Path

from msgspec import structs

from penstock.engine.machine.budgets import split_shared
from penstock.engine.machine.limits import free_disk, total_memory
from penstock.engine.machine.platforms import usable_cpus
from penstock.engine.machine.presets import GENERIC, generic_gpu, stored_machine
from penstock.engine.machine.profile import Machine

_GPU_DEVICES = ("nvidia0", "nvhost-gpu", "dxg")
"""In /dev, one of which a CUDA driver needs: on servers and desktops, on Tegra, on WSL."""


def machine_here(folder: Path) -> Machine:
    """This machine, without PyTorch where it was probed or has no GPU; else the drive is `folder`'s. UserError."""
    stored = stored_machine()
    if stored is not None:
        return stored
    gpu, (gpu_bytes, ram_bytes) = None, split_shared(total_memory())
    if any(os.path.exists(f"/dev/{name}") for name in _GPU_DEVICES):
        import torch

        from penstock.engine.machine.probe import memories

        gpu, gpu_bytes, ram_bytes = memories(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    assumed = GENERIC if gpu is None else generic_gpu(gpu)
    drive = structs.replace(assumed.drives[0], size_bytes=free_disk(folder))
    return structs.replace(assumed, gpu_bytes=gpu_bytes, ram_bytes=ram_bytes, cores=usable_cpus(), drives=(drive,))
