"""The run directory: the only interface between a run and whoever looks at it.

docs/run-directory.md describes its files. app.run_log writes what grows, app.control and app.checkpoints what is asked
of a running run.
"""

from __future__ import annotations

import difflib
import fcntl
import json
import os
import socket
import stat
import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from app.recipe import Recipe, from_run_json, to_run_json
from engine.events import Span
from storage.disk import atomic_write, require_writable
from storage.errors import UserError

State = Literal["preparing", "running", "paused", "finished", "stopped", "failed"]

LIVE_STATES = ("preparing", "running", "paused")
"""States in which a process works on the run, if it has not died."""

ATTENDED_STATES = (*LIVE_STATES, "stale")
"""What `state_of` says of a run whose process is there, silent or not."""

STALE_S = 10.0
"""A live run without a heartbeat for so long is stale: its process hangs, or its disk does."""

LEFT_BY_LAUNCHER = {"recipe.json", "run.lock", "output.log"}
"""What may be in the directory of a run that has not begun."""

_TAIL_BYTES = 1 << 16
_OBJECT_BYTES = 1 << 20
"""Far more than the small files of a run hold."""


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines; a torn last line, left by a killed writer, is the end.

    Raises UserError naming file and line for a line that is no JSON object.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            value = _object(line)
            if value is None:
                raise UserError(f"{path}, line {number}: not a JSON object; the file is damaged")
            yield value


def read_tail(path: Path, tail_bytes: int = _TAIL_BYTES) -> list[dict[str, Any]]:
    """The objects of the end of a file of JSON lines: cheap on a file of any size; [] when it cannot be read."""
    return list(_backwards(path, tail_bytes))[::-1]


def read_last(path: Path) -> dict[str, Any] | None:
    """The last object of a file of JSON lines; None without one."""
    return next(_backwards(path, _TAIL_BYTES), None)


def _backwards(path: Path, tail_bytes: int) -> Iterator[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - tail_bytes)
            file.seek(start)
            lines = file.read().split(b"\n")
    except OSError:
        return
    for line in reversed(lines[1 if start else 0 : -1]):  # the first may be cut, the last is torn or empty
        value = _object(line)
        if value is not None:
            yield value


def read_object(path: Path, most_bytes: int = _OBJECT_BYTES) -> dict[str, Any] | None:
    """The JSON object that a file holds; None where it is missing, unreadable, of more bytes, or anything else."""
    try:
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
    except (OSError, ValueError):
        return None
    return _object(content) if len(content) <= most_bytes else None


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def spans_text(spans: Iterable[Span], offset_s: float = 0.0, offset_id: int = 0) -> str:
    """Lines of spans.jsonl or predicted.jsonl; the offsets are added to times and ids."""
    return "".join(_span_line(span, offset_s, offset_id) for span in spans)


def _span_line(span: Span, offset_s: float, offset_id: int) -> str:
    line = span._asdict()
    line["start_s"], line["end_s"] = round(span.start_s + offset_s, 7), round(span.end_s + offset_s, 7)
    if span.id >= 0:
        line["id"], line["waited"] = span.id + offset_id, [id + offset_id for id in span.waited]
    return json.dumps(line, separators=(",", ":")) + "\n"


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
        path = fresh_path(root, recipe.name) if path is None else path
        try:
            path.mkdir(parents=True, exist_ok=True)
            content = sorted(item.name for item in path.iterdir())
        except OSError as error:
            raise UserError(
                f"run directory {path}: cannot be made ({error.strerror}); choose another --run-dir"
            ) from None
        require_writable(path)
        if not set(content) <= LEFT_BY_LAUNCHER and "run.lock" not in content:
            raise UserError(
                f"run directory {path}: is not empty (it holds {_strange(content)}); choose another --run-dir"
            )
        lock = RunLock(path)
        if (path / "metrics.jsonl").exists():
            lock.release()
            raise UserError(
                f"run directory {path}: already holds a run; go on with `penstock resume {path}`, "
                "or choose another --run-dir"
            )
        for name in ("spans.jsonl", "log.jsonl", "status.json", "control.json"):  # of the run that is replaced
            (path / name).unlink(missing_ok=True)
        atomic_write(path / "recipe.json", to_run_json(recipe))
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
        """Write recipe.json, atomically, if the recipe has changed or the file has no checksum."""
        if (self.path / "recipe.json").read_bytes() != (text := to_run_json(self.recipe)).encode():
            atomic_write(self.path / "recipe.json", text)

    def write_plan(self, plan: dict[str, Any], predicted: list[Span]) -> None:
        """Write plan.json, calibration.json and predicted.jsonl, each atomically: what the run promises, and why."""
        forecast = {"recipe": self.recipe.name, **plan}
        calibration = forecast.pop("calibration", None)
        atomic_write(self.path / "plan.json", json.dumps(forecast, indent=1) + "\n")
        atomic_write(self.path / "predicted.jsonl", spans_text(predicted))
        if calibration is not None:
            atomic_write(self.path / "calibration.json", json.dumps(calibration, indent=1) + "\n")

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write summary.json, atomically."""
        atomic_write(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *exc: object) -> None:
        self._lock.release()


def _strange(content: list[str]) -> str:
    return next(name for name in content if name not in LEFT_BY_LAUNCHER)


def fresh_path(root: Path, name: str) -> Path:
    """A directory for a new run of a recipe's name, which does not exist yet."""
    stem = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    path, number = root / stem, 2
    while path.exists():
        path, number = root / f"{stem}-{number}", number + 1
    return path


