"""The run directory: the only interface between a run and whoever looks at it (docs/run-directory.md). app/runs/log.py
writes what grows, control.py and checkpoints.py what is requested of a running run."""

from __future__ import annotations

import contextlib
import difflib
import errno
import fcntl
import json
import os
import shutil
import socket
import stat
import time
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from penstock.app.recipes.recipe import from_run_json, to_run_json
from penstock.app.runs.files import (
    examine_object,
    json_text,
    number,
    read_last,
    read_object,
    read_tail,
    remove_own,
    whole,
)
from penstock.engine.config import Recipe, drive_folders, state_folder
from penstock.engine.config.values import MOST_GPUS
from penstock.engine.events import Span
from penstock.storage.files import sealed
from penstock.storage.files.disk import atomic_write, disk_error, prepare_file, publish, require_writable
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import open_regular, printable, read_regular, shell

State = Literal["preparing", "running", "paused", "finished", "stopped", "failed"]

LIVE_STATES = ("preparing", "running", "paused")
"""States in which a process works on the run, if it has not died."""

ATTENDED_STATES = (*LIVE_STATES, "stale")
"""What `state_of` says of a run whose process is there, silent or not."""

ENDED_STATES = ("finished", "stopped", "failed")
"""States that a process leaves behind."""

STALE_S = 10.0
"""A live run without a heartbeat for so long is stale: its process hangs, or its disk does."""

LEFT_BY_LAUNCHER = {"recipe.json", "run.lock", "output.log"}
"""What may be in the directory of a run that has not begun."""


def spans_name(rank: int) -> str:
    """The file with the spans of a GPU, by number from 0."""
    return f"spans.{rank}.jsonl" if rank else "spans.jsonl"


OWN_FOLDERS = (
    *("data", "requests", "state", "state/checkpoints", "state/scratch", "export", "evals"),
    *("trackers", "tensorboard", "dcp", "inputs"),
)
"""Folders of a run: real ones, or somebody else's files would be written and deleted through them."""

OWN_FILES = (
    *("recipe.json", "plan.json", "calibration.json", "status.json", "status.json.tmp", "control.json", "summary.json"),
    *("metrics.jsonl", "validation.jsonl", "samples.jsonl", "spikes.jsonl", "spans.jsonl", "log.jsonl"),
    *("predicted.jsonl", "output.log", "run.lock", "fetch.json"),
    *(spans_name(rank) for rank in range(1, MOST_GPUS)),
)

_RECIPE_BYTES = 1 << 24
_FULL_BYTES = 1 << 20
"""A file system with less room than this is full."""
_BOOT_SLACK_S = 60.0
"""Clocks are set while a machine starts."""


def spans_text(spans: Iterable[Span], offset_s: float = 0.0, offset_id: int = 0) -> str:
    """Lines of spans.jsonl or predicted.jsonl; the offsets are added to times and ids."""
    return "".join(_span_line(span, offset_s, offset_id) for span in spans)


def _span_line(span: Span, offset_s: float, offset_id: int) -> str:
    line = span._asdict()
    line["start_s"], line["end_s"] = round(span.start_s + offset_s, 7), round(span.end_s + offset_s, 7)
    if span.id >= 0:
        line["id"], line["waited"] = span.id + offset_id, [id + offset_id for id in span.waited]
    if awaited := line.pop("awaited"):
        line["awaited"] = [[gpu, round(seconds, 7)] for gpu, seconds in awaited]
    return json.dumps(line, separators=(",", ":")) + "\n"


