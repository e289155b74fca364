"""What a run's samples.jsonl holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from penstock.tui.data.fields import get, objects, text, whole


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


def with_samples(known: Sequence[Samples], lines: Iterable[dict[str, Any]]) -> tuple[list[Samples], int]:
    """Samples step by step, with those of further lines, and how many lines were none.

    What was written again replaces those from its step on.
    """
    found, skipped = list(known), 0
    for line in lines:
        step, samples = whole(line, "step"), [_sample(one) for one in objects(line, "samples")]
        if step is None or not samples:
            skipped += 1
            continue
        while found and found[-1].step >= step:
            found.pop()
        found.append(Samples(step, samples))
    return found, skipped


def _sample(value: dict[str, Any]) -> Sample:
    prompt, written = text(value, "prompt") or "", text(value, "text") or ""
    return Sample(prompt, written, whole(value, "tokens"), get(value, "ended") is True)
