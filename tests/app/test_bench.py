"""The step benchmark's bookkeeping; its figures come from running it."""

import json

import pytest

from app.bench import step as bench
from storage.errors import UserError


@pytest.fixture
def outcomes(monkeypatch):
    """Workers that report step times and peaks without running anything; returns the order in which they ran."""
    order = []

    def run_case(case, steps, scratch):
        assert scratch.is_dir()
        order.append(case)
        step_s = {"plain": 4.0, "ram": 3.0, "nvme": 5.0}[case] + order.count(case)
        peak = {"plain": 1000, "ram": 900, "nvme": 400}[case] + order.count(case)
        return {"step_times_s": [99.0] * bench.WARMUP_STEPS + [step_s] * steps, "peak_rss_bytes": peak}

    monkeypatch.setattr(bench, "_run_case", run_case)
    return order


def test_ratios_are_medians_without_warm_up_and_highest_peaks(tmp_path, outcomes, capsys):
    figures = bench.bench_step(json=True, rounds=3, steps=2, folder=tmp_path)
    assert outcomes == ["plain", "ram", "nvme"] * 3
    assert json.loads(capsys.readouterr().out) == figures
    assert figures["plain_step_s"] == 6.0
    assert figures["ram_ratio"] == pytest.approx(5 / 6)
    assert figures["nvme_ratio"] == pytest.approx(7 / 6)
    assert figures["nvme_rss_ratio"] == pytest.approx(403 / 1003)
    assert list(tmp_path.iterdir()) == []


def test_table_has_a_row_for_each_case(tmp_path, outcomes, capsys):
    bench.bench_step(rounds=1, steps=1, folder=tmp_path)
    printed = capsys.readouterr().out
    assert all(text in printed for text in bench.CASES.values())
    assert "1.20" in printed  # (5 + 1) / (4 + 1)


def test_failed_case_shows_its_error(tmp_path, monkeypatch):
    monkeypatch.setattr(bench.sys, "executable", "/bin/false")
    with pytest.raises(UserError, match="bench case plain failed"):
        bench.bench_step(rounds=1, steps=1, folder=tmp_path)
