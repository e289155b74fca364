from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from cli_process import REPOSITORY, wait_until

import app.rundir
from app.recipe import Recipe
from app.rundir import RunDir, RunLog, find_run, is_live, list_runs, read_info, read_jsonl, read_recipe, read_tail
from engine.events import Span, StepMetrics
from storage.errors import UserError


def metrics(step: int, loss: float = 1.0) -> StepMetrics:
    return StepMetrics(
        step=step,
        loss=loss,
        grad_norm=0.5,
        lr=1e-3,
        tokens=7,
        step_s=0.25,
        tokens_per_s=28.0,
        model_flops=10**15,
        nvme_read_bytes={"/mnt/a/run": 4096},
        nvme_written_bytes={"/mnt/a/run": 8192},
    )


def span(step: int, start_s: float, end_s: float) -> Span:
    return Span("compute", "forward", "layers.0", 2, start_s, end_s, 0, step)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_new_run_is_named_by_recipe_and_time(tmp_path: Path) -> None:
    recipe = Recipe(name="x")
    with (
        RunDir.create(recipe, root=tmp_path / "runs") as first,
        RunDir.create(recipe, root=tmp_path / "runs") as second,
    ):
        assert first.path != second.path
        assert first.path.name.startswith("x-20")
        assert read_recipe(first.path) == recipe


def test_a_directory_with_anything_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(UserError, match=r"not empty.*thesis\.tex.*--run-dir"):
        RunDir.create(Recipe(name="x"), tmp_path)


def test_a_directory_with_a_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    RunDir.create(Recipe(name="x"), path).__exit__()
    RunDir.create(Recipe(name="y"), path).__exit__()
    assert read_recipe(path).name == "y", "a run without a step is replaced"
    (path / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match=r"already holds a run.*penstock resume"):
        RunDir.create(Recipe(name="z"), path)
    assert read_recipe(path).name == "y"


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UserError, match="file"):
            RunDir.create(Recipe(name="x"), path)


HOLD = """
import sys, time
from pathlib import Path
from app.recipe import Recipe
from app.rundir import RunDir, RunLog
run = RunDir.create(Recipe(name="x"), Path(sys.argv[1]))
log = RunLog(run.path, 10)
log.set_state("running")
print("held", flush=True)
time.sleep(60)
"""


def test_a_run_in_use_names_the_process_and_a_killed_one_is_crashed(tmp_path: Path) -> None:
    path = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"held\n"
        assert is_live(path)
        assert read_info(path).state == "running"
        for attempt in (lambda: RunDir.open(path), lambda: RunDir.create(Recipe(name="x"), path)):
            with pytest.raises(UserError, match=f"in use by process {process.pid};.*kill {process.pid}"):
                attempt()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert not is_live(path)
    assert read_info(path).state == "crashed"
    with RunDir.open(path):
        assert is_live(path)


def test_readers_that_test_the_lock_never_keep_a_run_from_starting(tmp_path: Path) -> None:
    RunDir.create(Recipe(name="x"), tmp_path / "run").__exit__()
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            is_live(tmp_path / "run")

    readers = [threading.Thread(target=look) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for _ in range(20):
            RunDir.open(tmp_path / "run").__exit__()
    finally:
        done.set()
        for reader in readers:
            reader.join()


def test_log_writes_exactly_the_documented_fields(tmp_path: Path) -> None:
    log = RunLog(tmp_path, total_steps=3)
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "preparing"
    log.set_state("running")
    log.step(metrics(1), [span(1, 0.0, 0.5)])
    log.step(metrics(2, loss=float("nan")), [])
    log.spans([span(2, 0.5, 0.75)])
    log.close("finished")
    log.close("failed")
    rest = {
        "grad_norm": 0.5,
        "lr": 1e-3,
        "tokens": 7,
        "step_s": 0.25,
        "tokens_per_s": 28.0,
        "model_flops": 10**15,
        "nvme_read_bytes": {"/mnt/a/run": 4096},
        "nvme_written_bytes": {"/mnt/a/run": 8192},
    }
    assert lines(tmp_path / "metrics.jsonl") == [
        {"step": 1, "loss": 1.0} | rest,
        {"step": 2, "loss": None} | rest,
    ]
    assert lines(tmp_path / "spans.jsonl") == [span(1, 0.0, 0.5)._asdict(), span(2, 0.5, 0.75)._asdict()]
    status = json.loads((tmp_path / "status.json").read_text())
    assert abs(status.pop("heartbeat") - time.time()) < 5
    assert status == {"state": "finished", "pid": os.getpid(), "step": 2, "total_steps": 3}


def test_heartbeat_goes_on_without_steps_and_under_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert app.rundir.HEARTBEAT_S <= 5
    monkeypatch.setattr(app.rundir, "HEARTBEAT_S", 0.05)

    def heartbeat() -> float:
        return float(json.loads((tmp_path / "status.json").read_text())["heartbeat"])

    log = RunLog(tmp_path, total_steps=3)
    first = heartbeat()
    wait_until(lambda: heartbeat() > first)
    busy_until = time.monotonic() + 0.2
    step = 0
    before = heartbeat()
    while time.monotonic() < busy_until:
        step += 1
        log.step(metrics(step), [span(step, 0.0, 1.0)] * 50)
    assert heartbeat() > before
    log.close("finished")
    assert len(lines(tmp_path / "metrics.jsonl")) == step


def test_nothing_is_lost_on_a_clean_exit_and_a_step_costs_little(tmp_path: Path) -> None:
    log = RunLog(tmp_path, total_steps=100)
    spans = [span(1, 0.0, 1.0)] * 500
    begin = time.perf_counter()
    for step in range(1, 101):
        log.step(metrics(step), spans)
    handed_over_s = time.perf_counter() - begin
    log.close("finished")
    assert sum(1 for _ in read_jsonl(tmp_path / "spans.jsonl")) == 50_000
    assert handed_over_s < 1.0


def test_a_stalled_disk_drops_spans_never_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app.rundir, "MAX_PENDING_SPANS", 3)
    log = RunLog(tmp_path, total_steps=9)
    log.step(metrics(1), [span(1, 0.0, 1.0)] * 4)
    log.step(metrics(2), [span(2, 0.0, 1.0)] * 2)
    log.close("finished")
    assert log.dropped_spans == 4
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2]
    assert [line["step"] for line in lines(tmp_path / "spans.jsonl")] == [2, 2]


