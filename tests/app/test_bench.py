"""The bookkeeping of the benchmarks of a step, whose figures come from running them, and the processes they work in."""

import json
from pathlib import Path

import pytest
import torch
from bad_model_files import CONFIG
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.app.bench import process
from penstock.app.bench import step as bench
from penstock.app.bench.attention import bench_attention
from penstock.app.bench.memory import bench_memory
from penstock.app.bench.plain import PlainBatch, plain_steps
from penstock.app.bench.plan import bench_plan
from penstock.app.bench.planned import bench_planned
from penstock.app.bench.suites import bench_suites
from penstock.engine.config import TrainConfig
from penstock.storage.errors import UserError

CPU = torch.device("cpu")


@pytest.fixture
def outcomes(monkeypatch):
    """Workers that report step times and peaks without running anything; returns the order in which they ran."""
    order = []

    def run_case(case, steps, scratch):
        assert Path(scratch).is_dir()
        order.append(case)
        step_s = {"plain": 4.0, "ram": 3.0, "nvme": 5.0}[case] + order.count(case)
        peak = {"plain": 1000, "ram": 900, "nvme": 400}[case] + order.count(case)
        return {
            "dtype": "float32",
            "step_times_s": [99.0] * bench.WARMUP_STEPS + [step_s] * steps,
            "peak_rss_bytes": peak,
        }

    monkeypatch.setattr(bench, "_run_case", run_case)
    return order


def test_ratios_are_medians_without_warm_up_and_highest_peaks(tmp_path, outcomes, capsys):
    figures = bench.bench_step(json=True, rounds=3, steps=2, folder=tmp_path)
    assert outcomes == ["plain", "ram", "nvme"] * 3
    assert json.loads(capsys.readouterr().out) == figures
    assert figures["plain_step_s"] == 6.0
    assert figures["plain_step_range_s"] == [5.0, 7.0]
    assert figures["ram_ratio"] == pytest.approx(5 / 6)
    assert figures["nvme_ratio"] == pytest.approx(7 / 6)
    assert figures["nvme_rss_ratio"] == pytest.approx(403 / 1003)
    assert list(tmp_path.iterdir()) == []


def test_the_result_is_one_line(tmp_path, outcomes, capsys):
    bench.bench_step(rounds=1, steps=1, folder=tmp_path)
    (line,) = capsys.readouterr().out.splitlines()
    assert "a step of 5.00 s in plain PyTorch (float32) takes Penstock 0.80 x its time in RAM, and 1.20 x" in line


def test_plain_pytorch_learns_the_same_in_float32_and_bfloat16():
    """In float32 the weights are their own master weights."""
    config = AutoConfig.for_model(**CONFIG | {"vocab_size": 50})
    torch.manual_seed(0)
    batch, half = (PlainBatch(torch.randint(0, 50, (rows, 24))) for rows in (2, 1))
    model = AutoModelForCausalLM.from_config(config)
    weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    found = {
        dtype: list(plain_steps(config, [[batch, half]] * 5, TrainConfig(lr=1e-2, compute_dtype=dtype), CPU, weights))
        for dtype in ("float32", "bfloat16")
    }
    losses = [loss for loss, *_ in found["float32"]]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.2
    for (loss, norm, _), (rounded_loss, rounded_norm, _) in zip(*found.values(), strict=True):
        assert loss == pytest.approx(rounded_loss, rel=0.01)
        assert norm == pytest.approx(rounded_norm, rel=0.1)


def test_failed_case_shows_its_error(tmp_path, monkeypatch):
    monkeypatch.setattr(process.sys, "executable", "/bin/false")
    with pytest.raises(UserError, match="bench case plain: exit 1"):
        bench.bench_step(rounds=1, steps=1, folder=tmp_path)


@pytest.mark.parametrize(
    "begin",
    [
        lambda folder: bench_memory(save=folder / "law"),
        lambda folder: bench_plan(cases=[], folder=folder),
        lambda folder: bench_plan(cases=[], save=folder / "planning.md"),
        lambda folder: bench_planned(folder),
        lambda folder: bench_suites("cpu", folder=folder),
        lambda folder: bench_suites("cpu", trace_dir=folder),
    ],
)
def test_folders_are_looked_for_before_anything_runs(tmp_path, begin):
    with pytest.raises(UserError, match="missing: no such folder"):
        begin(tmp_path / "missing")


def test_ratio_of_a_tiny_step_to_its_attention_alone(tmp_path, capsys):
    report = bench_attention(tokens=256, chunk_tokens=64, rounds=2, compile=False, json=True, folder=tmp_path)
    assert json.loads(capsys.readouterr().out) == report
    ratios = [each["ratio"] for each in report["rounds"]]
    assert ratios == [pytest.approx(each["step_s"] / each["attention_s"]) for each in report["rounds"]]
    assert len(ratios) == 2
    assert 0 < min(ratios) <= report["ratio"] <= max(ratios)
    assert list(tmp_path.iterdir()) == []


def test_one_chunk_is_refused(tmp_path):
    with pytest.raises(UserError, match="at least two chunks, 128"):
        bench_attention(tokens=100, chunk_tokens=64, folder=tmp_path)
