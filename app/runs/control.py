"""What is wanted of a run: `control.json`, written by `penstock pause`, `stop`, `resume` and the terminal UI, which the
run reads at every step boundary, and while it is paused several times a second."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Literal

from penstock.app.runs.directory import is_live, read_info, read_status
from penstock.app.runs.files import read_object, remove_own
from penstock.engine.events import Want
from penstock.storage.files.disk import atomic_write, reporting
from penstock.storage.files.errors import UserError

FILE_NAME = "control.json"


def ask(run_path: Path, want: Want) -> None:
    """Leave word for the process that works on the run. Raises UserError when the file cannot be written."""
    atomic_write(run_path / FILE_NAME, json.dumps({"want": want, "time": time.time()}) + "\n")


def wanted(run_path: Path) -> Want:
    """What was asked for last; to run where nothing was, or nothing that makes sense."""
    want = (read_object(run_path / FILE_NAME) or {}).get("want")
    return want if want in ("pause", "stop") else "run"


def pause_or_stop(run_path: Path, want: Literal["pause", "stop"]) -> str:
    """Ask a live run to pause or to stop; what will happen, in words. Raises UserError when it is not running."""
    if not is_live(run_path):
        state = read_info(run_path).state
        raise UserError(f"{run_path}: is not running ({state}); `penstock runs` lists those that are")
    is_paused = read_status(run_path).get("state") == "paused"  # before: a quick run has paused when this was written
    ask(run_path, want)
    if is_paused:
        return "already paused" if want == "pause" else "stops; its last step is committed"
    done = "pauses" if want == "pause" else "stops"
    return f"{done} once its current step is committed"


def go_on(run_path: Path) -> bool:
    """Let a run that is paused, or about to be, go on; False when no process works on it. UserError when it is
    running."""
    if not is_live(run_path):
        return False
    status = read_status(run_path)
    if status.get("state") != "paused" and wanted(run_path) != "pause":
        raise UserError(f"{run_path}: in use by process {status.get('pid')}; it is already running")
    ask(run_path, "run")
    return True


def forget(run_path: Path) -> None:
    """A process begins: what was asked of the one before it is done with. UserError where it cannot be removed."""
    file = run_path / FILE_NAME
    with reporting(file, "removing a request to the previous process"):
        remove_own(file)
