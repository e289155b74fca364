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
from penstock.app.runs.files import read_last, whole
from penstock.app.runs.log import Level
from penstock.app.trackers.base import ANSWER_S, CLOSING_S, End
from penstock.app.trackers.record import FOLDER, Mark, read_entries
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
        child.command("app.trackers.sender", name, str(run), *(["--once"] if once else [])),
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def listen(process: subprocess.Popen[bytes], report: Tell, *, once: bool = False) -> str | None:
    """Tell what a sender says until it has ended; why it failed, None where all was sent."""
    assert process.stdout is not None
    problem = ""
    for line in process.stdout:
        word: dict[str, Any] = json.loads(line)
        if "done" in word:
            return None if process.wait() == 0 else "its process failed at its end"
        if "error" in word:
            problem = one_line(word["error"])
        elif "at" in word:
            report(one_line(word["at"]), "info")
        elif "remark" in word:
            report(one_line(word["remark"]), "warning")
    code = process.wait()
    if code == -signal.SIGALRM:
        return f"it has not answered for {CLOSING_S if once else ANSWER_S} s"
    return problem or (f"its process was ended by signal {-code}" if code < 0 else f"its process ended with {code}")


def end_sender(process: subprocess.Popen[bytes]) -> None:
    """Kill a sender, and the processes that its tracker has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


class _Attached(threading.Thread):
    """One tracker of a running run: sends to it, again and again where that fails, until the run has ended."""

    def __init__(self, run: Path, name: str, report: Tell) -> None:
        super().__init__(name=f"tracker-{name}", daemon=True)
        self.problem: str | None = "its process has not begun"
        """Why it failed at last; None: all was sent and the tracker's run is closed."""
        self._run_path, self._tracker, self._report = run, name, report
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: End | None = None
        self._ended = threading.Event()
        self._killed = False
        self._reported: set[str] = set()

    def end(self, end: End) -> None:
        """Tell the process how the run has ended."""
        with self._lock:
            self._end = end
            self._say_end()
        self._ended.set()

    def kill(self) -> None:
        with self._lock:
            self._killed = True
            if self._process is not None:
                end_sender(self._process)

    def run(self) -> None:
        pause_s = _PAUSE_S
        while True:
            last = self._ended.is_set()
            try:
                with self._lock:
                    if self._killed:
                        return
                    self._process = process = start_sender(self._run_path, self._tracker)
                    self._say_end()
                self.problem = listen(process, self.report)
            except OSError as error:
                self.problem = f"its process cannot be started: {error.strerror}"
            if self.problem is None or last or self._killed:
                return
            if pause_s == _PAUSE_S and not self._ended.is_set():  # reported once: it is tried as long as the run runs
                log = f"{self._run_path.name}/{FOLDER}/{self._tracker}.log"
                more = f"it will be tried again, and the run continues without it ({log} has its own messages)"
                self.report(f"{self.problem}; {more}", "warning")
            self._ended.wait(pause_s)
            pause_s = min(2 * pause_s, _MOST_PAUSE_S)

    def report(self, text: str, level: Level) -> None:
        """Each text once."""
        if text not in self._reported:
            self._reported.add(text)
            self._report(f"tracker {self._tracker}: {text}", level)

    def _say_end(self) -> None:
        if self._process is not None and self._process.stdin is not None and self._end is not None:
            with contextlib.suppress(OSError, ValueError):
                self._process.stdin.write(f"{self._end}\n".encode())
                self._process.stdin.close()


class Trackers:
    """Sends a run to its trackers while it runs. Nothing that a tracker does reaches the run's own threads."""

    def __init__(self, run: Path, names: Iterable[str], report: Tell) -> None:
        """`report`: from threads of these trackers, each message once."""
        self._run, self._names, self._report = run, names, report
        self._all: dict[str, _Attached] = {}

    def begin(self) -> None:
        """Start their processes; returns at once."""
        self._all = {name: _Attached(self._run, name, self._report) for name in self._names}
        for tracker in self._all.values():
            tracker.start()

    def finish(self, end: End) -> None:
        """Let them send what is left, for FINISH_S at most, and tell what was not sent."""
        for tracker in self._all.values():
            tracker.end(end)
        deadline = time.monotonic() + FINISH_S
        for name, tracker in self._all.items():
            tracker.join(max(0.0, deadline - time.monotonic()))
            problem = tracker.problem
            if tracker.is_alive():
                problem = f"it did not accept everything within {FINISH_S:.0f} s"
                tracker.kill()
            if problem is not None:
                what = unsent(self._run, name) or "the last data may not have arrived"
                again = shell("penstock", "track", self._run)
                tracker.report(f"{what} ({problem}); nothing is lost, send it with: {again}", "warning")
        self._all = {}


def unsent(run: Path, name: str) -> str | None:
    """Which steps of a run a tracker has not got yet; None where it has got them all."""
    last = whole((read_last(run / "metrics.jsonl") or {}).get("step"))
    marks = (entry.sent.get("metrics", Mark()) for entry in read_entries(run, name).values())
    first = max((mark.step for mark in marks), default=-1) + 1
    if last is None or first > last:
        return None
    first = max(first, 1)
    return f"step {last:,} was not sent" if first == last else f"steps {first:,} to {last:,} were not sent"
