"""Standard output and error that nobody reads, and recipes that do more than build one: real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli_process import FAKE_RUN, REPOSITORY, Cli, default_signals

from app.recipe import load_recipe
from storage.errors import UserError


def command(folder: Path, redirections: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line under a shell's `redirections`."""
    words = " ".join([sys.executable, "-m", "app.cli", *arguments, redirections])
    return subprocess.run(
        ["bash", "-c", words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("redirections", "code"),
    [
        (">&-", 2),
        ("2>&-", 2),
        (">&- 2>&-", 2),
        ("<&- >&- 2>&-", 2),
        ("2>/dev/full", 2),
        (">/dev/full", 2),
    ],
)
def test_a_refusal_survives_streams_that_are_closed(tmp_path: Path, redirections: str, code: int) -> None:
    done = command(tmp_path, redirections, "plan", "nothing.py")
    assert done.returncode == code
    assert "Traceback" not in done.stdout + done.stderr
    if "2>" not in redirections:
        assert done.stderr.startswith("error: recipe nothing.py: no such file")


def test_output_that_is_not_printed_is_told(tmp_path: Path) -> None:
    done = command(tmp_path, ">/dev/full", "train", "--fields")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: standard output: No space left on device; not all was printed\n"


@pytest.mark.parametrize("redirections", [">&-", "| head -c 1", "2>&1 | true"])
def test_a_reader_that_is_gone_stops_nothing(cli: Cli, redirections: str) -> None:
    words = f"{sys.executable} {FAKE_RUN} train tiny.py --run-dir out {redirections}"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {words}"],
        cwd=cli.folder,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert json.loads((cli.folder / "out" / "status.json").read_text())["state"] == "finished"


def test_what_is_printed_reaches_no_file_of_the_run(cli: Cli) -> None:
    """A file opened in the place of a closed standard output would be written over."""
    words = f"{sys.executable} {FAKE_RUN} train tiny.py --run-dir out >&- 2>&-"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(["bash", "-c", words], cwd=cli.folder, env=environment, timeout=60)
    assert done.returncode == 0
    for path in (cli.folder / "out").rglob("*.json*"):
        for line in path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]:
            json.loads(line)


def test_ctrl_c_ends_a_recipe_that_loops(cli: Cli) -> None:
    (cli.folder / "loop.py").write_text("import os\nos.write(2, b'begun\\n')\nwhile True: pass\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "app.cli", "plan", "loop.py"],
        cwd=cli.folder,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=default_signals,
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert re.fullmatch(r"error: recipe loop\.py, line [23]: interrupted while the recipe was built\n", err)


def test_what_a_recipe_prints_is_no_output_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "loud.py"
    path.write_text("from app.recipe import Recipe\nprint('loud')\nrecipe = Recipe(name='x')\n")
    load_recipe(path)
    assert capsys.readouterr() == ("", "loud\n")
    path.write_text("import sys\nsys.exit()\n")
    with pytest.raises(UserError, match="line 2: ends the process"):
        load_recipe(path)


def test_a_mistake_of_ours_gives_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import app.rundir
    from app.cli import main

    def raises(error: Exception) -> None:
        raise error

    for ours in (RecursionError(), OverflowError(), UnicodeError(), FileNotFoundError(2, "gone", "x"), OSError(5, "?")):
        monkeypatch.setattr(app.rundir, "list_runs", lambda error=ours: raises(error))
        with pytest.raises(type(ours)):
            main(["runs"])
    for theirs in (MemoryError(), PermissionError(13, "not yours", "x"), OSError(28, "full", "x")):
        monkeypatch.setattr(app.rundir, "list_runs", lambda error=theirs: raises(error))
        assert main(["runs"]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    words = f"cd gone && rmdir ../gone && {sys.executable} -m app.cli runs"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        ["bash", "-c", words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: the current folder is gone")
