"""How fast a run trains: "last step" is the speed of one step, "mean" the run's, the same in all places, "planned" the
forecast's. A pause is in no step, nor is a validation, or what a resumed run prepares again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.app.runs.files import number, whole
from penstock.engine.events import WARMUP_STEPS as WARMUP_STEPS


@dataclass(slots=True)
class MeanSpeed:
    """The mean over steps, those left out in which a process warms up; all None before the first that counts."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    flops: float = 0.0

    @classmethod
    def of(cls, lines: Iterable[Mapping[str, Any]]) -> MeanSpeed:
        """Over lines of metrics.jsonl; where one does not say whether it is a warm-up step, its number does."""
        mean = cls()
        for line in lines:
            mean.add(line)
        return mean

    def add(self, line: Mapping[str, Any]) -> None:
        step_s, step = number(line.get("step_s")), whole(line.get("step")) or 0
        if step_s is not None and step_s > 0 and not line.get("warmup", step <= WARMUP_STEPS):
            self.steps += 1
            self.tokens += whole(line.get("tokens")) or 0
            self.seconds += step_s
            self.flops += number(line.get("model_flops")) or 0.0

    @property
    def tokens_per_s(self) -> float | None:
        return self.tokens / self.seconds if self.steps else None

    @property
    def step_s(self) -> float | None:
        return self.seconds / self.steps if self.steps else None

    def fields(self) -> dict[str, float | None]:
        """What a step's line in metrics.jsonl says of the run's mean up to it."""
        return {
            "mean_tokens_per_s": self.tokens_per_s,
            "mean_step_s": self.step_s,
            "mean_model_tflops_per_s": self.tflops_per_s,
        }

    @property
    def tflops_per_s(self) -> float | None:
        """Of the model's operations, in 1e12; None where no step tells them."""
        return self.flops / self.seconds / 1e12 if self.steps and self.flops else None


def speed_figure(tokens_per_s: float | None) -> str:
    """Tokens per second; below ten with decimals: of a slow model, or of long rows few of whose tokens are trained."""
    if tokens_per_s is None or not math.isfinite(tokens_per_s):
        return "n/a"
    return f"{tokens_per_s:,.{0 if tokens_per_s >= 10 else 1 if tokens_per_s >= 1 else 2}f}"


def speed_text(mean: float | None, last_step: float | None) -> str:
    """A run's tokens/s in words; what is not known is left out."""
    known = [
        f"{speed_figure(value)} tok/s {name}"
        for name, value in (("mean", mean), ("last step", last_step))
        if value is not None
    ]
    return ", ".join(known).replace(" tok/s last", " last") if len(known) > 1 else (known or ["n/a tok/s"])[0]
