"""The run directory: the only interface between a run and whoever looks at it.

```
recipe.json     the resolved recipe
plan.json       the forecast it began with  (engine.forecast)
calibration.json   what was measured of its ops for that forecast
predicted.jsonl one line per op of the forecast's step   (engine.events.Span)
metrics.jsonl   one line per step          (engine.events.StepMetrics)
spans.jsonl     one line per finished op   (engine.events.Span)
status.json     state, pid, step, total_steps, heartbeat (Unix seconds); `error` when failed
summary.json    figures of the finished run
run.lock        locked while a process works on the run
requests/       checkpoints asked of a running run (app.checkpoints)
data/           tokenizer and tokens
state/          the NVMe tier
export/         the Hugging Face folder, where the recipe asks for it
```
"""

from __future__ import annotations

import dataclasses
import difflib
import fcntl
import json
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from app.recipe import Recipe, from_json, to_json
from engine.events import Span, StepMetrics
from storage.disk import atomic_write, require_writable
from storage.errors import UserError

State = Literal["preparing", "running", "finished", "stopped", "failed"]

HEARTBEAT_S = 2.0
"""Readers may call a run silent after 5 s without a heartbeat."""

MAX_PENDING_SPANS = 500_000
"""Spans waiting for a stalled disk before further ones are dropped (and counted): about 200 MB."""

_TAIL_BYTES = 1 << 16


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines; a torn last line, left by a killed writer, is the end.

    Raises UserError naming file and line for a line that is no JSON object.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                value = json.loads(line)
            except ValueError:
                value = None
            if not isinstance(value, dict):
                raise UserError(f"{path}, line {number}: not a JSON object; the file is damaged")
            yield value


def read_tail(path: Path) -> list[dict[str, Any]]:
    """The objects of the last 64 KiB of a file of JSON lines: cheap on a file of any size; [] when it is missing."""
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES)
            file.seek(start)
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    whole = lines[1 if start else 0 : -1]  # the first may be cut, the last is torn or empty
    found = []
    for line in whole:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


