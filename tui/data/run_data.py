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
from penstock.tui.data.blocks import BlockLocation, BlockLocations
from penstock.tui.data.fields import get, number, objects, text, whole
from penstock.tui.data.metrics import MetricsLog, MetricsReader, Samples, with_samples
from penstock.tui.data.spans import SpanStore

SAMPLES_BYTES = 4 << 20
"""So much of the end of a long samples.jsonl is read."""
SPANS_BYTES = 24 << 20
"""So much of a long spans.jsonl is read: about as many spans as a SpanStore holds."""

LOG_BYTES = 1 << 20
LOG_LINES = 5000
_OBJECT_BYTES = 64 << 20
"""Of plan.json, the largest; a plan of a deep model takes some megabytes."""
_OUTPUT_BYTES = 8192
_SLOW_S = 2.0
_POLL_S = 0.3

STATES = (*ATTENDED_STATES, *ENDED_STATES, "crashed", "gone")


class LogLine(NamedTuple):
    """One message of the run."""

    time: float | None
    level: str
    text: str
    step: int | None


class Prepared(NamedTuple):
    """One item of what was prepared before the first step."""

    name: str
    done: bool
    seconds: float | None
    detail: str = ""
    fraction: float | None = None
    """How much of it is done, 0..1; None where unknown."""


class Checkpoint(NamedTuple):
    """A generation that is kept."""

    name: str
    step: int


