"""The trackers of a run, from the run's side: a process for each, a thread that starts it and hears what it says."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from penstock.app.hub.names import offline_wanted
from penstock.app.runs.files import read_last, read_object, whole
from penstock.app.runs.log import Level
from penstock.app.trackers.base import End
from penstock.app.trackers.record import FOLDER
from penstock.storage.files import child
from penstock.storage.files.untrusted import one_line, shell

FINISH_S = 10.0
"""What a run waits for its trackers at its end, for all of them together."""
_PAUSE_S, _MOST_PAUSE_S = 5.0, 300.0
"""Before a tracker that failed is tried again, the first time and at most; each pause is twice the one before."""

Tell = Callable[[str, Level], None]


def start_sender(run: Path, name: str, *, once: bool = False) -> subprocess.Popen[bytes]:
    """A process that sends a run to a tracker (see `sender`), out of the reach of this terminal's Ctrl-C. OSError."""
    environment = child.environment(OMP_NUM_THREADS="1")
    if not offline_wanted():  # what keeps our own libraries from the hub is not meant for trackers
        environment.pop("HF_HUB_OFFLINE", None)
    return subprocess.Popen(
        child.command("app.trackers", name, str(run), *(["--once"] if once else [])),
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def words(process: subprocess.Popen[bytes]) -> Iterable[dict[str, Any]]:
    """What a sender says, until it has ended."""
    assert process.stdout is not None
    for line in process.stdout:
        with contextlib.suppress(ValueError):
            word = json.loads(line)
            if isinstance(word, dict):
                yield word


def end_sender(process: subprocess.Popen[bytes]) -> None:
    """Kill a sender, and the processes that its tracker has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


class _Attached:
    """One tracker of a running run."""

    def __init__(self, run: Path, name: str, tell: Tell) -> None:
        self.name = name
        self.done = False
        """Whether all was sent and the tracker's run is closed."""
        self.problem = ""
        """Why it failed at last."""
        self._run, self._tell = run, tell
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._begun = threading.Event()
        self._ended = threading.Event()
        self._end: End | None = None
        self._killed = False
        self._warned = False
        self._told: set[str] = set()
        self.thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self.thread.start()

    def begin(self) -> None:
        self._begun.set()

    def end(self, end: End) -> None:
        """Tell the process how the run has ended; without one that has begun there is nothing to send."""
        with self._lock:
            self._end = end
            self._ended.set()
            self._say_end()
        self._begun.set()

    def kill(self) -> None:
        with self._lock:
            self._killed = True
            if self._process is not None:
                end_sender(self._process)

    def _work(self) -> None:
        self._begun.wait()
        if self._ended.is_set():
            self.done = True
            return
        pause_s = _PAUSE_S
        while True:
            last = self._ended.is_set()
            try:
                self._follow()
            except OSError as error:
                self.problem = f"its process cannot be started: {error.strerror}"
            if self.done or last or self._killed:
                return
            if not self._ended.is_set():
                self._warn()
            self._ended.wait(pause_s)
            pause_s = min(2 * pause_s, _MOST_PAUSE_S)

    def _follow(self) -> None:
        """One process, from its start to its end."""
        self.problem = ""
        with self._lock:
            if self._killed:
                return
            self._process = process = start_sender(self._run, self.name)
            self._say_end()
        for word in words(process):
            self._hear(word)
        code = process.wait()
        if not self.done and not self.problem:
            self.problem = f"its process was ended by signal {-code}" if code < 0 else f"its process ended with {code}"

    def _say_end(self) -> None:
        if self._process is None or self._process.stdin is None or self._end is None:
            return
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(f"{self._end}\n".encode())
            self._process.stdin.close()

    def _hear(self, word: dict[str, Any]) -> None:
        if "at" in word:
            self._once(f"tracker {self.name}: {one_line(word['at'])}", "info")
        elif "remark" in word:
            self._once(f"tracker {self.name}: {one_line(word['remark'])}", "warning")
        elif "error" in word:
            self.problem = one_line(word["error"])
        elif "done" in word:
            self.done = True

    def _once(self, text: str, level: Level) -> None:
        if text not in self._told:
            self._told.add(text)
            self._tell(text, level)

    def _warn(self) -> None:
        """The first failure alone is told: it is tried again as long as the run runs."""
        if self._warned:
            return
        self._warned = True
        self._tell(
            f"tracker {self.name}: {self.problem}; it will be tried again, and the run continues without it "
            f"({self._run.name}/{FOLDER}/{self.name}.log has its own messages)",
            "warning",
        )


class Trackers:
    """Sends a run to its trackers while it runs. Nothing that a tracker does reaches the run's own threads."""

    def __init__(self, run: Path, names: Iterable[str], tell: Tell) -> None:
        """`tell`: from threads of these trackers, each message once."""
        self._run, self._tell = run, tell
        self._all = [_Attached(run, name, tell) for name in names]
        self._begun = False

    def begin(self) -> None:
        """Start their processes; returns at once."""
        self._begun = True
        for tracker in self._all:
            tracker.begin()

    def finish(self, end: End) -> None:
        """Let them send what is left, for FINISH_S at most, and tell what was not sent."""
        for tracker in self._all:
            tracker.end(end)
        deadline = time.monotonic() + FINISH_S
        for tracker in self._all:
            tracker.thread.join(max(0.0, deadline - time.monotonic()))
            if tracker.thread.is_alive():
                tracker.problem = tracker.problem or f"it did not accept everything within {FINISH_S:.0f} s"
                tracker.kill()
            if self._begun and not tracker.done:
                self._tell_unsent(tracker)
        self._all = []

    def _tell_unsent(self, tracker: _Attached) -> None:
        again = shell("penstock", "track", self._run)
        what = unsent(self._run, tracker.name) or "the last data may not have arrived"
        self._tell(
            f"tracker {tracker.name}: {what} ({tracker.problem}); nothing is lost, send it with: {again}", "warning"
        )


def unsent(run: Path, name: str) -> str | None:
    """Which steps of a run a tracker has not got yet; None where it has got them all."""
    last = whole((read_last(run / "metrics.jsonl") or {}).get("step"))
    if last is None:
        return None
    sent = -1
    content = read_object(run / FOLDER / f"{name}.json") or {}
    places = content.get("places")
    for entry in places.values() if isinstance(places, dict) else ():
        marks = entry.get("sent") if isinstance(entry, dict) else None
        mark = marks.get("metrics") if isinstance(marks, dict) else None
        if isinstance(mark, list) and mark:
            sent = max(sent, whole(mark[0]) or -1)
    if sent >= last:
        return None
    first = max(sent + 1, 1)
    return f"step {last:,} was not sent" if first == last else f"steps {first:,} to {last:,} were not sent"
