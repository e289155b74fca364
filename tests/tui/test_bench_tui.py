"""The made-up run that watching is measured on, and the figures of a measurement."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from penstock.app.lanes import LANES
from penstock.storage.errors import UserError
from penstock.tui.bench import Sample, bench_tui, page, summarise
from penstock.tui.synthetic import Steps, Writer, metrics_line

MIB = 1 << 20


def test_made_up_steps_go_as_lanes_do() -> None:
    steps = Steps(num_layers=4, spans_per_s=100.0, first_step=7)
    ends = []
    lines = []
    for _ in range(5):
        lines += steps.next()
        ends.append(steps.end_s)
    assert {line["step"] for line in lines} == {7, 8, 9, 10, 11}
    assert len({line["id"] for line in lines}) == len(lines) == 5 * (12 * 4 + 2)
    by_id = {line["id"]: line for line in lines}
    for lane in LANES:
        mine = sorted((line for line in lines if line["lane"] == lane), key=lambda line: line["start_s"])
        assert all(a["end_s"] <= b["start_s"] for a, b in pairwise(mine)), "ops of a lane overlap"
        for before, line in pairwise(mine):
            for dep in line["waited"]:
                assert before["end_s"] < by_id[dep]["end_s"] <= line["start_s"]
    assert sum(1 for line in lines if line["waited"]) > 20
    assert all(0.7 * steps.step_s < b - a < 1.4 * steps.step_s for a, b in pairwise(ends))


def test_the_made_up_run_has_what_a_run_has_and_goes_on(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "run", spans_per_s=300.0, num_spans=1000, num_steps=50)
    writer.begin(1000.0)
    run = tmp_path / "run"

    def rows(name: str) -> list[dict[str, float]]:
        return [json.loads(line) for line in (run / name).read_text().splitlines()]

    assert [row["step"] for row in rows("metrics.jsonl")] == list(range(1, 51))
    spans = rows("spans.jsonl")
    assert 600 < len(spans) <= 1000
    added = sum(writer.advance(0.25, 1000.0 + 0.25 * i) for i in range(1, 41))
    assert len(rows("spans.jsonl")) == len(spans) + added
    assert 0.8 * 3000 < added < 1.2 * 3000
    ends = [row["end_s"] for row in rows("spans.jsonl")]
    assert ends == sorted(ends)
    status = json.loads((run / "status.json").read_text())
    assert status["step"] == writer.step == rows("metrics.jsonl")[-1]["step"] > 55
    assert status["clock_s"] >= ends[-1]
    assert status["now"]
    assert json.loads((run / "plan.json").read_text())["blocks"]
    assert metrics_line(3, 1.0, 0.0) == metrics_line(3, 1.0, 0.0)


def test_figures_worked_by_hand() -> None:
    # 8 s of processor time to start; then 0.1 s a second, but for ten seconds at 0.2; 1 MiB more every 10 s.
    cpu = [0.0, 4.0, 8.0, 8.5, 9.5, 10.5, 11.0, 11.5]
    at = [0.0, 15.0, 35.0, 40.0, 45.0, 50.0, 55.0, 60.0]
    samples = [Sample(a, c, int(100 * MIB + a / 10 * MIB)) for a, c in zip(at, cpu, strict=True)]
    cost = summarise(samples, 25 * 2048, [0.5, 0.3, 0.4], 1.0)
    assert cost.core_share == pytest.approx(3.5 / 25)
    assert cost.worst_share == pytest.approx(0.2)
    assert cost.warm_up_cpu_s == 8.0
    assert cost.rss_first_bytes == 103.5 * MIB
    assert cost.rss_most_bytes == cost.rss_last_bytes == 106 * MIB
    assert cost.rss_slope_bytes_per_hour == pytest.approx(360 * MIB, rel=1e-6)
    text = page(cost)
    for part in ("14.0%", "20.0%", "106 MiB", "+360.0 MiB an hour", "2.0 KiB/s", "0.40 s (of 0.30, 0.40, 0.50)"):
        assert part in text


def test_too_short_a_time_is_refused() -> None:
    with pytest.raises(UserError, match="--minutes"):
        bench_tui(0.5)
