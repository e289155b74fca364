"""Learning rates by group: a factor per parameter, and updates that are cut where it changes."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from penstock.engine.config import TrainConfig
from penstock.engine.optim.base import Mode, Optimizer, UpdateRange
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import one_line
from penstock.storage.tier.layout import FlatLayout

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_NEAREST = 3
"""Names that a refused pattern is answered with."""


def lr_factors(train: TrainConfig, depths: Mapping[str, int], frozen: Collection[str] = ()) -> dict[str, float]:
    """Parameter -> factor on the learning rate; empty where the recipe gives none.

    `depths`: trained parameter -> blocks between it and the head (engine/model/spec.py: depths); `frozen`: the others.
    A factor is that of the first pattern of `lr_groups` that fits the name, times `layer_lr_decay` to the power of the
    depth (BEiT, arXiv 2106.08254, section 3.2; ELECTRA, arXiv 2003.10555, appendix B). Raises UserError for a pattern
    that fits no parameter.
    """
    groups, decay = train.lr_groups, train.layer_lr_decay
    if not groups and decay == 1:
        return {}
    first = {name: next((p for p in groups if fnmatchcase(name, p)), None) for name in depths}
    for pattern in groups:
        if pattern not in first.values():
            raise UserError(_fits_none(pattern, list(depths), frozen))
    return {name: (1.0 if p is None else groups[p]) * decay ** depths[name] for name, p in first.items()}


def _fits_none(pattern: str, names: list[str], frozen: Collection[str]) -> str:
    """Why a pattern counts for no parameter."""
    line = one_line(pattern)
    if any(fnmatchcase(name, pattern) for name in names):
        return f"train.lr_groups: '{line}' applies to no parameter, as earlier patterns match them all; put it first"
    if any(fnmatchcase(name, pattern) for name in frozen):
        return f"train.lr_groups: '{line}' matches only frozen parameters, which have no learning rate; remove it"
    return f"train.lr_groups: '{line}' matches no parameter; the nearest are {nearest(pattern, names)}"


def nearest(pattern: str, names: Sequence[str]) -> str:
    """The few of a model's parameter `names` that are likest a pattern which fits none; for people."""
    # A layer's number is as good as another's.
    alike = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names)
    near = difflib.get_close_matches(pattern, alike, n=_NEAREST, cutoff=0.4) or list(alike)[:_NEAREST]
    return ", ".join(map(one_line, near))


def with_factors(optimizer: Optimizer, factors: Mapping[str, float]) -> Optimizer:
    """The optimizer, with a learning rate for each factor of `lr_factors`; itself where there are none."""
    return PerGroup(optimizer, factors) if factors else optimizer


class PerGroup:
    """Updates every parameter by an optimizer at the parameter's own multiple of the learning rate."""

    def __init__(self, optimizer: Optimizer, factors: Mapping[str, float]) -> None:
        self.mode: Mode = optimizer.mode
        self._optimizer, self._factors = optimizer, factors
        self._distinct = sorted({1.0, *factors.values()})

    def scalars(self, train: TrainConfig, lr: float, step: int, clip: float, device: torch.device) -> dict[float, Any]:
        """Factor -> the optimizer's scalars."""
        return {f: self._optimizer.scalars(train, lr * f, step, clip, device) for f in self._distinct}

    def step(
        self,
        state: Mapping[str, Tensor],
        gradient: Tensor,
        weights: Tensor,
        where: UpdateRange,
        scalars: dict[float, Any],
    ) -> None:
        for start, end, factor in runs(where, self._factors):
            cut = slice(start - where.start, end - where.start)
            some = {kind: tensor[cut] for kind, tensor in state.items()}
            run = UpdateRange(where.layout, start, end)
            self._optimizer.step(some, gradient[cut], weights[cut], run, scalars[factor])


def runs(where: UpdateRange, factors: Mapping[str, float]) -> Iterator[tuple[int, int, float]]:
    """(start, end, factor) of the pieces of a range whose elements share a factor, as long as they get."""
    for factor, pieces in itertools.groupby(_pieces(where.layout, factors), key=lambda piece: piece[2]):
        together = list(pieces)
        start, end = max(together[0][0], where.start), min(together[-1][1], where.end)
        if start < end:
            yield start, end, factor


def _pieces(layout: FlatLayout, factors: Mapping[str, float]) -> Iterator[tuple[int, int, float]]:
    """(start, end, factor) of each parameter with the gap behind it."""
    bounds = [*(layout.offsets[param.name] for param in layout.params), layout.numel]
    for param, (start, end) in zip(layout.params, itertools.pairwise(bounds), strict=True):
        yield start, end, factors.get(param.name, 1.0)