class RunLock:
    """Exclusive use of a run directory, held until `release` or the end of the process, however it ends."""

    def __init__(self, run_path: Path, *, read_only: bool = False) -> None:
        """UserError naming the process that holds it. `read_only`: a file that cannot be written, or made, will do."""
        self._fd, self._path = -1, run_path
        deadline = time.monotonic() + 0.5  # a reader that tests the lock holds it for a moment
        try:
            folder = os.open(run_path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                # One process at a time looks whether the file has other links, and replaces it.
                self._take(folder, deadline)
                self._open(folder, deadline, read_only)
            finally:
                os.close(folder)
        except OSError as error:
            self.release()
            raise disk_error(error, run_path / "run.lock", "locking the run") from None

    def _open(self, folder: int, deadline: float, read_only: bool) -> None:
        path, inode = self._path / "run.lock", os.fstat(folder).st_ino
        try:
            self._fd = open_regular(path, flags=os.O_RDWR | os.O_CREAT)
        except OSError as error:
            if not read_only or error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise
            with contextlib.suppress(FileNotFoundError):
                self._fd = open_regular(path)
                if not _is_anothers(self._fd, inode):
                    self._take(self._fd, deadline)
            return
        if not _is_anothers(self._fd, inode):
            self._take(self._fd, deadline)
        if os.fstat(self._fd).st_nlink > 1:  # a backup's file too, which is left to it
            temporary = prepare_file(path, b"")
            os.close(self._fd)
            self._fd = open_regular(temporary, flags=os.O_RDWR)
            self._take(self._fd, deadline)
            publish(temporary, path)
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()} {inode}\n".encode(), 0)

    def _take(self, fd: int, deadline: float) -> None:
        while True:
            try:
                return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    pid = None if self._fd < 0 else _holder(self._fd)[0]
                    self.release()
                    who, stop = (f"process {pid}", f" with `kill {pid}`") if pid else ("another process", "")
                    raise UserError(f"{self._path}: in use by {who}; wait for it, or stop it{stop}") from None
                time.sleep(0.02)

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _holder(fd: int) -> tuple[int | None, int | None]:
    """The process that took the lock last, and the inode of its run directory, as its file says; None: it does not."""
    words = os.pread(fd, 64, 0).split()
    pid, inode = [int(word) if word.isdigit() else None for word in (*words, b"", b"")[:2]]
    return pid, inode


def _is_anothers(fd: int, inode: int) -> bool:
    """Whether lock file `fd` is another run directory's than that of `inode`: a backup may have it by a hard link."""
    other = _holder(fd)[1]
    return os.fstat(fd).st_nlink > 1 and other is not None and other != inode


def is_live(run_path: Path) -> bool | None:
    """Whether a process holds the run's lock; None where this user may not look."""
    try:
        fd = open_regular(run_path / "run.lock")
    except PermissionError:
        return None
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return not _is_anothers(fd, os.stat(run_path).st_ino)
    finally:
        os.close(fd)
    return False


def require_own(run_path: Path) -> None:
    """Raise UserError where a file or folder of the run is a link, a pipe or anything else that it did not make."""
    for name in (*OWN_FOLDERS, *OWN_FILES):
        path = run_path / name
        try:
            mode = os.lstat(path).st_mode
        except OSError:
            continue
        kind, fine = ("folder", stat.S_ISDIR(mode)) if name in OWN_FOLDERS else ("file", stat.S_ISREG(mode))
        if not fine:
            what = "a link" if stat.S_ISLNK(mode) else f"not a {kind}"
            raise UserError(
                f"{path}: is {what}, but a run needs a {kind} of its own here; move it away. To keep a run's state on "
                "another drive, name the drive in storage.nvme"
            )


class _Before(NamedTuple):
    """What a new run found in the place of its directory."""

    made: list[Path]
    """Folders that it made, or a launcher for it, the innermost first."""
    files: dict[str, bytes | None]
    """Files that were somebody's own, and what is put back where the run writes a file of that name."""

    @classmethod
    def look(cls, path: Path, made: list[Path], content: list[str]) -> _Before:
        recipe = path / "recipe.json"
        if made or sealed.KEY in (read_object(recipe) or {}):  # a launcher's, or of a run that never began
            return cls([folder.resolve() for folder in made] or [path.resolve()], {})
        own = {name: None for name in content if name != "run.lock"}
        return cls([], own | ({"recipe.json": recipe.read_bytes()} if "recipe.json" in content else {}))


