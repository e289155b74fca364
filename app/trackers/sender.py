"""Sends one run to one tracker: the process that `attach` and `track` start.

    python -m penstock.app.trackers NAME RUN [--once]

It follows the run's files until a line on standard input says how the run has ended, or standard input ends without
one: the run's process is gone. With --once it sends what is there. What it says is one JSON object a line on standard
output: `at` (where the tracker's run is to be seen), `remark` and `error` (text, the last word before it fails),
`done`. What the tracker's package prints goes to RUN/trackers/NAME.log.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, cast, get_args

from penstock.app.runs.directory import read_recipe, read_status, state_of
from penstock.app.runs.files import MOST_SECONDS, read_object
from penstock.app.trackers.base import STREAMS, About, End, Line, Stream, Tracker, TrackerError
from penstock.app.trackers.feed import Feed, Mark
from penstock.app.trackers.on_mlflow import MLflow
from penstock.app.trackers.on_tensorboard import TensorBoard
from penstock.app.trackers.on_trackio import Trackio
from penstock.app.trackers.on_wandb import Wandb
from penstock.app.trackers.record import FOLDER, Record, SenderLock
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import one_line, open_regular, printable

POLL_S = 1.0
"""Between two looks at the run's files."""
ANSWER_S = 120.0
"""A tracker that has not come back for so long does not answer."""
CLOSING_S = 900.0
"""The same where nobody waits for it but the user, who has Ctrl-C: all of a run may be under way."""
LAST_S = 10.0
"""What a sender takes at most once the run's process is gone."""
LOCK_S = 15.0
"""Until the sender of a killed process has ended."""
_NICE = 10
_VERSIONS = ("penstock", "torch", "transformers", "peft")
_GIT_S = 5.0
_ERROR_CHARS = 200

Say = Callable[[dict[str, Any]], None]

_KINDS: dict[str, type[Tracker]] = {kind.name: kind for kind in (TensorBoard, Trackio, Wandb, MLflow)}


class Ending:
    """How the run has ended, as soon as that is known."""

    def __init__(self) -> None:
        self.end: End | None = None
        self.known = threading.Event()

    def set(self, end: End) -> None:
        self.end = end
        self.known.set()

    def read(self, stdin: int) -> None:
        """Wait for the word on standard input, or its end."""
        word = b""
        while not word.endswith(b"\n") and (data := os.read(stdin, 64)):
            word += data
        said = word.decode(errors="replace").strip()
        self.set(cast(End, said) if said in get_args(End) else "crashed")


