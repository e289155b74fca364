"""Carries out the ops of a schedule: each by the handler of its action, on the op's own lane. Nothing here allocates a
slot, chooses a place or waits for another op."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from penstock.engine.config import TrainConfig
from penstock.engine.model.runner import ModelRunner
from penstock.engine.objectives.base import OBJECTIVES, Objective
from penstock.engine.optim.base import Optimizer
from penstock.engine.plan.plan import Plan
from penstock.engine.runtime.batch import EvaluationData, SampleData, StepData
from penstock.engine.runtime.block_ops import BlockOps
from penstock.engine.runtime.exchange import Exchange
from penstock.engine.runtime.handlers import SKIPPED, Skipped, handlers_of
from penstock.engine.runtime.idle import Idle
from penstock.engine.runtime.layer_ops import BranchOps, LayerOps
from penstock.engine.runtime.memory import GpuMemory, RamMemory
from penstock.engine.runtime.sample_ops import SampleOps
from penstock.engine.runtime.sources import Weights
from penstock.engine.runtime.state_ops import StateOps
from penstock.engine.runtime.views import Views
from penstock.engine.schedule import actions as a
from penstock.engine.schedule.ops import Op
from penstock.storage.generations.store import NvmeStore


class Runtime:
    """The memory and the functions behind the ops. `perform` is what an Executor is given."""

    def __init__(
        self,
        plan: Plan,
        runner: ModelRunner,
        optimizer: Optimizer,
        store: NvmeStore | Weights | None,
        gpu: GpuMemory,
        ram: RamMemory,
        train: TrainConfig,
        logits_bytes: int,
        commit: Callable[[int], None],
        objective: Objective = OBJECTIVES["next_token"],
        exchange: Exchange | None = None,
    ) -> None:
        """`store`: the NVMe tier, of which compute ops need none; `commit` is called with a step's number."""
        self.plan, self.runner, self.optimizer = plan, runner, optimizer
        self._views = Views(plan, runner, gpu, ram)
        self._samples_passes = 0
        self.idle = self._idle(train)
        exchange = exchange or Exchange(plan, ram, None)
        self.layer_ops = LayerOps(self._views, self.idle, exchange)
        self._block_ops = BlockOps(self._views, optimizer, store, train, logits_bytes, self.idle, objective, exchange)
        state_ops = StateOps(self._views, optimizer, store, commit, self.idle, exchange)
        self.sample_ops = SampleOps(self._views, logits_bytes)
        self.handlers = handlers_of(self._block_ops, self.layer_ops, BranchOps(self._views), state_ops, self.sample_ops)

    def _idle(self, train: TrainConfig) -> Idle | None:
        """None where no group of experts is ever skipped."""
        if not self.plan.problem.senders:
            return None
        experts = {block.name: block.group for block in self.runner.spec.blocks if block.group is not None}
        return Idle(self.plan, experts, train, self.runner.device)

    def perform(self, op: Op) -> Future[Any] | Skipped | None:
        """Carry out `op`; a Future means that it goes on in the background."""
        if a.SKIPS in op.flags and self.idle is not None and self.idle.skips(op):
            return SKIPPED
        with torch.no_grad():
            future = self.handlers[op.action](op)
            if op.lane == "compute" and a.OUT in op.slots and not op.batch:
                self._block_ops.mark(op)
            if op.action is a.CLIP and self.idle is not None:
                self.idle.end_step(op.step)
        return future

    # ------------------------------------------------------------------ batches

    def begin(self, step: int, data: StepData) -> None:
        """Give the batch of `step` before its ops are submitted; forgets steps that no op can need any more."""
        steps = self._views.steps
        steps[step] = data
        for old in [s for s in steps if s < step - 1]:
            del steps[old]

    def drop_tokens(self) -> None:
        """Forget the tokens of the steps so far, which have been computed."""
        for done in self._views.steps.values():
            done.chunks = {}

    def begin_evaluation(self, batch: int, data: EvaluationData) -> None:
        """Give the tokens of a validation's pass, numbered from 1, before its ops are submitted."""
        self._views.evaluated[batch] = data

    def end_evaluation(self, batch: int) -> EvaluationData:
        """What `begin_evaluation` was given, with its loss, once the pass's "evaluate" is done; forgets it."""
        return self._views.evaluated.pop(batch)

    def begin_samples(self, data: SampleData) -> int:
        """Give the tokens of a samples' pass before its ops are submitted; its number, from -1 down."""
        self._samples_passes -= 1
        self._views.samples[self._samples_passes] = data
        return self._samples_passes

    def end_samples(self, batch: int) -> list[int]:
        """The tokens that were chosen, once all ops of the pass are done; forgets those of the pass."""
        self.sample_ops.forget()
        return self._views.samples.pop(batch).chosen

    def data(self, step: int) -> StepData:
        """What `begin` was given, with the results filled in once the step's "clip" is done."""
        return self._views.steps[step]