def read_recipe(path: Path) -> Recipe:
    """The resolved recipe of a run directory. Raises UserError when there is none."""
    file = path / "recipe.json"
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path}: not a run directory, it has no recipe.json; `penstock runs` lists them") from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from None
    return from_run_json(text, str(file))


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
    """What a list of runs says of one."""

    name: str
    path: Path
    state: str
    """A state of status.json; `crashed` for a run whose process died without a word, `stale` for one that is silent,
    or `unknown`."""
    step: int
    total_steps: int
    loss: float | None
    """Of the last step; none before the first."""
    error: str | None
    heartbeat: float | None = None
    """Unix seconds of the last word of its process."""
    tokens_per_s: float | None = None
    """Of the last step."""
    metrics: dict[str, Any] | None = None
    """The last line of metrics.jsonl."""


def read_info(path: Path) -> RunInfo:
    """What a run directory says about its run, never waiting and never failing on damaged files."""
    status = read_status(path)
    metrics = read_last(path / "metrics.jsonl")
    return RunInfo(
        name=path.name,
        path=path,
        state=state_of(path, status, time.time()),
        step=_whole(status.get("step")),
        total_steps=_whole(status.get("total_steps")),
        loss=_number(metrics, "loss"),
        error=None if status.get("error") is None else str(status["error"]),
        heartbeat=_number(status, "heartbeat"),
        tokens_per_s=_number(metrics, "tokens_per_s"),
        metrics=metrics,
    )


def read_status(path: Path) -> dict[str, Any]:
    """The content of status.json; {} where it is missing or damaged."""
    return read_object(path / "status.json") or {}


def state_of(path: Path, status: dict[str, Any], now: float) -> str:
    """The state of a run whose status.json says `status`, at Unix time `now`: see `RunInfo.state`.

    Whether the process lives is known by its lock; that of another host cannot be seen, only its heartbeat.
    """
    state = str(status.get("state", "unknown"))
    if state not in LIVE_STATES:
        return state
    silent = now - (_number(status, "heartbeat") or 0.0) > STALE_S
    if status.get("host", socket.gethostname()) != socket.gethostname():
        return "stale" if silent else state
    if not is_live(path):
        return "crashed"
    return "stale" if silent else state


def _whole(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _number(values: dict[str, Any] | None, key: str) -> float | None:
    value = (values or {}).get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def list_runs(root: Path = Path("runs")) -> list[RunInfo]:
    """The runs below `root`, oldest first; [] when there is no such folder."""
    try:
        recipes = [path / "recipe.json" for path in root.iterdir()]
    except OSError:
        return []
    ages = {file: age for file in recipes if (age := _made_ns(file)) is not None}
    return [read_info(file.parent) for file in sorted(ages, key=ages.__getitem__)]


def _made_ns(file: Path) -> int | None:
    """When a file was last written; None where it is missing, or goes missing."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns if stat.S_ISREG(status.st_mode) else None
