import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cli_process import FAKE, Cli, done, json_lines, started, steps, stop, wait_until
from samples import cases

import penstock
from penstock.app.cli.main import main
from penstock.app.launch import signals
from penstock.app.runs import control
from penstock.app.runs.checkpoints import make_checkpoint
from penstock.app.runs.directory import STALE_S, read_info, state_of
from penstock.storage.files.errors import UserError

COMMANDS = ["train", "plan", "probe", "resume", "check", "export", "checkpoint", "scrub", "runs", "trace", "lanes"]
COMMANDS += ["bench", "bench step", "bench storage", "bench plan"]
SLOW = {"FAKE_STEP_S": "0.2"}


def status(run: Path) -> dict[str, Any]:
    file = run / "status.json"
    return dict(json.loads(file.read_text())) if file.exists() else {}


def test_help_ends_with_an_example(monkeypatch: Any, capsys: Any) -> None:
    def printed(*arguments: str) -> str:
        assert main(list(arguments)) == 0
        return capsys.readouterr().out

    monkeypatch.setenv("COLUMNS", "100")
    for command in ("", *COMMANDS):
        last = printed(*command.split(), "--help").strip().splitlines()[-1].strip()
        assert last.startswith(f"Example: penstock {command}")
    assert printed("--version") == f"penstock {penstock.__version__}\n"
    assert "train.steps = 100\n    Optimizer steps of the whole run." in printed("train", "--fields")


def test_a_whole_run(cli: Cli) -> None:
    printed = cli.run("train", "tiny.py", "--set", "train.steps=3", "--run-dir", "out")
    assert printed.stderr == ""
    run = cli.folder / "out"
    files = ["log.jsonl", "metrics.jsonl", "plan.json", "predicted.jsonl", "recipe.json", "run.lock", "spans.jsonl"]
    assert sorted(path.name for path in run.iterdir()) == [*files, "state", "status.json", "summary.json"]
    assert json.loads((run / "recipe.json").read_text())["train"]["steps"] == 3
    prepared = ["loading PyTorch", "tokenizing the data"]
    assert [(item["name"], item["state"]) for item in status(run)["preparing"]] == [(name, "done") for name in prepared]
    told = [line["text"] for line in json_lines(run / "log.jsonl")]
    items = [text for text in told if text.startswith("  ")]
    assert [text.split("  ")[1] for text in items] == prepared
    (ready,) = (text for text in told if "the first step ended" in text)
    long = [text for text in items if float(text.split()[-2]) >= 10]
    assert [line for line in printed.stdout.splitlines() if line.startswith("  ")] == long
    assert ready not in printed.stdout
    assert json.loads((run / "plan.json").read_text())["recipe"] == "tiny"
    assert steps(run) == [1, 2, 3]
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["tokens"], summary["first_loss"], summary["last_loss"]) == (3, 300, 8.0, 8 / 3)
    assert set(summary) == {
        "steps", "tokens", "first_loss", "last_loss", "mean_tokens_per_s", "mean_step_s", "mean_model_tflops_per_s",
        "step_s_median", "tiers", "lanes", "drives", "gpu_memory", "attention", "ended_early", "validation_loss",
    }  # fmt: skip
    found = status(run)
    assert set(found) == {"state", "pid", "host", "started", "step", "total_steps", "clock_s", "heartbeat", "preparing"}
    assert (found["state"], found["step"], found["total_steps"]) == ("finished", 3, 3)
    parts = ["weights in gpu and ram and nvme", "step 2 of 3", "busiest compute"]
    parts += ["trained to step 3, ", "8.0000 -> 2.6667"]
    assert all(part in printed.stdout for part in parts), printed.stdout


def test_a_recipe_runs_as_a_script_just_the_same(cli: Cli) -> None:
    (cli.folder / "datasets.py").write_text("raise SystemExit('a recipe folder shadows a package')")
    arguments = ["tiny.py", "--set", "train.steps=2", "--run-dir", "out"]
    cli.run(*arguments, FAKE_SCRIPT="1")
    assert steps(cli.folder / "out") == [1, 2]
    for argument, code in (("--help", 0), ("--nonsense", 2)):
        cli.run("tiny.py", argument, code=code, FAKE_SCRIPT="1")


def test_runs_export_and_trace(cli: Cli) -> None:
    assert cli.run("runs").stdout == "no runs in runs/\n"
    cli.run("train", "tiny.py")
    (name,) = os.listdir(cli.folder / "runs")
    assert re.fullmatch(r"tiny-\d{8}-\d{6}", name)
    listed = cli.run("runs").stdout
    for part in (name, "finished", "5/5", "1.6000"):
        assert part in listed
    cli.run("export", name, "hf")
    assert (cli.folder / "hf" / "config.json").exists()
    assert "11 spans" in cli.run("trace", f"runs/{name}", "-o", "t.json").stdout
    assert json.loads((cli.folder / "t.json").read_text())["traceEvents"]


def test_what_ends_a_run_is_told_and_kept(cli: Cli) -> None:
    failed = cli.run("train", "tiny.py", "--run-dir", "out", code=2, FAKE_FAIL_AT="3:user")
    assert failed.stderr == "error: loss is NaN in step 3, chunk 1\n"
    found = status(cli.folder / "out")
    assert (found["state"], found["step"], found["error"]) == ("failed", 2, "loss is NaN in step 3, chunk 1")
    assert steps(cli.folder / "out") == [1, 2]
    cli.run("resume", "out")
    assert steps(cli.folder / "out") == [1, 2, 3, 4, 5]
    assert "error" not in status(cli.folder / "out")
    assert "nothing to resume" in cli.run("resume", "out", code=2).stderr
    failed = cli.run("train", "tiny.py", "--run-dir", "bug", code=1, FAKE_FAIL_AT="2:bug")
    assert "Traceback" in failed.stderr
    assert "RuntimeError: a bug" in failed.stderr
    assert status(cli.folder / "bug")["error"] == "RuntimeError: a bug"
    failed = cli.run("train", "tiny.py", "--run-dir", "other", code=2, FAKE_FAIL_AT="2:threads")
    assert failed.stderr.startswith("error: no more threads can be started")
    assert str(status(cli.folder / "other")["error"]).startswith("no more threads")


