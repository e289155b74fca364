"""Which dtype a run computes in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from penstock.engine.config import TrainConfig


def with_compute_dtype(train: TrainConfig, device_type: str) -> TrainConfig:
    """The same with train.compute_dtype=auto decided for a device: of this machine, where it is a CPU."""
    return train if train.compute_dtype != "auto" else replace(train, compute_dtype=usual_dtype(device_type))


def usual_dtype(device_type: str) -> Literal["bfloat16", "float32"]:
    """What train.compute_dtype=auto stands for there."""
    return "bfloat16" if device_type == "cuda" or cpu_has_bfloat16() else "float32"


def cpu_has_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this machine's CPU multiplies bfloat16 in hardware; else a product takes several times float32's time."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return False
    return not {"amx_bf16", "avx512_bf16", "bf16"}.isdisjoint(text.split())
