"""The step suites: what they choose, the figures they compute, and the whole path on the CPU."""

import json
import shutil
from collections import namedtuple
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from penstock.app.bench import cases as bench_cases
from penstock.app.bench import suite_plain
from penstock.app.bench import suites as bench_suites
from penstock.app.bench.cases import LLAMA3_8B, QWEN3_32B, QWEN25_7B, SUITES, Case, case_of, cases_of
from penstock.app.bench.figures import kernel_idle, limit_s, median_times, scaled_flops, step_times
from penstock.app.bench.setup import Setup, Skip, _scaled_peaks, choose, nvme_bytes, shape_model
from penstock.engine.config import DataConfig, Recipe
from penstock.engine.forecast.flops import StepFlops, executed_flops, model_flops
from penstock.engine.forecast.problem import ALLOCATOR_SHARE
from penstock.storage.files.errors import UserError

CPU_SHORT = SUITES["cpu"][0]
Captured = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


def test_names_of_suites_and_groups() -> None:
    assert [case.name for _, case in cases_of("long, short")] == ["long-7b", "long-8b", "short"]
    gpu = cases_of("gpu")
    assert {suite for suite, _ in gpu} == {"short", "long", "short-24gb", "long-24gb", "tiers", "short-32b"}
    assert len(cases_of("gpu,short")) == len(gpu) == 8  # each once
    assert cases_of("long-8b") == [("long", SUITES["long"][1])]
    with pytest.raises(UserError, match="--suite nope: no such suite; choose from gpu, short"):
        cases_of("short,nope")
    assert all(case_of(json.loads(json.dumps(asdict(case)))) == case for cases in SUITES.values() for case in cases)


LONG_SHAPES = [pytest.param(*case, marks=pytest.mark.long) for case in ((QWEN25_7B, 7.6), (QWEN3_32B, 32.8))]


@pytest.mark.parametrize(("shape", "billions"), [(LLAMA3_8B, 8.0), *LONG_SHAPES], ids=lambda value: str(value)[:20])
def test_shapes_are_those_of_the_models(shape: bench_cases.Shape, billions: float) -> None:
    recipe = Recipe(name="x", data=DataConfig(source="random", sequence_length=8192))
    _, spec = shape_model(recipe, shape, shape.layers)
    assert round(spec.num_params / 1e9, 1) == billions
    assert shape.params == pytest.approx(spec.num_params, rel=1e-3)
    _, two = shape_model(recipe, shape, 2)
    assert shape.step_flops(1, 8192) * 2 / shape.layers < model_flops(two, [8192]) * 1.6


def span(lane: str, op: str, block: str, start: float, end: float, step: int = 1) -> dict[str, Any]:
    return {"lane": lane, "op": op, "block": block, "start_s": start, "end_s": end, "bytes": 0, "step": step}


def one_step(step: int, begin: float, stretch: float = 1.0) -> list[dict[str, Any]]:
    """Of 10 s: layers from 1 to 4 and from 5 to 9 (with gaps), the rest at the edges."""
    at = [("embed_forward", "embed", 0.0, 1.0), ("layer_forward", "layers.0", 1.0, 2.0)]
    at += [
        ("layer_forward", "layers.1", 2.5, 4.0),
        ("head", "head", 4.0, 5.0),
        ("layer_backward", "layers.1", 5.0, 7.0),
    ]
    at += [("layer_backward", "layers.0", 7.0, 9.0), ("embed_backward", "embed", 9.0, 9.5)]
    spans = [span("compute", op, block, begin + a * stretch, begin + b * stretch, step) for op, block, a, b in at]
    return [*spans, span("optimizer", "clip", "all", begin + 10 * stretch, begin + 10 * stretch, step)]


