"""Small measurements of memory, packing, precision, uploads and attention; the planned tables; their arithmetic."""

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from cli_process import REPOSITORY
from recipe_texts import TINY
from sample_forecast import fitting, refused

from benchmarks import attention, memory, offsite, packing, planned, precision, shared_prompts
from benchmarks.planned import PUBLISHED
from penstock.engine.config import BudgetConfig, DataConfig, ModelConfig, Recipe, StorageConfig, TrainConfig
from penstock.engine.machine.presets import PRESETS
from penstock.storage.files.errors import UserError

PER_TOKEN = memory.BYTES_PER_TOKEN
Captured = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
MACHINES = ["gh200-480", "rtx3090-64"]
OWN = {"mine": "rtx3090-64", "theirs": "gh200-480"}
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
    report = memory.measure(tmp_path / "law", (512, 2048), depths, document_tokens=128, chunk_tokens=64)
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
    report = offsite.main(
        rounds=1, steps=2, layers=1, hidden=64, rate="2MB", on_drive=on_drive, json=True, folder=tmp_path
    )
    assert json.loads(capsys.readouterr().out) == report
    for way in ("alone", "limited", "unlimited"):
        assert [len(of_round) for of_round in report["steps_s"][way]] == [2]
        assert (report["moved_bytes"][way] > 0) == (way != "alone")
    assert report["ratios"]["limited"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_both_ways_of_packing_compute_the_same_tokens(tmp_path: Path, capsys: Captured) -> None:
    report = packing.main(context=256, document=32, chunk=64, rounds=2, json=True, folder=tmp_path)
    assert json.loads(capsys.readouterr().out) == report
    assert (report["documents"], report["trained_tokens"]) == (8, 8 * 31)
    assert report["computed_tokens"] == {"packed": 256, "apart": 256}
    assert report["padded_tokens"] == 8 * 224
    assert report["cpu_ratio"] == pytest.approx(report["cpu_s"]["apart"] / report["cpu_s"]["packed"])
    assert [len(times) for times in report["steps_s"].values()] == [2, 2]
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
    report = precision.main(tmp_path / "found", steps=10, before_steps=10, every=5, lr=1e-5)
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
    assert "what float32 learns:\nfloat32 throughout, plain PyTorch: 100%, loss " in capsys.readouterr().out


def test_what_cannot_be_done_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at least two chunks, 128"):
        attention.main(tokens=100, chunk=64, folder=tmp_path)
    with pytest.raises(UserError, match="missing: no such folder"):
        memory.main(tmp_path / "missing" / "law")
    with pytest.raises(UserError, match="rows: own"):
        planned.with_tables("a page without marks", [])


@pytest.mark.long
def test_ratio_of_a_tiny_step_to_its_attention_alone(tmp_path: Path, capsys: Captured) -> None:
    report = attention.main(tokens=256, chunk=64, rounds=2, compile=False, json=True, folder=tmp_path)
    assert json.loads(capsys.readouterr().out) == report
    ratios = [each["ratio"] for each in report["rounds"]]
    assert ratios == [pytest.approx(each["step_s"] / each["attention_s"]) for each in report["rounds"]]
    assert len(ratios) == 2
    assert 0 < min(ratios) <= report["ratio"] <= max(ratios)
    assert list(tmp_path.iterdir()) == []


def recipe(name: str, machine: str = "") -> Recipe:
    shape = SHAPE | {"max_position": 4096, "overrides": {"rope_parameters": {"a": 1}}}
    train = TrainConfig(global_batch_size=6, micro_batch_size=3, chunk_tokens=512, activation_checkpointing="full")
    found = Recipe(name=name, machine=machine, model=ModelConfig(path="models/none", **shape), train=train)
    found.data, found.budgets = DataConfig(sequence_length=4096), BudgetConfig(gpu="1GiB")
    found.storage = StorageConfig(nvme=["/mnt/a", "/mnt/b"])
    return found


def recipes() -> dict[str, Recipe]:
    return {name: recipe(name) for name in planned.GRID_MODELS.values()} | {
        name: recipe(name, machine) for name, machine in OWN.items()
    }


def fake(recipe: Recipe, machine: str) -> dict[str, Any]:
    """Fits gh200-480 only; faster for shorter contexts."""
    if machine != "gh200-480":
        return refused()
    return copy.deepcopy(fitting()) | {"tokens_per_s": 4e6 / recipe.data.sequence_length}


def planned_for(kind: str, *more: str) -> list[planned.Job]:
    return [job for job in planned.jobs(recipes(), [*MACHINES, *more]) if job.kind == kind]


def test_published_figures_name_what_exists_and_are_planned_in_their_own_micro_batches() -> None:
    names = set(planned.load_recipes())
    assert set(planned.GRID_MODELS.values()) <= names
    for figure in PUBLISHED:
        assert figure.recipe in names
        assert figure.machine in PRESETS
        assert figure.source
        assert figure.sequences % figure.micro_batch == 0
    jobs = planned_for("published", "rtx4090-256")
    assert len(jobs) >= 4
    for job in jobs:
        published, train = job.published, job.recipe.train
        assert published is not None
        assert (train.global_batch_size, train.micro_batch_size) == (published.sequences, published.micro_batch)
        assert job.recipe.data.sequence_length == published.context


def test_a_gpu_is_planned_whole_and_in_part(monkeypatch: Patch) -> None:
    jobs = planned_for("memory", "h200-1500")
    budgets = [(job.label, job.recipe.data.sequence_length, job.recipe.budgets.gpu) for job in jobs]
    assert budgets[::2] == [("7b_512k", 524_288, None), ("32b_512k", 8192, None)]
    assert budgets[1::2] == [("7b_512k", 524_288, "24GiB"), ("32b_512k", 8192, "24GiB")]
    monkeypatch.setattr(planned, "forecast", fake)
    whole, part, *others = [planned.row_of(replace(job, machine="gh200-480")) for job in jobs]
    part["tokens_per_s"] = whole["tokens_per_s"] * 0.953
    others[1] |= {"fits": False, "reason": "ram short by 1 GiB"}
    assert planned._memory_cells(whole, part) == ("7b_512k: 1 x 524,288", "7.63", "7.27", "0.95")
    assert planned._memory_cells(*others) == (
        "32b_512k: 16 x 8,192",
        "488",
        "does not fit (ram short by 1 GiB)",
        "n/a",
    )
    assert not planned_for("memory")
    beyond = Mock(side_effect=UserError("data.sequence_length: beyond the rotary range"))
    monkeypatch.setattr(planned, "forecast", beyond)
    row = planned.row_of(jobs[0])
    assert (row["fits"], row["reason"]) == (False, "data.sequence_length: beyond the rotary range")


@pytest.mark.long
def test_the_files(tmp_path: Path, monkeypatch: Patch, capsys: Captured) -> None:
    for name, value in {"load_recipes": recipes, "forecast": fake, "usable_cpus": lambda: 1}.items():
        monkeypatch.setattr(planned, name, value)
    page = tmp_path / "planned.md"
    before = (REPOSITORY / "docs" / "results" / "planned.md").read_text()
    page.write_text(before)
    planned.main(page)
    text = page.read_text()
    for part in (
        "| mine | 4,096, 24,576 | **rtx3090-64** | does not fit: gpu short by 11.0 GiB |",
        "| theirs | 4,096, 24,576 | **gh200-480** | 11m11s | 977 | nvme_read | 30.1% | 72.0 GiB | 400 GiB | ",
        "| 7b_512k: 1 x 524,288 | gh200-480 | 7.63 | nvme_read | 602 | MegaTrain | GH200 of 96 GB, 480 GB | arXiv",
    ):
        assert part in text
    parted = re.compile(r"(<!-- rows: \w+ -->\n).*?(<!-- end -->)", re.S)
    assert parted.sub(r"\1\2", text) == parted.sub(r"\1\2", before), "the words are the page's own"
    assert all(len(line.split("|")) in (1, 6, 10, 12, 13) for line in text.splitlines())
    assert (tmp_path / "planned.png").read_bytes().startswith(b"\x89PNG")
    out, err = capsys.readouterr()
    progress = err.splitlines()
    assert out == f"{out.split()[0]} of {len(progress)} plans fit; written to {page}\n"
    assert progress[-1].startswith(f"{len(progress)}/{len(progress)} 120B MoE, 1,048,576 tokens on ")


def test_a_prompt_computed_once_gives_the_same_losses(tmp_path: Path, capsys: Captured) -> None:
    report = shared_prompts.main(
        prompt=20, answer=6, pairs=3, chunk=16, hidden=32, layers=2, rounds=2, json=True, folder=tmp_path
    )
    assert json.loads(capsys.readouterr().out) == report
    assert report["tokens"] == {"twice": 3 * 52, "once": 3 * 33}
    assert report["losses"]["once"] == pytest.approx(report["losses"]["twice"], rel=1e-6)
    assert [len(times) for times in report["steps_s"].values()] == [2, 2]
    assert list(tmp_path.iterdir()) == []