def test_a_log_that_cannot_be_written_stops_the_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    log = RunLog(tmp_path, total_steps=9)
    log.step(metrics(1), [])
    wait_until(lambda: log._failure is not None)
    with pytest.raises(UserError, match="log cannot be written"):
        log.step(metrics(2), [])
    log.close("failed")


def test_a_resumed_run_replaces_steps_done_again_and_goes_on_in_time(tmp_path: Path) -> None:
    log = RunLog(tmp_path, total_steps=9)
    for step in (1, 2, 3):
        log.step(metrics(step, loss=10.0), [span(step, float(step), step + 1.0)])
    log.close("failed")
    for name in ("metrics.jsonl", "spans.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{"step": 4, "lo')
    log = RunLog(tmp_path, total_steps=9, step=3)
    for step in (3, 4):
        log.step(metrics(step, loss=20.0), [span(step, step - 3.0, step - 2.0)])
    log.close("finished")
    assert [(line["step"], line["loss"]) for line in lines(tmp_path / "metrics.jsonl")] == [
        (1, 10.0),
        (2, 10.0),
        (3, 20.0),
        (4, 20.0),
    ]
    assert [(line["step"], line["start_s"], line["end_s"]) for line in lines(tmp_path / "spans.jsonl")] == [
        (1, 1.0, 2.0),
        (2, 2.0, 3.0),
        (3, 3.0, 4.0),
        (3, 4.0, 5.0),
        (4, 5.0, 6.0),
    ]


@pytest.mark.parametrize("torn_bytes", [0, 1, 65535, 65536, 65537, 200_000])
def test_a_torn_last_line_of_any_length_is_cut_off(tmp_path: Path, torn_bytes: int) -> None:
    for whole in ("", '{"step": 1, "end_s": 2.5}\n'):
        (tmp_path / "spans.jsonl").write_text(whole + "x" * torn_bytes)
        offset_s = app.rundir._prepare_logs(tmp_path, 2)
        assert (tmp_path / "spans.jsonl").read_text() == whole
        assert offset_s == (2.5 if whole else 0.0)


def test_read_jsonl_stops_at_a_torn_line_and_names_a_damaged_one(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"a": 1}\n{"a": 2')
    assert list(read_jsonl(path)) == [{"a": 1}]
    path.write_text('{"a": 1}\n{"a": \n{"a": 3}\n')
    with pytest.raises(UserError, match=r"m\.jsonl, line 2"):
        list(read_jsonl(path))


def test_read_tail_of_a_long_file(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    assert read_tail(path) == []
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(20_000)) + '{"st')
    tail = read_tail(path)
    assert tail[-1] == {"step": 19_999}
    assert 1000 < len(tail) < 20_000


def test_runs_are_listed_whatever_their_state(tmp_path: Path) -> None:
    assert list_runs(tmp_path / "none") == []
    for name in ("a", "b", "c"):
        RunDir.create(Recipe(name="x"), tmp_path / name).__exit__()
    (tmp_path / "not-a-run").mkdir()
    (tmp_path / "b" / "status.json").write_text("[1]")
    log = RunLog(tmp_path / "c", total_steps=4)
    log.step(metrics(1, loss=3.5), [])
    log.close("stopped")
    found = list_runs(tmp_path)
    assert [info.name for info in found] == ["a", "b", "c"]
    assert [info.state for info in found] == ["unknown", "unknown", "stopped"]
    assert found[2][3:6] == (1, 4, 3.5)


def test_find_run_by_path_or_name(tmp_path: Path) -> None:
    RunDir.create(Recipe(name="x"), tmp_path / "quickstart-1").__exit__()
    assert find_run("quickstart-1", tmp_path) == tmp_path / "quickstart-1"
    assert find_run(str(tmp_path / "quickstart-1"), Path("nowhere")) == tmp_path / "quickstart-1"
    with pytest.raises(UserError, match="did you mean 'quickstart-1'"):
        find_run("quikstart", tmp_path)
    with pytest.raises(UserError, match="no such run"):
        find_run("zzz", tmp_path / "none")
