"""Learning rates, clipping by the global norm, and scalars on their way to the device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from penstock.engine.clock import wait_for_copies
from penstock.engine.config import TrainConfig


def learning_rate(config: TrainConfig, step: int) -> float:
    """Learning rate of step `step` (1-based): linear warm-up from 0, then decay to `min_lr_ratio` at the last step."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    span = max(1, config.steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    if config.lr_schedule == "constant":
        return config.lr
    shape = 1 - progress if config.lr_schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * shape)


def clip_coefficient(norm: float, clip_norm: float | None) -> float:
    """Factor on every gradient so that their global norm is at most `clip_norm` (torch.nn.utils.clip_grad_norm_)."""
    return 1.0 if clip_norm is None else min(1.0, clip_norm / (norm + 1e-6))


def on_device(values: Tensor, device: torch.device) -> Tensor:
    """`values` on `device`, where other streams may read them at once."""
    if device.type != "cuda":
        return values
    pinned = torch.empty_like(values, pin_memory=True).copy_(values)
    there = pinned.to(device, non_blocking=True)
    wait_for_copies(device)
    return there