class Sender:
    """Hands what is new to the tracker and keeps what was sent. Any failure is raised: the next process begins where
    the record says."""

    def __init__(self, run: Path, name: str, say: Say, made_with: dict[str, str]) -> None:
        recipe = read_recipe(run)
        config = read_object(run / "recipe.json", 1 << 24) or {"name": recipe.name}
        config.pop("crc32c", None)
        self._about = About(run, printable(run.name), config, made_with)
        self._tracker = _KINDS[name](self._about, {})
        self._record = Record(run, name, self._tracker.place(), local=self._tracker.local)
        self._tracker.known = dict(self._record.known)
        self._feed = Feed(run, self._record.marks)
        self._say = say
        self._open = False
        self._told: set[str] = set()

    def send(self) -> bool:
        """Send what has come; whether there may be more at once."""
        lines = self._feed.read()
        again = self._feed.redone
        if again is not None and self._tracker.rewinds:
            lines = [line for line in lines if line.step < again]
        elif again is not None:
            self._feed.redone, again = None, None
            self._remark("some steps were repeated; it keeps what it was sent first")
        if lines and not self._open:
            self._begin(lines[0].step)
            return True
        if again is not None:
            self._feed.rewind(again)
            if self._open:
                self._tracker.rewind(again)
        if lines:
            self._hand_over(lines)
        return again is not None or self._feed.behind

    def end(self, end: End, summary: dict[str, Any] | None) -> None:
        """Close the tracker's run, unless it has none or is closed already."""
        if not self._open and (not self._record.known or self._record.ended == end):
            return
        if not self._open:
            self._begin(max((mark.step for mark in self._record.marks.values()), default=-1) + 1)
            while self.send():
                pass
        self._tracker.about = self._about._replace(summary=summary)
        self._tracker.close(end)
        self._remarks()
        self._record.save(known=self._tracker.known, marks=self._feed.marks, ended=end)

    def _begin(self, first_step: int) -> None:
        """Open the tracker's run; what was read before is read again, from where the tracker is."""
        kept = dict(self._record.marks)
        self._tracker.open(first_step)
        self._open = True
        if self._tracker.rewinds and kept:
            kept = {stream: _before(mark, first_step) for stream, mark in kept.items()}
        if received := self._tracker.received():
            kept = _reconciled(kept, received)
        self._feed = Feed(self._about.path, kept)
        self._record.save(known=self._tracker.known, marks=kept)
        self._say({"at": self._tracker.known["at"]})
        self._remarks()

    def _hand_over(self, lines: list[Line]) -> None:
        self._tracker.send(lines)
        self._tracker.flush()
        self._remarks()
        self._record.save(known=self._tracker.known, marks=self._feed.marks)

    def _remarks(self) -> None:
        for remark in self._tracker.remarks:
            self._remark(remark)
        self._tracker.remarks.clear()

    def _remark(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._say({"remark": text})


def _before(mark: Mark, step: int) -> Mark:
    return mark if mark.step < step else Mark(step - 1, mark.time)


def _reconciled(kept: dict[Stream, Mark], received: dict[Stream, int]) -> dict[Stream, Mark]:
    """Marks of what a tracker has, by its own word where it has one."""
    found = {}
    most = received.get("metrics")
    for stream in STREAMS:
        mark = kept.get(stream, Mark())
        step = received.get(stream, mark.step if most is None else min(mark.step, most))
        found[stream] = mark if step == mark.step else Mark(step, MOST_SECONDS)
    return found


def follow(sender: Sender, run: Path, ending: Ending, alive: Callable[[], None]) -> None:
    """Send until the run has ended and all of it is sent; `alive` is called between two steps of that."""
    while True:
        ended = ending.end  # before the files are read: what came until then is in them
        while sender.send():
            alive()
        alive()
        if ended is not None:
            sender.end(ended, read_object(run / "summary.json") if ended in ("finished", "stopped") else None)
            return
        ending.known.wait(POLL_S)


class Watchdog:
    """Ends the process where the tracker does not come back, or where the run's process has gone and time is up."""

    def __init__(self, say: Say, ending: Ending, *, answer_s: float, last_s: float) -> None:
        self._say, self._ending = say, ending
        self._answer_s, self._last_s = answer_s, last_s
        self._alive_at = time.monotonic()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def alive(self) -> None:
        self._alive_at = time.monotonic()

    def _watch(self) -> None:
        gone_at: float | None = None
        while True:
            now = time.monotonic()
            if self._ending.end == "crashed":
                gone_at = gone_at or now
            if now - self._alive_at > self._answer_s:
                self._say({"error": f"it has not answered for {self._answer_s:.0f} s"})
                os._exit(1)
            if gone_at is not None and now - gone_at > self._last_s:
                os._exit(1)
            time.sleep(0.2)


def ended_as(run: Path) -> End:
    """How a run that nobody follows has ended; one that is running counts as stopped."""
    state = state_of(run, read_status(run), time.time())
    return cast(End, state) if state in get_args(End) else "stopped"


def made_with(folder: Path) -> dict[str, str]:
    """Versions, and the commit of the git repository that `folder` is in."""
    found = {"python": platform.python_version()}
    for name in _VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    commit = _git(folder, "rev-parse", "HEAD")
    if commit:
        found["git_commit"] = commit
        found["git_changed"] = "yes" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "no"
    return found


def _git(folder: Path, *words: str) -> str:
    """What git says; "" where it says nothing, or is not there."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_S,
            env=os.environ | {"GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return one_line(done.stdout.decode(errors="replace")) if done.returncode == 0 else ""


def describe(error: BaseException) -> str:
    """An error of a tracker in a line; a long one by what has caused it."""
    if isinstance(error, TrackerError | UserError):
        return one_line(error)
    while len(str(error)) > _ERROR_CHARS and (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return f"{type(error).__name__}: {one_line(error, _ERROR_CHARS)}".removesuffix(": ")


def work(run: Path, name: str, *, once: bool, say: Say) -> int:
    """Send until all is sent; exit code."""
    ending = Ending()
    if once:
        ending.set(ended_as(run))
    else:
        threading.Thread(target=ending.read, args=(0,), name="ending", daemon=True).start()
    try:
        with SenderLock(run, name) as lock:
            if not _taken(lock, 0 if once else LOCK_S):
                raise TrackerError("another process is sending this run to it")
            answer_s, last_s = (CLOSING_S, float("inf")) if once else (ANSWER_S, LAST_S)
            watchdog = Watchdog(say, ending, answer_s=answer_s, last_s=last_s)
            sender = Sender(run, name, say, {} if once else made_with(Path.cwd()))
            follow(sender, run, ending, watchdog.alive)
    except Exception as error:
        say({"error": describe(error)})
        return 1
    say({"done": True})
    return 0


def _taken(lock: SenderLock, wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    while not lock.take():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def main() -> NoReturn:
    """The process: standard output is for what it says, everything else goes to the tracker's log."""
    name, folder, *options = sys.argv[1:]
    run = Path(folder)
    out = os.dup(1)
    (run / FOLDER).mkdir(exist_ok=True)
    log = open_regular(run / FOLDER / f"{name}.log", flags=os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.nice(_NICE)

    def say(word: dict[str, Any]) -> None:
        try:
            os.write(out, json.dumps(word).encode() + b"\n")
        except BrokenPipeError:  # nobody listens any more; what is left is sent all the same
            return

    code = work(run, name, once="--once" in options, say=say)
    sys.stdout.flush()
    os._exit(code)  # a package's threads keep nobody
