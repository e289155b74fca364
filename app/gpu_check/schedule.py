"""Stages in their order within a time limit: what is begun, what is left out, and what a resumed check skips.

Nothing is reordered. A case begins where its estimate fits what is left, else it is named as not measured and the next
one is looked at. Every outcome is written as it is found (`Results`), so a check that is killed loses nothing of it.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from penstock.app.bench.process import raised_by_signals
from penstock.app.gpu_check.results import Results
from penstock.app.working import working
from penstock.storage.units import duration_text

LEAST_LIMIT_S = 20.0
"""Beyond twice its estimate, what a case may take before it is ended."""
KEPT = ("done", "skipped")
"""What a resumed check does not run again; what failed, was ended or was under way it does."""


@dataclass(slots=True)
class Job:
    limit_s: float
    """Seconds after which it is ended; a case that can end by itself does so before."""
    results: Results
    before: Mapping[str, Any]
    """What an earlier, unfinished run of the case has found."""
    found: Callable[[Mapping[str, Any]], None]
    """Adds to what is known of the case; on disk when it returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    estimate: Callable[[Results], float]
    """Seconds that it takes, from what is known by then; everything included."""
    run: Callable[[Job], Mapping[str, Any]]
    """Its figures, with `status` done, skipped, failed or ended, and `reason` where it is not done."""
    optional: bool = False
    """Begins only where the later stages' least time is left after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    name: str
    title: str
    cases: Sequence[Case]
    cap_s: float = math.inf
    """What all its cases together may take."""
    least_s: float = 0.0
    """What optional cases of stages before it leave it."""


@dataclass(slots=True)
class Check:
    stages: Sequence[Stage]
    results: Results
    limit_s: float
    """Of the whole run."""
    say: Callable[[str], None]
    started: float
    """By `clock`, when the limit began."""
    clock: Callable[[], float] = time.monotonic

    @property
    def left_s(self) -> float:
        return self.limit_s - (self.clock() - self.started)

    def run(self) -> None:
        """All stages, without what the results hold as done already. A signal that ends it is re-raised."""
        self.results.begin(
            {
                stage.name: [c.name for c in stage.cases if self.results.status(stage.name, c.name) not in KEPT]
                for stage in self.stages
            }
        )
        for index, stage in enumerate(self.stages):
            self._stage(stage, sum(later.least_s for later in self.stages[index + 1 :]))

    def _stage(self, stage: Stage, reserved_s: float) -> None:
        todo = [c for c in stage.cases if self.results.status(stage.name, c.name) not in KEPT]
        if there := len(stage.cases) - len(todo):
            self.say(f"{stage.name}: {there} of {len(stage.cases)} cases are already done")
        if not todo:
            return
        end = self.clock() + min(stage.cap_s, self.left_s)
        self._announce(stage, todo, end, reserved_s)
        for case in todo:
            estimate_s = case.estimate(self.results)
            before = self.results.case(stage.name, case.name)
            left_s = end - self.clock()
            if (reason := _too_late(case, estimate_s, left_s, reserved_s)) is not None:
                self._note(stage, case, {"status": "not measured", "reason": reason, "estimate_s": estimate_s})
                continue
            limit_s = min(left_s, 2 * estimate_s + LEAST_LIMIT_S)
            self._note(stage, case, {"status": "running", "reason": None, "estimate_s": estimate_s}, quiet=True)
            begun = self.clock()
            job = Job(limit_s, self.results, before, lambda more, case=case: self._found(stage, case, more))  # type: ignore[misc]
            try:
                with working(f"{stage.name}/{case.name}, about {duration_text(estimate_s)}"):
                    outcome = dict(case.run(job))
            except Exception as error:  # one case's failure keeps no other from running
                outcome = {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
            except BaseException:
                took = {"took_s": self.clock() - begun}
                self._note(stage, case, took | {"status": "ended", "reason": "gpu-check itself was ended"})
                raise
            self._note(stage, case, {"reason": None, "took_s": self.clock() - begun} | outcome)

    def _announce(self, stage: Stage, todo: Sequence[Case], end: float, reserved_s: float) -> None:
        """What the stage will probably run and leave out, by its estimates."""
        left_s = end - self.clock()
        runs, leaves = [], []
        for case in todo:
            estimate_s = case.estimate(self.results)
            if _too_late(case, estimate_s, left_s, reserved_s) is None:
                runs.append((case.name, estimate_s))
                left_s -= estimate_s
            else:
                leaves.append((case.name, estimate_s))
        seconds = sum(s for _, s in runs)
        text = f"{stage.name}: {stage.title}; about {seconds:.0f} s of {self.left_s:.0f} s left"
        for what, cases in (("", runs), ("leaves out ", leaves)):
            if cases:
                text += f"; {what}{', '.join(f'{name} ({s:.0f} s)' for name, s in cases)}"
        self.say(text)

    def _found(self, stage: Stage, case: Case, more: Mapping[str, Any]) -> None:
        self.results.put(stage.name, case.name, self.results.case(stage.name, case.name) | dict(more))

    def _note(self, stage: Stage, case: Case, outcome: Mapping[str, Any], *, quiet: bool = False) -> None:
        self._found(stage, case, outcome)
        if quiet:
            return
        now = self.results.case(stage.name, case.name)
        took = f", {now['took_s']:.0f} s" if "took_s" in outcome else ""
        why = f": {str(now['reason']).splitlines()[0]}" if now.get("reason") else ""
        self.say(f"  {stage.name}/{case.name}: {now['status']}{took}{why}")


def _too_late(case: Case, estimate_s: float, left_s: float, reserved_s: float) -> str | None:
    """Why a case is not begun; None where it is."""
    if estimate_s > left_s:
        return f"takes about {estimate_s:.0f} s, and {max(0.0, left_s):.0f} s were left"
    if case.optional and estimate_s > left_s - reserved_s:
        return f"takes about {estimate_s:.0f} s, and of {left_s:.0f} s left {reserved_s:.0f} s are for later stages"
    return None


class Ended(BaseException):
    """A signal asked the check to end."""


def ended_by_signals() -> AbstractContextManager[None]:
    """SIGTERM, SIGINT and SIGHUP raise `Ended` in the main thread: children end, and the last word is written."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    return raised_by_signals(lambda number: Ended(signal.Signals(number).name), *numbers)
