"""What a run directory says, of real runs and of directories in any state of ruin; the columns of its steps."""

import json
import math
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_process import json_lines
from seen import append

from penstock.app.launch.progress import Eta
from penstock.engine.events import StepMetrics
from penstock.tui.data.alerts import alerts
from penstock.tui.data.flow import tiers
from penstock.tui.data.metrics import MetricsLog
from penstock.tui.data.run_data import RunData

NOW = time.time()
Says = Callable[..., object]


def read(path: Path, clock: Any = time.time) -> RunData:
    data = RunData(path, clock)
    data.poll()
    while data.behind:
        data.poll()
    return data


def told(data: RunData) -> list[str]:
    return [alert.text for alert in alerts(data)]


@pytest.fixture
def running(first: Path, monkeypatch: pytest.MonkeyPatch) -> Says:
    """Says what the process of `first`, which is alive, writes to its status."""
    monkeypatch.setattr("penstock.app.runs.directory.is_live", lambda path: True)
    status = {"state": "running", "step": 12, "total_steps": 99, "heartbeat": NOW}
    return lambda **more: (first / "status.json").write_text(json.dumps(status | more))


def test_a_finished_run_and_the_end_of_the_output_where_a_process_died_silently(first: Path) -> None:
    data = read(first)
    assert (data.state, data.step, data.total_steps, data.problems) == ("finished", 12, 12, [])
    assert (data.metrics.rows, data.metrics.last("loss")) == (12, json_lines(first / "metrics.jsonl")[-1]["loss"])
    assert data.spans.view.num_spans == len(json_lines(first / "spans.jsonl"))
    assert data.committed_step == 12
    assert {*data.checkpoints} <= {5, 10, 12}
    assert [tier.name for tier in tiers(data)] == ["gpu", "ram", "nvme"]
    assert all(tier.held_bytes and tier.budget_bytes for tier in tiers(data))
    assert [block.name for block in data.blocks()] == [block["name"] for block in data.plan["blocks"]]
    assert (data.eta_s(), told(data)) == (None, [])
    summary = json.loads((first / "summary.json").read_text())
    ended = {"validations": 3, "best": 2.31, "best_step": 6}
    (first / "summary.json").write_text(json.dumps(summary | {"ended_early": ended}))
    assert told(read(first)) == ["ended early after step 12: no gain in 3 validations; best 2.31 at step 6"]
    crashed = first.with_name("crashed")
    (crashed / "output.log").write_text("".join(f"line {i}\n" for i in range(100)) + "Killed\n")
    assert read(crashed).log_lines()[-1].text == "Killed"


def test_what_changes_is_told(first: Path) -> None:
    data = read(first)
    assert data.poll() == set()
    for name in ("metrics", "spans"):
        append(first / f"{name}.jsonl", json_lines(first / f"{name}.jsonl")[-1] | {"step": 13})
        assert data.poll() == {name}
    append(first / "log.jsonl", {"time": 0, "level": "info", "text": "hello", "step": 3})
    assert data.poll() == {"log"}
    assert data.log_lines()[-1].text == "hello"
    append(first / "validation.jsonl", *({"step": step, "loss": 3.0 - step / 10} for step in (5, 10)))
    assert data.poll() == {"metrics"}
    assert data.metrics.validation[1].tolist()[-2:] == [2.5, 2.0]
    assert data.predicted is None
    data.want_predicted = True
    assert data.poll() == {"predicted"}
    assert data.predicted.view.num_spans == len(json_lines(first / "predicted.jsonl"))
    # Files that are replaced begin again, as a resumed run does with its metrics.
    before, fifth = data.spans, json_lines(first / "metrics.jsonl")[4]
    for name, count in (("metrics", 5), ("spans", 1)):
        append(first / "x", *json_lines(first / f"{name}.jsonl")[:count])
        os.replace(first / "x", first / f"{name}.jsonl")
        assert name in data.poll()
    assert data.metrics.rows == 5
    assert data.spans is not before
    assert data.spans.view.num_spans == 1
    append(first / "metrics.jsonl", fifth | {"step": 6})
    data.poll()
    assert data.metrics.last_step == 6


