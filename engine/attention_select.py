"""Which backend computes a part of attention, and in how many calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from engine.attention_backends import Backend, Problem, TiledReference, TorchCpuFlash
from engine.attention_compute import Operands
from engine.attention_cuda import TorchCudaFlash
from engine.attention_pieces import Call, Cut, Span, cut

BACKENDS: tuple[Backend, ...] = (TorchCudaFlash(), TorchCpuFlash(), TiledReference())
"""In order of preference; the last one takes everything."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """A backend and how spans are cut for it."""

    backend: Backend
    cut: Cut
    segments: bool = False

    def groups(self, parts: Sequence[Span]) -> list[list[Call]]:
        """The kernel calls for `parts`."""
        return cut(parts, self.cut, segments=self.segments)

    def computed_pairs(self, call: Call) -> int:
        """(query, key) pairs that the backend computes for one call."""
        geometry = call.geometry
        masked = self.backend.masks_tiles and geometry.needs_mask
        return geometry.n * geometry.m if masked else geometry.pairs


@dataclass(frozen=True, slots=True)
class Gradients:
    """What backward needs beside the operands: dout, out [n, heads, v_dim] and lse [heads, n], merged over all keys."""

    dout: Tensor
    out: Tensor
    lse: Tensor


def select(x: Operands, parts: Sequence[Span], gradients: Gradients | None = None) -> Strategy:
    """The strategy for `parts`, which are all causal or one span that is not; backward where `gradients` are given."""
    return _candidates(x, parts, backward=gradients is not None)[0]


def _candidates(x: Operands, parts: Sequence[Span], *, backward: bool) -> list[Strategy]:
    found: list[Strategy] = []
    for backend in BACKENDS:
        whole = Strategy(backend, "whole", segments=len(parts) > 1)
        for strategy in (whole, Strategy(backend, "whole"), Strategy(backend, "split")):
            if _refusal(strategy, x, parts, backward=backward) is None:
                found.append(strategy)
    return found


def _refusal(strategy: Strategy, x: Operands, parts: Sequence[Span], *, backward: bool) -> str | None:
    """Why a call of the strategy cannot be computed by its backend; None where all can."""
    backend = strategy.backend
    for group in strategy.groups(parts):
        for call in group:
            if strategy.cut == "whole" and backend.masks_tiles and call.geometry.needs_mask:
                return "would need a mask of all queries and keys"
            problem = Problem.of(x.q, x.v, call.geometry, softcap=x.softcap, backward=backward)
            refusal = backend.refusal(problem)
            if refusal is not None:
                return refusal
    return None
