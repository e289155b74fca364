"""What carries out the passes of a plan that trains nothing: memory, lanes and the weights in it."""

from __future__ import annotations

from contextlib import ExitStack, closing

import torch
from torch import Tensor

from penstock.engine.config import TrainConfig
from penstock.engine.model.runner import ModelRunner
from penstock.engine.model.spec import layouts
from penstock.engine.plan.plan import Plan
from penstock.engine.runtime.batch import BatchCarrier
from penstock.engine.runtime.lanes import Lanes
from penstock.engine.runtime.memory import allocate_gpu, allocate_ram
from penstock.engine.runtime.runtime import Runtime
from penstock.engine.runtime.sources import Source
from penstock.engine.runtime.state import load_memory
from penstock.engine.schedule.builder import ScheduleBuilder


class Computing:
    """The memory and lanes of a plan that trains nothing, filled with the weights of `source`. Close it."""

    step = 0

    def __init__(
        self, plan: Plan, runner: ModelRunner, source: Source, logits_bytes: int, weights: dict[str, Tensor]
    ) -> None:
        """`logits_bytes`: what logits may take at once. `weights`: of buffers that stay on the compute device."""
        self.plan, self.spec, self.runner = plan, runner.spec, runner
        device, tiers = runner.device, plan.tiers
        with ExitStack() as undo:
            self._lanes = undo.enter_context(closing(Lanes.open(device, tiers["gpu"].budget_bytes)))
            self._gpu = allocate_gpu(plan, device, runner.dtype, weights)
            ram = allocate_ram(plan, compute_dtype=runner.dtype, gradient_dtype=torch.float32)
            self._arena = undo.enter_context(closing(ram.arena))
            if device.type == "cuda":
                ram.arena.pin()
            load_memory(source, plan, self._gpu, ram, runner.dtype, weights)
            train = TrainConfig(steps=1)
            self.runtime = Runtime(
                plan, layouts(self.spec), runner, None, source, self._gpu, ram, train, logits_bytes, lambda step: None
            )
            self.carrier = BatchCarrier(plan.chunks, device)
            self._begin()
            undo.pop_all()

    def _begin(self) -> None:
        self.executor, self.builder = self._lanes.executor, ScheduleBuilder(self.plan)
        self.executor.attach(self.runtime.perform)

    def restart(self) -> None:
        """Drop what is under way of a pass that was broken off."""
        self._lanes.close()
        self._lanes = Lanes.open(self.runner.device, self.plan.tiers["gpu"].budget_bytes)
        self._begin()

    @property
    def remark(self) -> str | None:
        """What is to be said of its memory."""
        return self._arena.remark

    @property
    def weights(self) -> dict[str, Tensor]:
        """Of the buffers that are on the compute device for good."""
        return {name: kinds["weights"] for name, kinds in self._gpu.buffers.items() if kinds}

    def close(self) -> None:
        self._lanes.close()  # before the memory that its ops use
        self._arena.close()
