"""The bookkeeping of the benchmarks of a step, whose figures come from running them, and the processes they work in."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bad_model_files import CONFIG
from transformers import AutoConfig, AutoModelForCausalLM

import penstock.app.working
from penstock.app.bench import process
from penstock.app.bench import step as bench
from penstock.app.bench.attention import bench_attention
from penstock.app.bench.kernels import step_kernels
from penstock.app.bench.plain import PlainBatch, compiled_steps, plain_steps
from penstock.app.bench.plan import bench_plan
from penstock.app.bench.planned import bench_planned
from penstock.app.bench.suites import bench_suites
from penstock.engine.config import BudgetConfig, TrainConfig, parse_bytes
from penstock.engine.hf.config import model_config
from penstock.engine.model.anatomy import model_spec
from penstock.storage.errors import UserError

CPU = torch.device("cpu")
STEPS_S = {"plain": 4.0, "eager": 3.5, "compiled": 3.0, "ram": 2.5, "ram_plain": 3.0, "nvme": 5.0, "kernels": 1.0}
PEAKS = {"plain": 1000, "eager": 2000, "compiled": 900, "ram": 800, "ram_plain": 950, "nvme": 400, "kernels": 1}


@pytest.fixture
def outcomes(monkeypatch):
    """Workers that report step times and peaks without running anything; returns what they were given, in order."""
    order = []

    def run_case(case, steps, scratch, batch, memory_bytes):
        assert Path(scratch).is_dir()
        order.append((case, batch, memory_bytes))
        turn = sum(name == case for name, *_ in order)
        times = [99.0] * bench.WARMUP_STEPS + [STEPS_S[case] + turn] * steps
        outcome = {"dtype": "float32", "step_times_s": times, "peak_rss_bytes": PEAKS[case] + turn}
        return outcome | ({"parts_s": [{"adamw": seconds} for seconds in times]} if case == "kernels" else {})

    monkeypatch.setattr(bench, "_run_case", run_case)
    monkeypatch.setattr(bench, "_compiles", lambda: True)
    return order


def test_ratios_are_medians_without_warm_up_and_highest_peaks(tmp_path, outcomes, monkeypatch, capsys):
    """Every measurement is said without a terminal. Penstock is given the memory that plain PyTorch took, the least of
    all rounds so far; on NVMe half of it."""
    for name, value in {"FIRST_S": 0.0, "EVERY_S": 0.0, "EVERY_SHARE": 0.0, "_TICK_S": 1e6}.items():
        monkeypatch.setattr(penstock.app.working, name, value)
    figures = bench.bench_step(json=True, rounds=3, steps=2, folder=tmp_path, batch=(1, 64))
    assert [case for case, *_ in outcomes] == list(STEPS_S) * 3
    given = {case: memory for case, batch, memory in outcomes if batch == (1, 64)}
    assert given == dict.fromkeys(STEPS_S) | {"ram": 901, "ram_plain": 1001, "nvme": 450}
    printed = capsys.readouterr()
    said = [line for line in printed.err.splitlines() if line.startswith("measurement")]
    words = list(bench.WORDS.values()) * 3
    assert said == [f"measurement {number} of 21: {word}" for number, word in enumerate(words, start=1)]
    assert json.loads(printed.out) == figures
    assert figures["plain_step_s"] == 6.0
    assert figures["plain_step_range_s"] == [5.0, 7.0]
    assert figures["best_plain"] == "compiled"
    assert figures["kernels_parts_s"] == {"adamw": 3.0}
    expected = {
        "ram_ratio": 4.5 / 6,
        "ram_plain_ratio": 5 / 6,
        "nvme_ratio": 7 / 6,
        "best_plain_ratio": 4.5 / 5,
        "nvme_best_plain_ratio": 7 / 5,
        "kernels_ratio": 4.5 / 3,
        "ram_rss_ratio": 803 / 903,
        "nvme_rss_ratio": 403 / 903,
        "ram_plain_rss_ratio": 953 / 1003,
    }
    assert {name: figures[name] for name in expected} == pytest.approx(expected)
    assert list(tmp_path.iterdir()) == []


def test_the_table_states_every_case_that_runs(tmp_path, outcomes, monkeypatch, capsys):
    bench.bench_step(rounds=1, steps=1, folder=tmp_path)
    title, _, *rows = capsys.readouterr().out.splitlines()
    assert title.startswith("2 x 512 tokens, float32")
    assert [row[:58].strip() for row in rows] == list(bench.WORDS.values())
    assert rows[3].split()[-5:] == ["3.50", "0.88", "1.75", "0", "0.89"]
    assert rows[-1].split()[-3:] == ["2.00", "0.50", "1.00"]
    monkeypatch.setattr(bench, "_compiles", lambda: False)
    figures = bench.bench_step(rounds=1, steps=1, folder=tmp_path)
    assert figures["best_plain"] == "eager"
    assert "compiled_step_s" not in figures
    assert bench.WORDS["compiled"] not in capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_budgets_add_up_to_the_memory_given(dtype):
    memory = 4 << 30
    for case in ("ram", "nvme"):
        found = bench.budgets(case, memory, dtype, 1024)
        sizes = [parse_bytes(size, "budgets") for size in (found.gpu, found.ram)]
        assert sum(sizes) == pytest.approx(memory - bench.PROCESS_BYTES, abs=2 * bench.MIB)
        assert sizes[0] >= bench.GPU_BYTES[dtype]
    of_graphs = [parse_bytes(bench.budgets("ram", memory, dtype, tokens).gpu, "budgets") for tokens in (1024, 4096)]
    assert of_graphs[1] - of_graphs[0] == pytest.approx(3 * (of_graphs[0] - bench.GPU_BYTES[dtype]), abs=4 * bench.MIB)


def test_batches():
    """Others that are refused are in the catalogue of bad inputs."""
    assert [bench.parse_batch(text) for text in ("2x512", "1x4096", "8x512")] == [(2, 512), (1, 4096), (8, 512)]
    for text in ("", "x512", "-1x512", "٢x512", "2X512", "9" * 40):
        with pytest.raises(UserError, match="write ROWSxTOKENS, as in 2x512"):
            bench.parse_batch(text)


def test_the_kernels_alone_are_of_every_kind():
    recipe = bench._recipe(1, (2, 64), BudgetConfig())
    small = {"num_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "num_kv_heads": 1}
    recipe = replace(recipe, model=replace(recipe.model, **small, head_dim=16, vocab_size=96))
    parts = step_kernels(model_spec(model_config(recipe, None), recipe), 2, 64, CPU, recipe.train, compiled=False)
    assert set(parts) == {"layer_products", "head_products", "attention_forward", "attention_backward", "adamw"}
    assert min(parts.values()) > 0


def small_model():
    """Its config and weights, and micro-batches of two rows and of one."""
    config = AutoConfig.for_model(**CONFIG | {"vocab_size": 50})
    torch.manual_seed(0)
    batches = [PlainBatch(torch.randint(0, 50, (rows, 24))) for rows in (2, 1)]
    model = AutoModelForCausalLM.from_config(config)
    return config, {name: param.detach().clone() for name, param in model.named_parameters()}, batches


def test_plain_pytorch_learns_the_same_in_float32_and_bfloat16():
    """In float32 the weights are their own master weights."""
    config, weights, batches = small_model()
    found = {
        dtype: list(plain_steps(config, [batches] * 5, TrainConfig(lr=1e-2, compute_dtype=dtype), CPU, weights))
        for dtype in ("float32", "bfloat16")
    }
    losses = [loss for loss, *_ in found["float32"]]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.2
    for (loss, norm, _), (rounded_loss, rounded_norm, _) in zip(*found.values(), strict=True):
        assert loss == pytest.approx(rounded_loss, rel=0.01)
        assert norm == pytest.approx(rounded_norm, rel=0.1)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_plain_pytorch_learns_what_plain_pytorch_does(dtype, compiled, monkeypatch):
    """Of one micro-batch and of two; in bfloat16 its gradients are not rounded once more. As it is, and compiled."""
    if not compiled:
        monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    config, weights, (batch, half) = small_model()
    train = TrainConfig(lr=1e-2, weight_decay=0.1, clip_norm=1.0, compute_dtype=dtype)
    loss_error, norm_error = {"float32": (1e-4, 1e-4), "bfloat16": (0.01, 0.1)}[dtype]
    for step in ([batch], [batch, half]):
        ways = [steps(config, [step] * 3, train, CPU, weights) for steps in (plain_steps, compiled_steps)]
        for (loss, norm, _), (other_loss, other_norm, _) in zip(*ways, strict=True):
            assert other_loss == pytest.approx(loss, rel=loss_error)
            assert other_norm == pytest.approx(norm, rel=norm_error)


def test_failed_case_shows_its_error(tmp_path, monkeypatch):
    monkeypatch.setattr(process.sys, "executable", "/bin/false")
    with pytest.raises(UserError, match="bench case plain: exit 1"):
        bench.bench_step(rounds=1, steps=1, folder=tmp_path)


def test_folders_are_looked_for_before_anything_runs(tmp_path):
    folder = tmp_path / "missing"
    for begin in (
        lambda: bench_plan(cases=[], save=folder / "planning.md"),
        lambda: bench_planned(folder),
        lambda: bench_suites("cpu", folder=folder),
        lambda: bench_suites("cpu", trace_dir=folder),
    ):
        with pytest.raises(UserError, match="missing: no such folder"):
            begin()


@pytest.mark.long
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
