"""Runs that are started detached, and pause, stop and resume by command, around a stand-in for the engine."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_process import FAKE, REPOSITORY, Cli, default_signals, done, steps, stop, wait_until

from penstock.app import control, launcher
from penstock.app.recipe import to_json
from penstock.app.rundir import is_live, read_info
from penstock.engine.config import DataConfig, ModelConfig, Recipe, TrainConfig
from penstock.storage.errors import UserError

LONG = Recipe(name="tiny", train=TrainConfig(steps=100_000))


@pytest.fixture
def fake_cli(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(launcher, "CLI", FAKE)
    yield
    for child in launcher._children:
        child.kill()
        child.wait()
    launcher._children.clear()


def test_packages_that_lie_about_where_it_is_called_are_not_ours(tmp_path: Path) -> None:
    for name in ("app", "typer", "json"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("open('executed', 'w').close()")
    (tmp_path / "app" / "cli.py").write_text("")
    result = launcher.command(["--help"], tmp_path)
    assert (result.code, "resume" in result.output) == (0, True)
    assert not (tmp_path / "executed").exists()


@pytest.mark.usefixtures("fake_cli")
def test_a_run_is_started_paused_resumed_and_stopped(tmp_path: Path) -> None:
    run = launcher.start(LONG, tmp_path)
    assert run.parent == tmp_path / "runs"
    assert read_info(run).state in ("preparing", "running")
    wait_until(lambda: read_info(run).step > 2)
    status = json.loads((run / "status.json").read_text())
    assert os.getsid(status["pid"]) == status["pid"] != os.getsid(0)
    with pytest.raises(UserError, match="already running"):
        launcher.resume(run)
    said = launcher.command(["pause", str(run)])
    assert (said.code, "pauses once its current step" in said.output) == (0, True)
    wait_until(lambda: read_info(run).state == "paused")
    step = read_info(run).step
    assert "already paused" in launcher.command(["pause", run.name], tmp_path).output
    assert launcher.command(["checkpoint", str(run), "x"]).output == f"checkpoint x: step {step:,}\n"
    assert (read_info(run).step, steps(run)[-1]) == (step, step)
    launcher.resume(run)
    wait_until(lambda: read_info(run).step > step)
    assert launcher.command(["stop", str(run)]).code == 0
    wait_until(lambda: not is_live(run))
    assert read_info(run).state == "stopped"
    assert steps(run) == list(range(1, steps(run)[-1] + 1))
    said = launcher.command(["stop", str(run)])
    assert (said.code, "is not running (stopped)" in said.output) == (2, True)
    assert control.wanted(run) == "stop"
    step = read_info(run).step
    launcher.resume(run)
    wait_until(lambda: read_info(run).step > step)
    assert not (run / "control.json").exists(), "what was asked of the process before is done with"
    log = (run / "output.log").read_text()
    assert "stopped after step" in log
    assert f"step {step + 1} of 100,000" in log


def test_a_run_outlives_its_starter_and_the_terminal(tmp_path: Path) -> None:
    """The starter's whole session is hung up and killed, as when a terminal closes and its processes are ended."""
    (tmp_path / "recipe.json").write_text(to_json(LONG))
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        "from penstock.app import launcher\nfrom penstock.app.recipe import load_recipe\n"
        f"launcher.CLI = {FAKE!r}\n"
        "print(launcher.start(load_recipe(Path(sys.argv[1]) / 'recipe.json'), Path(sys.argv[1])), flush=True)\n"
        "time.sleep(60)\n"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, preexec_fn=default_signals,
    )  # fmt: skip
    assert starter.stdout is not None
    run = Path(starter.stdout.readline().strip())
    pid = json.loads((run / "status.json").read_text())["pid"]
    try:
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGKILL):
            os.killpg(starter.pid, number)
        starter.wait()
        starter.stdout.close()
        step = read_info(run).step
        wait_until(lambda: read_info(run).step > step + 3)
        assert read_info(run).state == "running"
        os.kill(pid, signal.SIGTERM)
        wait_until(lambda: not is_live(run))
        assert read_info(run).state == "stopped"
    finally:
        if is_live(run):
            os.kill(pid, signal.SIGKILL)


def test_what_cannot_start_leaves_no_run(tmp_path: Path) -> None:
    for recipe, message in (
        (Recipe(name="x", model=ModelConfig(path="no/such/model")), "no/such/model does not exist"),
        (Recipe(name="x", data=DataConfig(source="text", path="no/texts")), r"data\.path: .*no/texts does not exist"),
    ):
        with pytest.raises(UserError, match=message):
            launcher.start(recipe, tmp_path)
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.usefixtures("fake_cli")
def test_a_process_that_ends_at_once_is_told_with_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys; print('error: no such luck', file=sys.stderr); sys.exit(2)"
    monkeypatch.setattr(launcher, "CLI", (sys.executable, "-c", code))
    with pytest.raises(UserError, match=r"^no such luck$"):
        launcher.start(LONG, tmp_path)
    assert list((tmp_path / "runs").iterdir()) == []
    monkeypatch.setattr(launcher, "CLI", (str(tmp_path / "nothing"),))
    with pytest.raises(UserError, match="cannot be started"):
        launcher.start(LONG, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("end", ["stop", "signal"])
def test_signals_stop_a_paused_run_and_a_stop_ends_it(cli: Cli, end: str) -> None:
    run, process = cli.begin(100_000)
    control.ask(run, "pause")
    wait_until(lambda: read_info(run).state == "paused")
    if end == "signal":
        process.send_signal(signal.SIGINT)
    else:
        cli.run("stop", "out")
    assert "paused; the step is committed" in done(process).stdout
    assert read_info(run).state == "stopped"


def test_a_pause_that_has_not_come_yet_is_called_off(cli: Cli) -> None:
    run, process = cli.begin(2, FAKE_STEP_S="0.5")
    stop(process)  # amid a step
    assert "pauses once" in cli.run("pause", "out").stdout
    assert "continues" in cli.run("resume", "out").stdout
    cli.run("resume", "out", "--set", "train.steps=7", code=2)
    process.send_signal(signal.SIGCONT)
    done(process)
    assert steps(run) == [1, 2]


@pytest.mark.parametrize("content", ["", "[]", '{"want": "fly"}', '{"want": ["stop"]}', '{"time": 3}'])
def test_a_damaged_control_file_means_run(tmp_path: Path, content: str) -> None:
    assert control.wanted(tmp_path) == "run"
    (tmp_path / "control.json").write_text(content)
    assert control.wanted(tmp_path) == "run"
    control.ask(tmp_path, "pause")
    assert control.wanted(tmp_path) == "pause"
    assert abs(json.loads((tmp_path / "control.json").read_text())["time"] - time.time()) < 5
    control.forget(tmp_path)
    control.forget(tmp_path)
    assert control.wanted(tmp_path) == "run"
