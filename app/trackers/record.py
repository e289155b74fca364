"""What a tracker has of a run: RUN/trackers/NAME.json, and what is new in the run's files behind that."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from penstock.app.runs.files import json_text, read_object
from penstock.app.runs.tail import JsonTail
from penstock.app.trackers.base import STREAMS, Line, Stream, line_of
from penstock.storage.files.disk import temporary_name, write_file
from penstock.storage.files.untrusted import open_regular

FOLDER = "trackers"
"""Below the run directory: records, and what trackers' packages say and keep."""


class Mark(NamedTuple):
    """The last line of a stream that was handed out. -1: none."""

    step: int = -1
    time: float = 0.0
    """Unix seconds of that line: one of an earlier step that is younger is of a step that was done again."""


class Entry(msgspec.Struct, kw_only=True):
    """What is known of a tracker's run at one place: other settings are another place."""

    run: tuple[int, int]
    """Device and inode of the run directory: a copy is another run, but where the tracker lies in it."""
    id: Annotated[str, msgspec.Meta(pattern=r"^[\w.-]{1,200}$")]
    known: dict[str, Any]
    """What the tracker keeps of its run."""
    sent: dict[Stream, Mark] = {}
    """The last line of each stream that was sent."""
    ended: str | None = None
    """How the run had ended when the tracker's run was closed; None: it is open."""


def read_entries(run: Path, name: str) -> dict[str, Entry]:
    """Place -> entry; a damaged file holds none."""
    try:
        return msgspec.convert(read_object(run / FOLDER / f"{name}.json") or {}, dict[str, Entry])
    except msgspec.ValidationError:
        return {}


def directory_id(run: Path) -> tuple[int, int]:
    status = os.stat(run)
    return status.st_dev, status.st_ino


def write_entries(run: Path, name: str, entries: Mapping[str, Entry]) -> None:
    """Replace the file. Not synced: what a power cut voids is sent again, or known by the tracker. OSError."""
    path = run / FOLDER / f"{name}.json"
    temporary = temporary_name(path)
    write_file(temporary, json_text(msgspec.to_builtins(entries), indent=1).encode())
    os.replace(temporary, path)


def lock_sender(run: Path, name: str, wait_s: float) -> bool:
    """Whether this process, until it ends, is the one that sends the run to the tracker."""
    file = open_regular(run / FOLDER / f"{name}.lock", flags=os.O_RDWR | os.O_CREAT)
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)


class Feed:
    """Reads the run's files as they grow, from the marks on, in the order of steps. Of steps that a resumed run does
    again, known by their time, lines are handed out once more where `again`; else `repeated` tells of them."""

    def __init__(self, run: Path, marks: Mapping[Stream, Mark], *, again: bool = False) -> None:
        self.marks: dict[Stream, Mark] = {stream: marks.get(stream, Mark()) for stream in STREAMS}
        self.repeated = False
        self._again = again
        self._tails = {stream: JsonTail(run / f"{stream}.jsonl") for stream in STREAMS}
        self._seen = dict(self.marks)
        """As the marks, of what was read."""
        self._held: list[Line] = []
        """Validations and samples of steps whose metrics have not been read yet."""
        self._read_step = -1

    @property
    def behind(self) -> bool:
        """Whether the files held more than the last call read."""
        return bool(self._held) or any(tail.behind for tail in self._tails.values())

    def read(self) -> list[Line]:
        """Lines that have come since, at most some thousands; the marks are set behind them."""
        lines = self._held + [line for stream in STREAMS for line in self._new(stream)]
        last = self._read_step if self._tails["metrics"].behind else float("inf")
        result = [line for line in lines if line.stream == "metrics" or line.step <= last]
        self._held = [line for line in lines if line.stream != "metrics" and line.step > last]
        result.sort(key=lambda line: (line.step, STREAMS.index(line.stream)))
        for line in result:
            self.marks[line.stream] = Mark(line.step, line.time)
        return result

    def _new(self, stream: Stream) -> list[Line]:
        result = []
        for read in self._tails[stream].read():
            if (line := line_of(stream, read)) is None:
                continue
            if stream == "metrics":
                self._read_step = line.step
            mark = self._seen[stream]
            if line.step > mark.step or (self._again and line.time > mark.time):
                self._seen[stream] = Mark(line.step, line.time)
                result.append(line)
            elif line.time > mark.time:
                self.repeated = True
        return result
