"""The writing side of a run directory, by a thread: training costs it a queue insertion, and never waits for disk."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import mmap
import os
import queue
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, TextIO

from penstock.app.runs.directory import State, spans_text
from penstock.app.runs.files import (
    JsonLines,
    json_text,
    open_append,
    open_read,
    parse_line,
    read_tail,
    remove_own,
    span_of,
    whole,
    whole_lines,
)
from penstock.app.runs.samples_view import samples_line
from penstock.app.runs.speed import MeanSpeed
from penstock.engine.events import Preparing, Progress, SampleMetrics, Span, Spike, StepMetrics, ValidationMetrics
from penstock.storage.files.disk import disk_error, prepare_file, publish, reporting
from penstock.storage.files.untrusted import open_regular, printable
from penstock.storage.tier.filesystem import device_of, disk_temperature

HEARTBEAT_S = 0.5
"""Between two writes of status.json."""

TEMPERATURE_S = 5.0
"""Between two looks at the drives' temperatures."""

MAX_PENDING_SPANS = 500_000
"""Spans waiting for a stalled disk before further ones are dropped (and counted): about 200 MB."""

_ID_TAIL_BYTES = 4 << 20
"""Where the largest id of earlier spans is looked for: ops end at most some thousands of lines out of order."""

_MOST_ID = 2**52
"""Ids beyond it are nobody's: a run counts from zero."""

Level = Literal["info", "warning", "error"]

_Item = tuple[str, dict[str, Any]] | list[Span]
"""A line and the file that it goes to, or spans."""


class RunLog:
    """Writes what a run tells; all is on disk after `drain` or `close`. Spans may come from another thread."""

    def __init__(self, path: Path, total_steps: int, step: int = 0) -> None:
        self._path = path
        self._status: dict[str, Any] = {"state": "preparing", "pid": os.getpid(), "host": socket.gethostname()}
        self._status |= {"started": time.time(), "step": step, "total_steps": total_steps}
        self._queue: queue.SimpleQueue[_Item | threading.Event | None] = queue.SimpleQueue()
        self._status_lock = threading.Lock()
        self._disks: dict[str, Sequence[str]] = {}
        self._queued_spans = 0
        """Written by whoever hands spans over."""
        self._written_spans = 0
        """Written by the log's thread only."""
        self._failure: BaseException | None = None
        """The first thing that went wrong; `check` tells it."""
        self._closed = False
        self.dropped_spans = 0
        self._files: dict[str, TextIO] = {}
        self._preparing: tuple[tuple[Preparing, float], ...] = ()
        """The last word on each item of the checklist, and when it came by perf_counter; replaced, never changed."""
        self._dropped = False
        """Whether the lines of steps that are done again have gone."""
        self._mean: MeanSpeed | None = None
        """Of the run up to its last step; None before the first one of this process."""
        self._offset_s, self._offset_id = continue_spans(path)
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

    def prepare(self, item: Preparing) -> None:
        """Keep the last word on an item of the checklist; its beginning and its end are published at once."""
        before = self._preparing if item.state == "begun" else self._preparing[:-1]
        self._preparing = (*before, (item, time.perf_counter()))
        if item.state != "progress":
            self._write_status()

    def watch_drives(self, folders: Iterable[Path]) -> None:
        """Tell the temperature of the drives under these folders from now on."""
        for folder in folders:
            with contextlib.suppress(OSError):
                self._disks[str(folder)] = device_of(folder).disks

    def step(self, metrics: StepMetrics) -> MeanSpeed:
        """Hand over one step; the run's mean speed up to it. Raises like `check`."""
        self.check()
        if self._mean is None:
            lines = JsonLines(self._path / "metrics.jsonl").steps()
            self._mean = MeanSpeed.of(line for line in lines if line["step"] < metrics.step)
        line = dataclasses.asdict(metrics)
        self._mean.add(line)
        self._status["step"] = metrics.step
        self._queue.put(("metrics.jsonl", line | self._mean.fields()))
        return self._mean

    def validation(self, metrics: ValidationMetrics) -> None:
        self._queue.put(("validation.jsonl", dataclasses.asdict(metrics)))

    def samples(self, metrics: SampleMetrics) -> None:
        self._queue.put(("samples.jsonl", samples_line(metrics)))

    def spike(self, spike: Spike) -> None:
        self._queue.put(("spikes.jsonl", dataclasses.asdict(spike)))

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
            reported = op._asdict() | {"start_s": start_s}
            now.setdefault(reported.pop("lane"), []).append(reported)
        self._status |= {"clock_s": round(progress.clock_s + self._offset_s, 7), "now": now}

    def message(self, text: str, level: Level = "info") -> None:
        """Hand over a message of log.jsonl; names of files and models in it may hold anything."""
        self._queue.put(self._message(text, level))

    def _message(self, text: str, level: Level) -> _Item:
        line = {"time": time.time(), "level": level, "text": printable(text), "step": self._status["step"]}
        return "log.jsonl", line

    def check(self) -> None:
        """Raise what kept a line from being written, or ended the thread: UserError where disk or files are at
        fault."""
        failure = self._failure
        if isinstance(failure, OSError):
            failure = disk_error(failure, Path(failure.filename or self._path), "writing the run's log")
        if failure is not None:
            raise failure

    def flush(self) -> None:
        """Return once all that was handed over is written, or the thread has ended, which `check` tells."""
        written = threading.Event()
        self._queue.put(written)
        while self._thread.is_alive() and not written.wait(0.1):
            pass

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

    def _work(self) -> None:
        """Whatever ends the thread is raised by `check`, or a run would go on and leave no trace."""
        try:
            self._write_all()
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error

    def _write_all(self) -> None:
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
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                self._write(item)
            except Exception as error:  # heartbeats and later lines go on, the run ends
                self._fail(error)
            if isinstance(item, list):
                self._written_spans += len(item)
        for file in self._files.values():
            try:
                file.close()
            except OSError as error:
                self._fail(error)

    def _write(self, item: _Item) -> None:
        if isinstance(item, list):
            name, text = "spans.jsonl", spans_text(item, self._offset_s, self._offset_id)
        else:
            name, line = item
            text = json_text(_finite(line))
            if name != "log.jsonl" and not self._dropped:
                self._dropped = True
                self._drop_done_again(name, line["step"])
        file = self._file(name)
        file.write(text)
        file.flush()

    def _file(self, name: str) -> TextIO:
        """The open file; another one where a backup has it by a hard link since, which is to stay as it is."""
        path, file = self._path / name, self._files.get(name)
        if file is not None and os.fstat(file.fileno()).st_nlink <= 1:
            return file
        if file is not None:
            file.close()
        else:
            cut_torn_line(path)
        file = self._files[name] = os.fdopen(open_append(path), "a")
        return file

    def _drop_done_again(self, first: str, step: int) -> None:
        """Drop what this process writes again, whose first line is one of `step` in file `first`: validation and
        samples, in this order, are of the step before the one that it begins with."""
        begun = step + (first in ("validation.jsonl", "samples.jsonl"))
        steps = {"metrics.jsonl": begun, "spikes.jsonl": begun}
        steps |= {"validation.jsonl": step + (first == "samples.jsonl"), "samples.jsonl": step}
        for name, first_step in steps.items():
            if (warning := drop_steps(self._path / name, first_step)) is not None:
                self._write(self._message(warning, "warning"))

    def _look_at_drives(self) -> None:
        result = {folder: {"temperature_c": disk_temperature(disks)} for folder, disks in self._disks.items()}
        self._status["drives"] = result

    def _write_status(self) -> None:
        """Replace status.json. Not synced: after a power cut nobody needs the heartbeat of before."""
        if not self._status_lock.acquire(timeout=1.0):  # an abort must not wait for a stalled disk
            return
        try:
            temporary = self._path / "status.json.tmp"
            status = self._status | {"heartbeat": time.time()}
            if preparing := self._preparing:
                status["preparing"] = [self._item(*word) for word in preparing]
            remove_own(temporary)  # left by a killed process, and a backup's since
            with open(open_regular(temporary, flags=os.O_WRONLY | os.O_CREAT), "w") as file:
                file.write(json_text(status))
            os.replace(temporary, self._path / "status.json")
        except OSError as error:
            self._fail(error)
        finally:
            self._status_lock.release()

    @staticmethod
    def _item(item: Preparing, reported_at: float) -> dict[str, Any]:
        """An item as status.json has it; one that is not done has gone on since it was reported."""
        done = item.state == "done"
        seconds = item.seconds if done else item.seconds + time.perf_counter() - reported_at
        line: dict[str, Any] = {"name": item.name, "state": "done" if done else "running", "seconds": round(seconds, 3)}
        if not done:
            line |= {"detail": item.detail, "fraction": item.fraction}
        return line


