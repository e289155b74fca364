"""All that a run directory says, read a piece at a time. Never raises for anything that the directory holds."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from penstock.app.runs.checkpoints import checkpoint_manifests, checkpoint_steps, committed_step
from penstock.app.runs.directory import ATTENDED_STATES, ENDED_STATES, STALE_S, state_of, why_gone
from penstock.app.runs.files import examine_object, open_read
from penstock.app.runs.tail import JsonTail
from penstock.storage.files.untrusted import printable
from penstock.tui.data import spans
from penstock.tui.data.blocks import RECENT_S, BlockLocation, BlockLocations
from penstock.tui.data.catalog import MOST_PLAN_BYTES, NO_FILE, stamp_of
from penstock.tui.data.fields import get, number, objects, text, whole
from penstock.tui.data.metrics import MetricsLog, Samples, with_samples
from penstock.tui.data.spans import SpanStore

SPANS_BYTES = 24 << 20
"""So much of a long spans.jsonl is read: about as many spans as a SpanStore holds."""
_FIGURES = ("validation", "metrics")
_END_BYTES = {"samples": 4 << 20, "spans": SPANS_BYTES, "log": 1 << 20, "spikes": 1 << 20}
"""Of a long file of lines, how much of its end is read."""

LOG_LINES = 5000
_OUTPUT_BYTES = 8192
_SLOW_S = 2.0
_POLL_S = 0.3

STATES = (*ATTENDED_STATES, *ENDED_STATES, "crashed", "gone")


class LogLine(NamedTuple):
    time: float | None
    level: str
    text: str


class UnderWay(NamedTuple):
    """An op that has begun and not ended, from status.json's `now`."""

    lane: str
    op: str
    block: str
    chunk: int
    start_s: float | None


def ops_under_way(now: Any) -> list[UnderWay]:
    """The ops of status.json's `now`, without what is not as it should be."""
    return [
        UnderWay(
            str(lane),
            spans.printable(text(op, "op") or ""),
            spans.printable(text(op, "block") or ""),
            -1 if (chunk := whole(op, "chunk")) is None else chunk,
            number(op, "start_s"),
        )
        for lane in (now if isinstance(now, dict) else ())
        for op in objects(now, lane)
    ][:100]


class Prepared(NamedTuple):
    """One item of what was prepared before the first step."""

    name: str
    done: bool
    seconds: float | None
    detail: str = ""
    fraction: float | None = None
    """How much of it is done, 0..1; None where unknown."""


