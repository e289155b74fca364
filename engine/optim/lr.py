"""Learning rates, clipping by the global norm, and scalars on their way to the device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from penstock.engine.clock import wait_for_copies
from penstock.engine.config import TrainConfig
from penstock.storage.tier.arena import pinned_empty

DECAY_SHARE = 10
"""A wsd schedule decays in one part in so many of its steps where the recipe does not say in how many."""


def learning_rate(config: TrainConfig, step: int) -> float:
    """Learning rate of step `step` (1-based), that of Hugging Face's Trainer: of its schedule at the steps done before.

    Warm-up begins at 0, in wsd at `min_lr_ratio`, and the step behind it has the peak; `min_lr_ratio` would be reached
    by a step after the last. cosine and linear are get_cosine_with_min_lr_schedule_with_warmup and
    get_polynomial_decay_schedule_with_warmup of power 1, constant is get_constant_schedule_with_warmup. wsd
    (get_wsd_schedule, decay_type 1-sqrt) stays at the peak until `decay_steps` of all steps are left, and falls by 1 -
    sqrt(the share of them that is done) (Hagele et al., arXiv 2405.18392).
    """
    done, wsd = step - 1, config.lr_schedule == "wsd"
    if done < config.warmup_steps:
        begin = config.min_lr_ratio if wsd else 0.0
        return config.lr * (begin + (1 - begin) * done / config.warmup_steps)
    if config.lr_schedule == "constant":
        return config.lr
    begin_decay = config.warmup_steps
    if wsd:
        begin_decay = max(begin_decay, config.steps - (config.decay_steps or -(-config.steps // DECAY_SHARE)))
    progress = min(1.0, max(0, done - begin_decay) / max(1, config.steps - begin_decay))
    if wsd:
        shape = 1 - math.sqrt(progress)
    else:
        shape = 1 - progress if config.lr_schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * shape)


def clip_coefficient(norm: float, clip_norm: float | None) -> float:
    """Factor on every gradient so that their global norm is at most `clip_norm` (torch.nn.utils.clip_grad_norm_)."""
    return 1.0 if clip_norm is None else min(1.0, clip_norm / (norm + 1e-6))


def on_device(values: Tensor, device: torch.device) -> Tensor:
    """`values` on `device`, where other streams may read them at once."""
    if device.type != "cuda":
        return values
    pinned = pinned_empty(values.numel(), values.dtype).view(values.shape).copy_(values)
    there = pinned.to(device, non_blocking=True)
    wait_for_copies(device)
    return there
