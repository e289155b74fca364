"""The runs that there are, with their key figures; a damaged run directory is listed with what is wrong with it."""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.app.runs.directory import ATTENDED_STATES, RunInfo, read_info
from penstock.app.runs.files import read_object, read_tail
from penstock.app.runs.speed import WARMUP_STEPS, speed_figure
from penstock.storage.files.units import params_text
from penstock.storage.files.untrusted import printable
from penstock.tui.data.fields import number, text

MOST_PLAN_BYTES = 64 << 20
"""A plan of a deep model takes some megabytes."""
NO_FILE = (0, 0, 0)
RESUMABLE = ("paused", "stopped", "failed", "crashed")
"""States from which a run can go on."""
_FILES = ("recipe.json", "status.json", "metrics.jsonl")
"""The files by which a run is known and seen to change."""
_RECENT = 20
"""Steps from which the time that is left is estimated."""


@dataclass(frozen=True, slots=True)
class RunEntry:
    """A run directory, or what is in the place of one."""

    info: RunInfo
    """Its state may also be `damaged`: what is no run any more."""
    changed: float = 0.0
    """Unix seconds of its last sign of life."""
    losses: tuple[float, ...] = ()
    left_s: float | None = None

    @property
    def live(self) -> bool:
        return self.info.state in ATTENDED_STATES


@dataclass(slots=True)
class RunCatalog:
    """The runs below `root`/runs, read again only where they have changed."""

    root: Path
    _known: dict[Path, tuple[Any, RunEntry]] = field(default_factory=dict)

    def read(self) -> list[RunEntry]:
        """The runs, those that live first, then the latest; never raises."""
        try:
            folders = [Path(item.path) for item in os.scandir(self.root / "runs") if item.is_dir()]
        except OSError:
            folders = []
        known, self._known = self._known, {}
        for folder in folders:
            if folder.name.startswith("."):
                continue
            stamp = tuple(stamp_of(folder / name) for name in _FILES)
            if folder in known and known[folder][0] == stamp and not known[folder][1].live:
                self._known[folder] = known[folder]
            elif (entry := read_run_entry(folder)) is not None:
                self._known[folder] = stamp, entry
        entries = [entry for _, entry in self._known.values()]
        return sorted(entries, key=lambda entry: (not entry.live, -entry.changed, entry.info.name))


def stamp_of(path: Path) -> tuple[int, int, int]:
    """A file's time of change in nanoseconds, its size and its number; NO_FILE where there is none."""
    try:
        stat = path.stat()
    except OSError:
        return NO_FILE
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def read_run_entry(folder: Path) -> RunEntry | None:
    """A run's entry; None for a folder in which nothing looks like a run."""
    if not (folder / "recipe.json").exists():
        if not any((folder / name).exists() for name in (*_FILES, "spans.jsonl")):
            return None
        return RunEntry(_damaged(folder, "has no recipe.json"), stamp_of(folder)[0] / 1e9)
    try:
        return _read_run_entry(folder)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return RunEntry(_damaged(folder, printable(f"cannot be read: {type(error).__name__}: {error}")))


def _damaged(folder: Path, error: str) -> RunInfo:
    return RunInfo(printable(folder.name), folder, "damaged", step=0, total_steps=0, loss=None, error=error)


def _read_run_entry(folder: Path) -> RunEntry:
    info = read_info(folder)
    lines = read_tail(folder / "metrics.jsonl")[-_RECENT:]
    losses = tuple(loss for line in lines if (loss := number(line, "loss")) is not None)
    seconds = [step_s for line in lines if (step_s := number(line, "step_s")) is not None]
    timed = seconds[WARMUP_STEPS if info.step <= _RECENT else 0 :]
    steps_left = info.total_steps - info.step
    is_left = info.state in ATTENDED_STATES and timed and steps_left > 0
    return RunEntry(
        info._replace(loss=losses[-1] if losses else None),
        max(stamp_of(folder / name)[0] for name in _FILES) / 1e9,
        losses,
        statistics.fmean(timed) * steps_left if is_left else None,
    )


def about_lines(folder: Path) -> list[str]:
    """What a run's plan promised and what the run has done, as far as its files say."""
    plan, done = read_object(folder / "plan.json", MOST_PLAN_BYTES), read_object(folder / "summary.json")
    step_s, tokens_per_s = (number(plan, name) for name in ("step_s", "tokens_per_s"))
    params, layers = (number(plan, "model", name) for name in ("params", "layers"))
    result = []
    if step_s is not None and tokens_per_s is not None:
        speed = speed_figure(tokens_per_s)
        result.append(f"planned {speed} tok/s, {step_s:.3g} s a step, bound by {text(plan, 'bound_by')}")
    if params is not None and layers is not None:
        result.append(f"{params_text(params)} parameters, {layers:.0f} layers")
    step_s, tokens_per_s = (number(done, name) for name in ("mean_step_s", "mean_tokens_per_s"))
    tokens, first, last = (number(done, name) for name in ("tokens", "first_loss", "last_loss"))
    if step_s is not None and tokens_per_s is not None:
        result.append(f"mean {step_s:.3g} s a step, {speed_figure(tokens_per_s)} tok/s")
    if tokens is not None and first is not None and last is not None:
        result.append(f"{tokens:,.0f} tokens, loss {first:.4f} to {last:.4f}")
    return result
