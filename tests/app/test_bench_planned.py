"""The planned tables and the heat map: what is planned for which machine, and how the figures are shown."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recipe_texts import TINY
from sample_forecast import fitting, refused

from penstock.app import shipped
from penstock.app.bench import heatmap, planned
from penstock.app.bench.published import PUBLISHED
from penstock.engine.config import BudgetConfig, DataConfig, ModelConfig, Recipe, StorageConfig, TrainConfig
from penstock.engine.machine.presets import PRESETS
from penstock.storage.errors import UserError

MACHINES = ["gh200-480", "rtx3090-64"]
SHAPE = TINY["model"] | {"vocab_size": 512}


def recipe(name: str, machine: str = "") -> Recipe:
    return Recipe(
        name=name,
        machine=machine,
        model=ModelConfig(path="models/none", max_position=4096, overrides={"rope_parameters": {"a": 1}}, **SHAPE),
        data=DataConfig(sequence_length=4096),
        train=TrainConfig(global_batch_size=6, micro_batch_size=3, chunk_tokens=512, activation_checkpointing="full"),
        budgets=BudgetConfig(gpu="1GiB"),
        storage=StorageConfig(nvme=["/mnt/a", "/mnt/b"]),
    )


def recipes() -> dict[str, Recipe]:
    return {name: recipe(name) for name in planned.GRID_MODELS.values()} | {"mine": recipe("mine", "rtx3090-64")}


def fake(recipe: Recipe, machine: str) -> dict[str, Any]:
    """Fits gh200-480 only; faster for shorter contexts."""
    if machine != "gh200-480":
        return refused()
    return copy.deepcopy(fitting()) | {"tokens_per_s": 4e6 / recipe.data.sequence_length}


def planned_for(kind: str, *more: str) -> list[planned.Job]:
    return [job for job in planned.jobs(recipes(), [*MACHINES, *more]) if job.kind == kind]


def test_every_recipe_meets_every_machine_its_own_first() -> None:
    found = planned_for("recipe")
    assert len(found) == len(recipes()) * len(MACHINES)
    own, other = [job for job in found if job.label == "mine"]
    assert [(job.machine, job.own) for job in (own, other)] == [("rtx3090-64", True), ("gh200-480", False)]
    assert (own.recipe.budgets.gpu, own.recipe.storage.drives) == ("1GiB", ["/mnt/a", "/mnt/b"])
    assert (other.recipe.budgets, other.recipe.storage.drives) == (BudgetConfig(), [])


def test_the_grid_has_every_model_context_and_machine_once() -> None:
    grid = planned_for("grid")
    cells = {(job.label, job.recipe.data.sequence_length, job.machine) for job in grid}
    assert len(grid) == len(cells) == 6 * len(planned.GRID_CONTEXTS) * len(MACHINES)
    for job in grid:
        train, context = job.recipe.train, job.recipe.data.sequence_length
        assert context * train.global_batch_size == max(planned.GRID_STEP_TOKENS, context)
        assert (train.chunk_tokens, train.activation_checkpointing, train.kv_window) == (None, "auto", "auto")
        assert (job.recipe.model.path, job.recipe.model.hidden_size) == (None, 32)


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


def test_rows_keep_what_the_page_shows() -> None:
    job = planned.Job("recipe", "mine", recipe("mine"), "gh200-480", own=True)
    row = planned.row_of(job, fake)
    assert row["tokens_per_step"] == 6 * 4096
    assert row["peak_bytes"]["gpu"] == 72 * 2**30
    assert row["written_bytes_per_step"] == 1550 * 2**30
    row = planned.row_of(replace(job, machine="rtx3090-64"), fake)
    assert (row["fits"], row["reason"]) == (False, "gpu short by 11.0 GiB")

    def broken(recipe: Recipe, machine: str) -> dict[str, Any]:
        raise UserError("data.sequence_length: beyond the rotary range")

    row = planned.row_of(job, broken)
    assert (row["fits"], row["reason"]) == (False, "data.sequence_length: beyond the rotary range")


@pytest.mark.long
def test_a_small_model_is_planned_on_presets() -> None:
    small = planned.batched(recipe("mine"), 256, 2)
    job = planned.Job("grid", "mine", small, "rtx3090-64")
    row = planned.row_of(job, planned._forecast)
    assert row["fits"]
    assert row["tokens_per_s"] == pytest.approx(512 / row["step_s"])
    assert 0 < row["mfu"] < row["hfu"] < 1
    assert row["peak_bytes"]["gpu"] > 0
    tight = replace(small, budgets=BudgetConfig(gpu="1MiB"))
    row = planned.row_of(replace(job, recipe=tight), planned._forecast)
    assert not row["fits"]
    assert row["reason"].startswith("gpu short by ")


@pytest.mark.long
def test_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(planned, "load_recipes", lambda folder: recipes())
    report = planned.bench_planned(tmp_path, forecast_fn=fake, processes=1)
    text = (tmp_path / "planned.md").read_text()
    assert "**Planned, not measured.**" in text
    assert "| mine | 4,096, 24,576 | **rtx3090-64** | does not fit: gpu short by 11.0 GiB |" in text
    assert "## mine\n\nContext 4,096, 24,576 tokens a step. Its own machine first.\n" in text
    assert "| gh200-480 | 11m11s | 977 | nvme_read | 30.1% | 72.0 GiB | 400 GiB | 3.12 TiB | 1.51 TiB |" in text
    assert "Does not fit: rtx3090-64 (gpu short by 11.0 GiB); " in text
    assert (
        "| 7b_512k: 1 x 524,288 | gh200-480 | 7.63 | nvme_read | 602 | MegaTrain | GH200 of 96 GB, 480 GB | "
        "arXiv 2604.05091 |"
    ) in text
    assert "## With 24 GiB of the GPU's memory\n\nOn h200-1500, " in text
    assert "(planned.png)" in text
    assert all(len(line.split("|")) in (1, 6, 10, 11, 13) for line in text.splitlines())
    assert (tmp_path / "planned.png").read_bytes().startswith(b"\x89PNG")
    out, err = capsys.readouterr()
    progress = err.splitlines()
    fitting_there = sum(row["fits"] for part in ("recipes", "published", "memory", "grid") for row in report[part])
    assert out == f"{fitting_there} of {len(progress)} plans fit; written to {tmp_path / 'planned.md'}\n"
    assert len(progress) == sum(len(report[part]) for part in ("recipes", "published", "memory", "grid"))
    assert progress[-1].startswith(f"{len(progress)}/{len(progress)} 120B MoE, 1,048,576 tokens on ")


def test_short_rates() -> None:
    rates = (0.424, 9.32, 9.96, 928.4, 999.7, 1128, 11_280)
    assert [heatmap.short_rate(rate) for rate in rates] == ["0.42", "9.3", "10", "928", "1.0k", "1.1k", "11k"]
