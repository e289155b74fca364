"""Before the first step: what the ops take on this device, compiled or not, whichever is over sooner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.engine.events import Observer
from penstock.engine.forecast.costs import Calibration
from penstock.engine.forecast.request import PlanRequest
from penstock.engine.forecast.search import SearchResult
from penstock.engine.machine.profile import Machine
from penstock.engine.model.tokens import MicroBatch
from penstock.engine.preparing import Checklist
from penstock.engine.runtime.calibrate import calibrate
from penstock.engine.runtime.compute import Compute
from penstock.engine.runtime.failures import explain
from penstock.engine.runtime.lanes import Lanes
from penstock.storage.files.errors import UserError

COMPILE_S = 20.0
"""About what compiling a model's layers and its loss takes where none of it is in Inductor's cache."""

GAIN = 0.3
"""Share of a step's time that compiling layers saves, at most (docs/results/step-cpu.md)."""

CERTAIN_S = 3 * COMPILE_S / GAIN
"""Layers of a run that is planned to compute for longer are compiled without a question."""

OPTIMIZER_S = 900.0
"""AdamW, which moves a fifth less bytes then, is compiled for a run that computes for longer: that takes 5 to 10 s."""


@dataclass(slots=True)
class Tuning:
    """The measurements of one run's preparation; `batch` is the typical one."""

    task: PlanRequest
    machine: Machine
    batch: Sequence[MicroBatch]
    lanes: Lanes
    checklist: Checklist
    observer: Observer

    def run(self, result: SearchResult, compute: Compute, steps_left: int | None) -> tuple[Compute, Calibration]:
        """What the run computes with, and what the ops take with that. With `steps_left` and train.compile=auto it is
        measured whether compiling pays within so many steps; without, what can be compiled is."""
        compiled = self.task.recipe.train.compile == "auto" and compute.runner.compiled
        if compiled and steps_left is not None and steps_left * result.best.step_s < OPTIMIZER_S:
            compute = compute.with_fused_optimizer(self.task.recipe.train)
        if not compiled or steps_left is None or steps_left * result.best.step_s > CERTAIN_S:
            what = "compiling, and timing the ops" if compute.runner.compiled else "timing the ops"
            return compute, self._calibrate(what, result, compute)
        compute.runner.compile(False)
        with self.checklist.step("timing uncompiled layers"):
            eager_s = self._step_s(result, self._measure(result, compute, brief=True))
        if steps_left * eager_s * GAIN < COMPILE_S:
            self.observer.on_message(
                f"layers are not compiled: {steps_left:,} steps of about {eager_s:.2g} s finish sooner without",
                detail=True,
            )
            return compute, self._calibrate("timing the ops", result, compute)
        compute.runner.compile(True)
        return compute, self._calibrate("compiling, and timing the ops", result, compute)

    def _calibrate(self, what: str, result: SearchResult, compute: Compute) -> Calibration:
        with self.checklist.step(what):
            return self._measure(result, compute, brief=False)

    def _measure(self, result: SearchResult, compute: Compute, *, brief: bool) -> Calibration:
        what = result.plan, compute, self.task.recipe.train, self.batch, self.machine, self.lanes.executor
        try:
            return calibrate(*what, brief=brief)
        except UserError:
            raise
        except Exception as error:
            if (text := explain(error, None, result.plan)) is None:
                raise
            raise text from error

    def _step_s(self, result: SearchResult, calibration: Calibration) -> float:
        """Seconds of a step of the plan with these times."""
        task = replace(self.task, graph_bytes=None)
        known = (result.best.chunk_tokens, result.best.choice)
        documents, filled = [m.documents for m in self.batch], [m.filled for m in self.batch]
        return task.search(self.machine, calibration, documents, filled, known=known, only=known).best.step_s
