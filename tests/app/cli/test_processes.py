"""Real processes: runs started detached that pause, stop and resume by command, around a stand-in for the engine;
recipes that are scripts; streams that nobody reads; bounded memory; and that no other machine is asked for anything."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from cli_process import FAKE, REAL, REPOSITORY, Cli, Done, done, json_lines, started, steps, stop, wait_until
from forked import default_signals
from model_folders import as_users_have_it
from real_runs import make_corpus
from recipe_texts import recipe_text
from samples import cases

from penstock.app.cli import runs
from penstock.app.cli.main import main
from penstock.app.cli.script import run_recipe
from penstock.app.launch import launcher
from penstock.app.recipes.recipe import load_recipe, to_json
from penstock.app.runs import control
from penstock.app.runs.directory import is_live, read_info
from penstock.engine.config import DataConfig, ModelConfig, Recipe, TrainConfig
from penstock.storage.files import child
from penstock.storage.files.errors import UserError

LONG = Recipe(name="tiny", data=DataConfig(source="python_stdlib"), train=TrainConfig(steps=100_000))


@pytest.fixture
def fake_cli(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(launcher, "CLI", FAKE)
    yield
    for process, _ in launcher._words.values():
        process.kill()
        process.wait()
    launcher._words.clear()


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
        "import sys, time\nfrom pathlib import Path\nfrom penstock.app.launch import launcher\n"
        f"from penstock.app.recipes.recipe import load_recipe\nlauncher.CLI = {FAKE!r}\nfolder = Path(sys.argv[1])\n"
        "print(launcher.start(load_recipe(folder / 'recipe.json'), folder), flush=True)\ntime.sleep(60)\n"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY / "src")}, preexec_fn=default_signals,
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


@pytest.mark.usefixtures("fake_cli")
def test_what_cannot_start_or_ends_at_once_is_told_and_leaves_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for recipe, message in (
        (Recipe(name="x", model=ModelConfig(path="no/such/model")), "no/such/model does not exist"),
        (Recipe(name="x", data=DataConfig(source="text", path="no/texts")), r"data\.path: .*no/texts does not exist"),
    ):
        with pytest.raises(UserError, match=message):
            launcher.start(recipe, tmp_path)
    assert not list(tmp_path.rglob("*.json"))
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


def test_a_damaged_control_file_means_run(tmp_path: Path) -> None:
    assert control.wanted(tmp_path) == "run"
    for content in ("", "[]", '{"want": "fly"}', '{"want": ["stop"]}', '{"time": 3}'):
        (tmp_path / "control.json").write_text(content)
        assert control.wanted(tmp_path) == "run", content
    control.ask(tmp_path, "pause")
    assert control.wanted(tmp_path) == "pause"
    assert abs(json.loads((tmp_path / "control.json").read_text())["time"] - time.time()) < 5
    control.forget(tmp_path)
    control.forget(tmp_path)
    assert control.wanted(tmp_path) == "run"


def script(capfd: pytest.CaptureFixture[str], steps: int, *, code: int = 0) -> tuple[str, str]:
    """What mine.py, in the current folder, and the process that trains it print."""
    Path("mine.py").write_text(recipe_text(train={"steps": steps}, storage={"checkpoint_every": 10}))
    with pytest.raises(SystemExit) as ended:
        run_recipe("mine.py", kill_after=3)
    assert ended.value.code == code
    return capfd.readouterr()


@pytest.mark.long
def test_a_script_kills_and_resumes_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    make_corpus(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["mine.py", "--run-dir=run"])
    killed, rest = script(capfd, 30)[0].split(" (SIGKILL: nothing was saved, no handler ran); resuming the run\n")
    assert 3 <= int(killed.rpartition("killed after step ")[2]) < 30
    assert "trained to step 30, " in rest
    assert steps(Path("run")) == list(range(1, 31))
    before = Path("run/summary.json").read_bytes()
    monkeypatch.setattr(child, "command", lambda module, *arguments: [*FAKE, *arguments])
    assert "already contains a run" in script(capfd, 30, code=2)[1]
    assert Path("run/summary.json").read_bytes() == before


def test_what_ends_before_is_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    make_corpus(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["mine.py"])
    monkeypatch.setattr(child, "command", lambda module, *arguments: [*FAKE, *arguments])
    out = script(capfd, 2)[0]
    assert "trained to step 2, " in out
    assert "killed" not in out
    (made,) = Path("runs").iterdir()
    assert made.name.startswith("tiny-")


def shell(folder: Path, words: str, code: int) -> Done:
    """A line for bash, in which PENSTOCK is the command line and FAKE that around the stand-in."""
    line = words.replace("PENSTOCK", " ".join(REAL)).replace("FAKE", " ".join(FAKE))
    return Cli(folder, program=("bash", "-o", "pipefail", "-c")).run(line, code=code)


def test_a_refusal_survives_streams_that_are_closed_and_output_that_is_not_printed_is_told(tmp_path: Path) -> None:
    for redirections in ("<&- >&- 2>&-", "2>/dev/full", ">/dev/full"):
        found = shell(tmp_path, f"PENSTOCK plan nothing.py {redirections}", code=2)
        assert "Traceback" not in found.stdout + found.stderr
        assert "2>" in redirections or found.stderr.startswith("error: recipe nothing.py: no such file")
    found = shell(tmp_path, "PENSTOCK train --fields >/dev/full", code=2)
    assert found == ("", "error: standard output: No space left on device; the output is incomplete\n")
    for command in ("", "plan nothing.py", "sample nothing", "finetune nothing nowhere"):
        found = shell(tmp_path, f"PENSTOCK {command} <&-", code=2)
        assert "Traceback" not in found.stderr
    (tmp_path / "gone").mkdir()
    found = shell(tmp_path, "cd gone && rmdir ../gone && PENSTOCK runs", code=2)
    assert found.stderr.startswith("error: the current folder no longer exists")


@pytest.mark.parametrize("redirections", [">&- 2>&-", "| head -c 1"])
def test_a_reader_that_is_gone_stops_nothing(tmp_path: Path, redirections: str) -> None:
    """Nor is anything that is printed written over a file that is opened in the place of a closed standard output."""
    found = shell(tmp_path, f"FAKE train tiny.py --run-dir out {redirections}", code=0)
    assert "Traceback" not in found.stderr
    assert json.loads((tmp_path / "out" / "status.json").read_text())["state"] == "finished"
    for path in (tmp_path / "out").rglob("*.json*"):
        json_lines(path) if path.suffix == ".jsonl" else json.loads(path.read_text())


def test_ctrl_c_ends_a_recipe_that_loops(cli: Cli) -> None:
    (cli.folder / "loop.py").write_text("import os\nos.write(2, b'begun\\n')\nwhile True: pass\n")
    process = Cli(cli.folder, program=REAL).start("plan", "loop.py")
    assert process.stderr is not None
    assert process.stderr.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    err = done(process, code=2).stderr
    assert re.fullmatch(r"error: recipe loop\.py, line [23]: interrupted while the recipe was built\n", err)


def test_what_a_recipe_prints_is_no_output_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "loud.py"
    path.write_text("from penstock.app.recipes.recipe import Recipe\nprint('loud')\nrecipe = Recipe(name='x')\n")
    load_recipe(path)
    assert capsys.readouterr() == ("", "loud\n")
    path.write_text("import sys\nsys.exit()\n")
    with pytest.raises(UserError, match="line 2: ends the process"):
        load_recipe(path)


def test_a_mistake_of_ours_gives_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    for ours in (RecursionError(), OverflowError(), UnicodeError(), FileNotFoundError(2, "gone", "x"), OSError(5, "?")):
        with patch.object(runs, "list_runs", side_effect=ours), pytest.raises(type(ours)):
            main(["runs"])
    for theirs in (MemoryError(), PermissionError(13, "not yours", "x"), OSError(28, "full", "x")):
        with patch.object(runs, "list_runs", side_effect=theirs):
            assert main(["runs"]) == 2
        assert capsys.readouterr().err.count("\n") == 1


BOUNDED = """
import resource, subprocess, sys
from penstock.app.console import memory_limit
before = resource.getrlimit(resource.RLIMIT_AS)
memory_limit.bound(1 << 30)
try:
    bytearray(2 << 30)
