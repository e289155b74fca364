"""What a run reports: spans of work as they end, one line of metrics per step, plain messages."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

Want = Literal["run", "pause", "stop"]
"""What is wanted of a run at its next step boundary."""

STEP_MARK = "{step}"
"""In the name of a requested checkpoint: becomes its step, which is not known before."""

WARMUP_STEPS = 2
"""Steps of a process that compile and fill caches: no mean and no time to the end counts them."""


def op_text(op: str, block: str, chunk: int) -> str:
    """The one way in which an op is named: `layer_forward layers.3[2]`; `chunk` -1: it concerns the whole block."""
    return f"{op} {location_text(block, chunk)}"


def location_text(block: str, chunk: int) -> str:
    """Which block of the model, or which chunk or part of it: `layers.3`, `layers.3[2]`."""
    return f"{block}[{chunk}]" if chunk >= 0 else block


class Span(NamedTuple):
    """One finished op. Times are seconds since the run's process started training, pauses left out."""

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
    id: int = -1
    """The op's number in program order; -1 where it was not stored."""
    waited: tuple[int, ...] = ()
    """Ids of the ops that were not done when the lane reached this one; none: it ran as soon as its lane was free."""
    awaited: tuple[tuple[int, float], ...] = ()
    """Other GPUs whose work it waited for as it ran, by number, and for how many seconds each."""

    @classmethod
    def of(cls, line: dict[str, Any]) -> Span:
        """The span of a line of spans.jsonl, which may lack `id`, `waited` and `awaited`. Raises TypeError for anything
        else."""
        pairs = tuple((gpu, seconds) for gpu, seconds in line.get("awaited", ()))
        return cls(**line | {"waited": tuple(line.get("waited", ())), "awaited": pairs})


@dataclass(slots=True)
class LaneTotals:
    """Work of one lane over some time: seconds in which at least one op was under way, and payload bytes."""

    busy_s: float = 0.0
    bytes: int = 0
    _until: float = field(default=0.0, repr=False)

    def add(self, span: Span) -> None:
        """Count a span, roughly in the order of their ends; spans that overlap count their common time once."""
        self.busy_s += max(0.0, span.end_s - max(span.start_s, self._until))
        self._until = max(self._until, span.end_s)
        self.bytes += span.bytes


class UnderWay(NamedTuple):
    lane: str
    op: str
    block: str
    chunk: int
    step: int
    start_s: float | None
    """None where it is not known."""


class Progress(NamedTuple):
    """What the lanes did since the last word of it, and what they are doing."""

    spans: list[Span]
    """Of the ops that ended meanwhile; each span of a run is reported once."""
    clock_s: float
    """The spans' clock now."""
    under_way: list[UnderWay]


@dataclass(kw_only=True, slots=True)
class StepMetrics:
    step: int
    """1 for the first step of the run."""
    loss: float
    """Mean negative log-likelihood of the step's target tokens by their weights, nats: the cross entropy alone, without
    what train.z_loss and train.router_aux_loss add to what is trained; 0 where the step has no target. With an
    objective of its own it is that objective's value."""
    grad_norm: float
    """Global L2 norm of the gradient before clipping."""
    lr: float
    tokens: int
    """Trained tokens: those that carry a loss, padding and document ends excluded."""
    step_s: float
    """From the step's start to its loss and gradient norm being known; validations and pauses are in no step."""
    tokens_per_s: float
    warmup: bool = False
    """Whether it is one of the first WARMUP_STEPS of its process."""
    model_flops: int = 0
    """Floating-point operations that the step's tokens need, forward and backward (engine.forecast.flops)."""
    nvme_read_bytes: dict[str, int] = field(default_factory=dict)
    """Drive folder -> bytes read from it since the step before."""
    nvme_written_bytes: dict[str, int] = field(default_factory=dict)
    """Drive folder -> bytes written to it since the step before."""
    time: float = 0.0
    """Unix seconds at the step's end."""
    tier_bytes: dict[str, int] = field(default_factory=dict)
    """gpu, ram, nvme -> the most bytes held there at once so far; nvme was looked up some seconds ago at most."""
    measured: dict[str, float] = field(default_factory=dict)
    """What the objective reports beside its loss: name, as TRL has it (`rewards/margins`) -> value of the step."""


@dataclass(kw_only=True, slots=True)
class Recall:
    """Answers found in haystacks (engine/data/needles)."""

    lengths: list[int]
    """Tokens of the haystacks, rising."""
    right: list[list[int]]
    """[length][depth]: answers that were right; the depths are equal bands of a haystack, from its beginning."""
    queried: list[list[int]]
    """[length][depth]: all answers."""


REWARD = "reward"
"""What the mean reward of completions is called in `measured`."""


@dataclass(kw_only=True, slots=True)
class ValidationMetrics:
    step: int
    """It is measured with the weights as they are after this step."""
    loss: float | None
    """Mean negative log-likelihood of the target tokens of the documents held out, nats; with an objective of its own
    that objective's value; None where completions are rewarded, which has no loss."""
    tokens: int
    """Those targets, or the tokens of completions that were sampled."""
    seconds: float
    time: float
    """Unix seconds at its end."""
    accuracy: float = math.nan
    """Share of the targets that the model found likelier than any other token."""
    recall: Recall | None = None
    """The same by length and depth, of data.source=needles."""
    measured: dict[str, float] = field(default_factory=dict)
    """What the objective reports beside its loss: name, as TRL has it -> value over the documents held out."""

    @property
    def value(self) -> float:
        """The loss, which is to fall, or in its place the mean reward, which is to rise; NaN where there is none."""
        return self.measured.get(REWARD, math.nan) if self.loss is None else self.loss


