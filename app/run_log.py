"""The writing side of a run directory: metrics, spans, messages and status, by a thread of its own.

Training costs it a queue insertion; it never waits for the disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import queue
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO

from app.rundir import State, read_jsonl, read_tail, spans_text
from engine.events import Preparing, Progress, Span, StepMetrics, ValidationMetrics
from storage.disk import atomic_write
from storage.errors import UserError
from storage.temperature import disk_temperature

HEARTBEAT_S = 0.5
"""Between two writes of status.json."""

TEMPERATURE_S = 5.0
"""Between two looks at the drives' temperatures."""

MAX_PENDING_SPANS = 500_000
"""Spans waiting for a stalled disk before further ones are dropped (and counted): about 200 MB."""

_ID_TAIL_BYTES = 4 << 20
"""Where the largest id of earlier spans is looked for: ops end at most some thousands of lines out of order."""

_TORN_BYTES = 1 << 16

Level = Literal["info", "warning", "error"]


class _Message(NamedTuple):
    time: float
    level: Level
    text: str
    step: int


_Item = StepMetrics | ValidationMetrics | list[Span] | _Message


class RunLog:
    """Writes what a run tells. Everything is on disk when `drain` or `close` returns.

    Spans may come from another thread than the rest, but from one at a time.
    """

    def __init__(self, path: Path, total_steps: int, step: int = 0) -> None:
        self._path = path
        self._status: dict[str, Any] = {"state": "preparing", "pid": os.getpid(), "host": socket.gethostname()}
        self._status |= {"started": time.time(), "step": step, "total_steps": total_steps}
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._status_lock = threading.Lock()
        self._disks: dict[str, Sequence[str]] = {}
        self._queued_spans = 0
        """Written by whoever hands spans over."""
        self._written_spans = 0
        """Written by the log's thread only."""
        self._failure: Exception | None = None
        self._closed = False
        self.dropped_spans = 0
        self._files: dict[str, TextIO] = {}
        self._preparing: tuple[tuple[Preparing, float], ...] = ()
        """The last word on each item of the checklist, and when it came by perf_counter; replaced, never changed."""
        self._dropped = False
        """Whether the lines of steps that are done again have gone."""
        self._offset_s, self._offset_id = continue_spans(path)
        self._write_status()
        self._thread = threading.Thread(target=self._work, name="run-log", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ what the run tells

    def set_state(self, state: State, error: str | None = None) -> None:
        """Publish a new state at once."""
        with self._status_lock:
            self._status["state"] = state
            if error is not None:
                self._status["error"] = error
        self._write_status()

    def prepare(self, item: Preparing) -> None:
        """Keep the last word on an item of the checklist; its beginning and its end are published at once."""
        now = time.perf_counter()
        if item.state == "begun":
            self._preparing = (*self._preparing, (item, now))
        else:
            self._preparing = (*self._preparing[:-1], (item, now))
        if item.state != "progress":
            self._write_status()

    def watch_drives(self, folders: Iterable[Path]) -> None:
        """Tell the temperature of the drives under these folders from now on."""
        from storage.filesystem import device_of  # loads tensorstore

        for folder in folders:
            with contextlib.suppress(OSError):
                self._disks[str(folder)] = device_of(folder).disks

    def step(self, metrics: StepMetrics) -> None:
        """Hand over one step. Raises UserError when an earlier line could not be written."""
        if self._failure is not None:
            raise UserError(f"{self._path}: the run's log cannot be written ({self._failure}); free space and resume")
        self._status["step"] = metrics.step
        self._queue.put(metrics)

    def validation(self, metrics: ValidationMetrics) -> None:
        """Hand over a validation's loss."""
        self._queue.put(metrics)

    def progress(self, progress: Progress) -> None:
        """Hand over the spans that ended, and what is under way."""
        spans = progress.spans
        if self._queued_spans - self._written_spans + len(spans) > MAX_PENDING_SPANS:
            self.dropped_spans += len(spans)
            spans = []
        self._queued_spans += len(spans)
        if spans:
            self._queue.put(spans)
        now: dict[str, list[dict[str, Any]]] = {}
        for op in progress.under_way:
            start_s = None if op.start_s is None else round(op.start_s + self._offset_s, 7)
            now.setdefault(op.lane, []).append(op._asdict() | {"start_s": start_s})
        for ops in now.values():
            for op_now in ops:
                del op_now["lane"]
        self._status |= {"clock_s": round(progress.clock_s + self._offset_s, 7), "now": now}

    def message(self, text: str, level: Level = "info") -> None:
        """Hand over a message of log.jsonl."""
        self._queue.put(_Message(time.time(), level, text, self._status["step"]))

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
            for name in ("now", "drives"):
                self._status.pop(name, None)
            self.set_state(state, error)

    # ------------------------------------------------------------------ its thread

    def _work(self) -> None:
        """Lines as they come, and the status every HEARTBEAT_S."""
        beat_at, look_at = time.monotonic() + HEARTBEAT_S, 0.0
        while True:
            now = time.monotonic()
            if now >= beat_at:
                if now >= look_at and self._disks:
                    self._look_at_drives()
                    look_at = now + TEMPERATURE_S
                self._write_status()
                beat_at = time.monotonic() + HEARTBEAT_S
            try:
                item = self._queue.get(timeout=max(0.0, beat_at - time.monotonic()))
            except queue.Empty:
                continue
            if item is None:
                break
            try:
                self._write(item)
            except (OSError, UserError) as error:
                self._failure = error  # the next `step` tells it
            if isinstance(item, list):
                self._written_spans += len(item)
        for file in self._files.values():
            file.close()

    def _write(self, item: _Item) -> None:
        file: TextIO | None
        if isinstance(item, StepMetrics | ValidationMetrics):
            name = "metrics.jsonl" if isinstance(item, StepMetrics) else "validation.jsonl"
            if not self._dropped:
                # A validation is of the step before the one that this process begins with.
                drop_steps(self._path / "metrics.jsonl", item.step + (name == "validation.jsonl"))
                drop_steps(self._path / "validation.jsonl", item.step)
                self._dropped = True
            file = self._files.get(name) or self._open(name)
            file.write(json.dumps(_finite(dataclasses.asdict(item))) + "\n")
        elif isinstance(item, _Message):
            file = self._files.get("log.jsonl")
            if file is None:
                cut_torn_line(self._path / "log.jsonl")
                file = self._open("log.jsonl")
            file.write(json.dumps(item._asdict()) + "\n")
        else:
            file = self._files.get("spans.jsonl") or self._open("spans.jsonl")
            file.write(spans_text(item, self._offset_s, self._offset_id))
        file.flush()

    def _open(self, name: str) -> TextIO:
        file = self._files[name] = (self._path / name).open("a")
        return file

    def _look_at_drives(self) -> None:
        found = {folder: {"temperature_c": disk_temperature(disks)} for folder, disks in self._disks.items()}
        self._status["drives"] = found

    def _write_status(self) -> None:
        """Replace status.json. Not synced: after a power cut nobody needs the heartbeat of before."""
        if not self._status_lock.acquire(timeout=1.0):  # an abort must not wait for a stalled disk
            return
        try:
            temporary = self._path / "status.json.tmp"
            status = self._status | {"heartbeat": time.time()}
            if preparing := self._preparing:
                status["preparing"] = [self._item(*word) for word in preparing]
            temporary.write_text(json.dumps(status) + "\n")
            os.replace(temporary, self._path / "status.json")
        except OSError as error:
            self._failure = error
        finally:
            self._status_lock.release()

    @staticmethod
    def _item(item: Preparing, told_at: float) -> dict[str, Any]:
        """An item as status.json has it; one that is not done has gone on since it was told."""
        done = item.state == "done"
        seconds = item.seconds if done else item.seconds + time.perf_counter() - told_at
        line: dict[str, Any] = {"name": item.name, "state": "done" if done else "running", "seconds": round(seconds, 3)}
        if not done:
            line |= {"detail": item.detail, "fraction": item.fraction}
        return line


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN or infinity: they become null."""
    return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in values.items()}


def drop_steps(file: Path, first_step: int) -> None:
    """Drop the lines of a resumed run's steps that are done again, from `first_step` on, and a torn last line."""
    if file.exists():
        kept = [line for line in read_jsonl(file) if line["step"] < first_step]
        atomic_write(file, "".join(json.dumps(line) + "\n" for line in kept))


def continue_spans(path: Path) -> tuple[float, int]:
    """What to add to the times and ids of a resumed run's spans, which start at zero, so that they follow the old ones.

    The old ones stay, since their time was spent; a torn last line goes.
    """
    spans_path = path / "spans.jsonl"
    if not spans_path.exists():
        return 0.0, 0
    cut_torn_line(spans_path)
    last = read_tail(spans_path, _ID_TAIL_BYTES)
    return max((float(s["end_s"]) for s in last), default=0.0), max((s.get("id", -1) for s in last), default=-1) + 1


def cut_torn_line(path: Path) -> None:
    """Cut off what follows the last newline of a file of lines, if there is one and it is torn."""
    with contextlib.suppress(FileNotFoundError), path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:  # back to the last newline
            start = max(0, end - _TORN_BYTES)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            end = start + newline + 1 if newline >= 0 else start
            if newline >= 0:
                break
        file.truncate(end)