def test_what_is_damaged_is_counted_and_what_a_terminal_would_obey_not_shown(first: Path) -> None:
    with (first / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": "three"}\n{broken\n\xff\xfe\n')
    append(first / "log.jsonl", {"text": ["a"]}, {}, {"text": "two\nlines", "level": 3, "time": "late"})
    status = json.loads((first / "status.json").read_text())
    (first / "status.json").write_text(json.dumps(status | {"state": "failed", "error": "no\x1b[2Jroom\nTraceback"}))
    data = read(first)
    assert data.metrics.rows == 12
    assert data.problems == ["metrics.jsonl: 3 lines are damaged and left out"]
    assert [line.text for line in data.log_lines()[-3:]] == ["['a']", "None", "two\nlines"]
    assert told(data)[0] == "no\ufffd[2Jroom"


def test_a_live_run_that_falls_silent(first: Path, running: Says) -> None:
    running(heartbeat=1000.0)
    now = [1001.0]
    data = read(first, lambda: now[0])
    assert data.state == "running"
    assert data.eta_s() is not None
    now[0] = 1100.0
    assert "status" in data.poll()
    assert data.state == "stale"
    assert "no heartbeat for 1m40s" in told(data)[0]


def test_alerts_of_a_running_run(first: Path, running: Says) -> None:
    line = json_lines(first / "metrics.jsonl")[-1] | {"loss": 3.0}
    steps = [line | {"step": step, "grad_norm": 1 + 0.01 * (step % 3)} for step in range(13, 60)]
    full = {"gpu": 0, "ram": 0, "nvme": 62 << 20}
    append(first / "metrics.jsonl", *steps, line | {"step": 60, "grad_norm": 50.0, "loss": None, "tier_bytes": full})
    end_s = max(span["end_s"] for span in json_lines(first / "spans.jsonl"))
    now = {"d2h": [{"op": "store_x", "block": "layers.1", "start_s": end_s, "chunk": 0, "step": 61}]}
    running(step=60, clock_s=end_s + 300, now=now)
    found = " | ".join(told(read(first, lambda: NOW)))
    assert "gradient norm 50.0 is" in found
    assert "the loss of step 60 is not a number" in found
    assert "no op has finished for 5m00s; d2h store_x layers.1 under way" in found
    assert "nvme is 97% full, more than the plan allows for" in found


def test_a_loss_that_leapt_is_told_with_its_documents_for_some_steps(first: Path, running: Says) -> None:
    running()
    documents = [{"where": where, "document": n} for where, n in (("chats.jsonl:7", 6), (None, 41), ("c", 1))]
    append(first / "spikes.jsonl", {"step": 11, "loss": 9.0, "documents": documents, "num_documents": 5})
    data = read(first, lambda: NOW)
    spike = "the loss spiked in step 11, trained on chats.jsonl:7, document 41 and 3 more"
    assert spike in told(data)
    append(first / "metrics.jsonl", json_lines(first / "metrics.jsonl")[-1] | {"step": 31})
    data.poll()
    assert spike not in told(data)


JSON = ["[" * 100_000, "null", "[]", "{}", '{"state": ["x"], "step": "y"}', '"', "-1e999"]


@pytest.mark.parametrize("seed", range(3))
def test_any_damage_is_survived(first: Path, seed: int) -> None:
    """Files are cut, overwritten, swapped, made folders, while they are being read."""
    rng = random.Random(seed)
    data, recipe = read(first), (first / "recipe.json").read_bytes()
    names = [path.name for path in first.iterdir() if path.is_file()]
    for _ in range(25):
        path = first / rng.choice(names)
        act = rng.randrange(6)
        if path.is_dir():
            path.rmdir()
        elif act == 0 and path.exists():
            os.truncate(path, rng.randrange(path.stat().st_size + 1))
        elif act == 1:
            path.write_bytes(rng.randbytes(rng.randrange(300)))
        elif act == 2:
            path.write_text(rng.choice(JSON))
        elif act == 3 and path.exists():
            path.unlink()
            path.mkdir()
        elif act == 4:
            path.write_bytes(recipe)
        else:
            with path.open("ab") as file:
                file.write(rng.choice([b"\n\n", b'{"step": 1e400}\n', b"{\x00}\n", b'{"step": 3, "loss": {}}\n']))
        data.poll()
        for look in (alerts, tiers, RunData.blocks, RunData.eta_s):
            look(data)
        assert isinstance(data.step, int)
        assert data.mfu is None or data.mfu > 0


def line(step: int, **more: object) -> dict[str, object]:
    return {"step": step, "loss": 3.0, "grad_norm": 1.0, "lr": 1e-4, "tokens": 100, "step_s": 2.0} | more


def filled(steps: int, **more: object) -> MetricsLog:
    log = MetricsLog()
    log.add(line(step, **more) for step in range(1, steps + 1))
    return log


def test_columns_and_totals_and_what_is_absent_or_foreign_is_nan() -> None:
    log = filled(1000)
    assert (log.rows, log.last_step) == (1000, 1000)
    assert (log.column("total_tokens")[-1], log.column("total_s")[9]) == (100_000, 20.0)
    np.testing.assert_allclose(log.column("ema"), 3.0)
    rows, column = log.rows, log.column("loss", log.rows)
    log.add(line(step, loss=5.0) for step in range(1001, 4000))
    assert (len(column), set(column)) == (rows, {3.0}), "a reader keeps whole rows while it grows"
    log.add([line(6, loss=9.0)])  # steps that are done again
    assert (log.rows, log.last("loss"), log.column("total_tokens")[-1]) == (6, 9.0, 600)
    log = filled(3, nvme_written_bytes={"/a": 10, "/b": 1, "/c": "x"}, tier_bytes={"gpu": 7})
    assert (log.written_bytes, log.tier_bytes) == ({"/a": 30.0, "/b": 3.0}, {"gpu": 7.0})
    log = MetricsLog()
    odd = [{"step": 1}, {"step": 2, "loss": None, "tokens": "many"}, {"loss": 1}, {"step": True}, {"step": -1}]
    assert log.add([*odd, {"step": 3, "loss": 10**400, "tier_bytes": 3, "nvme_written_bytes": {"/a": "x"}}]) == 3
    assert np.isnan(log.column("loss")).all()
    assert (log.skipped, log.last("loss"), log.eta_s(10), log.z_score("loss")) == (3, None, None, None)
    # Absurd figures are none, too, and totals never fall.
    log = MetricsLog()
    steps = [line(1), line(2, tokens=-5, step_s=-1e9), line(3, loss=1e300, tokens=10**400), line(4)]
    log.add([*steps, {"step": 1e29}, {"step": 10**400}, {"step": float("nan")}])
    assert (log.rows, log.last_step, log.skipped) == (4, 4, 3)
    assert log.column("total_tokens").tolist() == [100.0, 100.0, 100.0, 200.0]
    assert log.column("total_s").tolist() == [2.0, 2.0, 4.0, 6.0]
    assert math.isnan(log.column("loss")[2])


def test_what_is_measured_beside_the_loss_has_columns_too_and_names_are_bounded() -> None:
    log = filled(2)
    assert (log.measured_names, log.newest) == ([], {})
    log.add(line(step, measured={"kl": step / 2, "rewards/margins": 3.0}) for step in range(3, 1001))
    assert log.measured_names == ["rewards/margins", "kl"]
    values, averages = log.measured("kl")
    assert np.isnan(values[:2]).all()
    assert values[2:].tolist() == [step / 2 for step in range(3, 1001)]
    assert values[-1] > averages[-1] > values[900]
    np.testing.assert_allclose(log.measured("rewards/margins")[1][2:], 3.0)
    log.add([line(6, measured={"kl": None, "reward": 7.0})])  # steps that are done again
    assert [len(column) for column in log.measured("kl")] == [6, 6]
    assert log.measured("kl")[1][-1] == log.measured("kl")[1][-2], "the average goes on over a gap"
    assert repr(log.newest) == repr({"kl": math.nan, "rewards/margins": 3.0, "reward": 7.0})
    assert np.isnan(log.measured("nobody's")[0]).tolist() == [True] * 6
    log.add(line(step, measured={f"{step}/{n}": 0.5 for n in range(64)}) for step in range(7, 20))
    assert len(log.measured_names) == 64
    log = MetricsLog()
    log.add_validation({"step": step, "loss": 2.0, "measured": {"kl": step / 4}} for step in (4, 8, 12))
    log.add_validation([{"step": 8, "loss": 1.0, "measured": {"reward": 0.5}}])  # done again
    found = {name: [column.tolist() for column in columns] for name, columns in log.validated.items()}
    assert found == {"kl": [[4], [1.0]], "reward": [[8], [0.5]]}
    assert log.add_validation([{"step": 9, "loss": None, "measured": {"reward": 0.75}}, {"step": 9, "loss": None}]) == 1
    assert log.validated["reward"][1].tolist() == [0.5, 0.75]
    assert log.validation[0].tolist() == [4, 8], "rewards alone have no loss"
    log.add_validation([{"step": 4, "loss": 1.0}], anew=True)
    assert (log.measured_names, log.validated) == ([], {})


def test_eta_average_z_score_and_validations() -> None:
    log, eta = MetricsLog(), Eta(100)
    for step in range(1, 41):
        step_s = 10.0 if step <= 2 else 1.0 + step / 10
        log.add([line(step, step_s=step_s)])
        metrics = StepMetrics(step=step, loss=1, grad_norm=1, lr=1, tokens=1, step_s=step_s, tokens_per_s=1)
        expected = eta.update(metrics)
        assert log.eta_s(100) == (None if expected is None else pytest.approx(expected))
    # The first steps of a resumed process, which are slower, are left out.
    log = MetricsLog()
    log.add(line(step, time=1000.0 + step) for step in range(1, 31))
    log.add([line(31, step_s=50.0, time=5000.0), line(32, step_s=50.0, time=5050.0)])
    assert log.eta_s(40, started=4000.0) is None
    log.add([line(33, step_s=4.0, time=5054.0)])
    assert [log.eta_s(40, started=4000.0, now=now) for now in (None, 5055.0, 9999.0)] == [28.0, 27.0, 24.0]
    assert log.eta_s(33) == 0.0
    for losses, averages in (((4.0, None, 4.0), [4.0] * 3), ((2.0, 4.0), [2.0, pytest.approx(3.0)])):
        log = MetricsLog()  # the average starts as a mean, and goes on over a gap
        log.add(line(step, loss=loss) for step, loss in enumerate(losses, 1))
        assert log.column("ema").tolist() == averages
    log = MetricsLog()
    log.add(line(step, loss=3.0 + (step % 2) * 0.1) for step in range(1, 60))
    log.add([line(60, loss=9.0)])
    assert log.z_score("loss") > 50
    assert filled(60).z_score("loss") is None  # nothing varies
    log = filled(10)
    assert log.add_validation([{"step": 4, "loss": 2.0}, {"step": 8, "loss": 1.5}, {"loss": 1}]) == 2
    assert log.add_validation([{"step": 8, "loss": 1.25}]) == 1
    assert [column.tolist() for column in log.validation] == [[4, 8], [2.0, 1.25]]
    assert log.at_steps(log.validation[0], "total_tokens").tolist() == [400.0, 800.0]
    assert math.isnan(MetricsLog().recent_step_s() or math.nan)
