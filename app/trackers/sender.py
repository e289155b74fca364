"""Sends one run to one tracker: `python -m penstock.app.trackers.sender NAME RUN [--once]`.

It follows the run's files until a line on standard input says how the run has ended, or that ends without one: the
run's process is gone. With --once it sends what is there. It says JSON objects, one a line: `at` (where the tracker's
run is to be seen), `remark`, `error` (before it fails), `done`. What the tracker's package prints goes to
RUN/trackers/NAME.log. SIGALRM ends it where the tracker does not come back.
"""

from __future__ import annotations

import json
import os
import platform
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, cast, get_args

from penstock.app.console.loading import versions
from penstock.app.runs.directory import read_recipe, read_status, state_of
from penstock.app.runs.files import MOST_SECONDS, read_object
from penstock.app.trackers.base import ANSWER_S, CLOSING_S, STREAMS, End, Stream, TrackerError, tracker
from penstock.app.trackers.record import (
    FOLDER,
    Entry,
    Feed,
    Mark,
    directory_id,
    lock_sender,
    read_entries,
    write_entries,
)
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import one_line, open_regular, printable

POLL_S = 1.0
"""Between two looks at the run's files."""
LAST_S = 10
"""What a sender takes at most once the run's process is gone."""
LOCK_S = 15.0
"""Until the sender of a killed process has ended."""
_NICE = 10
_GIT_S = 5.0
_ERROR_CHARS = 200

Say = Callable[[dict[str, Any]], None]


class Sender:
    """Hands what is new to the tracker and keeps what was sent. After a failure the next process begins there."""

    def __init__(self, run: Path, name: str, say: Say, made_with: dict[str, str]) -> None:
        config = read_object(run / "recipe.json", 1 << 24) or {"name": read_recipe(run).name}
        config.pop("crc32c", None)
        self._run, self._say = run, say
        self._tracker = tracker(name)(run, printable(run.name), config | {"made_with": made_with})
        self._location = self._tracker.location()
        self._entry = read_entries(run, name).get(self._location)
        if self._entry is not None and not self._tracker.local and self._entry.run != directory_id(run):
            self._entry = None
        if self._entry is not None:
            self._tracker.known = {**self._entry.known, "id": self._entry.id}
        self._feed = Feed(run, self._sent, again=self._tracker.rewinds)
        self._open = False
        self._reported: set[str] = set()

    @property
    def _sent(self) -> dict[Stream, Mark]:
        return {} if self._entry is None else self._entry.sent

    def send(self) -> bool:
        """Send what has come; whether there may be more at once."""
        lines = self._feed.read()
        if lines and not self._open:
            self._begin(lines[0].step)
            return True
        if self._feed.repeated:
            self._tracker.remarks.append("some steps were repeated; it keeps what it was sent first")
        if lines:
            self._tracker.send(lines)
            self._keep(self._feed.marks)
        return self._feed.behind

    def end(self, end: End, summary: dict[str, Any] | None) -> None:
        """Close the tracker's run, unless it has none or is closed already."""
        if not self._open and (self._entry is None or self._entry.ended == end):
            return
        if not self._open:
            self._begin(max((mark.step for mark in self._sent.values()), default=-1) + 1)
            while self.send():
                pass
        self._tracker.close(end, summary)
        self._keep(self._feed.marks, end)

    def _begin(self, first_step: int) -> None:
        """Open the tracker's run; what was read before is read again, from where the tracker is."""
        marks = dict(self._sent)
        self._tracker.open(first_step)
        self._open = True
        if self._tracker.rewinds:
            marks = {stream: Mark(min(step, first_step - 1), time) for stream, (step, time) in marks.items()}
        if received := self._tracker.received():
            most = received.get("metrics")
            for stream in STREAMS:
                mark = marks.get(stream, Mark())
                step = received.get(stream, mark.step if most is None else min(mark.step, most))
                marks[stream] = mark if step == mark.step else Mark(step, MOST_SECONDS)
        self._feed = Feed(self._run, marks, again=self._tracker.rewinds)
        self._keep(marks)
        self._say({"at": self._tracker.known["at"]})

    def _keep(self, marks: dict[Stream, Mark], ended: End | None = None) -> None:
        """Write what the tracker has got, and say what it remarks."""
        known, name = self._tracker.known, self._tracker.name
        sent = {stream: mark for stream, mark in marks.items() if mark.step >= 0}
        self._entry = Entry(run=directory_id(self._run), id=known["id"], known=known, sent=sent, ended=ended)
        write_entries(self._run, name, read_entries(self._run, name) | {self._location: self._entry})
        for remark in self._tracker.remarks:
            if remark not in self._reported:
                self._reported.add(remark)
                self._say({"remark": remark})
        self._tracker.remarks.clear()


def heard(wait_s: float) -> End | None:
    """How the run has ended, by the word on standard input; its end without one is a crash. None: it runs."""
    if not select.select([0], [], [], wait_s)[0]:
        return None
    word = os.read(0, 64).decode(errors="replace").strip()
    return cast(End, word) if word in get_args(End) else "crashed"


def follow(sender: Sender, run: Path, end: End | None, answer_s: int) -> None:
    """Send until the run has ended and all of it is sent; a tracker that does not come back ends the process."""
    while True:
        end = end or heard(0)  # before the files are read: what came until then is in them
        gone = end == "crashed" and answer_s == ANSWER_S
        signal.alarm(LAST_S if gone else answer_s)
        while sender.send():
            if not gone:
                signal.alarm(answer_s)
        if end is not None:
            sender.end(end, read_object(run / "summary.json") if end in ("finished", "stopped") else None)
            return
        signal.alarm(0)
        end = heard(POLL_S)


def made_with(folder: Path) -> dict[str, str]:
    """Versions, and the commit of the git repository that `folder` is in."""
    result = {"python": platform.python_version()} | versions("penstock", "torch", "transformers", "peft")
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_GIT_S, env=environment)
    except (OSError, subprocess.SubprocessError):
        return result
    if done.returncode == 0:
        commit, _, dirty = one_line(done.stdout.decode(errors="replace")).partition("-")
        result |= {"git_commit": commit, "git_changed": "yes" if dirty else "no"}
    return result


def describe(error: BaseException) -> str:
    """An error of a tracker in a line; a long one by what has caused it."""
    if isinstance(error, TrackerError | UserError):
        return one_line(error)
    while len(str(error)) > _ERROR_CHARS and (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return f"{type(error).__name__}: {one_line(error, _ERROR_CHARS)}".removesuffix(": ")


def work(run: Path, name: str, *, once: bool, say: Say) -> int:
    """Send until all is sent; exit code."""
    end: End | None = None
    if once:  # nobody follows it: one that is running counts as stopped
        state = state_of(run, read_status(run), time.time())
        end = cast(End, state) if state in get_args(End) else "stopped"
    try:
        if not lock_sender(run, name, 0 if once else LOCK_S):
            raise TrackerError("another process is sending this run to it")
        sender = Sender(run, name, say, {} if once else made_with(Path.cwd()))
        follow(sender, run, end, CLOSING_S if once else ANSWER_S)
    except Exception as error:
        say({"error": describe(error)})
        return 1
    say({"done": True})
    return 0


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


if __name__ == "__main__":
    main()