def test_a_step_its_limit_and_gaps_between_kernels_by_hand() -> None:
    spans = [span("optimizer", "clip", "all", 0.0, 0.0, 0)]
    for step, (begin, stretch) in enumerate(((0.0, 1.0), (10.0, 3.0), (40.0, 2.0)), start=1):
        spans += one_step(step, begin, stretch)
    times, all_s = median_times(spans, [1, 2, 3])
    assert all_s == [10.0, 30.0, 20.0]
    assert (times.step_s, times.layers_s, times.edges_s) == (20.0, 14.0, 6.0), "the median step counts"
    times = step_times([span("optimizer", "clip", "all", 5.0, 5.0, 0), *one_step(1, 5.0)], 1)
    assert (times.step_s, times.layers_s, times.edges_s) == (10.0, 7.0, 3.0)
    assert (times.scaled(4.0), times.scaled(1.0)) == (31.0, 10.0)
    flops = scaled_flops(StepFlops(3 * 10**12, 10**12, 10**12, 2 * 10**12), 2.0)
    assert flops == StepFlops(6 * 10**12, 10**12, 2 * 10**12, 4 * 10**12)
    kernels = {"matmul_tflops": {"layer": 3.0, "head": 1.0}, "attention_tflops": {"forward": 2.0, "backward": 1.0}}
    assert limit_s(flops, kernels) == pytest.approx(2 + 1 + 1 + 4)

    def kernel(stream: int, start: float, length: float) -> dict[str, Any]:
        return {"cat": "kernel", "ts": start, "dur": length, "args": {"stream": stream}}

    events = [kernel(7, 0, 40), kernel(7, 50, 50), kernel(7, 90, 10), kernel(3, 0, 5), {"cat": "gpu_memcpy", "ts": 1}]
    assert kernel_idle(events) == pytest.approx(0.1)
    with pytest.raises(UserError, match="no kernel"):
        kernel_idle([])


def chosen(case: Case, folder: Path) -> Setup:
    return choose(replace(case, needs_cuda=False), folder)


@pytest.fixture(scope="module")
def tiny_setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    """Of a tiny model with biases on little memory."""
    shape = replace(bench_cases.TINY, model_type="qwen2")
    return chosen(replace(CPU_SHORT, gpu="2MiB", shapes=(shape,)), tmp_path_factory.mktemp("setup"))


@pytest.mark.long
def test_a_cut_model_keeps_the_whole_ones_share_on_the_gpu(tmp_path: Path) -> None:
    for gpu in ("24GiB", "110GiB", "400GiB"):
        case = replace(SUITES["short"][0], gpu=gpu, ram="100GiB", rows=1)  # few tokens: what is left over holds blocks
        setup = chosen(case, tmp_path)
        shares = []
        for plan in (setup.plan, setup.full_plan):
            layers = [b for name, b in plan.buffers.items() if name.startswith("layers.")]
            shares.append(sum(b.state == "gpu" for b in layers) / len(layers))
        assert shares[0] == pytest.approx(shares[1], abs=0.26)  # one of four layers
        assert setup.plan.choice == setup.full_plan.choice
        assert setup.plan.tiers["gpu"].peak_bytes <= setup.full_plan.tiers["gpu"].peak_bytes
        assert setup.depth == 8.0


def test_the_allocators_share_of_a_smaller_budget_becomes_nothing_else(tiny_setup: Setup) -> None:
    full = tiny_setup.full_plan
    without, ram = _scaled_peaks(full, 0.25)
    on_gpu = replace(full, problem=replace(full.problem, allocator_share=ALLOCATOR_SHARE))
    within, same_ram = _scaled_peaks(on_gpu, 0.25)
    used = without - full.problem.gpu_budget // ALLOCATOR_SHARE  # the CPU's plan has no such share to take out
    assert within - within // ALLOCATOR_SHARE == pytest.approx(used, abs=1)
    assert ram == same_ram


def test_where_plain_pytorch_fails_both_ways_it_has_no_step(tiny_setup: Setup, monkeypatch: Patch) -> None:
    """A card's allocator refuses, say: what fits only with checkpointing is timed with it."""
    full = "CUDA out of memory. Tried to allocate 2.00 GiB"
    for error, reason in (
        (torch.OutOfMemoryError(f"{full}\nmore words"), f"does not fit: {full}"),
        (RuntimeError("cuDNN error: NOT_INITIALIZED"), "failed: RuntimeError: cuDNN error: NOT_INITIALIZED"),
    ):
        plain_steps = Mock(side_effect=error)
        monkeypatch.setattr(suite_plain, "plain_steps", plain_steps)
        found = suite_plain.plain_step(CPU_SHORT, tiny_setup, "bfloat16")
        assert [call.kwargs["checkpointing"] for call in plain_steps.call_args_list] == [False, True]
        assert found["name"] is found["step_s"] is None
        assert found["reason"] == f"plain PyTorch {reason}"


