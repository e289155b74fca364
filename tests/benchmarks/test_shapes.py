"""Steps of real shapes: what is chosen, the figures, and the whole path on the CPU."""

import json
import shutil
from collections import namedtuple
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import typer

from benchmarks import shapes
from benchmarks.parts.cases import CASES, LLAMA3_8B, QWEN3_32B, QWEN25_7B, TINY, Case, case_of, cases_of, small
from benchmarks.parts.setup import Cut, Skip, _scaled_peaks, choose, nvme_bytes, random_model
from benchmarks.shapes import kernel_idle, limit_s, scaled_flops, step_times
from penstock.engine.config import ModelConfig
from penstock.engine.forecast.flops import StepFlops
from penstock.engine.forecast.problem import ALLOCATOR_SHARE
from penstock.storage.files.errors import UserError

CPU_SHORT = CASES["cpu-short"]
Captured = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


def test_names_of_cases() -> None:
    assert [*cases_of("long-7b, short")] == ["long-7b", "short"]
    with pytest.raises(UserError, match="nope: no such case; choose from short, short-24gb, "):
        cases_of("short,nope")
    assert all(case_of(json.loads(json.dumps(asdict(case)))) == case for case in CASES.values())
    assert small(CASES["tiers"], on_gpu=False).shapes["tiny"].tie_embeddings


LONG_SHAPES = [pytest.param(*case, marks=pytest.mark.long) for case in ((QWEN25_7B, 7.6), (QWEN3_32B, 32.8))]


@pytest.mark.parametrize(("model", "billions"), [(LLAMA3_8B, 8.0), *LONG_SHAPES], ids=lambda value: str(value)[-20:])
def test_shapes_are_those_of_the_models(model: ModelConfig, billions: float) -> None:
    assert round(random_model(model, 8192, 1)[1].num_params / 1e9, 1) == billions


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
    assert [step_times(spans, step).step_s for step in (1, 2, 3)] == [10.0, 30.0, 20.0]
    times = step_times([span("optimizer", "clip", "all", 5.0, 5.0, 0), *one_step(1, 5.0)], 1)
    assert (times.step_s, times.layers_s) == (10.0, 7.0)
    assert (times.scaled(4.0), times.scaled(1.0)) == (31.0, 10.0)
    flops = scaled_flops(StepFlops(3 * 10**12, 10**12, 10**12, 2 * 10**12), 2.0)
    assert flops == StepFlops(6 * 10**12, 10**12, 2 * 10**12, 4 * 10**12)
    kernels = {"matmul_tflops": {"layer": 3.0, "head": 1.0}, "attention_tflops": {"forward": 2.0, "backward": 1.0}}
    assert limit_s(flops, kernels) == pytest.approx(2 + 1 + 1 + 4)

    def kernel(stream: int, start: float, length: float) -> dict[str, Any]:
        return {"cat": "kernel", "ts": start, "dur": length, "args": {"stream": stream}}

    events = [kernel(7, 0, 40), kernel(7, 50, 50), kernel(7, 90, 10), kernel(3, 0, 5), {"cat": "gpu_memcpy", "ts": 1}]
    assert kernel_idle(events) == pytest.approx(0.1)
    assert kernel_idle([]) is None


def chosen(case: Case, folder: Path) -> Cut:
    return choose(replace(case, needs_cuda=False), folder)


@pytest.fixture(scope="module")
def tiny_setup(tmp_path_factory: pytest.TempPathFactory) -> Cut:
    """Of a tiny model with biases on little memory."""
    shape = replace(TINY, model_type="qwen2")
    return chosen(replace(CPU_SHORT, gpu="2MiB", shapes={"tiny": shape}), tmp_path_factory.mktemp("setup"))


@pytest.mark.long
def test_a_cut_model_keeps_the_whole_ones_share_on_the_gpu(tmp_path: Path) -> None:
    for gpu in ("24GiB", "110GiB", "400GiB"):
        case = replace(CASES["short"], gpu=gpu, ram="100GiB", rows=1)  # few tokens: what is left over holds blocks
        setup = chosen(case, tmp_path)
        shares = []
        for plan in (setup.plan, setup.full_plan):
            layers = [b for name, b in plan.buffers.items() if name.startswith("layers.")]
            shares.append(sum(b.state == "gpu" for b in layers) / len(layers))
        assert shares[0] == pytest.approx(shares[1], abs=0.26)  # one of four layers
        assert setup.plan.choice == setup.full_plan.choice
        assert setup.plan.tiers["gpu"].peak_bytes <= setup.full_plan.tiers["gpu"].peak_bytes
        assert setup.depth == 8.0


def test_the_allocators_share_of_a_smaller_budget_becomes_nothing_else(tiny_setup: Cut) -> None:
    full = tiny_setup.full_plan
    without, ram = _scaled_peaks(full, 0.25)
    on_gpu = replace(full, problem=replace(full.problem, allocator_share=ALLOCATOR_SHARE))
    within, same_ram = _scaled_peaks(on_gpu, 0.25)
    used = without - full.problem.gpu_budget // ALLOCATOR_SHARE  # the CPU's plan has no such share to take out
    assert within - within // ALLOCATOR_SHARE == pytest.approx(used, abs=1)
    assert ram == same_ram


