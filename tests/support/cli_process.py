"""Subprocesses that run the real command line, around a stand-in for the engine or all of it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from forked import PATHS, Forked, default_signals, fork_server
from forked import REPOSITORY as REPOSITORY

from penstock.app.cli.main import main
from penstock.app.runs.directory import read_info

FAKE = (sys.executable, str(Path(__file__).with_name("fake_run.py")))
"""The command line around the stand-in."""
REAL = (sys.executable, "-m", "penstock.app.cli.main")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")

RECIPE = """
from penstock import DataConfig, Recipe, TrainConfig, run_recipe
recipe = Recipe(name="tiny", data=DataConfig(source="python_stdlib"), train=TrainConfig(steps=5))
if __name__ == "__main__":
    run_recipe(__file__)
"""

PATIENCE_S = 600.0
"""After which a test that waits has failed: nothing takes as long, however loaded the machine is."""


class Done(NamedTuple):
    stdout: str
    stderr: str


def started(
    folder: Path, *command: str, stdout: Any = subprocess.PIPE, stderr: Any = subprocess.PIPE, **environment: str
) -> subprocess.Popen[str]:
    """A command in `folder` that imports this checkout; one of the command line is forked where it makes no difference
    to what is imported."""
    found = os.environ | PATHS | environment
    forked = any(command[: len(program)] == program for program in (REAL, FAKE, TORCHRUN)) and fork_server().has(found)
    return (Forked if forked else subprocess.Popen)(
        command, cwd=folder, env=found, stdout=stdout, stderr=stderr, text=True, preexec_fn=default_signals
    )


def done(process: subprocess.Popen[str], code: int = 0) -> Done:
    """What a process that ends with that exit code has printed."""
    found = Done(*process.communicate(timeout=PATIENCE_S))
    assert process.returncode == code, found.stderr or found.stdout
    return found


def documented(file: str, *, table: bool = False) -> set[str]:
    """The names that docs/run-directory.md has of a file of the run directory, or those of its table's first column."""
    page = (REPOSITORY / "docs" / "run-directory.md").read_text(encoding="utf-8")
    section = next(part for part in page.split("\n## ") if part.startswith(f"{file}\n"))
    texts = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")] if table else [section]
    return {name for text in texts for code in re.findall(r"`(.+?)`", text) for name in re.findall(r"\w+", code)}


class Cli:
    """Starts commands in a folder of their own, which holds the recipe tiny.py."""

    def __init__(self, folder: Path, recipe: str = RECIPE, program: tuple[str, ...] = FAKE) -> None:
        self.folder, self.program = folder, program
        (folder / "tiny.py").write_text(recipe)

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        return started(self.folder, *self.program, *arguments, **environment)

    def run(self, *arguments: str, code: int = 0, **environment: str) -> Done:
        """A command that ends with that exit code."""
        return done(self.start(*arguments, **environment), code)

    def begin(self, steps: int = 5, **environment: str) -> tuple[Path, subprocess.Popen[str]]:
        """The run directory `out`, and the process, which is in a step."""
        run = self.folder / "out"

        def in_a_step() -> bool:
            status = json.loads((run / "status.json").read_text()) if read_info(run).state == "running" else {}
            return bool(status.get("now") or status.get("step"))

        process = self.start("train", "tiny.py", "--set", f"train.steps={steps}", "--run-dir", "out", **environment)
        wait_until(in_a_step)
        return run, process


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one message of a command that is refused, in this process; an item that took long is told besides."""
    capsys.readouterr()
    assert main(list(arguments)) == 2
    error = "".join(line for line in capsys.readouterr().err.splitlines(True) if not line.startswith("  "))
    assert error.startswith("error: ")
    assert (error.count("\n"), error.count("Traceback")) == (1, 0)
    return error


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a .jsonl file of a run."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps(run: Path) -> list[int]:
    """The steps of which a run has metrics."""
    return [line["step"] for line in json_lines(run / "metrics.jsonl")]


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for another process to get somewhere."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "the other process did not get there"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Not gone, and not a zombie that nobody has waited for."""
    return _state_of(pid) not in ("", "Z")


def stop(process: subprocess.Popen[str]) -> None:
    """As Ctrl-Z does; done when it has stopped."""
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: _state_of(process.pid) == "T")


def _state_of(pid: int) -> str:
    """As the kernel names it; empty where the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