@pytest.mark.long
def test_depth_is_what_ram_holds(tmp_path: Path) -> None:
    short = replace(CPU_SHORT, gpu="2MiB", layers=(4, 2))
    assert len(chosen(replace(short, ram="16MiB"), tmp_path).spec.attention) == 4
    assert len(chosen(replace(short, ram="3MiB"), tmp_path).spec.attention) == 2
    with pytest.raises(Skip, match=r"2 layers of tiny need .* of RAM or more, and budgets.ram is 2.0 MiB"):
        chosen(replace(short, ram="2MiB"), tmp_path)


@pytest.mark.long
def test_tiers_takes_the_largest_that_the_drive_holds(tmp_path: Path, monkeypatch: Patch) -> None:
    usage = namedtuple("usage", "total used free")
    case = replace(SUITES["tiers"][0], gpu="70GiB", ram="60GiB")
    for free_gib, name in ((10_000, "Mistral-Large-2 (123B)"), (140, "Qwen3-4B")):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free_gib: usage(0, 0, free << 30))
        setup = chosen(case, tmp_path)
        assert setup.shape.name == name
        assert nvme_bytes(setup.full_plan, setup.recipe.train) < free_gib << 30
        assert len(setup.spec.attention) == 2
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, 1 << 30))
    with pytest.raises(Skip, match=r"Qwen3-0.6B: needs .* of disk for two generations of its state, and 1.00 GiB"):
        chosen(case, tmp_path)


@pytest.mark.long
def test_what_graphs_take_once_measured_decides_how_many_are_kept(tmp_path: Path) -> None:
    case = replace(CPU_SHORT, gpu="2MiB")
    eager, compiled = chosen(case, tmp_path), choose(case, tmp_path, {"layers.0": 1000})
    assert {b.graph_bytes_per_token for b in eager.plan.blocks if b.saved_inputs} == {3232}
    for plan in (compiled.plan, compiled.full_plan):
        # What is measured holds the log-sum-exp, which the plan counts apart: 4 bytes for each of 4 heads.
        assert {b.graph_bytes_per_token for b in plan.blocks if b.saved_inputs} == {1000 - 16}
    assert len(compiled.plan.saved_graphs) > len(eager.plan.saved_graphs) > 0


def check_figures(row: dict[str, Any], case: Case) -> None:
    assert row["status"] == "done", row.get("reason")
    assert row["tokens"] == case.rows * (case.row_tokens - 1)  # a document's last token has no target
    assert row["tokens_per_s"] * row["step_s"] == pytest.approx(row["tokens"])
    assert 0 < row["ratio"] <= row["ratio_once"]
    assert row["step_s"] == pytest.approx(row["ratio"] * row["limit_s"])
    assert row["mfu"] is None  # a CPU has no peak here
    assert set(row["busy"]) == {"nvme_read", "h2d", "compute", "d2h", "optimizer", "nvme_write"}
    for share in (*row["busy"].values(), row["exposed_io"], row["idle"], row["compute_idle"]):
        assert 0 <= share <= 1
    assert row["compute_idle"] == pytest.approx(1 - row["busy"]["compute"])
    assert row["attention_executed_over_once"] == pytest.approx({"forward": 1.0, "backward": 1.0})
    for tier in ("gpu", "ram"):
        sizes = row["tiers"][tier]
        assert 0 < sizes["peak_bytes"] <= sizes["planned_bytes"] <= sizes["budget_bytes"]
    rates = row["attention_tflops"] | row["matmul_tflops"]
    assert all(rates[key] > 0 for key in ("forward", "backward", "layer", "head"))
    measured = row["measured"]
    assert len(measured["steps_s"]) == case.timed
    assert measured["step_s"] in measured["steps_s"]
    assert measured["step_s"] == pytest.approx(measured["layers_s"] + measured["edges_s"])
    if case.plain:
        assert row["plain"]["name"] in ("eager", "plain")
        assert row["best_plain_ratio"] == pytest.approx(measured["step_s"] / row["plain"]["step_s"])
    else:
        assert row["best_plain_ratio"] is None
        assert row["plain"]["reason"] == "plain PyTorch not tried"
    assert (row["layers"], measured["layers"], row["label"]) == (6, 2, "scaled from 2 layers")
    assert row["step_s"] == pytest.approx(3 * measured["layers_s"] + measured["edges_s"])
    assert measured["losses"][0] == pytest.approx(6.24, abs=0.1)  # ln 512: a new model's