class RunDir:
    """A locked run directory. Use as a context manager; leaving it releases the lock."""

    def __init__(self, path: Path, recipe: Recipe, lock: RunLock, before: _Before | None = None) -> None:
        self.path = path
        self._before = before or _Before([], {})
        self.recipe = recipe
        """Of this process: one that is put in its place is the run's own after `save_recipe`."""
        self._lock = lock

    @classmethod
    def create(cls, recipe: Recipe, path: Path | None = None, root: Path = Path("runs")) -> RunDir:
        """Make and lock the directory of a new run: `path`, or a fresh `root`/<name>-<timestamp>; one that never came
        to its first step is replaced. UserError when it holds anything else, is in use, or cannot be written."""
        path = fresh_path(root, recipe.name) if path is None else path
        made = [folder for folder in (path, *path.parents) if not folder.exists()]
        try:
            path.mkdir(parents=True, exist_ok=True)
            content = sorted(item.name for item in path.iterdir())
        except OSError as error:
            raise UserError(
                f"run directory {path}: cannot be made ({error.strerror}); choose another --run-dir"
            ) from None
        require_writable(path)
        strange = [name for name in content if name not in LEFT_BY_LAUNCHER]
        if strange and "run.lock" not in content:
            raise UserError(f"run directory {path}: is not empty (it holds {strange[0]}); choose another --run-dir")
        require_own(path)
        lock = RunLock(path)
        try:
            if os.path.lexists(path / "metrics.jsonl"):
                raise UserError(
                    f"run directory {path}: already contains a run; continue it with "
                    f"`{shell('penstock', 'resume', path)}`, or choose another --run-dir"
                )
            before = _Before.look(path, made, content)
            spans = [spans_name(rank) for rank in range(MOST_GPUS)]
            for name in (*spans, "log.jsonl", "status.json", "control.json"):  # of the run that is replaced
                remove_own(path / name)
            atomic_write(path / "recipe.json", to_run_json(recipe))
        except BaseException as error:
            lock.release()
            if isinstance(error, OSError):
                raise disk_error(error, path, "replacing a run that never began") from None
            raise
        return cls(path.resolve(), recipe, lock, before)

    @property
    def has_begun(self) -> bool:
        """Whether the run has ended a step."""
        return os.path.lexists(self.path / "metrics.jsonl")

    def discard(self) -> None:
        """Remove all that can be of a new run that no process works on, on its drives too, and release its lock; a
        folder that was there before stays."""
        from penstock.storage.generations.tidy import remove_store  # loads torch

        with contextlib.suppress(UserError):
            folders = [folder for folder in drive_folders(self.path, self.recipe.storage) if folder.exists()]
            remove_store(state_folder(self.path), folders)
        for name in OWN_FOLDERS:
            shutil.rmtree(self.path / name, ignore_errors=True)
        with contextlib.suppress(OSError):
            for name in OWN_FILES:
                if name not in self._before.files:
                    (self.path / name).unlink(missing_ok=True)
                elif (content := self._before.files[name]) is not None:
                    atomic_write(self.path / name, content)
            for folder in self._before.made:
                folder.rmdir()
        self._lock.release()

    @classmethod
    def open(cls, path: Path, *, read_only: bool = False) -> RunDir:
        """Lock an existing run, or raise UserError. `read_only`: nothing is written to it, which may be on a read-only
        disk or another user's."""
        recipe = read_recipe(path)
        require_own(path)
        return cls(path.resolve(), recipe, RunLock(path, read_only=read_only))

    def save_recipe(self) -> None:
        """Write recipe.json, atomically, if the recipe has changed or the file has no checksum."""
        if (self.path / "recipe.json").read_bytes() != (text := to_run_json(self.recipe)).encode():
            atomic_write(self.path / "recipe.json", text)

    def write_plan(self, plan: dict[str, Any], predicted: list[Span]) -> None:
        """Write plan.json, calibration.json and predicted.jsonl, each atomically: what the run promises, and why."""
        forecast = {"recipe": self.recipe.name, **plan}
        calibration = forecast.pop("calibration", None)
        atomic_write(self.path / "plan.json", json_text(forecast, indent=1))
        atomic_write(self.path / "predicted.jsonl", spans_text(predicted))
        if calibration is not None:
            atomic_write(self.path / "calibration.json", json_text(calibration, indent=1))

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *exc: object) -> None:
        self._lock.release()


def fresh_path(root: Path, name: str) -> Path:
    """A directory for a new run of a recipe's name, which does not exist yet."""
    stem = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    path, number = root / stem, 2
    while os.path.lexists(path):
        path, number = root / f"{stem}-{number}", number + 1
    return path


def read_recipe(path: Path) -> Recipe:
    """The resolved recipe of a run directory. Raises UserError when there is none."""
    file = path / "recipe.json"
    try:
        text = read_regular(file, most_bytes=_RECIPE_BYTES).decode(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path}: not a run directory, it has no recipe.json; `penstock runs` lists them") from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}); put the run's recipe back") from None
    except ValueError as error:
        raise UserError(f"{file}: {error}; put the run's recipe back") from None
    return from_run_json(text, str(file))