class RunLock:
    """Exclusive use of a run directory, held until `release` or the end of the process, however it ends."""

    def __init__(self, run_path: Path) -> None:
        """Take the lock. Raises UserError naming the process that holds it."""
        lock_path = run_path / "run.lock"
        self._fd = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + 0.5  # a reader that tests the lock holds it for a moment
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    pid = os.pread(self._fd, 32, 0).decode(errors="replace").strip()
                    os.close(self._fd)
                    raise UserError(
                        f"{run_path}: in use by process {pid}; wait for it, or stop it with `kill {pid}`"
                    ) from None
                time.sleep(0.02)
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Give the directory free."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def is_live(run_path: Path) -> bool:
    """Whether a process holds the run's lock."""
    try:
        fd = os.open(run_path / "run.lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


class RunDir:
    """A locked run directory. Use as a context manager; leaving it releases the lock."""

    def __init__(self, path: Path, recipe: Recipe, lock: RunLock) -> None:
        self.path = path
        self.recipe = recipe
        self._lock = lock

    @classmethod
    def create(cls, recipe: Recipe, path: Path | None = None, root: Path = Path("runs")) -> RunDir:
        """Make and lock the directory of a new run: `path`, or a fresh `root`/<name>-<timestamp>.

        A run that never came to its first step is replaced. Raises UserError when the directory holds any other run
        or anything else, is in use, or cannot be written.
        """
        path = _fresh_path(root, recipe.name) if path is None else path
        try:
            path.mkdir(parents=True, exist_ok=True)
            content = sorted(item.name for item in path.iterdir())
        except OSError as error:
            raise UserError(
                f"run directory {path}: cannot be made ({error.strerror}); choose another --run-dir"
            ) from None
        require_writable(path)
        if content and "run.lock" not in content:
            raise UserError(f"run directory {path}: is not empty (it holds {content[0]}); choose another --run-dir")
        lock = RunLock(path)
        if (path / "metrics.jsonl").exists():
            lock.release()
            raise UserError(
                f"run directory {path}: already holds a run; go on with `penstock resume {path}`, "
                "or choose another --run-dir"
            )
        atomic_write(path / "recipe.json", to_json(recipe))
        return cls(path.resolve(), recipe, lock)

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """Lock the directory of an existing run. Raises UserError when it is no run or is in use."""
        recipe = read_recipe(path)
        return cls(path.resolve(), recipe, RunLock(path))

    def change_recipe(self, recipe: Recipe) -> None:
        """Take `recipe` for this process; `save_recipe` makes it the run's own."""
        self.recipe = recipe

    def save_recipe(self) -> None:
        """Write recipe.json, atomically, if the recipe has changed."""
        if read_recipe(self.path) != self.recipe:
            atomic_write(self.path / "recipe.json", to_json(self.recipe))

    def write_plan(self, plan: dict[str, Any], predicted: list[Span]) -> None:
        """Write plan.json, calibration.json and predicted.jsonl, each atomically: what the run promises, and why."""
        forecast = {"recipe": self.recipe.name, **plan}
        calibration = forecast.pop("calibration", None)
        atomic_write(self.path / "plan.json", json.dumps(forecast, indent=1) + "\n")
        atomic_write(self.path / "predicted.jsonl", _spans_text(predicted))
        if calibration is not None:
            atomic_write(self.path / "calibration.json", json.dumps(calibration, indent=1) + "\n")

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write summary.json, atomically."""
        atomic_write(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *exc: object) -> None:
        self._lock.release()


def _fresh_path(root: Path, name: str) -> Path:
    stem = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    path, number = root / stem, 2
    while path.exists():
        path, number = root / f"{stem}-{number}", number + 1
    return path


def read_recipe(path: Path) -> Recipe:
    """The resolved recipe of a run directory. Raises UserError when there is none."""
    file = path / "recipe.json"
    try:
        return from_json(file.read_text(encoding="utf-8"), str(file))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path}: not a run directory, it has no recipe.json; `penstock runs` lists them") from None


def find_run(run: str, root: Path = Path("runs")) -> Path:
    """The directory of a run given by path or by its name below `root`.

    Raises UserError with the nearest run's name when there is none.
    """
    for path in (Path(run), root / run):
        if (path / "recipe.json").is_file():
            return path
    names = [info.name for info in list_runs(root)]
    close = difflib.get_close_matches(run, names, n=1, cutoff=0.3)
    hint = f"did you mean '{close[0]}'?" if close else "`penstock runs` lists them"
    raise UserError(f"{run}: no such run; {hint}")


class RunInfo(NamedTuple):
    """One line of `penstock runs`."""

    name: str
    path: Path
    state: str
    """A state of status.json, `crashed` for a run whose process died without a word, or `unknown`."""
    step: int
    total_steps: int
    loss: float | None
    """Of the last step; none before the first."""
    error: str | None


def read_info(path: Path) -> RunInfo:
    """What a run directory says about its run, never waiting and never failing on a damaged status."""
    try:
        status = json.loads((path / "status.json").read_bytes())
    except (OSError, ValueError):
        status = None
    status = status if isinstance(status, dict) else {}
    state = str(status.get("state", "unknown"))
    if state in ("preparing", "running") and not is_live(path):
        state = "crashed"
    metrics = read_tail(path / "metrics.jsonl")
    loss = metrics[-1].get("loss") if metrics else None
    return RunInfo(
        path.name, path, state, status.get("step", 0), status.get("total_steps", 0), loss, status.get("error")
    )


def list_runs(root: Path = Path("runs")) -> list[RunInfo]:
    """The runs below `root`, oldest first; [] when there is no such folder."""
    if not root.is_dir():
        return []
    paths = [path for path in root.iterdir() if (path / "recipe.json").is_file()]
    return [read_info(path) for path in sorted(paths, key=lambda path: (path / "recipe.json").stat().st_mtime_ns)]


class RunLog:
    """Writes metrics, spans and status from one thread of its own, so that training never waits for the disk.

    A step costs the training thread one queue insertion. Everything is on disk when `drain` or `close` returns.
    """

    def __init__(self, path: Path, total_steps: int, step: int = 0) -> None:
        self._path = path
        self._status: dict[str, Any] = {"state": "preparing", "pid": os.getpid(), "step": step}
        self._status["total_steps"] = total_steps
        self._queue: queue.SimpleQueue[tuple[StepMetrics | None, list[Span]] | None] = queue.SimpleQueue()
        self._status_lock = threading.Lock()
        self._queued_spans = 0
        """Written by the training thread only."""
        self._written_spans = 0
        """Written by the log's thread only."""
        self._failure: OSError | None = None
        self._closed = False
        self.dropped_spans = 0
        self._write_status()
        self._thread = threading.Thread(target=self._work, name="run-log", daemon=True)
        self._thread.start()

    def set_state(self, state: State, error: str | None = None) -> None:
        """Publish a new state at once."""
        with self._status_lock:
            self._status["state"] = state
            if error is not None:
                self._status["error"] = error
        self._write_status()

    def step(self, metrics: StepMetrics, spans: list[Span]) -> None:
        """Hand over one step. Raises UserError when an earlier line could not be written."""
        if self._failure is not None:
            raise UserError(f"{self._path}: the run's log cannot be written ({self._failure}); free space and resume")
        self._status["step"] = metrics.step
        self._put(metrics, spans)

    def spans(self, spans: list[Span]) -> None:
        """Hand over spans that finished after the last step."""
        self._put(None, spans)

    def _put(self, metrics: StepMetrics | None, spans: list[Span]) -> None:
        if self._queued_spans - self._written_spans + len(spans) > MAX_PENDING_SPANS:
            self.dropped_spans += len(spans)
            spans = []
        self._queued_spans += len(spans)
        self._queue.put((metrics, spans))

    def drain(self) -> None:
        """Write what is pending and end the thread: metrics and spans are complete."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def close(self, state: State, error: str | None = None) -> None:
        """Drain, then publish the last state. A second call does nothing."""
        self.drain()
        if not self._closed:
            self._closed = True
            self.set_state(state, error)

    def _write_status(self) -> None:
        """Replace status.json. Not synced: after a power cut nobody needs the heartbeat of before."""
        if not self._status_lock.acquire(timeout=1.0):  # an abort must not wait for a stalled disk
            return
        try:
            temporary = self._path / "status.json.tmp"
            temporary.write_text(json.dumps(self._status | {"heartbeat": time.time()}) + "\n")
            os.replace(temporary, self._path / "status.json")
        except OSError as error:
            self._failure = error
        finally:
            self._status_lock.release()

    def _work(self) -> None:
        """The thread: lines as they come, a heartbeat every HEARTBEAT_S."""
        metrics_file = spans_file = None
        beat_at = time.monotonic() + HEARTBEAT_S
        offset_s = 0.0
        while True:
            if time.monotonic() >= beat_at:
                self._write_status()
                beat_at = time.monotonic() + HEARTBEAT_S
            try:
                item = self._queue.get(timeout=max(0.0, beat_at - time.monotonic()))
            except queue.Empty:
                continue
            if item is None:
                break
            metrics, spans = item
            try:
                if metrics_file is None or spans_file is None:
                    offset_s = _prepare_logs(self._path, metrics.step if metrics else sys.maxsize)
                    metrics_file = (self._path / "metrics.jsonl").open("a")
                    spans_file = (self._path / "spans.jsonl").open("a")
                spans_file.write(_spans_text(spans, offset_s))
                if metrics is not None:
                    metrics_file.write(json.dumps(_finite(dataclasses.asdict(metrics))) + "\n")
                spans_file.flush()
                metrics_file.flush()
            except OSError as error:
                self._failure = error
            self._written_spans += len(spans)
        for file in (metrics_file, spans_file):
            if file is not None:
                file.close()


def _spans_text(spans: Iterable[Span], offset_s: float = 0.0) -> str:
    return "".join(_span_line(span, offset_s) for span in spans)


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN or infinity: they become null."""
    return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in values.items()}


def _span_line(span: Span, offset_s: float) -> str:
    moved = span._replace(start_s=round(span.start_s + offset_s, 7), end_s=round(span.end_s + offset_s, 7))
    return json.dumps(moved._asdict(), separators=(",", ":")) + "\n"


def _prepare_logs(path: Path, first_step: int) -> float:
    """Make the logs of a resumed run ready for lines from `first_step` on.

    Torn last lines go, and so do metrics of steps that are done again; spans stay, since their time was spent.
    Returns the seconds to add to the new spans' times, which start at zero, so that they follow the old ones.
    """
    metrics_path, spans_path = path / "metrics.jsonl", path / "spans.jsonl"
    if metrics_path.exists():
        kept = [line for line in read_jsonl(metrics_path) if line["step"] < first_step]
        atomic_write(metrics_path, "".join(json.dumps(line) + "\n" for line in kept))
    if not spans_path.exists():
        return 0.0
    with spans_path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:  # back to the last newline
            start = max(0, end - _TAIL_BYTES)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            end = start + newline + 1 if newline >= 0 else start
            if newline >= 0:
                break
        file.truncate(end)
    return max((float(span["end_s"]) for span in read_tail(spans_path)), default=0.0)