@dataclass(kw_only=True, slots=True)
class Sample:
    prompt: str
    text: str
    """Behind the prompt."""
    tokens: int
    """Of the text, what ended it included."""
    ended: bool
    """Whether the model ended it; else it is cut off."""
    reward: float | None = None
    """Of a completion that is trained on; None: it has none."""


@dataclass(kw_only=True, slots=True)
class SampleMetrics:
    step: int
    """They are written with the weights as they are after this step."""
    samples: list[Sample]
    """One per prompt, in the recipe's order."""
    seconds: float
    time: float
    """Unix seconds at their end."""


@dataclass(kw_only=True, slots=True)
class StepDocument:
    """A document, or a piece of one, that a step was trained on."""

    document: int
    """Its number in the corpus, from 0."""
    where: str | None
    """Where it comes from, as `chats.jsonl:12`, `part.parquet:row 12` or a file; None where that is not known."""
    first_token: int
    """Of the document, with which its piece begins."""
    tokens: int
    """Of it in the step."""
    loss: float | None
    """Mean loss of the chunks of tokens that it lies in, nats, which may hold others too; None where nothing of them is
    trained, or the loss is not a number."""
    excerpt: str
    """How the piece begins; empty for random tokens."""

    def words(self) -> str:
        name = self.where or f"document {self.document:,}"
        excerpt = f": {self.excerpt!r}" if self.excerpt else ""
        return f"{name} ({self.tokens:,} tokens{excerpt})"


@dataclass(kw_only=True, slots=True)
class Spike:
    """A step whose loss leapt, or is not finite, and the documents that it was trained on."""

    step: int
    loss: float
    """Of the step, nats; not a number where a value of the step is not finite."""
    expected: float | None
    """Running mean of the losses before it, nats; None where there were too few."""
    documents: list[StepDocument]
    """Those of the highest loss first, 64 at most."""
    num_documents: int
    """All that were in the step."""
    time: float
    """Unix seconds."""

    def words(self) -> str:
        """One sentence, with the first documents."""
        if math.isfinite(self.loss) and self.expected is not None:
            what = f"the loss jumped to {self.loss:.4g} from a running mean of {self.expected:.4g}"
        else:
            what = "a value is not finite"
        named = [one.words() for one in self.documents[:3]]
        more = self.num_documents - len(named)
        rest = f" and {more:,} more (spikes.jsonl)" if more > 0 else ""
        return f"step {self.step:,}: {what}; trained on {', '.join(named)}{rest}"


class Preparing(NamedTuple):
    """One item of what is prepared before the first step (engine/preparing.py)."""

    name: str
    """For people: "self-check", "pinning 350 GB"."""
    state: Literal["begun", "progress", "done"]
    """An item that begins and is never done was broken off."""
    seconds: float
    """Since it began."""
    detail: str | None = None
    """What it is at, in a few words."""
    fraction: float | None = None
    """How much of it is done, 0 to 1; None where that is not known."""


def step_name(name: str, step: int) -> str:
    """What a checkpoint requested as `name` is called when it holds `step`."""
    return name.replace(STEP_MARK, str(step))


class Observer(Protocol):
    """Receives the events of a run, on the training thread but for `on_progress` and items' progress. Never blocks."""

    def on_prepare(self, item: Preparing) -> None:
        """An item before the first step has begun, got on, or is done; never two at once."""

    def on_plan(self, plan: dict[str, Any], predicted: list[Span]) -> None:
        """The forecast (engine/forecast/report.py) as JSON-ready data, with its `calibration`, before the first step;
        `predicted`: the spans of its step, from that step's start."""

    def on_progress(self, progress: Progress) -> None:
        """What the lanes do: some times a second from a thread of its own, and before `on_step`; never two at once."""

    def on_step(self, metrics: StepMetrics) -> None:
        """A step's gradient is complete; `on_progress` has had its spans."""

    def on_validation(self, metrics: ValidationMetrics) -> None:
        """The validation loss has been measured: after `on_step` of its step, or first of all on a resumed run."""

    def on_spike(self, spike: Spike) -> None:
        """The loss of a step leapt: after its `on_step`, or before what is not finite in it ends the run."""

    def on_sample(self, metrics: SampleMetrics) -> None:
        """Samples have been written: after `on_step` of their step and `on_validation`, or first of all on a resumed
        run."""

    def on_message(self, text: str, *, detail: bool = False) -> None:
        """A line worth showing to the user; `detail`: worth keeping, for whoever looks closer."""

    def checkpoint_requests(self) -> list[str]:
        """Names of checkpoints requested since the last call; each is made of the step that just ended."""
        return []

    def on_checkpoint(self, name: str, step: int, error: str | None) -> None:
        """A checkpoint that was requested as `name` exists, or could not be made for the reason in `error`."""

    def wanted(self) -> Want:
        """Queried after each step: go on, commit and wait until that changes, or commit and return."""
        return "run"

    def on_pause(self, paused: bool) -> None:
        """The run has committed its step and waits, or goes on."""