@pytest.mark.long
def test_the_cpu_suite(tmp_path: Path, capsys: Captured) -> None:
    traces, scratch = tmp_path / "traces", tmp_path / "scratch"
    traces.mkdir()
    scratch.mkdir()
    report = bench_suites.bench_suites("cpu", json=True, trace_dir=traces, folder=scratch)
    printed = capsys.readouterr()
    assert json.loads(printed.out) == report
    assert [line.split(":")[0] for line in printed.err.splitlines()] == ["cpu-short", "cpu-long", "cpu-tiers"]
    for row, case in zip(report["cases"], SUITES["cpu"], strict=True):
        check_figures(row, case)
        trace = json.loads((traces / f"{case.name}.trace.json").read_text())
        ops = {event["name"].split()[0] for event in trace["traceEvents"] if event["ph"] == "X"}
        assert {"layer_forward", "head", "layer_backward", "clip"} <= ops
    short, long, tiers = report["cases"]
    assert long["flops"]["attention_forward"] > short["flops"]["attention_forward"]
    assert tiers["tiers"]["nvme"]["peak_bytes"] > 10**6
    assert tiers["bytes"]["nvme_read"] > 10**6
    assert list(scratch.iterdir()) == []
    assert short["attention_tflops"]["kernels"] == {"forward": "torch-cpu-flash", "backward": "torch-cpu-flash"}


@pytest.mark.long
def test_a_case_that_fails_or_does_not_fit_loses_no_other(tmp_path: Path, monkeypatch: Patch, capsys: Captured) -> None:
    cases = (
        replace(CPU_SHORT, name="unknown", shapes=(replace(bench_cases.TINY, model_type="nonsense"),)),
        replace(CPU_SHORT, name="slow", limit_s=0.3),
        replace(CPU_SHORT, name="large", gpu="4KiB"),
        replace(CPU_SHORT, name="good", timed=1),
    )
    monkeypatch.setitem(SUITES, "mixed", cases)
    report = bench_suites.bench_suites("mixed", folder=tmp_path)
    assert [row["status"] for row in report["cases"]] == ["failed", "failed", "skipped", "done"]
    *others, good = report["cases"]
    reasons = ("unknown architecture 'nonsense'", "not done after 0 s", "budgets.gpu: 0.0 MiB cannot hold")
    assert all(reason in row["reason"] for reason, row in zip(reasons, others, strict=True))
    out, err = capsys.readouterr()
    for row in others:
        assert f"{row['case']}: {row['status']}: {row['reason'].splitlines()[0]}" in err
    assert out.splitlines() == [
        "1 of 4 cases",
        f"good: {good['tokens_per_s']:,.0f} tokens/s, {good['ratio_once']:.2f} x the kernels alone, "
        f"{good['best_plain_ratio']:.2f} x the fastest plain PyTorch (eager)",
    ]


@pytest.fixture
def known_machine(monkeypatch: Patch) -> None:
    """Of which nothing is measured."""
    machine = {"gpu": None, "cores": 2, "matmul_flops": 1e10}
    monkeypatch.setattr(bench_suites, "probe", lambda **_: machine)


@pytest.mark.usefixtures("known_machine")
def test_nothing_begins_that_would_end_beyond_a_time_limit_or_needs_cuda(tmp_path: Path) -> None:
    report = bench_suites.bench_suites("cpu", folder=tmp_path, time_limit_s=1.0)
    assert [row["status"] for row in report["cases"]] == ["skipped"] * 3
    assert "of the time limit are left; name its suite by itself" in report["cases"][0]["reason"]
    reasons = [row["reason"] for row in bench_suites.bench_suites("gpu", folder=tmp_path)["cases"]]
    assert reasons == ["needs CUDA, and torch sees no device"] * 8


@pytest.mark.long
@pytest.mark.usefixtures("known_machine")
def test_a_case_that_meets_the_time_limit_is_no_failure(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(Case, "estimate_s", lambda *_: 0.0)
    monkeypatch.setitem(SUITES, "late", (replace(CPU_SHORT, timed=1_000_000),))
    (row,) = bench_suites.bench_suites("late", folder=tmp_path, time_limit_s=5.0)["cases"]
    assert row["status"] == "skipped"
    assert row["reason"].startswith("ended by the time limit after")


@pytest.mark.long
def test_executed_flops_of_the_long_case_are_near_the_estimate(tmp_path: Path) -> None:
    setup = chosen(replace(SUITES["long"][0], gpu="70GiB", ram="100GiB"), tmp_path)
    executed = executed_flops(setup.spec, setup.plan, [524_288]).total
    assert replace(QWEN25_7B, layers=1).step_flops(1, 524_288) == pytest.approx(executed, rel=0.05)
