"""What an optimizer is to the rest: its kinds of state, how finely it can be cut, and a step over a range.

No torch is needed to plan for one: only `OptimizerSpec.make` loads it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from penstock.engine.config import TrainConfig, nearest
from penstock.storage.files.errors import UserError, ensure
from penstock.storage.tier.layout import FlatLayout

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MASTER = "master"
"""Kind of state that every optimizer has: the float32 weights."""

Mode = Literal["compiled", "fused"]
"""How an update is computed: under torch.compile, or by a kernel of torch's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSpec:
    """An entry of `OPTIMIZERS`."""

    kinds: tuple[str, ...]
    """Its state beside the master weights: float32, as many elements as parameters, zero at first; names of folders."""
    granularity: Literal["element", "parameter"]
    """What an update must see whole: nothing, or each parameter; then a buffer is updated in one piece."""
    implementation: str
    """`module:class` of an `Optimizer`, called with a Mode and `free_threaded`."""

    @property
    def state_kinds(self) -> tuple[str, ...]:
        """All of its state, master weights first."""
        return (MASTER, *self.kinds)

    def make(self, mode: Mode, *, free_threaded: bool = False) -> Optimizer:
        """`free_threaded`: an update should not hold the interpreter's lock, so that other lanes go on meanwhile."""
        module, _, name = self.implementation.partition(":")
        made: Optimizer = getattr(importlib.import_module(module), name)(mode, free_threaded=free_threaded)
        return made


OPTIMIZERS = {
    "adamw": OptimizerSpec(
        kinds=("exp_avg", "exp_avg_sq"), granularity="element", implementation="penstock.engine.optim.adamw:AdamW"
    )
}
"""train.optimizer -> what it is."""


def find_optimizer(train: TrainConfig) -> OptimizerSpec:
    """The recipe's optimizer. Raises UserError with the nearest name for an unknown one."""
    if train.optimizer not in OPTIMIZERS:
        raise UserError(f"train.optimizer: '{train.optimizer}' is unknown; {nearest(train.optimizer, OPTIMIZERS)}")
    return OPTIMIZERS[train.optimizer]


@dataclass(frozen=True, slots=True)
class UpdateRange:
    """Elements `start` to `end` of a flat buffer."""

    layout: FlatLayout
    start: int
    end: int

    @property
    def decay_runs(self) -> list[tuple[int, int, bool]]:
        """(first element, end, whether weight decay applies), counted from the range's start, of all its elements."""
        cut = ((max(a, self.start), min(b, self.end), decays) for a, b, decays in self.layout.decay_runs)
        return [(a - self.start, b - self.start, decays) for a, b, decays in cut if a < b]

    def parameters(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of `flat` [end - start] by parameter; for optimizers that see each whole, whose ranges cut none."""
        ensure(flat.shape == (self.end - self.start,), f"{(tuple(flat.shape), self.start, self.end)}")
        offsets = {param: self.layout.offsets[param.name] - self.start for param in self.layout.params}
        return {
            param.name: flat[offset : offset + param.numel].view(param.shape)
            for param, offset in offsets.items()
            if 0 <= offset < self.end - self.start
        }


class Optimizer(Protocol):
    """Updates ranges of flat buffers in place; called by the optimizer lane, and by the compute lane on the GPU."""

    mode: Mode

    def scalars(self, train: TrainConfig, lr: float, step: int, clip: float, device: torch.device) -> Any:
        """What step number `step` (1-based) needs besides tensors, on `device`; gradients count `clip` times."""

    def step(
        self, state: Mapping[str, Tensor], gradient: Tensor, weights: Tensor, where: UpdateRange, scalars: Any
    ) -> None:
        """Update one range. state: kind -> float32 [n]; gradient: float32 or bfloat16 [n], unscaled; weights: compute
        dtype [n], to become the rounded new master weights."""
