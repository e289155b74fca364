"""What carries out the passes of a plan without a run: memory, lanes and the weights in it."""

from __future__ import annotations

from contextlib import ExitStack, closing

from torch import Tensor

from penstock.engine.config import TrainConfig
from penstock.engine.model.runner import ModelRunner
from penstock.engine.model.spec import layouts
from penstock.engine.optim.base import find_optimizer
from penstock.engine.plan.plan import Plan
from penstock.engine.ranks.memory import shared_arena
from penstock.engine.ranks.ranks import ALONE, Ranks
from penstock.engine.runtime.batch import BatchCarrier
from penstock.engine.runtime.lanes import Lanes
from penstock.engine.runtime.memory import allocate_gpu, allocate_ram, shared_slots
from penstock.engine.runtime.runtime import Runtime
from penstock.engine.runtime.sources import Weights
from penstock.engine.runtime.state import load_memory
from penstock.engine.schedule.builder import ScheduleBuilder


class Computing:
    """The memory and lanes of a plan of which nothing is on NVMe but weights to read, filled from `source`; no pass
    updates any. Close it."""

    step = 0

    def __init__(
        self,
        plan: Plan,
        runner: ModelRunner,
        source: Weights,
        logits_bytes: int,
        weights: dict[str, Tensor] | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """`logits_bytes`: what logits may take at once. `weights`: of buffers that stay on the compute device. `ranks`:
        each makes one of the same plan, and weights in RAM are there once."""
        plan = plan.of_rank(ranks.rank)
        self.plan, self.spec, self.runner, self._ranks = plan, runner.spec, runner, ranks
        device = runner.device
        with ExitStack() as undo:
            self._lanes = undo.enter_context(closing(self._open_lanes()))
            self._gpu = allocate_gpu(plan, device, weights)
            shared = shared_arena(ranks, shared_slots(plan)) if ranks.count > 1 else None
            ram = self._ram = allocate_ram(plan, shared)
            undo.enter_context(closing(ram))
            for arena in (ram.arena, shared) if device.type == "cuda" else ():
                if arena is not None:
                    arena.pin()
            load_memory(source, plan, self._gpu, ram, weights or ())
            ranks.meet()  # weights that others have read are there as well
            train = TrainConfig(steps=1)
            work = plan, runner, find_optimizer(train).make("fused"), source, self._gpu, ram
            self.runtime = Runtime(*work, train, logits_bytes, lambda step: None)
            self.carrier = BatchCarrier(plan, device)
            self._begin()
            undo.pop_all()

    def _open_lanes(self) -> Lanes:
        return Lanes.open(self.runner.device, self.plan.tiers["gpu"].budget_bytes, ranks=self._ranks.count)

    def _begin(self) -> None:
        self.executor, self.builder = self._lanes.executor, ScheduleBuilder(self.plan)
        self.executor.attach(self.runtime.perform)

    def restart(self) -> None:
        """Drop what is under way of a pass that was broken off."""
        self._lanes.close()
        self._lanes = self._open_lanes()
        self._begin()

    @property
    def remark(self) -> str | None:
        """What is to be said of its memory."""
        return self._ram.arena.remark

    @property
    def weights(self) -> dict[str, Tensor]:
        """Of the buffers that are on the compute device for good."""
        return {name: kinds["weights"] for name, kinds in self._gpu.buffers.items() if kinds}

    def gradients(self) -> dict[str, Tensor]:
        """Of each trained parameter, by name, after the pass of a step: float32."""
        buffers = [held for memory in (self._gpu, self._ram) for held in memory.buffers.items()]
        flats = {name: kinds["gradient"] for name, kinds in buffers if "gradient" in kinds}
        flat = layouts(self.spec)
        return {param: view for name, tensor in flats.items() for param, view in flat[name].views(tensor).items()}

    def close(self) -> None:
        self._lanes.close()  # before the memory that its ops use
        self._ram.close()
