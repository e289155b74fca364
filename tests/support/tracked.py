"""Run directories with all that is sent to trackers, made up line by line."""

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from penstock.app.rundir import RunDir
from penstock.engine.config import Recipe

BEGAN = 1.8e9
"""Unix seconds of step 0."""


def made_up_run(path: Path, steps: Iterable[int] = range(1, 21), trackers: Iterable[str] = ()) -> Path:
    """A finished run of these steps, with a validation and samples every tenth."""
    RunDir.create(Recipe(name="tiny", trackers=list(trackers)), path).__exit__()
    write_steps(path, steps)
    end(path, "finished")
    return path


def metrics_line(step: int, began: float = BEGAN) -> dict[str, Any]:
    return {
        "step": step, "loss": 8.0 / step, "grad_norm": None if step == 3 else 1.5, "lr": 1e-3, "tokens": 100,
        "tokens_per_s": 50.0, "step_s": 2.0, "time": began + step, "tier_bytes": {"gpu": 1000 + step, "ram": 2000},
        "nvme_read_bytes": {"/a": 5, "/b": 6},
    }  # fmt: skip


def write_steps(path: Path, steps: Iterable[int], began: float = BEGAN) -> None:
    """Append lines as a run does, the metrics of a step before its validation and samples."""
    for step in steps:
        at = began + step
        _append(path / "metrics.jsonl", metrics_line(step, began))
        if step % 10 == 0:
            _append(path / "validation.jsonl", {"step": step, "loss": 2.0, "accuracy": 0.5, "time": at + 0.1})
            sample = {"prompt": "One *day*", "text": f" after {step} steps\nit rained", "tokens": 5, "ended": False}
            _append(path / "samples.jsonl", {"step": step, "samples": [sample], "seconds": 1, "time": at + 0.2})


def drop_steps(path: Path, first: int) -> None:
    """Drop the lines of a resumed run's steps that are done again."""
    for name in ("metrics", "validation", "samples"):
        file = path / f"{name}.jsonl"
        kept = [line for line in file.read_text().splitlines(keepends=True) if json.loads(line)["step"] < first]
        file.unlink()
        file.write_text("".join(kept))


def end(path: Path, state: str) -> None:
    (path / "status.json").write_text(json.dumps({"state": state, "step": 20, "heartbeat": time.time()}))
    (path / "summary.json").write_text(json.dumps({"steps": 20, "last_loss": 0.4, "tiers": {"gpu": {"peak_bytes": 7}}}))


def _append(path: Path, line: dict[str, Any]) -> None:
    with open(path, "a") as file:
        file.write(json.dumps(line) + "\n")
