"""The clock of kernels: what the host takes bounds how often work is launched."""

from __future__ import annotations

import time

import pytest
import torch

from penstock.engine import clock

CPU = torch.device("cpu")


def test_work_that_only_the_host_takes_long_for_is_not_repeated_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = []

    def launch() -> None:
        launches.append(time.sleep(0.002))

    def on_a_device(work: object, device: torch.device, count: int = 1) -> float:
        for _ in range(count):
            launch()
        return count * 1e-9  # by its own events it was done at once

    monkeypatch.setattr(clock, "elapsed_s", on_a_device)
    assert clock.clock(launch, CPU, 0.02) == pytest.approx(1e-9)
    assert len(launches) <= 2 + 3 * 3  # a third of 20 ms holds three of 2 ms


def test_work_longer_than_the_time_given_runs_three_times() -> None:
    launches = []
    assert clock.clock(lambda: launches.append(time.sleep(0.01)), CPU, 0.005) >= 0.01
    assert len(launches) == 3  # to warm up, to look, to measure