except MemoryError:
    print("refused")
ask = "import resource; input(); print(resource.getrlimit(resource.RLIMIT_AS))"
child = subprocess.Popen([sys.executable, "-c", ask], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
memory_limit.unbound(child.pid)
print(child.communicate("go\\n")[0].strip() == str(before))
child = subprocess.Popen([sys.executable, "-c", ask], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
print(child.communicate("go\\n")[0].strip() == str(before))
memory_limit.unbound(child.pid)  # which has ended
"""


def test_memory_is_bounded_for_this_process_and_not_for_what_it_starts() -> None:
    assert done(started(REPOSITORY, sys.executable, "-c", BOUNDED)).stdout.split() == ["refused", "True", "False"]


SITE = """
import os, socket, sys, traceback

def _tell(what):
    with open(os.environ["NO_NETWORK_LOG"], "a") as file:
        where = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_stack()[-6:-2]]
        file.write(f"{what} {where}\\n")

def _audit(event, arguments):
    if event == "socket.connect":
        address = arguments[1]
        if isinstance(address, tuple) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            _tell(f"connect {address}")
            raise OSError(101, "Network is unreachable")
    elif event == "socket.sendto" and isinstance(arguments[1], tuple):
        _tell(f"sendto {arguments[1]}")
        raise OSError(101, "Network is unreachable")
    elif event == "socket.getaddrinfo" and arguments[0] not in (None, "", "127.0.0.1", "::1", "localhost"):
        _tell(f"getaddrinfo {arguments[0]}")
        raise socket.gaierror(-3, "Temporary failure in name resolution")

sys.addaudithook(_audit)
"""


def cut(folder: Path) -> tuple[dict[str, str], Path]:
    """The environment of a Python without a network, and the file in which it tells what was tried."""
    site, log = folder / "site", folder / "tried.txt"
    site.mkdir(parents=True)
    (site / "sitecustomize.py").write_text(SITE)
    log.touch()
    return {"NO_NETWORK_LOG": str(log), "PYTHONPATH": str(site)}, log


def tried(folder: Path, *arguments: str, offline: str | None = None) -> str:
    """What a command that ends well has tried to reach."""
    environment, log = cut(folder / "cut")
    environment["PYTHONPATH"] += os.pathsep + str(REPOSITORY / "src")
    unset = ("HF_HUB_OFFLINE", "PENSTOCK_OFFLINE_BY_DEFAULT", "TRANSFORMERS_OFFLINE", "HF_ENDPOINT")
    environment |= {name: value for name, value in os.environ.items() if name not in (*unset, "PYTHONPATH")}
    environment |= {"HF_HOME": str(folder / "home"), "XDG_CACHE_HOME": str(folder / "cache")}
    environment |= {} if offline is None else {"HF_HUB_OFFLINE": offline}
    ended = subprocess.run([*REAL, *arguments], env=environment, cwd=folder, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return log.read_text()


def test_the_watch_sees_what_is_tried(tmp_path: Path) -> None:
    environment, log = cut(tmp_path)
    code = "import urllib.request; urllib.request.urlopen('http://huggingface.co', timeout=3)"
    error = done(started(tmp_path, sys.executable, "-c", code, **environment), 1).stderr
    assert "Temporary failure in name resolution" in error
    assert log.read_text().startswith("getaddrinfo huggingface.co")


@pytest.mark.parametrize("arguments", cases([("--help",), ("plan", "tiny.py", "--machine", "rtx4090-64")], ("--help",)))
def test_help_and_a_plan_ask_nobody(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    budgets = dict.fromkeys(("gpu", "ram", "nvme"))
    text = recipe_text(model={"vocab_size": 300}, data={"source": "random", "path": None}, budgets=budgets)
    (tmp_path / "tiny.py").write_text(text)
    assert tried(tmp_path, *arguments) == ""


LOCAL = """
from penstock import AfterConfig, BudgetConfig, DataConfig, ModelConfig, Recipe, TrainConfig

recipe = Recipe(
    name="local",
    model=ModelConfig(path="model", added_tokens=["<|note|>"]),
    data=DataConfig(source="text", path="text.txt", sequence_length=16),
    train=TrainConfig(steps=2, lr=1e-3, compile="off", calibrate=False, device="cpu"),
    budgets=BudgetConfig(gpu="1GiB", ram="1GiB"),
    after=AfterConfig(export=True, export_dtype="float32", sample_prompt="some", sample_tokens=3),
)
"""


@pytest.mark.long
@pytest.mark.parametrize("offline", [None, "0", "1"])
def test_a_fine_tune_from_a_folder_to_an_export_asks_nobody(tmp_path: Path, offline: str | None) -> None:
    as_users_have_it(tmp_path / "model", "llama", True)
    (tmp_path / "text.txt").write_text("some text to train on\n" * 200)
    (tmp_path / "local.py").write_text(LOCAL)
    assert tried(tmp_path, "train", "local.py", "--run-dir", "run", offline=offline) == ""
    assert (tmp_path / "run" / "export" / "model.safetensors").is_file()
