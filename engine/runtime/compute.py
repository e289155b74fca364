"""What a run computes with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.config import TrainConfig
from penstock.engine.machine.compilers import Compilation, find_compilation
from penstock.engine.machine.device import compute_dtype
from penstock.engine.model.router import router_coefficient
from penstock.engine.model.runner import ModelRunner
from penstock.engine.model.spec import ModelSpec, depths
from penstock.engine.optim.base import Mode, Optimizer, find_optimizer
from penstock.engine.optim.groups import lr_factors, with_factors


@dataclass(frozen=True, slots=True)
class Compute:
    runner: ModelRunner
    optimizer: Optimizer

    @staticmethod
    def make(
        spec: ModelSpec,
        train: TrainConfig,
        device: torch.device,
        constants: dict[str, Tensor],
        compilation: Compilation | None = None,
    ) -> Compute:
        """`compilation`: what is compiled; None: what the recipe wants and the machine can."""
        what = compilation or find_compilation(train, device, lambda message: None)
        dtype = compute_dtype(train)
        aux = router_coefficient(spec.config, train.router_aux_loss, whole_documents=spec.whole_documents)
        runner = ModelRunner(
            spec, device=device, dtype=dtype, compile=what.layers, constants=constants, router_aux_loss=aux
        )
        mode: Mode = "compiled" if what.optimizer else "fused"
        optimizer = find_optimizer(train).make(mode, free_threaded=device.type == "cuda")
        return Compute(runner, with_factors(optimizer, lr_factors(train, depths(spec))))

    def with_fused_optimizer(self, train: TrainConfig) -> Compute:
        """The same with torch's fused kernel for the update."""
        factors = lr_factors(train, depths(self.runner.spec))
        return Compute(self.runner, with_factors(find_optimizer(train).make("fused"), factors))
