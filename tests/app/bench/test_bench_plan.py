"""Plans beside runs, by hand."""

import json
from pathlib import Path

import pytest
from sample_forecast import GIB, fitting

from penstock.app.bench import plan
from penstock.app.bench.plan import _pair, bench_plan, compare
from penstock.app.bench.plan_cases import CASES, PlanCase
from penstock.app.bench.process import CallFailed
from penstock.storage.files.errors import UserError

Captured = pytest.CaptureFixture[str]


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
    assert _pair(0, 0, 0.05) == {"planned": 0, "measured": 0, "ratio": None, "within": True}
    assert not _pair(0, 4096, 0.05)["within"]
    with pytest.raises(UserError, match=r"plan\.json: cannot be read .*left no such file"):
        compare(tmp_path)
    finished(tmp_path / "short", [1.0])
    with pytest.raises(UserError, match="1 steps; the first does not count"):
        compare(tmp_path / "short")


def test_report_and_table(tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(case: PlanCase, run_dir: Path) -> None:
        if case.name == "moe":
            raise CallFailed("exit 1: KeyError: 'odd'", "Traceback\nKeyError: 'odd'")
        slow = case.name == "1m-gpu"
        finished(run_dir, [9.0, 900.0 if slow else 671.4], gpu=0.94 if slow else 1.0)

    cases = [case for case in CASES if case.name in ("1m-gpu", "29m-ram", "moe")]
    monkeypatch.setattr(plan, "run_case", run)
    report = bench_plan(cases=cases, folder=tmp_path)
    assert (report["failed"], report["peaks_within"], report["steps_within"]) == (1, 1, 1)
    assert report["worst_peak"]["gpu"] == pytest.approx(0.06)
    assert report["worst_step"] == pytest.approx(900 / 671.4 - 1)
    assert list(tmp_path.iterdir()) == []  # run directories are gone
    text, err = capsys.readouterr()
    row = "| 1m-gpu | tied, hardly any RAM | 122610.1M | 32,768, 262,144 | ram 1%, nvme 99% | "
    assert f"{row}0.940! |" in text
    assert "15m00s of 11m11s: 1.340! | nvme_read |" in text
    assert "| moe | 8 experts, 2 a token | failed: exit 1: KeyError: 'odd' |" in text
    assert "- peaks of all tiers within 5%: 1 of 3; largest deviation gpu 6.0%, ram 0.0%, nvme 0.0%" in text
    assert "- step time within 15%: 1 of 3; median deviation 17.0%, largest 34.0%" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in rows} == {11}
    assert err.splitlines()[0].startswith("1/3 1m-gpu: measured over planned: gpu 0.940!, ram 1.000, nvme 1.000, step ")
    assert "3/3 moe: failed: exit 1: KeyError: 'odd'" in err


def test_a_missing_folder_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="missing: no such folder"):
        bench_plan(cases=[], folder=tmp_path / "missing")