class RunData:
    """One thread calls `poll`; the attributes may be read by any thread, objects in them only grow or are replaced."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time, *, figures_only: bool = False) -> None:
        """`figures_only`: of the files of lines, read steps and validations alone."""
        self.path = path
        self.clock = clock
        """Unix seconds now."""
        self.exists = True
        self.state = "unknown"
        """One of STATES as of the last poll, or `unknown`."""
        self.status: dict[str, Any] = {}
        self.plan: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.recipe: dict[str, Any] = {}
        self.metrics = MetricsLog()
        self.spans = SpanStore()
        self.predicted: SpanStore | None = None
        """The forecast's step; read once `want_predicted` is set."""
        self.want_predicted = False
        self.log: deque[LogLine] = deque(maxlen=LOG_LINES)
        self.num_log = 0
        """Lines ever added to `log`."""
        self.spike: dict[str, Any] = {}
        self.checkpoints: list[int] = []
        """Steps of the generations that are kept, ascending."""
        self.committed_step: int | None = None
        self.problems: list[str] = []
        self.behind = True
        self._looked_at = 0.0
        self._manifests: list[tuple[Path, tuple[int, int, int]]] = []
        self._locations = BlockLocations({})
        self._stamps: dict[str, tuple[int, ...]] = {}
        self._wrong: dict[str, str | None] = {}
        """What is wrong by what is concerned; None: nothing."""
        self.samples: list[Samples] = []
        """What the model wrote, step by step, ascending; replaced, never changed."""
        self._tails = {
            name: JsonTail(path / f"{name}.jsonl", start_bytes=_END_BYTES.get(name))
            for name in (_FIGURES if figures_only else (*_FIGURES, *_END_BYTES))
        }
        self._skipped = 0
        """Lines of samples.jsonl that are none."""
        self._output_read = False
        self._why_gone: str | None = None

    @property
    def name(self) -> str:
        return printable(self.path.name)

    @property
    def silent_s(self) -> float | None:
        """Seconds since the process last wrote its status; None where that is in the future: a clock was set back."""
        heartbeat = number(self.status, "heartbeat")
        if heartbeat is None or heartbeat > self.clock() + STALE_S:
            return None
        return max(0.0, self.clock() - heartbeat)

    @property
    def is_live(self) -> bool:
        return self.state in ATTENDED_STATES

    @property
    def error(self) -> str | None:
        """Why the run failed, or what is known of the end of a crashed one."""
        return text(self.status, "error") or self._why_gone

    @property
    def step(self) -> int:
        return max(whole(self.status, "step") or 0, self.metrics.last_step)

    @property
    def total_steps(self) -> int | None:
        return whole(self.status, "total_steps") or whole(self.plan, "steps") or whole(self.recipe, "train", "steps")

    @property
    def now(self) -> list[UnderWay]:
        """Ops under way, as the run's process last said; [] when none works on it."""
        return ops_under_way(get(self.status, "now")) if self.state == "running" else []

    @property
    def preparing(self) -> list[Prepared]:
        """What the run's process prepared before its first step, as it last said; [] where it said nothing."""
        return [
            Prepared(
                name=_line(item, "name") or "?",
                done=get(item, "state") == "done",
                seconds=number(item, "seconds"),
                detail=_line(item, "detail"),
                fraction=None if (share := number(item, "fraction")) is None else min(1.0, max(0.0, share)),
            )
            for item in objects(self.status, "preparing")
        ]

    @property
    def clock_s(self) -> float | None:
        """The spans' clock now: moved on from what the process last said, but not beyond what it can be."""
        clock_s = number(self.status, "clock_s")
        if clock_s is None:
            view = self.spans.view
            return view.last_end_s if view.num_spans else None
        silent_s = self.silent_s or 0.0
        return clock_s + min(silent_s, STALE_S) if self.state == "running" else clock_s

    @property
    def mfu(self) -> float | None:
        """Of the run's mean speed; None where the GPU's peak is not known."""
        planned, flops = number(self.plan, "mfu"), number(self.plan, "model_flops")
        step_s = number(self.plan, "step_s")
        mean = self.metrics.last("mean_model_tflops_per_s")
        if not (planned and flops and step_s and mean):
            return None
        return mean * 1e12 / (flops / step_s / planned)

    @property
    def share_read(self) -> float:
        """How much of a long run's files has been read, 0..1."""
        return min(self._tails["metrics"].share_read, self._tails["spans"].share_read)

    def eta_s(self) -> float | None:
        """Seconds to the end of a run that goes on."""
        total = self.total_steps
        if total is None or self.state not in ("running", "paused", "stale"):
            return None
        now = self.clock() if self.state == "running" else None
        return self.metrics.eta_s(total, number(self.status, "started"), now)

    def ended_lately(self, within_s: float) -> list[tuple[str, str, str]]:
        """(lane, op, block) of what ended in the last seconds, the newest first; many last much less than one looks."""
        return [] if self.clock_s is None else self.spans.view.ended_since(self.clock_s - within_s)

    def blocks(self) -> list[BlockLocation]:
        """Every block and where it is now. For the polling thread."""
        if self.state not in ("running", "paused", "stale"):
            return self._locations.snapshot(live=False)
        ops = [*self.ended_lately(RECENT_S), *(op[:3] for op in self.now)]
        return self._locations.snapshot((op, block) for _, op, block in ops)

    def log_lines(self) -> list[LogLine]:
        """The messages kept, oldest first."""
        while True:
            try:
                return list(self.log)
            except RuntimeError:  # the polling thread added one meanwhile
                continue

    def poll(self) -> set[str]:
        """Read what is new, for a fraction of a second at most; the parts that changed.

        Of `status`, `plan`, `metrics`, `samples`, `spans`, `predicted`, `log`, `checkpoints`, `problems`.
        """
        deadline = time.monotonic() + _POLL_S
        before, problems = (self.exists, self.state), self.problems
        changed: set[str] = set()
        self.exists = self.path.is_dir()
        self.behind = False
        if self.exists:
            changed |= self._read_objects()
            self._find_state()
            changed |= self._read_checkpoints()
            while True:
                changed |= self._read_lines()
                self.behind = any(tail.behind for tail in self._tails.values())
                if not self.behind or time.monotonic() > deadline:
                    break
            changed |= self._read_output() | self._read_predicted()
        self._find_state()
        self._say_problems()
        if before != (self.exists, self.state):
            changed.add("status")
        if problems != self.problems:
            changed.add("problems")
        return changed

    def _read_objects(self) -> set[str]:
        changed = set()
        for name in ("status", "plan", "summary", "recipe"):
            path = self.path / f"{name}.json"
            stamp = stamp_of(path)
            if stamp == self._stamps.get(name, ()):
                continue
            result, wrong = examine_object(path, MOST_PLAN_BYTES)
            self._stamps[name] = stamp
            self._wrong[name] = wrong
            if result is not None or stamp == NO_FILE:
                setattr(self, name, result or {})
            changed.add("status" if name == "status" else "plan")
            if name == "plan":
                self._locations = BlockLocations(self.plan)
        return changed

    def _find_state(self) -> None:
        if not self.exists:
            self.state = "gone"
            from penstock.app.launch.launcher import last_words

            if (words := last_words(self.path)) is not None:  # started from here, it failed at once and left nothing
                self.state, self._why_gone = "failed", words
            return
        state = state_of(self.path, self.status, self.clock())
        if state != "crashed":
            self._why_gone = None
        elif self._why_gone is None:
            self._why_gone = why_gone(self.path, self.status)
        self.state = state

    def _read_checkpoints(self) -> set[str]:
        now = time.monotonic()
        if self._looked_at and now - self._looked_at < _SLOW_S:
            return set()
        self._looked_at = now
        manifests = [self.path / "state" / "manifest.json", *checkpoint_manifests(self.path)]
        stamps = [(manifest, stamp_of(manifest)) for manifest in manifests]
        if stamps == self._manifests:
            return set()
        self._manifests = stamps
        self.checkpoints = [step for _, step in checkpoint_steps(self.path)]
        self.committed_step = committed_step(self.path)
        return {"checkpoints"}

    def _read_lines(self) -> set[str]:
        changed = set()
        for name, tail in self._tails.items():
            lines = tail.read()
            if lines or tail.began_anew:
                getattr(self, f"_take_{name}")(lines, tail.began_anew)
                changed.add({"validation": "metrics", "spikes": "status"}.get(name, name))
            skipped = {"metrics": self.metrics.skipped, "spans": self.spans.num_rejected, "samples": self._skipped}
            if name != "validation":
                self._count_damage(name, tail.damaged + skipped.get(name, 0))
        return changed

    def _take_metrics(self, lines: list[dict[str, Any]], anew: bool) -> None:
        if anew:
            before, self.metrics = self.metrics, MetricsLog()
            self.metrics.validation, self.metrics.recall = before.validation, before.recall
            self.metrics.validated = before.validated
        self.metrics.add(lines)

    def _take_validation(self, lines: list[dict[str, Any]], anew: bool) -> None:
        self.metrics.add_validation(lines, anew=anew)

    def _take_samples(self, lines: list[dict[str, Any]], anew: bool) -> None:
        self.samples, skipped = with_samples([] if anew else self.samples, lines)
        self._skipped = skipped + (0 if anew else self._skipped)

    def _take_spans(self, lines: list[dict[str, Any]], anew: bool) -> None:
        if anew:
            self.spans, self._locations = SpanStore(), BlockLocations(self.plan)
        self.spans.add(lines)
        self._locations.add(lines)

    def _take_log(self, lines: list[dict[str, Any]], anew: bool) -> None:
        if anew:
            self.log.clear()
        for line in lines:
            self._add_log(number(line, "time"), text(line, "level") or "info", get(line, "text"))

    def _take_spikes(self, lines: list[dict[str, Any]], anew: bool) -> None:
        self.spike = lines[-1] if lines else {}

    def _read_output(self) -> set[str]:
        """The end of output.log, once, where a process died without a word."""
        if self._output_read or self.state != "crashed" or self.behind:
            return set()
        self._output_read = True
        try:
            with open_read(self.path / "output.log") as file:
                file.seek(max(0, file.seek(0, 2) - _OUTPUT_BYTES))
                lines = printable(file.read(_OUTPUT_BYTES).decode(errors="replace")).splitlines()[-40:]
        except OSError:
            return set()
        for line in lines:
            self._add_log(None, "output", line)
        return {"log"} if lines else set()

    def _add_log(self, at: float | None, level: str, content: Any) -> None:
        self.log.append(LogLine(at, level, content if isinstance(content, str) else repr(content)))
        self.num_log += 1

    def _read_predicted(self) -> set[str]:
        if not self.want_predicted:
            return set()
        stamp = stamp_of(self.path / "predicted.jsonl")
        if stamp == self._stamps.get("predicted", ()):
            return set()
        self._stamps["predicted"] = stamp
        self.predicted = read_predicted(self.path)
        return {"predicted"}

    def _count_damage(self, name: str, number_of: int) -> None:
        many = f"{number_of:,} line{'s are' if number_of > 1 else ' is'}"
        self._wrong[name] = f"{name}.jsonl: {many} damaged and left out" if number_of else None

    def _say_problems(self) -> None:
        if not self.exists and self.state == "failed":
            self.problems = ["the run failed before its first step finished and left nothing behind"]
            return
        if not self.exists:
            self.problems = [f"{printable(str(self.path))} is gone; this shows what was read earlier"]
            return
        problems = [wrong for wrong in self._wrong.values() if wrong is not None]
        if self._stamps.get("recipe", NO_FILE) == NO_FILE:
            problems.insert(
                0,
                f"{printable(str(self.path))} has no recipe.json: it is not a run directory, or is still being created",
            )
        elif not self.status and self._wrong.get("status") is None:
            problems.append("no status.json yet: the run has not started")
        self.problems = problems


def read_predicted(run_path: Path) -> SpanStore:
    """The forecast's spans, the last of many; none where the run has no forecast."""
    tail = JsonTail(run_path / "predicted.jsonl", start_bytes=2 * SPANS_BYTES)
    store = SpanStore(capacity=200_000)
    store.add(tail.read())
    while tail.behind:
        store.add(tail.read())
    return store


def _line(value: Any, *keys: str) -> str:
    return (text(value, *keys) or "").replace("\n", " ")
