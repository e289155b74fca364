"""Starts runs that outlive whoever started them, and other commands, for the terminal UI: each in a session of its own,
which neither Ctrl-C nor a closed terminal reaches. What a run prints goes to its `output.log`."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path
from typing import BinaryIO, NamedTuple

from penstock.app.console import memory_limit
from penstock.app.planning.inputs import require_inputs, require_weights
from penstock.app.recipes.recipe import resolve_paths, to_run_json
from penstock.app.runs import control
from penstock.app.runs.directory import LEFT_BY_LAUNCHER, fresh_path, read_recipe, read_status
from penstock.app.runs.files import open_append, open_read, remove_own
from penstock.engine.config import Recipe
from penstock.storage.files import child
from penstock.storage.files.disk import atomic_write, disk_error, require_writable
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import RefusedFileError

CLI = tuple(child.command("app.cli.main"))

START_S = 30.0
"""How long a started run may take to say something before it counts as started anyway: a loaded machine."""

_SAID_BYTES = 1 << 16
"""Of what a process says that ends at once, no more is shown."""

_words: dict[Path, tuple[subprocess.Popen[bytes], BinaryIO]] = {}
"""Run directory -> the process started there and its output, which can be read when the run has left nothing."""


class CommandResult(NamedTuple):
    code: int
    output: str
    """Standard output and error, as they were mixed."""


def command(arguments: list[str], root: Path | None = None) -> CommandResult:
    """Run a command of the command line in folder `root` (default: this one) and wait for its end."""
    process = _begin(arguments, root, subprocess.PIPE)
    output, _ = process.communicate()
    return CommandResult(process.returncode, output.decode(errors="replace"))


def start(recipe: Recipe, root: Path) -> Path:
    """Start training a recipe below `root`/runs, detached; relative paths are taken from `root`. The run directory.
    Raises UserError when it cannot start, which leaves no run behind."""
    recipe = resolve_paths(recipe, root.resolve())
    require_inputs(recipe)
    path = _make_folder(root.resolve() / "runs", recipe.name)
    atomic_write(path / "recipe.json", to_run_json(recipe))
    try:
        _spawn(["train", str(path / "recipe.json"), "--run-dir", str(path)], path, root)
    except UserError:
        if path.exists() and {item.name for item in path.iterdir()} <= LEFT_BY_LAUNCHER:
            for item in path.iterdir():
                remove_own(item)
            path.rmdir()
        raise
    return path


def last_words(run_path: Path) -> str | None:
    """The last words of a run that this process has started, where it failed and left no directory behind; else
    None."""
    process, output = _words.get(run_path.resolve(), (None, None))
    if process is None or output is None or run_path.exists() or process.poll() is None:
        return None
    said = _read_words(output, max(0, output.seek(0, os.SEEK_END) - _SAID_BYTES))
    errors = re.split(r"^error: ", said, flags=re.MULTILINE)
    return errors[-1] if len(errors) > 1 else f"{said.rpartition(chr(10))[2]}\n{said}"


def resume(run_path: Path) -> None:
    """Let a paused run go on, or start training one that has ended, detached. UserError when it is running, or
    cannot."""
    run_path = run_path.resolve()
    recipe = read_recipe(run_path)
    if (run_path / "data" / "corpus" / "meta.json").exists():  # whatever became of their source, it goes on with these
        require_weights(recipe)
    else:
        require_inputs(recipe)
    if not control.go_on(run_path):
        _spawn(["resume", str(run_path)], run_path, run_path.parent)


def _make_folder(root: Path, name: str) -> Path:
    require_writable(root)
    while True:
        path = fresh_path(root, name)
        try:
            path.mkdir()
        except FileExistsError:
            continue  # somebody else was quicker
        return path


def _spawn(arguments: list[str], run_path: Path, folder: Path) -> None:
    """Start a process on the run; returns once its word is in status.json. UserError when it ends before."""
    for earlier, _ in _words.values():
        earlier.poll()  # so that none stays a zombie
    log = run_path / "output.log"
    try:
        with open(open_append(log), "ab") as output:
            begin = output.seek(0, os.SEEK_END)
            process, said = _begin(arguments, folder, output), open_read(log)
            _words[run_path] = process, said
    except OSError as error:
        if isinstance(error, RefusedFileError):
            raise disk_error(error, log, "writing the run's output") from None
        raise UserError(f"{run_path}: the run cannot be started ({error.strerror})") from None
    deadline = time.monotonic() + START_S
    while read_status(run_path).get("pid") != process.pid and time.monotonic() < deadline:
        if process.poll() is not None:
            if process.returncode == 0:
                return
            words = _read_words(said, begin)
            raise UserError(
                words.removeprefix("error: ") or f"{run_path}: ended at once with code {process.returncode}"
            )
        time.sleep(0.02)


def _read_words(output: BinaryIO, begin: int) -> str:
    """What a process has written to its output, from byte `begin` on."""
    try:
        output.seek(begin)
        return output.read(_SAID_BYTES).decode(errors="replace").strip()
    except OSError as error:
        return f"error: its output cannot be read: {error.strerror}"


def _begin(arguments: list[str], folder: Path | None, output: BinaryIO | int) -> subprocess.Popen[bytes]:
    """A process of the command line in a session of its own, which prints to `output`. OSError."""
    process = subprocess.Popen(
        [*CLI, *arguments],
        cwd=folder,
        env=child.environment(COLUMNS="120"),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    memory_limit.unbound(process.pid)
    return process