def test_where_plain_pytorch_fails_both_ways_it_has_no_step(tiny_setup: Cut, monkeypatch: Patch) -> None:
    """A card's allocator refuses, say: what fits only with checkpointing is timed with it."""
    full = "CUDA out of memory. Tried to allocate 2.00 GiB"
    for error, reason in (
        (torch.OutOfMemoryError(f"{full}\nmore words"), f"does not fit: {full}"),
        (RuntimeError("cuDNN error: NOT_INITIALIZED"), "failed: RuntimeError: cuDNN error: NOT_INITIALIZED"),
    ):
        plain_steps = Mock(side_effect=error)
        monkeypatch.setattr(shapes, "plain_steps", plain_steps)
        found = shapes.plain_step(CPU_SHORT, tiny_setup, "bfloat16")
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
    case = replace(CASES["tiers"], gpu="70GiB", ram="60GiB")
    for free_gib, name in ((10_000, "Mistral-Large-2 (123B)"), (140, "Qwen3-4B")):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free_gib: usage(0, 0, free << 30))
        setup = chosen(case, tmp_path)
        assert setup.name == name
        assert nvme_bytes(setup.full_plan) < free_gib << 30
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
    assert row["mfu"] is None  # a CPU has no peak here
    assert set(row["busy"]) == {"nvme_read", "h2d", "compute", "d2h", "optimizer", "nvme_write"}
    for share in (*row["busy"].values(), row["exposed_io"], row["compute_idle"]):
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
    if case.plain:
        assert row["plain"]["name"] in ("eager", "plain")
        assert row["best_plain_ratio"] == pytest.approx(measured["step_s"] / row["plain"]["step_s"])
    else:
        assert row["best_plain_ratio"] is None
        assert row["plain"]["reason"] == "plain PyTorch not tried"
    assert (measured["layers"], row["label"]) == (2, "scaled from 2 layers")
    assert row["step_s"] == pytest.approx(measured["step_s"] + 2 * measured["layers_s"])
    assert measured["losses"][0] == pytest.approx(6.24, abs=0.1)  # ln 512: a new model's


def objects(text: str) -> list[dict[str, Any]]:
    """The JSON objects that follow one another."""
    return json.loads("[" + text.replace("\n}\n{", "\n},\n{") + "]")


@pytest.mark.long
def test_cases_of_a_cpu(tmp_path: Path, capsys: Captured) -> None:
    traces, scratch = tmp_path / "traces", tmp_path / "scratch"
    traces.mkdir()
    scratch.mkdir()
    names = ("cpu-short", "cpu-long", "cpu-tiers")
    shapes.main(",".join(names), traces=traces, folder=scratch)
    rows = objects(capsys.readouterr().out)
    for row, name in zip(rows, names, strict=True):
        assert row["case"] == name
        check_figures(row, CASES[name])
        trace = json.loads((traces / f"{name}.trace.json").read_text())
        ops = {event["name"].split()[0] for event in trace["traceEvents"] if event["ph"] == "X"}
        assert {"layer_forward", "head", "layer_backward", "clip"} <= ops
    short, _, tiers = rows
    assert tiers["tiers"]["nvme"]["peak_bytes"] > 10**6
    assert tiers["busy"]["nvme_read"] > 0
    assert list(scratch.iterdir()) == []
    assert short["attention_tflops"]["kernels"] == {"forward": "torch-cpu-flash", "backward": "torch-cpu-flash"}


@pytest.mark.long
def test_a_case_that_fails_or_does_not_fit_loses_no_other(tmp_path: Path, monkeypatch: Patch, capsys: Captured) -> None:
    unknown = replace(CPU_SHORT, shapes={"odd": replace(TINY, model_type="nonsense")})
    for name, case in (("odd", unknown), ("large", replace(CPU_SHORT, gpu="4KiB")), ("good", CPU_SHORT)):
        monkeypatch.setitem(CASES, name, replace(case, timed=1))
    with pytest.raises(typer.Exit):
        shapes.main("odd,large,good", folder=tmp_path)
    out, err = capsys.readouterr()
    odd, large, good = objects(out)
    assert [row["status"] for row in (odd, large, good)] == ["failed", "skipped", "done"]
    assert "unknown architecture 'nonsense'" in odd["reason"]
    assert "budgets.gpu: 0.0 MiB cannot hold" in large["reason"]
    for line in (f"odd: failed: {odd['reason']}", f"large: skipped: {large['reason']}"):
        assert line in err.splitlines()
    last = f"good: {good['tokens_per_s']:,.0f} tokens/s, {good['ratio_once']:.2f} x the kernels alone, "
    assert err.splitlines()[-1] == last + f"{good['best_plain_ratio']:.2f} x the fastest plain PyTorch (eager)"


def test_folders_are_looked_for_before_anything_runs(tmp_path: Path) -> None:
    for more in ({"folder": tmp_path / "missing"}, {"traces": tmp_path / "missing"}):
        with pytest.raises(UserError, match="missing: no such folder"):
            shapes.main("cpu-short", **more)


def test_without_cuda_a_gpus_case_is_skipped(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(Skip, match="needs CUDA, and torch sees no device"):
        choose(CASES["short"], tmp_path)
