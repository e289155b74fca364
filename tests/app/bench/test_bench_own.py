"""The project's own benchmarks: small measurements of memory, packing, precision, uploads and attention, plans beside
runs, the planned tables and the heat map; and their arithmetic by hand."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_texts import TINY
from sample_forecast import GIB, fitting, refused

from penstock.app.bench import memory, planned, precision
from penstock.app.bench import plan as bench_plan_module
from penstock.app.bench.attention import bench_attention
from penstock.app.bench.offsite import bench_offsite
from penstock.app.bench.packing import bench_packing
from penstock.app.bench.plan import bench_plan, compare
from penstock.app.bench.plan_cases import CASES, PlanCase
from penstock.app.bench.process import CallFailed
from penstock.app.bench.published import PUBLISHED
from penstock.app.recipes import shipped
from penstock.engine.config import BudgetConfig, DataConfig, ModelConfig, Recipe, StorageConfig, TrainConfig
from penstock.engine.machine.presets import PRESETS
from penstock.storage.files.errors import UserError

PER_TOKEN = 12 * memory.SHAPE.kv_heads * memory.SHAPE.head_dim
Captured = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
MACHINES = ["gh200-480", "rtx3090-64"]
SHAPE = TINY["model"] | {"vocab_size": 512}


def test_deviation_from_the_memory_law_by_hand() -> None:
    # At 10 bytes a token 100 tokens weigh 1,000 and the constant 500: the law says 2,500 at 200 tokens.
    sizes = [(100, 1, "whole", 1500), (200, 1, "whole", 2550), (100, 1, "streamed", 400), (200, 1, "streamed", 404)]
    sizes += [(100, 2, "whole", 1530), (200, 2, "whole", 2530)]
    rows = [dict(zip(("tokens", "depth", "window", "arena_bytes"), size, strict=True)) for size in sizes]
    assert memory.deviation(rows, "whole", "arena_bytes", 10) == pytest.approx(0.02)
    assert memory.deviation(rows, "streamed", "arena_bytes", 10) == pytest.approx(0.01)
    assert memory.depth_difference(rows, "whole", "arena_bytes") == pytest.approx(0.02)


@pytest.mark.long
def test_a_small_measurement_follows_the_memory_law(tmp_path: Path, monkeypatch: Patch, capsys: Captured) -> None:
    monkeypatch.chdir(tmp_path)
    depths = {"whole": (1, 2), "streamed": (1, 2)}
    report = memory.bench_memory(
        lengths=(512, 2048), depths=depths, document_tokens=128, chunk_tokens=64, save=tmp_path / "law"
    )
    sizes = {(r["window"], r["depth"], r["tokens"]): r["arena_bytes"] for r in report["rows"]}
    for depth in (1, 2):
        assert sizes["whole", depth, 2048] - sizes["whole", depth, 512] == PER_TOKEN * (2048 - 512)
        assert sizes["streamed", depth, 2048] == sizes["streamed", depth, 512] < sizes["whole", depth, 512]
    for figure in ("deviation", "depth_difference"):
        assert report[figure]["arena_bytes"] == {"whole": 0, "streamed": 0}
    assert all(r["resident_bytes"] > 0 for r in report["rows"])
    assert json.loads((tmp_path / "law.json").read_text()) == report
    assert "<svg" in (tmp_path / "law.svg").read_text()[:500]
    line = f"{PER_TOKEN:,} bytes a token; the arena is off by at most, K/V window whole 0.00%, streamed 0.00%\n"
    assert capsys.readouterr().out == line


@pytest.mark.long
@pytest.mark.parametrize("on_drive", [False, True])
def test_a_small_measurement_of_uploads(tmp_path: Path, capsys: Captured, on_drive: bool) -> None:
    """Steps alone and beside one, in turn, and bytes that moved meanwhile."""
    report = bench_offsite(
        rounds=1, steps=2, layers=1, hidden=64, bytes_per_s=2_000_000, on_drive=on_drive, json=True, folder=tmp_path
    )
    assert json.loads(capsys.readouterr().out) == report
    for way in ("alone", "limited", "unlimited"):
        assert [len(of_round) for of_round in report[f"{way}_steps_s"]] == [2]
        assert (report[f"{way}_moved_bytes"] > 0) == (way != "alone")
    assert report["limited_ratio"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_both_ways_of_packing_compute_the_same_tokens(tmp_path: Path, capsys: Captured) -> None:
    report = bench_packing(context=256, document=32, chunk_tokens=64, rounds=2, json=True, folder=tmp_path)
    assert json.loads(capsys.readouterr().out) == report
    assert (report["documents"], report["trained_tokens"]) == (8, 8 * 31)
    assert report["packed_computed_tokens"] == report["apart_computed_tokens"] == 256
    assert report["apart_padded_tokens"] == 8 * 224
    assert report["cpu_ratio"] == pytest.approx(report["apart_cpu_s"] / report["packed_cpu_s"])
    assert len(report["packed_steps_s"]) == len(report["apart_steps_s"]) == 2
    assert list(tmp_path.iterdir()) == []


def test_stochastic_rounding_goes_to_a_neighbour_and_is_right_on_average() -> None:
    ulp = 2.0**-7  # of bfloat16 between 1 and 2
    generator = torch.Generator().manual_seed(0)
    for sign in (1, -1):
        found = sign * precision.rounded_stochastically(torch.full((20_000,), sign * (1 + 0.25 * ulp)), generator)
        assert found.dtype == torch.bfloat16
        assert set(found.tolist()) == {1, 1 + ulp}
        assert (found > 1).float().mean() == pytest.approx(0.25, abs=0.02)
    exact = torch.randn(1000).bfloat16()
    assert torch.equal(precision.rounded_stochastically(exact.float(), generator), exact)


@pytest.mark.long
def test_a_small_measurement_of_precision(tmp_path: Path, monkeypatch: Patch, capsys: Captured) -> None:
    """At a rate at which a few steps show it."""
    monkeypatch.chdir(tmp_path)
    report = precision.bench_precision(steps=10, before_steps=10, every=5, lr=1e-5, save=tmp_path / "found")
    cases, learnt = report["cases"], report["learnt"]
    assert list(cases) == list(precision.CASES)
    assert all([row["step"] for row in rows] == [0, 5, 10] for rows in cases.values())
    assert len({rows[0]["loss"] for rows in cases.values()}) == 1, "all start at the same weights"
    last = {name: rows[-1] for name, rows in cases.items()}
    assert last["masters"]["loss"] == pytest.approx(last["float32"]["loss"], rel=2e-3)
    assert learnt["masters"] == pytest.approx(1, abs=0.1)
    assert learnt["weights"] > 2 * learnt["in_place"]
    assert last["float32"]["changed"] > 0.95
    assert last["weights"]["changed"] > last["in_place"]["changed"]
    assert json.loads((tmp_path / "found.json").read_text()) == report
    assert "<svg" in (tmp_path / "found.svg").read_text()[:500]
    assert capsys.readouterr().out.startswith("10 steps at 1e-05, learnt of what float32 learns: float32 throughout")


def test_what_cannot_be_done_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at least two chunks, 128"):
        bench_attention(tokens=100, chunk_tokens=64, folder=tmp_path)
    with pytest.raises(UserError, match="missing: no such folder"):
        bench_plan(cases=[], save=tmp_path / "missing" / "planning.md")
    with pytest.raises(UserError, match="missing: no such folder"):
        planned.bench_planned(tmp_path / "missing")


@pytest.mark.long
def test_ratio_of_a_tiny_step_to_its_attention_alone(tmp_path: Path, capsys: Captured) -> None:
    report = bench_attention(tokens=256, chunk_tokens=64, rounds=2, compile=False, json=True, folder=tmp_path)
    assert json.loads(capsys.readouterr().out) == report
    ratios = [each["ratio"] for each in report["rounds"]]
    assert ratios == [pytest.approx(each["step_s"] / each["attention_s"]) for each in report["rounds"]]
    assert len(ratios) == 2
    assert 0 < min(ratios) <= report["ratio"] <= max(ratios)
    assert list(tmp_path.iterdir()) == []


def finished(run_dir: Path, step_times_s: list[float], gpu: float = 1, nvme: float = 1, on_gpu: bool = True) -> None:
    """A run directory of the sample forecast whose peaks are these shares of what was planned."""
    run_dir.mkdir(parents=True)
    (run_dir / "plan.json").write_text(json.dumps(fitting()))
    shares, tiers = {"gpu": gpu, "ram": 1, "nvme": nvme}, fitting()["tiers"]
    used = {name: tier | {"peak_bytes": int(tier["peak_bytes"] * shares[name])} for name, tier in tiers.items()}
    summary = {"tiers": used, "gpu_memory": {"allocated_bytes": 1} if on_gpu else None}
    (run_dir / "summary.json").write_text(json.dumps(summary))
    lines = [json.dumps({"step": i, "step_s": s}) + "\n" for i, s in enumerate(step_times_s, start=1)]
    (run_dir / "metrics.jsonl").write_text("".join(lines))


def test_the_comparison_by_hand(tmp_path: Path) -> None:
    # The first step is not counted: the median of 600, 700 and 740 is 700, planned were 671.4.
    finished(tmp_path / "run", [2000.0, 600.0, 740.0, 700.0], gpu=0.96, nvme=1.06)
    row = compare(tmp_path / "run")
    assert row["step_s"]["measured"] == 700.0
    assert row["step_s"]["ratio"] == pytest.approx(700 / 671.4)
    assert row["step_s"]["within"]
    assert row["tiers"]["gpu"]["ratio"] == pytest.approx(0.96)
    assert [row["tiers"][name]["within"] for name in ("gpu", "ram", "nvme")] == [True, True, False]
    # Without a GPU temporaries are not compared: 72 GiB were planned, 5 of them as workspace.
    finished(tmp_path / "cpu", [1.0, 1.0], gpu=67 / 72, on_gpu=False)
    found = compare(tmp_path / "cpu")["tiers"]["gpu"]
    assert found == {"planned": 67 * GIB, "measured": 67 * GIB, "ratio": 1.0, "within": True}
    # What was not planned must not be used.
    assert bench_plan_module._pair(0, 0, 0.05) == {"planned": 0, "measured": 0, "ratio": None, "within": True}
    assert not bench_plan_module._pair(0, 4096, 0.05)["within"]
    with pytest.raises(UserError, match=r"plan\.json: cannot be read .*left no such file"):
        compare(tmp_path)
    finished(tmp_path / "short", [1.0])
    with pytest.raises(UserError, match="1 steps; the first does not count"):
        compare(tmp_path / "short")


def test_report_table_and_page(tmp_path: Path, capsys: Captured) -> None:
    def run(case: PlanCase, run_dir: Path) -> None:
        if case.name == "moe":
            raise CallFailed("exit 1: KeyError: 'odd'", "Traceback\nKeyError: 'odd'")
        slow = case.name == "1m-gpu"
        finished(run_dir, [9.0, 900.0 if slow else 671.4], gpu=0.94 if slow else 1.0)

    cases = [case for case in CASES if case.name in ("1m-gpu", "29m-ram", "moe")]
    report = bench_plan(cases=cases, run=run, folder=tmp_path, save=tmp_path / "planning.md")
    assert (report["failed"], report["peaks_within"], report["steps_within"]) == (1, 1, 1)
    assert report["worst_peak"]["gpu"] == pytest.approx(0.06)
    assert report["worst_step"] == pytest.approx(900 / 671.4 - 1)
    assert [path.name for path in tmp_path.iterdir()] == ["planning.md"]  # run directories are gone
    text = (tmp_path / "planning.md").read_text()
    assert "penstock bench plan --save docs/results/planning.md" in text
    row = "| 1m-gpu | tied, hardly any RAM | 122610.1M | 32,768, 262,144 | ram 1%, nvme 99% | "
    assert f"{row}0.940! |" in text
    assert "15m00s of 11m11s: 1.340! | nvme_read |" in text
    assert "| moe | 8 experts, 2 a token | failed: exit 1: KeyError: 'odd' |" in text
    assert "- peaks of all tiers within 5%: 1 of 3; largest deviation gpu 6.0%, ram 0.0%, nvme 0.0%" in text
    assert "- step time within 15%: 1 of 3; median deviation 17.0%, largest 34.0%" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in rows} == {11}
    out, err = capsys.readouterr()
    assert out.splitlines() == ["; ".join(line.removeprefix("- ") for line in text.splitlines()[-2:])]
    assert err.splitlines()[0].startswith("1/3 1m-gpu: measured over planned: gpu 0.940!, ram 1.000, nvme 1.000, step ")
    assert "3/3 moe: failed: exit 1: KeyError: 'odd'" in err


def recipe(name: str, machine: str = "") -> Recipe:
    shape = SHAPE | {"max_position": 4096, "overrides": {"rope_parameters": {"a": 1}}}
    train = TrainConfig(global_batch_size=6, micro_batch_size=3, chunk_tokens=512, activation_checkpointing="full")
    found = Recipe(name=name, machine=machine, model=ModelConfig(path="models/none", **shape), train=train)
    found.data, found.budgets = DataConfig(sequence_length=4096), BudgetConfig(gpu="1GiB")
    found.storage = StorageConfig(nvme=["/mnt/a", "/mnt/b"])
    return found


def recipes() -> dict[str, Recipe]:
    return {name: recipe(name) for name in planned.GRID_MODELS.values()} | {"mine": recipe("mine", "rtx3090-64")}


def fake(recipe: Recipe, machine: str) -> dict[str, Any]:
    """Fits gh200-480 only; faster for shorter contexts."""
    if machine != "gh200-480":
        return refused()
    return copy.deepcopy(fitting()) | {"tokens_per_s": 4e6 / recipe.data.sequence_length}


def planned_for(kind: str, *more: str) -> list[planned.Job]:
    return [job for job in planned.jobs(recipes(), [*MACHINES, *more]) if job.kind == kind]


def test_published_figures_name_what_exists_and_are_planned_in_their_own_micro_batches() -> None:
    names = set(planned.load_recipes(shipped.FOLDER))
    assert set(planned.GRID_MODELS.values()) <= names
    for figure in PUBLISHED:
        assert figure.recipe in names
        assert figure.machine in PRESETS
        assert figure.source
        assert figure.sequences % figure.micro_batch == 0
    jobs = planned_for("published", "rtx4090-256")
    assert len(jobs) >= 6
    for job in jobs:
        published, train = job.published, job.recipe.train
        assert published is not None
        assert (train.global_batch_size, train.micro_batch_size) == (published.sequences, published.micro_batch)
        assert job.recipe.data.sequence_length == published.context


def test_a_gpu_is_planned_whole_and_in_part() -> None:
    jobs = planned_for("memory", "h200-1500")
    budgets = [(job.label, job.recipe.data.sequence_length, job.recipe.budgets.gpu) for job in jobs]
    assert budgets[::2] == [("7b_512k", 524_288, None), ("32b_512k", 8192, None)]
    assert budgets[1::2] == [("7b_512k", 524_288, "24GiB"), ("32b_512k", 8192, "24GiB")]
    whole, part, *others = [planned.row_of(replace(job, machine="gh200-480"), fake) for job in jobs]
    part["tokens_per_s"] = whole["tokens_per_s"] * 0.953
    others[1] |= {"fits": False, "reason": "ram short by 1 GiB"}
    assert planned._memory([whole, part, *others])[2:] == [
        "| 7b_512k: 1 x 524,288 | 7.63 | 7.27 | 0.95 |",
        "| 32b_512k: 16 x 8,192 | 488 | does not fit (ram short by 1 GiB) | n/a |",
    ]
    assert not planned_for("memory")

    def broken(recipe: Recipe, machine: str) -> dict[str, Any]:
        raise UserError("data.sequence_length: beyond the rotary range")

    row = planned.row_of(jobs[0], broken)
    assert (row["fits"], row["reason"]) == (False, "data.sequence_length: beyond the rotary range")


@pytest.mark.long
def test_the_files(tmp_path: Path, monkeypatch: Patch, capsys: Captured) -> None:
    monkeypatch.setattr(planned, "load_recipes", lambda folder: recipes())
    report = planned.bench_planned(tmp_path, forecast_fn=fake, processes=1)
    text = (tmp_path / "planned.md").read_text()
    for part in (
        "**Planned from data sheets, not measured.**",
        "| mine | 4,096, 24,576 | **rtx3090-64** | does not fit: gpu short by 11.0 GiB |",
        "| recipe | dgx-spark | gh200-480 | ",
        "| mine | - | 977 | - | ",
        "| 7b_512k: 1 x 524,288 | gh200-480 | 7.63 | nvme_read | 602 | MegaTrain | GH200 of 96 GB, 480 GB | arXiv",
        "## With 24 GiB of the GPU's memory\n\nOn h200-1500. ",
        "(planned.png)",
    ):
        assert part in text
    assert all(len(line.split("|")) in (1, 6, 10, 11, 12, 13) for line in text.splitlines())
    assert (tmp_path / "planned.png").read_bytes().startswith(b"\x89PNG")
    out, err = capsys.readouterr()
    progress = err.splitlines()
    rows = [row for part in ("recipes", "published", "memory", "grid") for row in report[part]]
    fitting_there = sum(row["fits"] for row in rows)
    assert out == f"{fitting_there} of {len(progress)} plans fit; written to {tmp_path / 'planned.md'}\n"
    assert len(progress) == len(rows)
    assert progress[-1].startswith(f"{len(progress)}/{len(progress)} 120B MoE, 1,048,576 tokens on ")
