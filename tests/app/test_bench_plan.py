"""The comparison of plans with runs: the cases, the arithmetic, the page."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from sample_forecast import GIB, fitting

from penstock.app.bench import plan as bench_plan_module
from penstock.app.bench.plan import bench_plan, cases_here, compare, progress, row_of, run_case
from penstock.app.bench.plan_cases import CASES, CUDA_CASES, PlanCase
from penstock.app.bench.process import CallFailed
from penstock.app.recipe import from_json, to_json
from penstock.engine.config import Recipe, parse_bytes
from penstock.engine.forecast.request import PlanRequest
from penstock.engine.hf.config import model_config
from penstock.engine.machine.budgets import Budgets
from penstock.engine.machine.device import LEAST_LIMIT_BYTES
from penstock.engine.machine.presets import generic_gpu
from penstock.engine.model.anatomy import model_spec
from penstock.storage.errors import UserError


def finished(
    run_dir: Path, *, step_times_s: list[float], gpu: float = 1.0, nvme: float = 1.0, on_gpu: bool = True
) -> None:
    """A run directory of the sample forecast whose peaks are these shares of what was planned."""
    run_dir.mkdir(parents=True)
    forecast = fitting()
    shares = {"gpu": gpu, "ram": 1.0, "nvme": nvme}
    tiers = {
        name: {"budget_bytes": tier["budget_bytes"], "peak_bytes": int(tier["peak_bytes"] * shares[name])}
        for name, tier in forecast["tiers"].items()
    }
    gpu_memory = {"allocated_bytes": 1} if on_gpu else None
    (run_dir / "plan.json").write_text(json.dumps(forecast))
    (run_dir / "summary.json").write_text(json.dumps({"tiers": tiers, "gpu_memory": gpu_memory}))
    lines = [json.dumps({"step": i, "step_s": s}) + "\n" for i, s in enumerate(step_times_s, start=1)]
    (run_dir / "metrics.jsonl").write_text("".join(lines))


def differing(cases: Sequence[PlanCase]) -> dict[str, Recipe]:
    """The cases' recipes by name, which differ in what a plan decides wherever they run."""
    recipes = {case.name: from_json(to_json(case.recipe())) for case in cases}
    assert len(recipes) == len(cases)
    assert {r.train.activation_checkpointing for r in recipes.values()} == {"auto", "full", "selective", "none"}
    assert {r.train.kv_window for r in recipes.values()} == {"auto", "whole", "streamed"}
    assert {r.train.compute_dtype for r in recipes.values()} == {"bfloat16", "float32"}
    assert {r.train.gradient_dtype for r in recipes.values()} == {"bfloat16", "float32"}
    assert {r.model.tie_embeddings for r in recipes.values()} == {True, False}
    assert {r.train.compile for r in recipes.values()} == {"auto", "off"}
    assert any("num_experts" in r.model.overrides for r in recipes.values())
    assert any(r.train.chunk_tokens is None for r in recipes.values())
    assert len({r.train.micro_batch_size for r in recipes.values()}) > 1
    assert len({r.data.sequence_length for r in recipes.values()}) >= 4
    return recipes


def test_cases_differ_in_what_a_plan_decides() -> None:
    recipes = differing(CASES)
    assert len(recipes) >= 12
    # Both tiers are ordinary memory on a machine without a GPU: a case must leave room on one of 8 GiB.
    for found in recipes.values():
        assert parse_bytes(found.budgets.gpu or 0, "gpu") + parse_bytes(found.budgets.ram or 0, "ram") <= 6 * GIB


