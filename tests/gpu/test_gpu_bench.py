"""What measures a GPU: gaps between kernels by the profiler, kernels alone, a small case whole, and the probe."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.parts.cases import CASES, TINY
from benchmarks.parts.setup import choose, random_model
from benchmarks.shapes import attention_rates, matmul_rates, measure, profiled
from penstock.engine.clock import clock
from penstock.engine.machine.peaks import peak_flops
from penstock.engine.machine.probe import probe

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

CUDA = torch.device("cuda")


@pytest.mark.usefixtures("time_passes")
def test_gaps_between_kernels_are_seen(tmp_path: Path) -> None:
    a = torch.randn(4096, 4096, device=CUDA, dtype=torch.bfloat16)

    def dense() -> None:
        for _ in range(50):
            a @ a

    def sparse() -> None:
        for _ in range(10):
            a @ a
            torch.cuda.synchronize()
            time.sleep(0.01)

    dense()
    torch.cuda.synchronize()
    busy, idle = profiled(dense, tmp_path / "dense.json"), profiled(sparse, tmp_path / "sparse.json")
    if busy is None or idle is None:
        pytest.skip("the profiler does not work here")
    assert 0 <= busy < 0.2 < 0.7 < idle < 1


def test_kernels_alone(emulated: bool) -> None:
    size, tokens = (64, 64) if emulated else (2048, 256)
    a = torch.randn(size, size, device=CUDA, dtype=torch.bfloat16)
    once = clock(lambda: a @ a, CUDA, 0.05)
    assert 1e-6 < once < 1e-2
    _, spec = random_model(replace(TINY, head_dim=64, num_layers=2), 1024, 1)
    for rates in (
        matmul_rates(spec, tokens, CUDA, torch.bfloat16, 0.05),
        attention_rates(spec, 4 * tokens, tokens, CUDA, torch.bfloat16, 0.05),
    ):
        assert all(rate > 0 for name, rate in rates.items() if name != "kernels")


def test_a_small_case_whole(tmp_path: Path, emulated: bool) -> None:
    shape = TINY if emulated else replace(TINY, hidden_size=256, intermediate_size=512, head_dim=64)
    tokens = 128 if emulated else 512
    case = replace(CASES["cpu-long"], shapes={"small": shape}, row_tokens=4 * tokens, chunk_tokens=tokens)
    case = replace(case, gpu="4GiB", ram="4GiB", needs_cuda=True, kernel_gaps=True)
    row = measure(case, tmp_path, tmp_path / "trace.json")
    assert row["tokens_per_s"] * row["step_s"] == pytest.approx(row["tokens"])
    assert row["attention_executed_over_once"]["backward"] == pytest.approx(1.0)
    assert row["attention_executed_over_once"]["forward"] == pytest.approx(1.0)
    assert all(0 <= share <= 1 for share in (*row["busy"].values(), row["exposed_io"], row["compute_idle"]))
    # Compiled graphs are smaller than the eager ones that the first plan counts with.
    assert row["saved_graphs"] >= len(choose(case, tmp_path).plan.saved_graphs)
    assert row["kernel_idle"] is None or 0 <= row["kernel_idle"] < 1
    assert 0 < row["tiers"]["gpu"]["peak_bytes"] <= row["tiers"]["gpu"]["budget_bytes"]


@pytest.mark.usefixtures("time_passes")
def test_rates_are_a_gpus(tmp_path: Path) -> None:
    """Below what its data sheet allows, and in time."""
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
