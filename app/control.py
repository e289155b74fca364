"""What is wanted of a run: `control.json`, written by `penstock pause`, `stop`, `resume` and the terminal UI.

The run reads it at every step boundary, and while it is paused several times a second.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from engine.events import Want
from storage.disk import atomic_write

FILE_NAME = "control.json"


def ask(run_path: Path, want: Want) -> None:
    """Leave word for the process that works on the run. Raises UserError when the file cannot be written."""
    atomic_write(run_path / FILE_NAME, json.dumps({"want": want, "time": time.time()}) + "\n")


def wanted(run_path: Path) -> Want:
    """What was asked for last; to run where nothing was, or nothing that makes sense."""
    try:
        content = json.loads((run_path / FILE_NAME).read_bytes())
    except (OSError, ValueError):
        return "run"
    want = content.get("want") if isinstance(content, dict) else None
    return want if want in ("pause", "stop") else "run"


def forget(run_path: Path) -> None:
    """A process begins: what was asked of the one before it is done with."""
    (run_path / FILE_NAME).unlink(missing_ok=True)
