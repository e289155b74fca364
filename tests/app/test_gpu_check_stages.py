"""gpu-check's own stages: their order and estimates, their tables, and the smoke whole on the CPU."""

import subprocess
import sys
import venv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_process import REPOSITORY

from penstock.app.bench.cases import TINY, Rates
from penstock.app.gpu_check import smoke, stages, tables
from penstock.app.gpu_check.results import Results
from penstock.engine.config import parse_bytes
from penstock.engine.forecast.request import PlanRequest
from penstock.engine.machine.budgets import Budgets
from penstock.engine.machine.presets import generic_gpu
from penstock.storage.errors import UserError

CPU = torch.device("cpu")
H200: dict[str, Any] = {
    "status": "done",
    "machine": {"gpu": "NVIDIA H200", "cores": 16},
    "matmul_flops": 670e12,
    "attention": {
        "forward": {"chosen": "torch-cudnn", "tflops": {"torch-cudnn": 620.0, "flash": 380.0}, "refused": {}},
        "backward": {"chosen": "torch-cudnn", "tflops": {"torch-cudnn": 510.0}, "refused": {"fa3": "is not installed"}},
    },
}


def known(folder: Path, device: dict[str, Any] | None = None, gpu: str = "Some GPU") -> Results:
    results = Results(folder, {"gpu": gpu}, {"device": ("what", lambda cases: [])}, resume=False)
    if device is not None:
        results.put("device", "device", device)
    return results


def test_ten_minutes_of_an_h200_hold_what_matters_most(tmp_path: Path) -> None:
    results = known(tmp_path, H200)
    found = stages.all_stages(tmp_path)
    assert list(stages.SHOWN) == [stage.name for stage in found]
    assert [case.name for case in found[2].cases if not case.optional] == ["long-7b", "short", "long-8b"]
    needed = sum(case.estimate(results) for case in found[0].cases + found[1].cases)
    needed += sum(case.estimate(results) for case in found[2].cases if not case.optional)
    assert 350 < needed < 560 - 50
    slow = H200 | {"attention": {"forward": {"tflops": {"fa2": 380.0}}, "backward": {"tflops": {"fa2": 300.0}}}}
    case = found[2].cases[0]
    assert case.name == "long-7b"
    assert case.estimate(known(tmp_path, slow)) > case.estimate(results) + 10
    with pytest.raises(UserError, match="--suite nope: no such suite"):
        stages.all_stages(tmp_path, "nope")


def test_rates_are_measured_ones_else_of_the_data_sheet_else_unknown(tmp_path: Path) -> None:
    measured = Rates(matmul=670e12, attention_forward=620e12, attention_backward=510e12)
    assert stages.rates(known(tmp_path, H200)) == measured
    products_only = {"status": "ended", "matmul_flops": 100e12, "attention": {"error": "RuntimeError"}}
    assert stages.rates(known(tmp_path, products_only)) == Rates.of_matmul(100e12)
    assert stages.rates(known(tmp_path, gpu="NVIDIA H200")) == Rates.of_matmul(0.67 * 989.5e12)
    assert stages.rates(known(tmp_path)) is None


def test_tables_show_what_was_found_and_what_was_not() -> None:
    device = "\n".join(tables.device({"device": H200 | {"links": {"h2d_bytes_per_s": 50e9}, "estimate_s": 20.0}}))
    assert "| bf16 products | 670 TFLOP/s |" in device
    assert "| links: h2d_bytes_per_s | 50.0 GB/s |" in device
    assert "| attention backward: fa3 | refused: is not installed |" in device
    trace = "def bad():\nE   assert 1 == 2\ntest_a.py:3: AssertionError"
    tests = {
        "tests/gpu/test_a.py::good": {"outcome": "passed", "seconds": 1, "text": ""},
        "tests/gpu/test_a.py::bad": {"outcome": "failed", "seconds": 1, "text": trace},
        "tests/gpu/test_a.py::lacking": {"outcome": "skipped", "seconds": 0, "text": "no kernel"},
        "tests/gpu/test_a.py::late": {"outcome": "not run"},
    }
    text = "\n".join(tables.tests({"tests": {"status": "ended", "reason": "late", "tests": tests, "took_s": 90.0}}))
    assert "1 passed, 1 failed, 1 skipped, 1 not run" in text
    assert "| test_a.py::bad | failed | assert 1 == 2 |" in text
    assert "good" not in text
    assert "lacking" not in text
    late = {"status": "not measured", "reason": "takes about 100 s, and 3 s were left", "estimate_s": 100.0}
    for table in (tables.suites({"a": late}), tables.plans({"a": late}), tables.drives({"probe": late})):
        assert "not measured: takes about 100 s" in table[2]