def find_run(run: str, root: Path = Path("runs")) -> Path:
    """The directory of a run given by path or name below `root`. UserError with the nearest name when there is none."""
    for path in (Path(run), root / run):
        try:
            if (path / "recipe.json").is_file():
                return path
        except PermissionError:
            raise UserError(
                f"{path}: you have no permission to read it; run the command as the user who owns the run"
            ) from None
        except (OSError, ValueError):  # no name that a file can have
            continue
    names = [info.name for info in list_runs(root)]
    close = difflib.get_close_matches(run, names, n=1, cutoff=0.3)
    hint = f"did you mean '{close[0]}'?" if close else "`penstock runs` lists them"
    raise UserError(f"{run}: no such run; {hint}")


class RunInfo(NamedTuple):
    """What a list of runs says of one."""

    name: str
    """The directory's, fit for a terminal."""
    path: Path
    state: str
    """Of status.json; `crashed` if its process died without a word, `stale` if it is silent, or `unknown`."""
    step: int
    total_steps: int
    loss: float | None
    """Of the last step; none before the first."""
    error: str | None
    """Why it failed, or of a crashed one what is known of its end, or why its status cannot be read."""
    heartbeat: float | None = None
    """Unix seconds of the last word of its process."""
    mean_tokens_per_s: float | None = None
    """Of the run, without warm-up steps and pauses, as its last step recorded it."""
    metrics: dict[str, Any] | None = None


def read_info(path: Path) -> RunInfo:
    """What a run directory says about its run, never waiting and never failing on damaged files."""
    result, wrong = examine_object(path / "status.json")
    status = result or {}
    metrics = read_last(path / "metrics.jsonl")
    state = state_of(path, status, time.time())
    error = status.get("error")
    if not isinstance(error, str):
        error = why_gone(path, status) if state == "crashed" else wrong
    return RunInfo(
        name=printable(path.name),
        path=path,
        state=state,
        step=whole(status.get("step")) or 0,
        total_steps=whole(status.get("total_steps")) or 0,
        loss=number((metrics or {}).get("loss")),
        error=error,
        heartbeat=number(status.get("heartbeat")),
        mean_tokens_per_s=number((metrics or {}).get("mean_tokens_per_s")),
        metrics=metrics,
    )


def read_status(path: Path) -> dict[str, Any]:
    """The content of status.json; {} where it is missing or damaged."""
    return read_object(path / "status.json") or {}


def state_of(path: Path, status: dict[str, Any], now: float) -> str:
    """The state (see `RunInfo.state`) of a run whose status.json says `status`, at Unix time `now`. Its lock says
    whether the process lives, or its heartbeat where that of another host or user cannot be seen."""
    state = status.get("state")
    if state not in LIVE_STATES:
        return state if state in ENDED_STATES else "unknown"
    # A heartbeat of the future is of before the clock was set back, and nobody has written one since.
    silent = abs(now - (number(status.get("heartbeat")) or 0.0)) > STALE_S
    here = status.get("host", socket.gethostname()) == socket.gethostname()
    if here and is_live(path) is False:
        return "crashed"
    return "stale" if silent else str(state)


def why_gone(path: Path, status: dict[str, Any]) -> str:
    """What is known of the end of a process that left a live state: its last error, a full disk, a restart."""
    started = number(status.get("started")) or 0.0
    for line in reversed(read_tail(path / "log.jsonl")):
        if line.get("level") == "error" and (number(line.get("time")) or 0.0) >= started:
            return f"its last message was: {str(line.get('text')).strip()}"
    go_on = f"continue with: {shell('penstock', 'resume', path)}"
    try:
        space = os.statvfs(path)
    except OSError as error:
        return f"its process is gone, and its folder cannot be read: {error.strerror}"
    if space.f_bavail * space.f_frsize < _FULL_BYTES:
        return (
            f"its process is gone, and the disk is full, so the reason could not be recorded. Free space, then {go_on}"
        )
    heartbeat, booted = number(status.get("heartbeat")), time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    if heartbeat is not None and heartbeat < booted - _BOOT_SLACK_S:
        return f"its process is gone since the machine was restarted; {go_on}"
    return f"its process is gone without a message: killed, or out of memory (see the kernel's log); {go_on}"


def list_runs(root: Path = Path("runs")) -> list[RunInfo]:
    """The runs below `root`, oldest first; [] when there is no such folder."""
    try:
        recipes = [path / "recipe.json" for path in root.iterdir()]
    except OSError:
        return []
    ages = {}
    for file in recipes:
        with contextlib.suppress(OSError):  # it is missing, or goes missing
            status = file.stat()
            if stat.S_ISREG(status.st_mode):
                ages[file] = status.st_mtime_ns
    return [read_info(file.parent) for file in sorted(ages, key=ages.__getitem__)]
