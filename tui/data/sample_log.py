"""What a run's samples.jsonl holds, as it grows."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from penstock.app.runs.tail import JsonTail
from penstock.tui.data.fields import get, objects, text, whole

SAMPLES_BYTES = 4 << 20
"""So much of the end of a long file is read."""


class Sample(NamedTuple):
    """What the model wrote behind one prompt."""

    prompt: str
    text: str
    tokens: int | None
    ended: bool
    """The model ended it; else it is cut off."""


class Samples(NamedTuple):
    """The samples of one step, in the order of the prompts."""

    step: int
    samples: list[Sample]


class SampleReader:
    """Attributes: `found`, the samples step by step, ascending; it is replaced, never changed."""

    def __init__(self, run_path: Path) -> None:
        self.found: list[Samples] = []
        self.tail = JsonTail(run_path / "samples.jsonl", start_bytes=SAMPLES_BYTES)
        self._skipped = 0

    @property
    def damaged(self) -> int:
        """Lines that were no samples."""
        return self.tail.damaged + self._skipped

    def read(self) -> bool:
        """Read a piece of what is new; whether there was anything."""
        lines = self.tail.read()
        if self.tail.began_anew:
            self.found, self._skipped = [], 0
        if lines:
            self.found = self._with(lines)
        return bool(lines) or self.tail.began_anew

    def _with(self, lines: Iterable[dict[str, Any]]) -> list[Samples]:
        """All samples, with those of `lines`; what was written again replaces those from its step on."""
        found = list(self.found)
        for line in lines:
            step, samples = whole(line, "step"), [_sample(one) for one in objects(line, "samples")]
            if step is None or not samples:
                self._skipped += 1
                continue
            while found and found[-1].step >= step:
                found.pop()
            found.append(Samples(step, samples))
        return found


def _sample(value: dict[str, Any]) -> Sample:
    return Sample(
        prompt=text(value, "prompt") or "",
        text=text(value, "text") or "",
        tokens=whole(value, "tokens"),
        ended=get(value, "ended") is True,
    )