TINY_SMOKE = smoke.Smoke(
    shape=replace(TINY, layers=3, hidden=128, intermediate=384, vocab=1024, head_dim=32), rows=2, row_tokens=128,
    chunk_tokens=64, gpu="6MiB", ram="9MiB", lr=3e-3, part="64KiB",
)  # fmt: skip


@pytest.mark.long
def test_the_smoke_agrees_with_plain_pytorch_and_finds_a_wrong_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smoke, "STEPS", 4)
    found = smoke.check(TINY_SMOKE, tmp_path, CPU, "off")
    assert found["wrong"] == []
    plain = found["plain"]
    assert plain["losses"][0] - plain["losses"][-1] > 0.3
    assert len(found["penstock"]["losses"]) == 4
    setup = smoke.prepare(TINY_SMOKE, tmp_path, CPU, "off")
    assert all(smoke.state_bytes(setup).values())
    wrong = replace(setup.recipe, train=replace(setup.recipe.train, lr=1.1 * TINY_SMOKE.lr))
    (tmp_path / "wrong").mkdir()
    assert smoke.compare(smoke.penstock(replace(setup, recipe=wrong), tmp_path / "wrong"), plain)


def test_what_the_smoke_calls_wrong() -> None:
    right = {"losses": [7.0, 6.5, 6.0], "grad_norms": [1.0, 2.0, 3.0], "steps_s": [1.0, 1.0, 1.0]}
    assert smoke.compare(right, right) == []
    apart = right | {"losses": [7.0, 6.53, 6.0]}
    assert smoke.compare(apart, right) == ["step 2: loss 6.53000 and 6.50000, 3.0% of the fall apart"]
    norms = right | {"grad_norms": [1.0, 2.0, 3.3]}
    assert smoke.compare(norms, right) == ["step 3: gradient norm 3.30000 and 3.00000, 10.0% apart"]
    assert "does not fall" in smoke.compare(right, right | {"losses": [7.0, 7.0, 7.0]})[0]
    nothing = right | {"losses": [7.0, float("nan"), 6.0]}
    assert smoke.compare(nothing, right) == ["a loss or a gradient norm is not finite"]


@pytest.mark.long
@pytest.mark.parametrize("smoke_case", smoke.SMOKES, ids=lambda case: case.shape.name)
def test_every_smokes_state_lives_in_all_three_tiers_of_a_gpu(smoke_case: smoke.Smoke, tmp_path: Path) -> None:
    setup = smoke.prepare(replace(smoke_case, gpu="400GiB", ram="400GiB"), tmp_path, CPU)
    budgets = Budgets(parse_bytes(smoke_case.gpu, "gpu"), parse_bytes(smoke_case.ram, "ram"), None, {})
    task = PlanRequest(spec=setup.spec, recipe=setup.recipe, budgets=budgets, device_type="cuda", device_reads=False)
    plan = task.search(generic_gpu("NVIDIA H200")).plan
    assert {buffer.state for buffer in plan.buffers.values()} == {"gpu", "ram", "nvme"}


def gpu_check(python: str, results: Path) -> subprocess.CompletedProcess[str]:
    command = ["make", "gpu-check", f"PYTHON={python}", f"RESULTS={results}"]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_no_gpu_is_said_and_is_no_failure(tmp_path: Path) -> None:
    done = gpu_check(sys.executable, tmp_path / "results")
    assert done.returncode == 0, done.stderr
    assert "gpu-check: skipped: torch of" in done.stdout
    assert not (tmp_path / "results").exists()


def test_an_interpreter_without_torch_is_said_too(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    done = gpu_check(str(tmp_path / "bare" / "bin" / "python"), tmp_path / "results")
    assert done.returncode == 0, done.stderr
    assert "is missing or sees no CUDA device" in done.stdout
