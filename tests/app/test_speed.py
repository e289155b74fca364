"""The mean speed of a run, as every place shows it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.app.lanes import lanes_report
from penstock.app.run_log import RunLog
from penstock.app.rundir import read_info
from penstock.app.speed import MeanSpeed, speed_text
from penstock.engine.events import StepMetrics
from penstock.tui.data.catalog import read_run_entry, summary_lines
from penstock.tui.data.compare import ComparedRun, figure_rows
from penstock.tui.data.run_data import RunData
from penstock.tui.widgets.kpi_bar import figures
from penstock.tui.widgets.plan_table import real_step

KEPT = Path(__file__).parents[1] / "tui" / "snapshot_run"


def step(number: int, step_s: float, *, warmup: bool, tokens: int = 100) -> StepMetrics:
    of_step: dict[str, Any] = {"loss": 1.0, "grad_norm": 1.0, "lr": 1.0, "tokens": tokens, "step_s": step_s}
    return StepMetrics(step=number, tokens_per_s=tokens / step_s, warmup=warmup, model_flops=10**12, **of_step)


def test_the_mean_of_a_resumed_run_leaves_out_every_process_warm_up(tmp_path: Path) -> None:
    first = RunLog(tmp_path, total_steps=8)
    assert first.step(step(1, 90.0, warmup=True)).tokens_per_s is None
    first.step(step(2, 30.0, warmup=True))
    assert first.step(step(3, 2.0, warmup=False)).tokens_per_s == 50.0
    first.step(step(4, 7.0, warmup=False))  # of a generation that is never committed
    first.close("crashed")  # type: ignore[arg-type]
    second = RunLog(tmp_path, total_steps=8, step=3)
    second.step(step(4, 80.0, warmup=True))
    second.step(step(5, 40.0, warmup=True))
    mean = second.step(step(6, 3.0, warmup=False, tokens=400))
    second.close("stopped")
    assert (mean.steps, mean.tokens_per_s, mean.step_s, mean.tflops_per_s) == (2, 100.0, 2.5, 0.4)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["mean_tokens_per_s"] for line in lines] == [None, None, 50.0, 50.0, 50.0, 100.0]
    assert MeanSpeed.of(lines) == mean
    assert read_info(tmp_path).mean_tokens_per_s == 100.0


def test_speeds_are_named() -> None:
    assert speed_text(1282.4, 1234.0) == "1,282 tok/s mean, 1,234 last step"
    assert speed_text(12.3, 0.45) == "12 tok/s mean, 0.45 last step"
    assert speed_text(None, 1234.0) == "1,234 tok/s last step"
    assert speed_text(1282.4, None) == "1,282 tok/s mean"
    assert speed_text(None, None) == "n/a tok/s"


def test_every_place_tells_the_same_mean(tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(KEPT, path)
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    mean, last = MeanSpeed.of(lines), lines[-1]["tokens_per_s"]
    assert mean.steps == len(lines) - 2
    assert mean.tokens_per_s is not None
    said, planned = f"{mean.tokens_per_s:,.0f}", json.loads((path / "plan.json").read_text())["tokens_per_s"]
    assert len({said, f"{last:,.0f}", f"{planned:,.0f}"}) == 3, "they are told apart"
    data = RunData(path)
    while data.behind:
        data.poll()
    header = next(figure for figure in figures(data) if "tok/s" in figure.text)
    assert (header.text, header.short) == (f"{said} tok/s mean, {last:,.0f} last step", f"{said} tok/s mean")
    assert real_step(data).tokens_per_s == pytest.approx(mean.tokens_per_s)
    entry = read_run_entry(path)
    assert entry is not None
    assert entry.mean_tokens_per_s == pytest.approx(mean.tokens_per_s)
    assert f"{said} tok/s" in summary_lines(path)[0]
    compared = ComparedRun(path)
    compared.poll()
    shown = dict(figure_rows([compared]))
    found = [shown[f"tokens/s, {which}"] for which in ("mean", "last step", "planned")]
    assert found == [said, f"{last:,.0f}", f"{planned:,.0f}"]
    of_two = MeanSpeed.of(lines[-2:]).tokens_per_s  # the spans kept are of these steps
    assert f"steps 29 to 30: 115 ms a step, {of_two:,.0f} tok/s mean; " in lanes_report(path, None, as_json=False)