def _finite(value: Any) -> Any:
    """JSON has no NaN or infinity: in objects they become null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def drop_steps(file: Path, first_step: int) -> str | None:
    """Drop lines of steps done again, from `first_step` on, and those too long to be read; what to tell of damaged
    ones. UserError, OSError."""
    lines = JsonLines(file)
    again = sum(line["step"] >= first_step for line in lines.steps())
    if not again:
        return lines.warning()
    with reporting(file, "dropping the lines of steps that are done again"), open_read(file) as old:
        publish(prepare_file(file, _kept(old, first_step)), file)
    return lines.warning()


def _kept(file: BinaryIO, first_step: int) -> Iterator[bytes]:
    for line in whole_lines(file):
        step = whole((parse_line(line) or {}).get("step"))
        if line is not None and (step is None or step < first_step):
            yield line


def continue_spans(path: Path, name: str = "spans.jsonl") -> tuple[float, int]:
    """What to add to times and ids of a resumed run's spans, which start at zero, to follow the old ones, whose time
    was spent; a torn last line goes. UserError where the file is none of ours."""
    spans_path = path / name
    with reporting(spans_path, "cutting off a torn last line"):
        cut_torn_line(spans_path)
    last = [span for line in read_tail(spans_path, _ID_TAIL_BYTES) if (span := span_of(line)) is not None]
    ids = (span.id for span in last if span.id < _MOST_ID)
    return max((span.end_s for span in last), default=0.0), max(ids, default=-1) + 1


def cut_torn_line(path: Path) -> None:
    """Cut off what follows the last newline of a file of lines, if there is one and it is torn. OSError."""
    try:
        with open_read(path) as lines:
            lines.seek(max(0, lines.seek(0, os.SEEK_END) - 1))
            if lines.read(1) in (b"\n", b""):
                return
    except FileNotFoundError:
        return
    os.close(open_append(path))  # its own from here on
    with open(open_regular(path, flags=os.O_RDWR), "rb+") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as content:
            end = content.rfind(b"\n") + 1
        file.truncate(end)
