"""Ways to compute a kind of attention problem: which give the right results here, and which is fastest.

What a kernel says it can do is checked on a small problem against the tiled reference; those that pass are timed,
forward and backward apart. One that raises, computes something else or cannot be checked is left out, with a reason.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.engine.attention.backends import Backend, Gradients, Operands, Problem, work_dtype
from penstock.engine.attention.compute import group_backward, group_forward
from penstock.engine.attention.spans import Call, Cut, Span, cut, spans
from penstock.engine.clock import elapsed_s

MEASURED_KEYS = 32768
"""Earlier keys in a measurement: beyond, the rates no longer change."""
_LAUNCHES = 3
_SMALL = 192
"""Earlier keys of the problem on which kernels are checked."""
_TOLERANCE = 0.03
"""Relative error (of norms) against the reference that half-precision kernels stay well below."""
_LSE_TOLERANCE = 0.05
"""Absolute; soft-caps are computed with a fast tanh."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """A backend and how spans are cut for it."""

    backend: Backend
    cut: Cut
    segments: bool
    keys_per_call: int | None

    def groups(self, parts: Sequence[Span]) -> list[list[Call]]:
        return cut(parts, self.cut, segments=self.segments, keys_per_call=self.keys_per_call)

    def computed_pairs(self, call: Call) -> int:
        """(query, key) pairs that the backend computes for one call."""
        geometry = call.geometry
        masked = self.backend.masks_tiles and geometry.needs_mask
        return geometry.n * geometry.m if masked else geometry.pairs

    def refusal(self, x: Operands, parts: Sequence[Span], *, backward: bool, aligned: bool = False) -> str | None:
        """Why a call of it cannot be computed by its backend; None where all can. `aligned`: as if all lengths were."""
        seen = set()
        for group in self.groups(parts):
            for call in group:
                if self.cut == "whole" and self.backend.masks_tiles and call.geometry.needs_mask:
                    return "would need a mask of all queries and keys"
                problem = Problem.of(x, call.geometry, backward=backward)
                problem = replace(problem, aligned=problem.aligned or aligned)
                if problem in seen:
                    continue
                seen.add(problem)
                refusal = self.backend.refusal(problem)
                if refusal is not None:
                    return refusal
        return None

    @property
    def name(self) -> str:
        """The backend's, and whether own and earlier keys are computed apart or documents together."""
        how = "own + earlier" if self.cut == "split" else "documents in one call" if self.segments else "one call"
        return f"{self.backend.name}, {how}"


@dataclass(frozen=True, slots=True)
class Ranking:
    """How problems of one kind can be computed."""

    strategies: list[Strategy]
    """Best first; the last one is the reference."""
    tflops: dict[str, float]
    """Measured rates by strategy, of the pairs that are visible."""
    refused: dict[str, str]
    """Why not, by backend or strategy."""

    def why_not(self, name: str) -> str:
        """Of a strategy that is not among these."""
        return self.refused.get(name) or self.refused.get(name.partition(",")[0], "is not there")


def rank(x: Operands, parts: Sequence[Span], backends: Sequence[Backend], *, backward: bool, checked: bool) -> Ranking:
    """The strategies that can compute some problem of the kind of `parts`; the last of `backends` is the reference.

    In the order of `backends`. Of `x` and `parts` only what they are like matters, not the lengths. `checked`: only
    strategies whose results on a small problem are right.
    """
    kernels: list[Strategy] = []
    refused: dict[str, str] = {}
    reference = Strategy(backends[-1], "whole", False, None)
    small = _SmallProblem.like(x, parts)
    for backend in backends[:-1]:
        reasons: list[str] = []
        strategies = _strategies(backend, parts, backward=backward)
        for strategy in strategies:
            reason = _for_small(strategy).refusal(small.x, small.parts, backward=backward, aligned=True)
            if reason is None and checked:
                reason = _checked(strategy, small, reference, backward=backward)
                if reason is not None:
                    refused[strategy.name] = reason
            if reason is None:
                kernels.append(strategy)
            else:
                reasons.append(reason)
        if len(reasons) == len(strategies):
            refused[backend.name] = reasons[0]
    return Ranking([*kernels, reference], {}, refused)


def _checked(strategy: Strategy, small: _SmallProblem, reference: Strategy, *, backward: bool) -> str | None:
    """Why the strategy cannot be used. What there was no memory to check is checked again with all that is unused."""
    for _ in range(2):
        with suppress(torch.cuda.OutOfMemoryError):
            return _fault(strategy, small, reference, backward=backward)
        torch.cuda.empty_cache()
    return "not checked: no GPU memory is free for it"


def timed(ranking: Ranking, x: Operands, parts: Sequence[Span], given: Gradients | None) -> Ranking:
    """The ranking with what computes `parts` in the order of the time that it takes, where there is a choice."""
    *kernels, reference = ranking.strategies
    able = [s for s in kernels if s.refusal(x, parts, backward=given is not None) is None]
    if len(able) < 2:
        return ranking
    seconds, tflops, refused = dict.fromkeys(kernels, math.inf), dict[str, float](), dict(ranking.refused)
    for strategy in able:
        try:
            seconds[strategy], tflops[strategy.name] = _measure(strategy, x, parts, given)
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
        except Exception as error:
            refused[strategy.name] = f"fails: {_first_line(error)}"
            del seconds[strategy]
    return Ranking([*sorted(seconds, key=seconds.__getitem__), reference], tflops, refused)