def test_cases_are_those_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for there, cases in ((True, CUDA_CASES), (False, CASES)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert cases_here() is cases


def test_the_comparison_by_hand(tmp_path: Path) -> None:
    # The first step is not counted: the median of 600, 700 and 740 is 700, planned were 671.4.
    finished(tmp_path / "run", step_times_s=[2000.0, 600.0, 740.0, 700.0], gpu=0.96, nvme=1.06)
    row = compare(tmp_path / "run")
    assert row["step_s"]["measured"] == 700.0
    assert row["step_s"]["ratio"] == pytest.approx(700 / 671.4)
    assert row["step_s"]["within"]
    assert row["tiers"]["gpu"]["ratio"] == pytest.approx(0.96)
    assert [row["tiers"][name]["within"] for name in ("gpu", "ram", "nvme")] == [True, True, False]


def test_without_a_gpu_temporaries_are_not_compared(tmp_path: Path) -> None:
    finished(tmp_path / "run", step_times_s=[1.0, 1.0], gpu=67 / 72, on_gpu=False)
    # 72 GiB were planned, 5 of them as workspace.
    assert compare(tmp_path / "run")["tiers"]["gpu"] == {
        "planned": 67 * GIB,
        "measured": 67 * GIB,
        "ratio": 1.0,
        "within": True,
    }


def test_what_was_not_planned_must_not_be_used() -> None:
    assert bench_plan_module._pair(0, 0, 0.05) == {"planned": 0, "measured": 0, "ratio": None, "within": True}
    assert not bench_plan_module._pair(0, 4096, 0.05)["within"]


def test_runs_that_cannot_be_compared(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"plan\.json: cannot be read .*left no such file"):
        compare(tmp_path)
    finished(tmp_path / "short", step_times_s=[1.0])
    with pytest.raises(UserError, match="1 steps; the first does not count"):
        compare(tmp_path / "short")


def test_report_table_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(case: PlanCase, run_dir: Path) -> None:
        if case.name == "moe":
            raise CallFailed("exit 1: KeyError: 'odd'", "Traceback\nKeyError: 'odd'")
        slow = case.name == "1m-gpu"
        finished(run_dir, step_times_s=[9.0, 900.0 if slow else 671.4], gpu=0.94 if slow else 1.0)

    cases = [case for case in CASES if case.name in ("1m-gpu", "29m-ram", "moe")]
    page = tmp_path / "planning.md"
    report = bench_plan(cases=cases, run=run, folder=tmp_path, save=page)
    assert (report["failed"], report["peaks_within"], report["steps_within"]) == (1, 1, 1)
    assert report["worst_peak"]["gpu"] == pytest.approx(0.06)
    assert report["worst_step"] == pytest.approx(900 / 671.4 - 1)
    assert [path.name for path in tmp_path.iterdir()] == ["planning.md"]  # run directories are gone
    text = page.read_text()
    assert "penstock bench plan --save docs/results/planning.md" in text
    assert (
        "| 1m-gpu | tied, hardly any RAM | 122610.1M | 32,768, 262,144 | ram 1%, nvme 99% | "
        "67.7 GiB of 72.0 GiB: 0.940! |" in text
    )
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


@pytest.mark.long
def test_a_refused_case_is_one_line_without_a_traceback(tmp_path: Path) -> None:
    tiny = PlanCase(name="tiny", about="", model=CASES[0].model, context=256, gpu="1MiB", ram="1MiB", train={})
    row = row_of(tiny, tmp_path)
    assert row["error"].startswith("budgets.gpu: 1.0 MiB cannot hold one block's working set")
    assert "\n" not in row["error"]
    assert "output" not in row
    assert progress(row) == f"tiny: failed: {row['error']}"
    assert list(tmp_path.iterdir()) == []


def test_a_case_whose_process_breaks_keeps_what_it_wrote(tmp_path: Path) -> None:
    row = row_of(
        PlanCase(name="odd", about="", model={}, context=8, gpu="1MiB", ram="1MiB", train={"odd": 1}), tmp_path
    )
    assert row["error"].startswith("exit 1: TypeError: ")
    assert "\n" not in row["error"]
    assert row["output"].startswith("Traceback")


def test_a_case_ends_at_its_limit(tmp_path: Path) -> None:
    with pytest.raises(CallFailed, match="not done after 0 s"):
        run_case(CASES[0], tmp_path / "run", limit_s=0.2)


@pytest.mark.long
def test_cuda_cases_fit_a_gpu_and_differ_in_what_a_plan_decides() -> None:
    recipes = differing(CUDA_CASES)
    assert len(recipes) >= 8
    places = {}
    for name, recipe in recipes.items():
        budgets = [parse_bytes(getattr(recipe.budgets, tier) or 0, tier) for tier in ("gpu", "ram")]
        assert budgets[0] >= LEAST_LIMIT_BYTES  # so the allocator keeps to it
        assert budgets[1] <= 10 * GIB
        task = PlanRequest(
            spec=model_spec(model_config(recipe, None), recipe),
            recipe=recipe,
            budgets=Budgets(budgets[0], budgets[1], None, {}),
            device_type="cuda",
            device_reads=False,
        )
        plan = task.search(generic_gpu("NVIDIA H200")).plan
        places[name] = {buffer.state for buffer in plan.buffers.values()}
    assert next(iter(places.values())) == {"gpu", "ram", "nvme"}  # the most telling one first
    assert {"nvme"} in places.values()
    assert {"gpu"} in places.values()
    assert {"ram"} in places.values()
