"""Timing work on the compute device, and waiting for it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

_ROUNDS = 3
"""Measurements of which the median counts, as long as there is time; each runs for a third of it."""

_ORIGIN_TRIES = 5
"""Readings of both clocks side by side, of which the tightest sets an origin."""


def clock(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Seconds of one `work`: median of three rounds that together last `seconds`, or of one run if that is longer. What
    a launch takes on the host counts towards `seconds` only."""
    once = elapsed_s(work, device, 1)  # warm-up: allocation, compilation, first touch
    begin = time.perf_counter()
    once = elapsed_s(work, device, 1)
    once = max(once, time.perf_counter() - begin)
    count = max(1, int(seconds / _ROUNDS / once))
    rounds = [elapsed_s(work, device, count) / count]
    while len(rounds) < _ROUNDS and time.perf_counter() - begin < seconds:
        rounds.append(elapsed_s(work, device, count) / count)
    return statistics.median(rounds)


def elapsed_s(work: Callable[[], object], device: torch.device, count: int = 1) -> float:
    """Seconds of `count` times `work` on the device."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(count):
            work()
        return time.perf_counter() - start
    first, last = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
    first.record()
    for _ in range(count):
        work()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3


def wait_for_copies(device: torch.device) -> None:
    """Return once what the calling thread has put on its stream is done; the thread sleeps meanwhile."""
    if device.type == "cuda":
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(device))
        event.synchronize()


def origin(device: torch.device, new_event: Callable[[], torch.cuda.Event]) -> tuple[torch.cuda.Event, float]:
    """An event that has passed, and perf_counter just before it: no time on the GPU can read later than the host's. The
    host may lose its core between the two readings; of a few tries the tightest counts."""
    tries = []
    for _ in range(_ORIGIN_TRIES):
        event = new_event()
        before_s = time.perf_counter()
        event.record(torch.cuda.current_stream(device))
        event.synchronize()
        tries.append((time.perf_counter() - before_s, before_s, event))
    _, epoch, passed = min(tries, key=lambda one: one[0])
    return passed, epoch