def _strategies(backend: Backend, parts: Sequence[Span], *, backward: bool) -> list[Strategy]:
    keys = backend.backward_keys if backward else backend.forward_keys
    whole = [Strategy(backend, "whole", segments, keys) for segments in ([True, False] if len(parts) > 1 else [False])]
    windows = any(span.window is not None for span in parts)
    earlier = any(span.causal and span.k0 < span.q0 for span in parts)
    # A window is cut into tiles only for a kernel that has none of its own.
    if backend.masks_tiles if windows else earlier:
        return [*whole, Strategy(backend, "split", False, keys)]
    return whole


@dataclass(frozen=True, slots=True)
class _SmallProblem:
    """Random operands with the dtype, heads and widths of others, and spans with the features of others."""

    x: Operands
    parts: list[Span]
    dout: Tensor

    @staticmethod
    def like(x: Operands, parts: Sequence[Span]) -> _SmallProblem:
        window = _SMALL * 2 // 3 if any(span.window is not None for span in parts) else None
        start = _SMALL if any(span.k0 < span.q0 for span in parts) else 0
        lengths = [70, 33, 129] if len(parts) > 1 else [129]
        documents = [0, *(start + sum(lengths[:i]) for i in range(1, len(lengths)))]
        end = start + sum(lengths)
        key_end = end if parts[0].causal else start
        generator = torch.Generator(x.q.device).manual_seed(0)

        def random(rows: int, like: Tensor, width: int) -> Tensor:
            shape = (rows, like.shape[1], width)
            return torch.randn(shape, dtype=like.dtype, device=like.device, generator=generator)

        qk_dim, v_dim = x.q.shape[2], x.v.shape[2]
        q, k, v = random(end - start, x.q, qk_dim), random(key_end, x.k, qk_dim), random(key_end, x.v, v_dim)
        sample = Operands(q, k, v, x.call, start)
        small = spans(start, end, 0, key_end, documents, window)
        return _SmallProblem(sample, small, random(end - start, x.q, v_dim))

    def given(self, reference: Strategy) -> Gradients:
        """As if other keys, elsewhere, had taken half of the weight."""
        merged = _run(reference, self.x, self.parts, None)
        return Gradients(self.dout, merged["out"].to(self.x.q.dtype), merged["lse"] + math.log(2))


def _for_small(strategy: Strategy) -> Strategy:
    """The same, with earlier keys that are cut in the small problem too."""
    return strategy if strategy.keys_per_call is None else replace(strategy, keys_per_call=_SMALL // 2)


def _fault(strategy: Strategy, small: _SmallProblem, reference: Strategy, *, backward: bool) -> str | None:
    """What is wrong with the strategy's results on the small problem; None where nothing is."""
    exact = replace(small.x, q=small.x.q.float(), k=small.x.k.float(), v=small.x.v.float())
    given = small.given(reference) if backward else None
    try:
        results = _run(_for_small(strategy), small.x, small.parts, given)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:
        return f"fails: {_first_line(error)}"
    expected = _run(reference, exact, small.parts, given)
    for name, target in expected.items():
        difference = results[name].float() - target.float()
        if name == "lse":
            error_size, allowed = float(difference.abs().max()), _LSE_TOLERANCE
        else:
            error_size, allowed = float(difference.norm() / target.norm()), _TOLERANCE
        if not error_size <= allowed:
            return f"computes {name} incorrectly: off by {error_size:.2g}"
    return None


def _run(strategy: Strategy, x: Operands, parts: Sequence[Span], given: Gradients | None) -> dict[str, Tensor]:
    """Out and lse, or dq, dk and dv where gradients are `given`; 0 where a query is in no span."""
    work = work_dtype(x.q.dtype)
    if given is None:
        out = x.q.new_zeros(*x.q.shape[:2], x.v.shape[2], dtype=work)
        lse = x.q.new_zeros(x.q.shape[1], x.q.shape[0], dtype=work)
        for group in strategy.groups(parts):
            rows = x.rows(group[0])
            out[rows], lse[:, rows] = group_forward(x, strategy.backend, group)
        return {"out": out, "lse": lse}
    dq, dk, dv = (torch.zeros_like(tensor, dtype=work) for tensor in (x.q, x.k, x.v))
    for group in strategy.groups(parts):
        for part in group_backward(x, strategy.backend, group, given, dk, dv):
            dq[x.rows(group[0])] += part
    return {"dq": dq, "dk": dk, "dv": dv}


def _measure(strategy: Strategy, x: Operands, parts: Sequence[Span], given: Gradients | None) -> tuple[float, float]:
    """Best seconds of a few launches, waiting for each, and TFLOP/s of the visible pairs."""
    groups = strategy.groups(parts)
    scratch = [torch.zeros_like(t, dtype=work_dtype(t.dtype)) for t in (x.k, x.v)] if given is not None else []

    def launch() -> None:
        for group in groups:
            if given is None:
                group_forward(x, strategy.backend, group)
            else:
                for _ in group_backward(x, strategy.backend, group, given, *scratch):
                    pass

    launch()  # the first one compiles
    seconds = min(elapsed_s(launch, x.q.device) for _ in range(_LAUNCHES))
    heads, qk_dim, v_dim = x.q.shape[1], x.q.shape[2], x.v.shape[2]
    per_pair = 2 * heads * (qk_dim + v_dim if given is None else 3 * qk_dim + 2 * v_dim)
    visible = sum(call.geometry.pairs for group in groups for call in group)
    return seconds, per_pair * visible / seconds / 1e12


def _first_line(error: Exception) -> str:
    return " ".join([type(error).__name__ + ":", *str(error).strip().splitlines()[:1]])
