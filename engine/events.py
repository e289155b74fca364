"""What a run tells the outside: spans of work, one line of metrics per step, plain messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol


class Span(NamedTuple):
    """One finished op. Times are seconds since the run's process started training."""

    lane: str
    op: str
    block: str
    chunk: int
    """Index of the chunk (or part) within the step; -1 for ops of a whole block."""
    start_s: float
    end_s: float
    bytes: int
    """Payload bytes the op moved; 0 for compute."""
    step: int


@dataclass(kw_only=True, slots=True)
class StepMetrics:
    """One optimizer step."""

    step: int
    """1 for the first step of the run."""
    loss: float
    """Mean negative log-likelihood of the step's target tokens, nats."""
    grad_norm: float
    """Global L2 norm of the gradient before clipping."""
    lr: float
    tokens: int
    """Trained tokens: those that carry a loss, padding and document ends excluded."""
    step_s: float
    tokens_per_s: float
    model_flops: int = 0
    """Floating-point operations that the step's tokens need, forward and backward (engine.flops)."""
    nvme_read_bytes: dict[str, int] = field(default_factory=dict)
    """Drive folder -> bytes read from it since the step before."""
    nvme_written_bytes: dict[str, int] = field(default_factory=dict)
    """Drive folder -> bytes written to it since the step before."""


class Observer(Protocol):
    """Receives the events of a run on the training thread; must never block for long."""

    def on_plan(self, plan: dict[str, Any], predicted: list[Span]) -> None:
        """The forecast (engine/forecast.py) as JSON-ready data, with its `calibration`, before the first step.

        `predicted`: the spans of the forecast's step, counted from that step's start.
        """

    def on_step(self, metrics: StepMetrics, spans: list[Span]) -> None:
        """A step's gradient is complete; `spans` finished since the last call."""

    def on_spans(self, spans: list[Span]) -> None:
        """Spans that finished after the last step's."""

    def on_message(self, text: str) -> None:
        """A line worth showing to the user."""

    def checkpoint_requests(self) -> list[str]:
        """Names of checkpoints asked for since the last call; each is made of the step that just ended."""
        ...

    def on_checkpoint(self, name: str, step: int, error: str | None) -> None:
        """A checkpoint that was asked for exists, or could not be made for the reason in `error`."""

    def should_stop(self) -> bool:
        """True asks the run to finish its step, commit and return."""
        ...