@pytest.mark.parametrize("number", cases([signal.SIGINT, signal.SIGTERM, signal.SIGHUP], signal.SIGTERM))
def test_the_first_signal_finishes_the_step_and_exits_0(cli: Cli, number: signal.Signals) -> None:
    run, process = cli.begin(200, **SLOW)
    process.send_signal(number)
    process.send_signal(number)  # a supervisor that signals process and group: one request
    out = done(process).stdout
    found = status(run)
    assert found["state"] == "stopped"
    assert steps(run)[-1] == found["step"] == int((run / "state" / "committed").read_text()) < 200
    assert "penstock resume" in out
    assert (run / "summary.json").exists()
    cli.run("resume", "out", FAKE_STEP_S="0.001")
    assert steps(run) == list(range(1, 201))


def test_a_signal_before_the_first_step_stops_at_once(cli: Cli) -> None:
    run = cli.folder / "out"
    process = cli.start("train", "tiny.py", "--run-dir", "out", FAKE_PREPARE_S="3600")
    wait_until(lambda: (run / "state").exists())
    process.send_signal(signal.SIGTERM)
    out = done(process).stdout
    assert "stopped before the first step" in out
    assert status(run)["state"] == "stopped"
    cli.run("resume", "out")
    assert steps(run) == [1, 2, 3, 4, 5]


def test_the_second_signal_aborts_at_once(cli: Cli) -> None:
    run, process = cli.begin(FAKE_STEP_S="3600")
    process.send_signal(signal.SIGINT)
    wait_until(lambda: any("stopping after" in line["text"] for line in json_lines(run / "log.jsonl")))
    time.sleep(2 * signals._SAME_REQUEST_S)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert "aborted" in done(process, code=130).stderr
    assert status(run)["state"] == "stopped"


def test_a_stopped_process_is_stale_takes_requests_and_goes_on(cli: Cli) -> None:
    run, process = cli.begin(30, FAKE_STEP_S="0.05")
    stop(process)
    assert state_of(run, status(run), time.time() + STALE_S + 1) == "stale"
    with pytest.raises(UserError, match=f"in use by process {process.pid}"):
        control.go_on(run)
    control.pause_or_stop(run, "pause")
    process.send_signal(signal.SIGCONT)
    wait_until(lambda: status(run).get("state") == "paused")
    assert control.go_on(run)
    done(process)
    assert steps(run) == list(range(1, 31))


def test_a_run_that_goes_on_exports_beside_what_it_has_exported(cli: Cli) -> None:
    cli.run("train", "tiny.py", "--run-dir", "out", "--set", "after.export=true", "--set", "train.steps=2")
    longer = cli.run("resume", "out", "--set", "train.steps=4")
    assert "exported to out/export-step-4" in longer.stdout
    for name, step in (("export", "2"), ("export-step-4", "4")):
        assert (cli.folder / "out" / name / "config.json").read_text() == step


@pytest.mark.long
def test_exports_and_checkpoints_asked_for_at_once_are_all_answered(cli: Cli) -> None:
    run, process = cli.begin(1000, FAKE_STEP_S="0.5")
    exports = [cli.start("export", "out", f"export{number}") for number in range(3)]
    for export in exports:
        done(export)
    stop(process)  # it takes no request now
    (run / "requests" / "one.request").touch()
    with pytest.raises(UserError, match="'one' has already been requested"):
        make_checkpoint(run, "one")
    process.kill()
    process.communicate()


@pytest.mark.long
def test_nohup_outlives_the_terminal(cli: Cli) -> None:
    run = cli.folder / "out"
    nohup = Cli(cli.folder, program=("nohup", *FAKE))
    process = nohup.start("train", "tiny.py", "--run-dir", "out", FAKE_PREPARE_S="0.2", FAKE_STEP_S="0.2")
    wait_until(lambda: status(run).get("state") == "running")
    process.send_signal(signal.SIGHUP)
    done(process)
    assert status(run)["state"] == "finished"


def test_a_killed_run_is_crashed_and_resumes(cli: Cli) -> None:
    run = cli.folder / "runs" / "tiny-x"
    process = cli.start("train", "tiny.py", "--set", "train.steps=200", "--run-dir", str(run), **SLOW)
    wait_until(lambda: (run / "state" / "committed").exists())
    assert f"in use by process {process.pid}" in cli.run("resume", "tiny-x", code=2).stderr
    process.kill()
    process.communicate()
    assert read_info(run).state == "crashed"
    assert "crashed" in cli.run("runs").stdout
    cli.run("resume", "tiny-x", FAKE_STEP_S="0.001")
    assert steps(run) == list(range(1, 201))


def test_a_shell_completes_commands_recipes_and_runs(cli: Cli) -> None:
    for name in ("out-1", "other"):
        (cli.folder / "runs" / name).mkdir(parents=True)
        (cli.folder / "runs" / name / "recipe.json").write_text("{}")
    for words, offered in (
        ("penstock tra", ["train", "trace", "track"]),
        ("penstock train 7b_5", ["7b_512k", "7b_512k_24gb"]),
        ("penstock resume ou", ["out-1"]),
    ):
        asked = {"_PENSTOCK_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        process = started(cli.folder, sys.executable, "-P", "-m", "penstock", **asked)
        assert done(process).stdout.split() == offered
