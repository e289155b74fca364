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
from penstock.storage.units import tokens_text

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


def test_every_recipe_meets_every_machine_its_own_first() -> None:
    found = [job for job in planned.jobs(recipes(), MACHINES) if job.kind == "recipe"]
    assert len(found) == len(recipes()) * len(MACHINES)
    mine = [job for job in found if job.label == "mine"]
    assert [(job.machine, job.own) for job in mine] == [("rtx3090-64", True), ("gh200-480", False)]
    assert mine[0].recipe.budgets.gpu == "1GiB"
    assert mine[0].recipe.storage.drives == ["/mnt/a", "/mnt/b"]
    assert mine[1].recipe.budgets == BudgetConfig()
    assert mine[1].recipe.storage.drives == []


def test_the_grid_has_every_model_context_and_machine_once() -> None:
    grid = [job for job in planned.jobs(recipes(), MACHINES) if job.kind == "grid"]
    cells = {(job.label, job.recipe.data.sequence_length, job.machine) for job in grid}
    assert len(grid) == len(cells) == 6 * len(planned.GRID_CONTEXTS) * len(MACHINES)
    assert {min(planned.GRID_CONTEXTS), max(planned.GRID_CONTEXTS)} == {4096, 1 << 20}
    for job in grid:
        tokens = job.recipe.data.sequence_length * job.recipe.train.global_batch_size
        assert tokens == max(planned.GRID_STEP_TOKENS, job.recipe.data.sequence_length)
        assert job.recipe.train.chunk_tokens is None
        assert job.recipe.train.activation_checkpointing == job.recipe.train.kv_window == "auto"
        assert job.recipe.model.path is None
        assert job.recipe.model.hidden_size == 32


def test_a_missing_recipe_is_named() -> None:
    missing = {name: found for name, found in recipes().items() if name != "70b_gh200"}
    with pytest.raises(UserError, match=r"recipes/70b_gh200\.py: missing; the heat map takes the shape of 70B"):
        list(planned.jobs(missing, MACHINES))


def test_published_figures_name_recipes_and_presets_that_exist() -> None:
    names = set(planned.load_recipes(shipped.FOLDER))
    assert set(planned.GRID_MODELS.values()) <= names
    for figure in PUBLISHED:
        assert figure.recipe in names
        assert figure.machine in PRESETS
        assert figure.source
        assert figure.sequences % figure.micro_batch == 0


def test_a_published_step_is_planned_in_its_own_micro_batches() -> None:
    jobs = planned.jobs(recipes(), [*MACHINES, "rtx4090-256"])
    found = {
        (job.published.system, job.label, job.recipe.data.sequence_length): job.recipe.train
        for job in jobs
        if job.published is not None and job.machine == "rtx4090-256"
    }
    batches = {case: (train.global_batch_size, train.micro_batch_size) for case, train in found.items()}
    assert batches == {
        ("LLMQ", "7b_512k", 1024): (512, 16),
        ("LLaMA-Factory, ZeRO-3 offload", "7b_512k", 1024): (512, 32),
        ("LLMQ", "14b_workstation", 1024): (512, 32),
        ("LLaMA-Factory, ZeRO-3 offload", "14b_workstation", 1024): (520, 20),
        ("LLMQ", "7b_512k", 8192): (64, 2),
        ("LLMQ", "14b_workstation", 8192): (64, 1),
    }


def test_a_gpu_is_planned_whole_and_in_part() -> None:
    jobs = [job for job in planned.jobs(recipes(), [*MACHINES, "h200-1500"]) if job.kind == "memory"]
    budgets = [(job.label, job.recipe.data.sequence_length, job.recipe.budgets.gpu) for job in jobs]
    assert budgets == [
        ("7b_512k", 524_288, None),
        ("7b_512k", 524_288, "24GiB"),
        ("32b_512k", 8192, None),
        ("32b_512k", 8192, "24GiB"),
    ]
    whole, part, *others = [planned.row_of(replace(job, machine="gh200-480"), fake) for job in jobs]
    part["tokens_per_s"] = whole["tokens_per_s"] * 0.953
    others[1] |= {"fits": False, "reason": "ram short by 1 GiB"}
    assert planned._memory([whole, part, *others])[2:] == [
        "| 7b_512k: 1 x 524,288 | 7.63 | 7.27 | 0.95 |",
        "| 32b_512k: 16 x 8,192 | 488 | does not fit (ram short by 1 GiB) | n/a |",
    ]
    assert not [job for job in planned.jobs(recipes(), MACHINES) if job.kind == "memory"]


def test_rows_keep_what_the_page_shows() -> None:
    job = planned.Job("recipe", "mine", recipe("mine"), "gh200-480", own=True)
    row = planned.row_of(job, fake)
    assert row["tokens_per_step"] == 6 * 4096
    assert row["peak_bytes"]["gpu"] == 72 * 2**30
    assert row["written_bytes_per_step"] == 1550 * 2**30
    row = planned.row_of(planned.Job("recipe", "mine", recipe("mine"), "rtx3090-64"), fake)
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
    cells = planned._cells(row)
    assert cells[0] == "rtx3090-64"
    assert len(cells) == 9
    tight = replace(small, budgets=BudgetConfig(gpu="1MiB"))
    row = planned.row_of(replace(job, recipe=tight), planned._forecast)
    assert not row["fits"]
    assert row["reason"].startswith("gpu short by ")


def test_processes_keep_the_order() -> None:
    todo = [planned.Job("recipe", str(i), recipe("mine"), "gh200-480") for i in range(5)]
    rows = list(planned._forecasts(todo, fake, 2))
    assert [row["label"] for row in rows] == list("01234")
    assert all(row["fits"] for row in rows)


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


def test_without_matplotlib_nothing_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"needs matplotlib: pip install 'penstock\[dev\]'"):
        planned.bench_planned(tmp_path, forecast_fn=fake)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("rate", "text"),
    [(0.424, "0.42"), (9.32, "9.3"), (9.96, "10"), (928.4, "928"), (999.7, "1.0k"), (1128, "1.1k"), (11_280, "11k")],
)
def test_short_rates(rate: float, text: str) -> None:
    assert heatmap.short_rate(rate) == text


def test_short_contexts() -> None:
    assert [tokens_text(n) for n in (4096, 262_144, 1 << 20)] == ["4k", "256k", "1M"]


def test_a_grid_in_which_nothing_fits_is_drawn(tmp_path: Path) -> None:
    row = {"label": "7B", "context": 4096, "machine": "a", "fits": False}
    heatmap.draw([row], ["a"], tmp_path / "map.png")
    assert (tmp_path / "map.png").stat().st_size > 1000
