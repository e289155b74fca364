"""The probe on CUDA: rates below what the GPU's data sheet allows, and in time."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from penstock.engine.machine.peaks import peak_flops
from penstock.engine.machine.probe import probe

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def test_rates_are_a_gpus(tmp_path: Path) -> None:
    start = time.monotonic()
    machine = probe([tmp_path], seconds=20)
    assert time.monotonic() - start < 60
    assert machine.gpu == torch.cuda.get_device_name()
    peak = peak_flops(machine.gpu)
    assert machine.matmul_flops > 1e12
    if peak is not None:
        assert 0.3 * peak < machine.matmul_flops <= peak
        for rate in machine.attention:
            assert 0.05 * peak < rate.forward_flops <= peak
            assert 0.05 * peak < rate.backward_flops <= peak
    assert machine.h2d_bytes_per_s > 1e9
    assert machine.d2h_bytes_per_s > 1e9
    assert machine.gpu_copy_bytes_per_s > machine.h2d_bytes_per_s
    assert list(tmp_path.iterdir()) == []
