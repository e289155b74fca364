"""What a run directory says, read from real runs and from directories in any state of ruin."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.tui.data.alerts import alerts
from penstock.tui.data.run_data import RunData
from penstock.tui.data.tiers import tiers

NOW = time.time()


def read(path: Path, clock: Any = time.time) -> RunData:
    data = RunData(path, clock)
    data.poll()
    while data.behind:
        data.poll()
    return data


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def test_a_finished_run(first: Path) -> None:
    data = read(first)
    metrics = lines_of(first / "metrics.jsonl")
    assert (data.state, data.step, data.total_steps) == ("finished", 12, 12)
    assert data.problems == []
    assert data.metrics.rows == 12
    assert data.metrics.last("loss") == metrics[-1]["loss"]
    assert data.spans.view.num_spans == len(lines_of(first / "spans.jsonl"))
    assert data.committed_step == 12
    assert {checkpoint.step for checkpoint in data.checkpoints} <= {5, 10, 12}
    assert [tier.name for tier in tiers(data)] == ["gpu", "ram", "nvme"]
    assert all(tier.held_bytes and tier.budget_bytes for tier in tiers(data))
    assert [block.name for block in data.blocks()] == [block["name"] for block in data.plan["blocks"]]
    assert data.eta_s() is None
    assert alerts(data) == []


def test_a_crashed_run_says_where_it_can_go_on(first: Path, root: Path) -> None:
    data = read(root / "runs" / "crashed")
    assert (data.state, data.step) == ("crashed", 9)
    assert data.metrics.rows == 9
    assert "process is gone" in alerts(data)[0].text
    assert "R resumes from step" in alerts(data)[0].text


def test_what_changes_is_told(first: Path) -> None:
    data = read(first)
    assert data.poll() == set()
    append(first / "metrics.jsonl", lines_of(first / "metrics.jsonl")[-1] | {"step": 13})
    assert data.poll() == {"metrics"}
    append(first / "spans.jsonl", lines_of(first / "spans.jsonl")[-1])
    assert data.poll() == {"spans"}
    append(first / "log.jsonl", {"time": 0, "level": "info", "text": "hello", "step": 3})
    assert data.poll() == {"log"}
    assert data.log_lines()[-1].text == "hello"
    for step, loss in ((5, 2.5), (10, 2.25)):
        append(first / "validation.jsonl", {"step": step, "loss": loss, "tokens": 9, "seconds": 1, "time": 0})
    assert data.poll() == {"metrics"}
    assert data.metrics.validation[1].tolist()[-2:] == [2.5, 2.25]
    assert data.predicted is None
    data.want_predicted = True
    assert data.poll() == {"predicted"}
    assert data.predicted.view.num_spans == len(lines_of(first / "predicted.jsonl"))


def test_a_resumed_run_rewrites_its_metrics(first: Path) -> None:
    data = read(first)
    kept = (first / "metrics.jsonl").read_text().splitlines(keepends=True)[:5]
    (first / "x").write_text("".join(kept))
    os.replace(first / "x", first / "metrics.jsonl")
    assert "metrics" in data.poll()
    assert data.metrics.rows == 5
    append(first / "metrics.jsonl", json.loads(kept[-1]) | {"step": 6})
    data.poll()
    assert data.metrics.last_step == 6


def test_replaced_spans_begin_again(first: Path) -> None:
    data = read(first)
    before = data.spans
    span = lines_of(first / "spans.jsonl")[0]
    (first / "x").write_text(json.dumps(span) + "\n")
    os.replace(first / "x", first / "spans.jsonl")
    assert data.poll() == {"spans"}
    assert data.spans is not before
    assert data.spans.view.num_spans == 1


def test_an_empty_folder_and_a_foreign_one(tmp_path: Path) -> None:
    assert "is gone" in read(Path("/dev/null/nothing")).problems[0]
    data = read(tmp_path)
    assert "no recipe.json" in data.problems[0]
    (tmp_path / "photo.jpg").write_bytes(os.urandom(1000))
    (tmp_path / "status.json").write_text("hello")
    data.poll()
    assert any("status.json is damaged" in problem for problem in data.problems)
    assert data.state == "unknown"
    assert data.blocks() == []


def test_a_run_that_vanishes_and_comes_back(first: Path) -> None:
    data = read(first)
    aside = first.with_name("aside")
    first.rename(aside)
    assert "problems" in data.poll()
    assert data.state == "gone"
    assert data.metrics.rows == 12
    aside.rename(first)
    data.poll()
    assert (data.state, data.problems) == ("finished", [])


def test_what_is_damaged_is_counted_and_what_a_terminal_would_obey_not_shown(first: Path) -> None:
    with (first / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": "three"}\n{broken\n\xff\xfe\n')
    with (first / "log.jsonl").open("a") as file:
        file.write('{"text": ["a"]}\n{}\n{"text": "two\\nlines", "level": 3, "time": "late"}\n')
    data = read(first)
    assert data.metrics.rows == 12
    assert data.problems == ["metrics.jsonl: 3 lines are damaged and left out"]
    assert [line.text for line in data.log_lines()[-3:]] == ["['a']", "None", "two\nlines"]
    status = json.loads((first / "status.json").read_text())
    (first / "status.json").write_text(json.dumps(status | {"state": "failed", "error": "no\x1b[2Jroom\nTraceback"}))
    assert alerts(read(first))[0].text == "no\ufffd[2Jroom"


def test_the_end_of_the_output_where_a_process_died_silently(root: Path) -> None:
    path = root / "runs" / "crashed"
    (path / "output.log").write_text("".join(f"line {i}\n" for i in range(100)) + "Killed\n")
    data = read(path)
    assert data.log_lines()[-1].text == "Killed"


def test_a_live_run_that_falls_silent(first: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.app.rundir.is_live", lambda path: True)
    status = json.loads((first / "status.json").read_text())
    (first / "status.json").write_text(
        json.dumps(status | {"state": "running", "heartbeat": 1000.0, "total_steps": 99})
    )
    now = [1001.0]
    data = read(first, lambda: now[0])
    assert data.state == "running"
    assert data.eta_s() is not None
    now[0] = 1100.0
    assert "status" in data.poll()
    assert data.state == "stale"
    assert "no heartbeat for 1m40s" in alerts(data)[0].text


def test_alerts_of_a_running_run(first: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.app.rundir.is_live", lambda path: True)
    line = lines_of(first / "metrics.jsonl")[-1]
    for step in range(13, 60):
        append(first / "metrics.jsonl", line | {"step": step, "grad_norm": 1 + 0.01 * (step % 3), "loss": 3.0})
    full = {"gpu": 0, "ram": 0, "nvme": 62 << 20}
    append(first / "metrics.jsonl", line | {"step": 60, "grad_norm": 50.0, "loss": None, "tier_bytes": full})
    end_s = max(span["end_s"] for span in lines_of(first / "spans.jsonl"))
    status = {"state": "running", "step": 60, "total_steps": 99, "heartbeat": NOW, "clock_s": end_s + 300}
    status["now"] = {"d2h": [{"op": "store_x", "block": "layers.1", "start_s": end_s, "chunk": 0, "step": 61}]}
    (first / "status.json").write_text(json.dumps(status))
    found = " | ".join(alert.text for alert in alerts(read(first, lambda: NOW)))
    assert "gradient norm 50.0 is" in found
    assert "the loss of step 60 is not a number" in found
    assert "no op has finished for 5m00s; d2h store_x layers.1 under way" in found
    assert "nvme is 97% full, more than the plan allows for" in found


def test_a_loss_that_leapt_is_told_with_its_documents_for_some_steps(
    first: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.app.rundir.is_live", lambda path: True)
    status = {"state": "running", "step": 12, "total_steps": 99, "heartbeat": NOW}
    (first / "status.json").write_text(json.dumps(status))
    documents = [
        {"where": "chats.jsonl:7", "document": 6},
        {"where": None, "document": 41},
        {"where": "c", "document": 1},
    ]
    append(first / "spikes.jsonl", {"step": 11, "loss": 9.0, "documents": documents, "num_documents": 5})
    data = read(first, lambda: NOW)
    told = "the loss spiked in step 11, trained on chats.jsonl:7, document 41 and 3 more"
    assert told in [alert.text for alert in alerts(data)]
    line = lines_of(first / "metrics.jsonl")[-1]
    append(first / "metrics.jsonl", line | {"step": 31})
    data.poll()
    assert told not in [alert.text for alert in alerts(data)]


def test_a_run_that_ended_early_says_why(first: Path) -> None:
    summary = json.loads((first / "summary.json").read_text())
    ended = {"validations": 3, "best": 2.31, "best_step": 6}
    (first / "summary.json").write_text(json.dumps(summary | {"ended_early": ended}))
    found = [alert.text for alert in alerts(read(first))]
    assert found == ["ended early after step 12: no gain in 3 validations; best 2.31 at step 6"]


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
        alerts(data)
        tiers(data)
        data.blocks()
        assert isinstance(data.step, int)
        assert data.mfu is None or data.mfu > 0
        data.eta_s()
