"""What a tracker is to the rest: it is opened, gets lines in the order of steps, and is closed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Literal, NamedTuple

Stream = Literal["metrics", "validation", "samples"]
STREAMS: tuple[Stream, ...] = ("metrics", "validation", "samples")
"""Files of lines that are sent, NAME.jsonl; those of one step in this order."""

End = Literal["finished", "stopped", "failed", "crashed"]
"""How a run's process ended."""

PROJECT = "penstock"
"""Where a tracker sorts runs by projects and its environment names none."""


class TrackerError(Exception):
    """What a tracker does not do, and how to mend it, in a line."""


class Line(NamedTuple):
    """A line of one of the files."""

    stream: Stream
    step: int
    time: float
    """Unix seconds."""
    values: dict[str, float]
    """Finite figures by the names that trackers show."""
    samples: list[dict[str, Any]]
    """`prompt`, `text` and `ended` of each; of the stream of samples alone."""


class About(NamedTuple):
    """The run that is sent."""

    path: Path
    name: str
    """The run directory's."""
    config: dict[str, Any]
    """The recipe, as JSON."""
    made_with: dict[str, str]
    """Versions of the packages, and of the folder in git that the run was started in."""
    summary: dict[str, Any] | None = None
    """summary.json, of a run that has ended."""


class Tracker(ABC):
    """One tracker, which takes its settings from its own environment variables. Any exception of a method means that
    what was handed over since the last `flush` is sent again, by a new process.

    Its package is imported by `open`, not before.
    """

    name: str
    """As a recipe names it: the package's name."""
    rewinds = False
    """Whether steps that are done again replace those that it has."""
    local = False
    """Whether it lies in the run directory, and is copied with it."""

    def __init__(self, about: About, known: dict[str, Any]) -> None:
        self.about = about
        self.known = known
        """What the run directory keeps of the tracker's run: `id`, `at`, words that say where it is to be seen, and
        what a tracker adds. Empty: it has none yet."""
        self.remarks: list[str] = []
        """What went wrong without anything being lost but for the tracker's own comfort; told once each."""

    @abstractmethod
    def place(self) -> str:
        """Where it sends to, by its environment; nothing is contacted."""

    @abstractmethod
    def open(self, first_step: int) -> None:
        """Begin the tracker's run, or go on with the one that `known` tells of, and complete `known`.

        `first_step`: the smallest step that will be sent.
        """

    def received(self) -> dict[Stream, int]:
        """The last step of each stream that the tracker says it has, -1 for none; a stream that it cannot tell is left
        out. It has nothing of any stream beyond the last step of `metrics`, where it tells that one. After `open`."""
        return {}

    @abstractmethod
    def send(self, lines: list[Line]) -> None:
        """Hand over lines, in the order of their steps."""

    def flush(self) -> None:
        """Return once all that was handed over would survive a kill of this process."""
        return

    def rewind(self, step: int) -> None:
        """Void what it has of `step` and later ones; where it `rewinds`."""
        raise NotImplementedError

    @abstractmethod
    def close(self, end: End) -> None:
        """End the tracker's run; what is under way has arrived when it returns."""
