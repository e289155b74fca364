"""What a tracker is to the rest: it is opened, gets lines in the order of steps, and is closed."""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Literal, NamedTuple

from penstock.app.runs.files import MOST_SECONDS, number
from penstock.app.runs.measured import measured_of

Stream = Literal["metrics", "validation", "samples"]
STREAMS: tuple[Stream, ...] = ("metrics", "validation", "samples")
"""Files of lines that are sent, NAME.jsonl; those of one step in this order."""

End = Literal["finished", "stopped", "failed", "crashed"]
"""How a run's process ended."""

PROJECT = "penstock"
"""Where a tracker sorts runs by projects and its environment names none."""

ANSWER_S = 120
"""A tracker that has not come back for so long does not answer."""
CLOSING_S = 900
"""The same where nobody waits for it but the user, who has Ctrl-C: all of a run may be under way."""

_FIGURES: dict[Stream, dict[str, str]] = {
    "metrics": {
        "loss": "train/loss",
        "grad_norm": "train/grad_norm",
        "lr": "train/learning_rate",
        "tokens": "train/tokens",
        "tokens_per_s": "train/tokens_per_second",
        "step_s": "train/step_seconds",
    },
    "validation": {"loss": "validation/loss", "accuracy": "validation/accuracy"},
    "samples": {},
}
"""Field of a line -> name in a tracker."""
_MEASURED: dict[Stream, str] = {"metrics": "train", "validation": "eval"}
"""Before the names of what an objective measures, as the trainers of transformers and TRL have it."""


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
    samples: list[tuple[str, str]]
    """(prompt, text) of each; of the stream of samples alone."""


def line_of(stream: Stream, line: dict[str, Any]) -> Line | None:
    """What is sent of a line; None where it has no step."""
    step, time = number(line.get("step")), number(line.get("time")) or 0.0
    if step is None or step != int(step) or step < 0:
        return None
    result: dict[str, object] = {}
    if (prefix := _MEASURED.get(stream)) is not None:
        result |= {f"{prefix}/{name}": value for name, value in measured_of(line).items()}
    result |= {shown: line.get(name) for name, shown in _FIGURES[stream].items()}
    if isinstance(tiers := line.get("tier_bytes"), dict):
        result |= {f"memory/{tier}_bytes": tiers.get(tier) for tier in ("gpu", "ram", "nvme")}
    for way in ("read", "written"):
        if isinstance(drives := line.get(f"nvme_{way}_bytes"), dict) and drives:
            result[f"drives/{way}_bytes"] = sum(number(value) or 0.0 for value in drives.values())
    values = {name: value for name, given in result.items() if (value := number(given)) is not None}
    if (loss := values.get("validation/loss")) is not None and loss < math.log(1e30):
        values["validation/perplexity"] = math.exp(loss)
    given = line.get("samples") if stream == "samples" else None
    samples = [
        (one["prompt"], one["text"] + ("" if one.get("ended") is True else " ...") + _reward(one.get("reward")))
        for one in (given if isinstance(given, list) else ())
        if isinstance(one, dict) and isinstance(one.get("prompt"), str) and isinstance(one.get("text"), str)
    ]
    return Line(stream, int(step), min(max(time, 0.0), MOST_SECONDS), values, samples)


def _reward(given: object) -> str:
    """What stands behind a sample that has a reward."""
    return "" if (value := number(given)) is None else f"  [reward {value:.4g}]"


def samples_text(samples: list[tuple[str, str]]) -> str:
    """Samples as Markdown that shows their characters as they are, each behind its prompt."""

    def plain(text: str) -> str:
        return "".join(f"\\{char}" if char in "\\`*_{}[]<>#|" else char for char in text)

    return "\n---\n\n".join(f"**{plain(prompt)}**\n\n{plain(text)}\n" for prompt, text in samples)


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of nested dicts by dotted names; lists and nulls are leaves."""
    result: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        result |= flat(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return result


class Tracker(ABC):
    """One tracker, set by its own environment variables; its package is imported by `open`, not before. Any exception
    of a method means that what came since the last `send` that returned is sent again, by a new process."""

    name: str
    """As a recipe names it: the name that is imported."""
    package: tuple[str, tuple[int, int]]
    """What is installed for it, and the oldest version, as in pyproject.toml."""
    rewinds = False
    """Whether steps that are done again replace those that it has, when they are sent, and `open` voids what it has of
    the first step and later ones."""
    local = False
    """Whether it lies in the run directory, and is copied with it."""

    def __init__(self, path: Path, name: str, config: dict[str, Any]) -> None:
        """`config`: the recipe as JSON, and `made_with`: versions of packages, the commit of the folder in git."""
        self.path, self.run_name, self.config = path, name, config
        self.known: dict[str, Any] = {}
        """What the run directory keeps of the tracker's run: `id`, `at`, words that say where it is to be seen, and
        what a tracker adds. Empty: it has none yet."""
        self.remarks: list[str] = []
        """What went wrong without anything being lost but for the tracker's own comfort; reported once each."""

    @staticmethod
    def unready() -> str | None:
        """What keeps its package from sending, by the environment and the user's settings; None if nothing does."""
        return None

    @abstractmethod
    def location(self) -> str:
        """Where it sends to, by its environment; nothing is contacted."""

    @abstractmethod
    def open(self, first_step: int) -> None:
        """Begin the tracker's run, or go on with that of `known`, completed here; `first_step`: the smallest to be
        sent."""

    def received(self) -> dict[Stream, int]:
        """The last step of each stream that the tracker says it has, -1 for none; a stream that it cannot tell is left
        out. It has nothing of any stream beyond the last step of `metrics`, where it tells that one. After `open`."""
        return {}

    @abstractmethod
    def send(self, lines: list[Line]) -> None:
        """Hand over lines, in the order of their steps; they survive a kill of this process once it returns. Steps that
        go back are done again."""

    @abstractmethod
    def close(self, end: End, summary: dict[str, Any] | None) -> None:
        """End the tracker's run; what is under way has arrived when it returns. `summary`: summary.json of a run that
        has ended by itself."""


def tracker(name: str) -> type[Tracker]:
    """The tracker of that name, one of engine.config.recipe.TRACKERS: `TRACKER` of the module on_NAME."""
    found: type[Tracker] = importlib.import_module(f"penstock.app.trackers.on_{name}").TRACKER
    return found
