"""What is new in a run's files, in the order of steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from penstock.app.runs.files import MOST_SECONDS
from penstock.app.runs.tail import JsonTail
from penstock.app.trackers.base import STREAMS, Line, Stream
from penstock.app.trackers.figures import line_of


class Mark(NamedTuple):
    """The last line of a stream that was handed out. -1: none."""

    step: int = -1
    time: float = 0.0
    """Unix seconds of that line: one of an earlier step that is younger is of a step that was done again."""


class Feed:
    """Reads the run's files as they grow, from the marks on; a missing file holds nothing.

    A resumed run drops the lines of steps that it does again: the files are then read anew, and what was handed out
    before is known by its mark.
    """

    def __init__(self, run: Path, marks: Mapping[Stream, Mark]) -> None:
        self.marks: dict[Stream, Mark] = {stream: marks.get(stream, Mark()) for stream in STREAMS}
        self.redone: int | None = None
        """The first step that was done again after it had been handed out; None: none was."""
        self._run = run
        self._begin()

    def _begin(self) -> None:
        self._tails = {stream: JsonTail(self._run / f"{stream}.jsonl") for stream in STREAMS}
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
        found = self._new("metrics")
        for stream in STREAMS[1:]:
            self._held += self._new(stream)
        caught_up = not self._tails["metrics"].behind
        found += [line for line in self._held if caught_up or line.step <= self._read_step]
        self._held = [line for line in self._held if not caught_up and line.step > self._read_step]
        found.sort(key=lambda line: (line.step, STREAMS.index(line.stream)))
        for line in found:
            self.marks[line.stream] = Mark(line.step, line.time)
        return found

    def rewind(self, step: int) -> None:
        """Hand out all lines of `step` and later ones once more."""
        self.redone = None
        for stream, mark in self.marks.items():
            if mark.step >= step:
                self.marks[stream] = Mark(step - 1, MOST_SECONDS)
        self._begin()

    def _new(self, stream: Stream) -> list[Line]:
        found = []
        for read in self._tails[stream].read():
            line = line_of(stream, read)
            if line is None:
                continue
            if stream == "metrics":
                self._read_step = line.step
            mark = self._seen[stream]
            if line.step > mark.step:
                self._seen[stream] = Mark(line.step, line.time)
                found.append(line)
            elif line.time > mark.time and self.redone is None:
                self.redone = line.step
        return found
