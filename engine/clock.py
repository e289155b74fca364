"""Timing of work on the compute device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

_ROUNDS = 3
"""Measurements of which the median counts; each runs for a third of the time given."""


def clock(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Seconds of one `work`: median of three rounds that together last `seconds`, or one run each if that is longer."""
    once = elapsed_s(work, device, 1)  # warm-up: allocation, compilation, first touch
    once = elapsed_s(work, device, 1)
    count = max(1, round(seconds / _ROUNDS / max(once, 1e-9)))
    return statistics.median(elapsed_s(work, device, count) / count for _ in range(_ROUNDS))


def elapsed_s(work: Callable[[], object], device: torch.device, count: int = 1) -> float:
    """Seconds of `count` times `work` on the device."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(count):
            work()
        return time.perf_counter() - start
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    for _ in range(count):
        work()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3
