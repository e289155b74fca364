"""The state of a committed generation as of its step: what is behind in it is brought to that as it is read.

Groups of experts that nothing was sent to are behind (engine/runtime/idle.py). Their gradients since have been zero, so
that AdamW's scalars of these steps say all of it; a generation records them.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from penstock.engine.config import TrainConfig
from penstock.engine.machine.compilers import optimizer_compiles
from penstock.engine.model.spec import ModelSpec, depths, layouts
from penstock.engine.optim.base import MASTER, Mode, Optimizer, UpdateRange, find_optimizer
from penstock.engine.optim.groups import lr_factors, with_factors
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import is_whole
from penstock.storage.generations.store import NvmeStore
from penstock.storage.tier.arena import empty_aligned
from penstock.storage.tier.manifest import ArraySpec

KEY = "idle_experts"
"""Of the record in a generation."""
SCALARS = ("beta1", "beta2", "eps", "weight_decay")
"""Fields of the recipe that a step's scalars come from, beside its learning rate."""
_OF_GROUPS = ("lr_groups", "layer_lr_decay")
"""Those that multiply it. A run that goes on with others catches up first."""
_DEFAULTS = TrainConfig()


@dataclass(frozen=True, slots=True)
class Past:
    """What a generation's buffers lack."""

    as_of: Mapping[str, int]
    """Buffer -> the last step that has been applied to it, of those that are behind."""
    scalars: Mapping[int, tuple[float, ...]]
    """Step -> learning rate and SCALARS, of all steps that one of them lacks."""

    @staticmethod
    def of(meta: Mapping[str, Any]) -> Past:
        """What a generation records."""
        record = meta.get(KEY, {"as_of": {}, "scalars": []})
        return Past(record["as_of"], {step: tuple(values) for step, *values in record["scalars"]})

    def to_json(self) -> dict[str, Any]:
        """The record; empty where nothing is behind."""
        if not self.as_of:
            return {}
        return {KEY: {"as_of": dict(self.as_of), "scalars": [[step, *row] for step, row in self.scalars.items()]}}


def is_record(meta: Mapping[str, Any]) -> bool:
    """Whether a generation's record is one of `Past.to_json`."""
    if KEY not in meta:
        return True
    record, step = meta[KEY], meta.get("step")
    if not isinstance(record, dict) or record.keys() != {"as_of", "scalars"} or not is_whole(step):
        return False
    as_of, rows = record["as_of"], record["scalars"]
    if not isinstance(as_of, dict) or not isinstance(rows, list):
        return False
    if not all(isinstance(row, list) and len(row) == 2 + len(SCALARS) for row in rows):
        return False
    if not all(isinstance(value, (int, float)) for row in rows for value in row):
        return False
    if not as_of or not all(is_whole(at) and 0 <= at < step for at in as_of.values()):
        return False
    return [row[0] for row in rows] == list(range(min(as_of.values()) + 1, step + 1))


def scalars_of(optimizer: Optimizer, train: TrainConfig, step: int, values: tuple[float, ...]) -> Any:
    """The optimizer's scalars in host memory of a step with a zero gradient, which is not clipped."""
    beta1, beta2, eps, weight_decay = values[1:]
    then = replace(train, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay)
    return optimizer.scalars(then, values[0], step, 1.0, torch.device("cpu"))


class StateReader:
    """Any thread may call it."""

    def __init__(self, store: NvmeStore, spec: ModelSpec, train: TrainConfig) -> None:
        """`spec` and `train`: of the run, whose learning rates by group may have been others. Raises UserError where
        the generation does not say what it lacks."""
        trained = {array.buffer for array in store.arrays() if array.kind == MASTER}
        if not is_record(store.meta) or not trained >= Past.of(store.meta).as_of.keys():
            raise UserError(
                f"{store.root / 'manifest.json'}: does not say how far its experts have been updated; restore it from "
                "a copy, or resume from a checkpoint"
            )
        fields = store.meta.get("fields")
        fields = fields if isinstance(fields, dict) else {}
        of_groups = {name: fields.get(f"train.{name}", getattr(_DEFAULTS, name)) for name in _OF_GROUPS}
        self.store, self._spec, self._train, self._layouts = store, spec, replace(train, **of_groups), layouts(spec)
        self._past = Past.of(store.meta)
        self.same_rates = self._train == train
        """Whether learning rates by group are the recipe's still."""

    @cached_property
    def _optimizer(self) -> Optimizer:
        """As the run's, whose bits it gives."""
        compiled = self.store.meta.get("plan", {}).get("optimizer_mode") == "compiled"
        mode: Mode = "compiled" if compiled and optimizer_compiles().ok else "fused"
        return with_factors(find_optimizer(self._train).make(mode), lr_factors(self._train, depths(self._spec)))

    def is_behind(self, buffer: str) -> bool:
        return buffer in self._past.as_of

    def catch_up(self, going_on: Container[str]) -> Past:
        """Write what is behind, but for the buffers that are `going_on` so, as uncommitted state; what is left."""
        left = {name: at for name, at in self._past.as_of.items() if name in going_on and self.same_rates}
        arrays = {spec.buffer: spec for spec in self.store.arrays() if spec.kind == MASTER}
        for buffer in self._past.as_of.keys() - left.keys():
            for number in range(len(arrays[buffer].parts())):
                values = self.part(buffer, number)
                for future in [self.store.write(buffer, kind, number, rows) for kind, rows in values.items()]:
                    future.result()
        return Past(left, self._past.scalars if left else {})

    def part(self, buffer: str, part: int) -> dict[str, Tensor]:
        """All kinds of state of a part of a buffer that is trained, float32."""
        kinds = find_optimizer(self._train).state_kinds
        array = next(spec for spec in self.store.arrays() if (spec.buffer, spec.kind) == (buffer, MASTER))
        start, end = array.parts()[part]
        state = {kind: empty_aligned(end - start, torch.float32) for kind in kinds}
        for future in [self.store.read(buffer, kind, part, values) for kind, values in state.items()]:
            future.result()
        if self.is_behind(buffer):
            gradient, weights = torch.zeros(end - start), torch.empty(end - start)
            where = UpdateRange(self._layouts[buffer], start, end)
            for step in range(self._past.as_of[buffer] + 1, max(self._past.scalars) + 1):
                scalars = scalars_of(self._optimizer, self._train, step, self._past.scalars[step])
                self._optimizer.step(state, gradient, weights, where, scalars)
        return state

    def read(self, array: ArraySpec, part: int, out: Tensor) -> None:
        """Fill `out`, of the array's dtype and the part's length."""
        if self.is_behind(array.buffer):
            out.copy_(self.part(array.buffer, part)[array.kind])
        else:
            self.store.read(array.buffer, array.kind, part, out).result()
