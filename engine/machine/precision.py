"""Which dtype a run computes in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from penstock.engine.config import TrainConfig

if TYPE_CHECKING:
    import torch

BFLOAT16_CAPABILITY = (8, 0)


def with_compute_dtype(train: TrainConfig, device: torch.device | str) -> TrainConfig:
    """The same with train.compute_dtype=auto decided for a device."""
    return train if train.compute_dtype != "auto" else replace(train, compute_dtype=usual_dtype(device))


def usual_dtype(device: torch.device | str) -> Literal["bfloat16", "float32"]:
    """What train.compute_dtype=auto stands for on a device; as a text: this machine's cpu, or any new enough cuda."""
    if isinstance(device, str):
        able = device == "cuda" or cpu_has_bfloat16()
    elif device.type == "cuda":
        import torch

        able = torch.cuda.get_device_capability(device) >= BFLOAT16_CAPABILITY
    else:
        able = cpu_has_bfloat16()
    return "bfloat16" if able else "float32"


def cpu_has_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this machine's CPU multiplies bfloat16 in hardware; else a product takes several times float32's time."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return False
    return not {"amx_bf16", "avx512_bf16", "bf16"}.isdisjoint(text.split())