class RunData:
    """One thread calls `poll`; the attributes may be read by any thread, objects in them only grow or are replaced."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
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
        self.spans = SpanStore()
        self.predicted: SpanStore | None = None
        """The forecast's step; read once `want_predicted` is set."""
        self.want_predicted = False
        self.log: deque[LogLine] = deque(maxlen=LOG_LINES)
        self.num_log = 0
        """Lines ever added to `log`."""
        self.spike: dict[str, Any] = {}
        self.checkpoints: list[Checkpoint] = []
        self.committed_step: int | None = None
        self.problems: list[str] = []
        self.behind = True
        self._looked_at = 0.0
        self._manifests: list[tuple[Path, tuple[int, ...] | None]] = []
        self._locations = BlockLocations({})
        self._stamps: dict[str, tuple[int, ...] | None] = {}
        self._wrong: dict[str, str] = {}
        """What is wrong by what is concerned."""
        self._metrics = MetricsReader(path)
        self.samples: list[Samples] = []
        """What the model wrote, step by step, ascending; replaced, never changed."""
        most = {"samples": SAMPLES_BYTES, "spans": SPANS_BYTES, "log": LOG_BYTES, "spikes": LOG_BYTES}
        self._tails = {name: JsonTail(path / f"{name}.jsonl", start_bytes=size) for name, size in most.items()}
        self._skipped = {"samples": 0}
        self._output_read = False
        self._why_gone: str | None = None

    @property
    def name(self) -> str:
        return printable(self.path.name)

    @property
    def metrics(self) -> MetricsLog:
        return self._metrics.log

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
        """Why the run failed, or what can be told of the end of a crashed one."""
        return text(self.status, "error") or self._why_gone

    @property
    def step(self) -> int:
        return max(whole(self.status, "step") or 0, self.metrics.last_step)

    @property
    def total_steps(self) -> int | None:
        return whole(self.status, "total_steps") or whole(self.plan, "steps") or whole(self.recipe, "train", "steps")

    @property
    def now(self) -> dict[str, Any]:
        """Lane -> ops under way, as the run's process last said; {} when none works on it."""
        result = get(self.status, "now")
        return result if self.state == "running" and isinstance(result, dict) else {}

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
        return min(self._metrics.tail.share_read, self._tails["spans"].share_read)

    def eta_s(self) -> float | None:
        """Seconds to the end of a run that goes on."""
        total = self.total_steps
        if total is None or self.state not in ("running", "paused", "stale"):
            return None
        now = self.clock() if self.state == "running" else None
        return self.metrics.eta_s(total, number(self.status, "started"), now)

    def blocks(self) -> list[BlockLocation]:
        """Every block and where it is now. For the polling thread."""
        return self._locations.snapshot(self.now, self.clock_s, live=self.state in ("running", "paused", "stale"))

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
                self.behind = any(tail.behind for tail in (self._metrics.tail, *self._tails.values()))
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
            stamp = _stamp(path)
            if stamp == self._stamps.get(name, ()):
                continue
            result, wrong = examine_object(path, _OBJECT_BYTES)
            self._stamps[name] = stamp
            self._note(name, wrong)
            if result is not None or stamp is None:
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
        stamps = [(manifest, _stamp(manifest)) for manifest in manifests]
        if stamps == self._manifests:
            return set()
        self._manifests = stamps
        self.checkpoints = [Checkpoint(*result) for result in checkpoint_steps(self.path)]
        self.committed_step = committed_step(self.path)
        return {"checkpoints"}

    def _read_lines(self) -> set[str]:
        changed = {"metrics"} if self._metrics.read() else set()
        self._count_damage("metrics", self._metrics.damaged)
        for name, take in (
            ("samples", self._take_samples),
            ("spans", self._take_spans),
            ("log", self._take_log),
            ("spikes", self._take_spikes),
        ):
            tail = self._tails[name]
            lines = tail.read()
            if lines or tail.began_anew:
                take(lines, tail.began_anew)
                changed.add("status" if name == "spikes" else name)
            skipped = self.spans.num_rejected if name == "spans" else self._skipped.get(name, 0)
            self._count_damage(name, tail.damaged + skipped)
        return changed

    def _take_samples(self, lines: list[dict[str, Any]], anew: bool) -> None:
        self.samples, skipped = with_samples([] if anew else self.samples, lines)
        self._skipped["samples"] = skipped + (0 if anew else self._skipped["samples"])

    def _take_spans(self, lines: list[dict[str, Any]], anew: bool) -> None:
        if anew:
            self.spans, self._locations = SpanStore(), BlockLocations(self.plan)
        self.spans.add(lines)
        self._locations.add(lines)

    def _take_log(self, lines: list[dict[str, Any]], anew: bool) -> None:
        if anew:
            self.log.clear()
        for line in lines:
            self._add_log(number(line, "time"), text(line, "level") or "info", get(line, "text"), whole(line, "step"))

    def _take_spikes(self, lines: list[dict[str, Any]], anew: bool) -> None:
        self.spike = lines[-1] if lines else {}

    def _read_output(self) -> set[str]:
        """The end of output.log, once, where a process died without a word."""
        if self._output_read or self.state != "crashed" or self._tails["log"].behind:
            return set()
        self._output_read = True
        try:
            with open_read(self.path / "output.log") as file:
                file.seek(max(0, file.seek(0, 2) - _OUTPUT_BYTES))
                lines = printable(file.read(_OUTPUT_BYTES).decode(errors="replace")).splitlines()[-40:]
        except OSError:
            return set()
        for line in lines:
            self._add_log(None, "output", line, None)
        return {"log"} if lines else set()

    def _add_log(self, at: float | None, level: str, content: Any, step: int | None) -> None:
        self.log.append(LogLine(at, level, content if isinstance(content, str) else repr(content), step))
        self.num_log += 1

    def _read_predicted(self) -> set[str]:
        if not self.want_predicted:
            return set()
        stamp = _stamp(self.path / "predicted.jsonl")
        if stamp == self._stamps.get("predicted", ()):
            return set()
        self._stamps["predicted"] = stamp
        self.predicted = read_predicted(self.path)
        return {"predicted"}

    def _count_damage(self, name: str, number_of: int) -> None:
        many = f"{number_of:,} line{'s are' if number_of > 1 else ' is'}"
        self._note(name, f"{name}.jsonl: {many} damaged and left out" if number_of else None)

    def _note(self, name: str, wrong: str | None) -> None:
        if wrong is None:
            self._wrong.pop(name, None)
        else:
            self._wrong[name] = wrong

    def _say_problems(self) -> None:
        if not self.exists and self.state == "failed":
            self.problems = ["the run failed before its first step finished and left nothing behind"]
            return
        if not self.exists:
            self.problems = [f"{printable(str(self.path))} is gone; this shows what was read earlier"]
            return
        problems = list(self._wrong.values())
        if self._stamps.get("recipe") is None:
            problems.insert(
                0,
                f"{printable(str(self.path))} has no recipe.json: it is not a run directory, or is still being created",
            )
        elif not self.status and "status" not in self._wrong:
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


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
