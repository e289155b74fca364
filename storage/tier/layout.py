"""How the parameters of one block are laid out in its flat buffer, and how a flat buffer is cut into parts."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

ALIGN_NUMEL = 2048
"""Every parameter and every part starts at a multiple of this: 4 KiB in bfloat16, 8 KiB in float32, which is what
direct I/O and GPUDirect want of offsets, sizes and addresses."""


class Rows(NamedTuple):
    """Of a parameter that is cut along its first dimension."""

    of: str
    """Name of the whole one."""
    first: int
    total: int
    """Rows of the whole one."""


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter of a block: its state-dict name, its shape and whether weight decay applies to it."""

    name: str
    shape: tuple[int, ...]
    decay: bool
    rows: Rows | None = None
    """Which ones it has, where it is a part of a parameter."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def align_up(numel: int) -> int:
    """The smallest multiple of ALIGN_NUMEL that is not below `numel`."""
    return -(-numel // ALIGN_NUMEL) * ALIGN_NUMEL


def part_numel_even(numel: int, part_numel: int) -> int:
    """Elements of every part but the last when `numel` elements are cut into parts of at most `part_numel`, a multiple
    of ALIGN_NUMEL: as equal as that allows, since on disk every part takes a file of the same size."""
    assert numel > 0, numel
    assert part_numel > 0, part_numel
    assert part_numel % ALIGN_NUMEL == 0, part_numel
    num_parts = -(-numel // part_numel)
    return align_up(-(-numel // num_parts))


def part_ranges(numel: int, part_numel: int) -> list[tuple[int, int]]:
    """The parts of `numel` elements as (start, stop), in order; all but the last are equally long."""
    stride = part_numel_even(numel, part_numel)
    return [(start, min(start + stride, numel)) for start in range(0, numel, stride)]


def stripe(number: int, part: int, count: int) -> int:
    """Which of `count` drives holds part `part` of array number `number`; neighbours in either go to different ones."""
    return (number + part) % count


@dataclass(frozen=True)
class FlatLayout:
    """Where each parameter of one block starts in the block's flat buffers (the same for every kind of state).

    Parameters of two or more dimensions come first: nearly all of them are decayed, and hardly any other. The gaps
    between parameters are zero and stay zero: their gradient, moments and weights are never written through a view.
    """

    params: tuple[ParamSpec, ...]
    """Parameters in buffer order."""
    offsets: dict[str, int]
    """First element of each parameter, a multiple of ALIGN_NUMEL."""
    numel: int
    """Elements of the buffer with padding, a multiple of ALIGN_NUMEL."""

    @functools.cached_property
    def decay_runs(self) -> tuple[tuple[int, int, bool], ...]:
        """(first element, end, whether weight decay applies) of all elements, each run as long as it gets; the gap
        behind a parameter goes with it."""
        bounds = [*(self.offsets[param.name] for param in self.params), self.numel]
        pieces = zip(self.params, itertools.pairwise(bounds), strict=True)
        runs = [(decays, list(run)) for decays, run in itertools.groupby(pieces, key=lambda piece: piece[0].decay)]
        return tuple((run[0][1][0], run[-1][1][1], decays) for decays, run in runs)

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """(first element, end) of what belongs to no parameter."""
        starts = [self.offsets[param.name] for param in self.params]
        ends = [self.offsets[param.name] + param.numel for param in self.params]
        return [gap for gap in zip([0, *ends], [*starts, self.numel], strict=True) if gap[0] < gap[1]]

    @staticmethod
    def build(params: Sequence[ParamSpec]) -> FlatLayout:
        """Lay out `params`: those of two or more dimensions first, each group in the order given."""
        ordered = tuple(sorted(params, key=lambda param: len(param.shape) < 2))
        offsets: dict[str, int] = {}
        numel = 0
        for param in ordered:
            assert param.name not in offsets, f"parameter {param.name} twice in one buffer"
            offsets[param.name] = numel
            numel = align_up(numel + param.numel)
        assert numel > 0, "a flat buffer needs at least one element"
        return FlatLayout(ordered, offsets, numel)

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of `flat` [numel] with the parameters' names and shapes; no copy."""
        assert flat.shape == (self.numel,), (tuple(flat.shape), self.numel)
        return {
            param.name: flat[self.offsets[param.name] : self.offsets[param.name] + param.numel].view(param.shape)
            for param in self.params
        }
