"""Which backend computes a part of attention, and in how many calls.

On a GPU every kernel that claims a problem is first checked on a small one against the tiled reference, then those that
passed are timed, forward and backward apart, on the operands at hand; the ranking is kept for all problems of the same
kind and size. A kernel that raises or computes something else is left out, and `attention_report` says why. On a CPU,
and where determinism is asked for, the order of `BACKENDS` decides and nothing is timed.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from penstock.engine import preparing
from penstock.engine.attention.backends import (
    ALIGNMENT,
    AttentionCall,
    Backend,
    Gradients,
    Operands,
    Problem,
    TiledReference,
    TorchCpuFlash,
    work_dtype,
)
from penstock.engine.attention.compute import group_backward, group_forward
from penstock.engine.attention.flash_attn import FlashAttention2, FlashAttention3, FlashAttention4
from penstock.engine.attention.spans import Call, Cut, Span, cut, spans
from penstock.engine.attention.torch_cuda import CudaKernel, TorchCudaFlash, TorchCudnn
from penstock.engine.clock import elapsed_s

BACKENDS: tuple[Backend, ...] = (
    FlashAttention3(),
    FlashAttention4(),
    TorchCudnn(),
    FlashAttention2(),
    TorchCudaFlash(),
    TorchCpuFlash(),
    TiledReference(),
)
"""In order of preference where nothing is measured; the last one takes everything and is never measured."""

_MEASURED_KEYS = 32768
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

    @property
    def name(self) -> str:
        """The backend's, and whether own and earlier keys are computed apart or documents together."""
        how = "own + earlier" if self.cut == "split" else "documents in one call" if self.segments else "one call"
        return f"{self.backend.name}, {how}"


@dataclass(frozen=True, slots=True)
class _Kind:
    """Problems that share a ranking. Lengths are rounded up to powers of two."""

    device: str
    dtype: str
    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    queries: int
    keys: int
    spans: int
    causal: bool
    earlier: bool
    aligned: bool
    """All lengths are multiples of `ALIGNMENT`."""
    window: bool
    softcap: bool
    direction: str
    deterministic: bool

    @staticmethod
    def of(x: Operands, parts: Sequence[Span], backward: bool) -> _Kind:
        lengths = {length for span in parts for length in (span.q1 - span.q0, span.k1 - span.k0, span.q0 - span.k0)}
        queries = sum(span.q1 - span.q0 for span in parts)
        keys = sum(span.k1 - span.k0 for span in parts)
        return _Kind(
            device=str(x.q.device),
            dtype=str(x.q.dtype).removeprefix("torch."),
            heads=x.q.shape[1],
            kv_heads=x.v.shape[1],
            qk_dim=x.q.shape[2],
            v_dim=x.v.shape[2],
            queries=_power_of_two(queries),
            keys=_power_of_two(min(keys, queries + _MEASURED_KEYS)),
            spans=_power_of_two(len(parts)),
            causal=parts[0].causal,
            earlier=any(span.k0 < span.q0 for span in parts),
            aligned=not any(length % ALIGNMENT for length in lengths),
            window=any(span.window is not None for span in parts),
            softcap=x.call.softcap is not None,
            direction="backward" if backward else "forward",
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )


@dataclass(frozen=True, slots=True)
class Ranking:
    """How problems of one kind can be computed."""

    strategies: list[Strategy]
    """Best first; the last one is the reference."""
    tflops: dict[str, float]
    """Measured rates by strategy, of the pairs that are visible."""
    refused: dict[str, str]
    """Why not, by backend or strategy."""


_rankings: dict[_Kind, Ranking] = {}


def select(x: Operands, parts: Sequence[Span], given: Gradients | None = None) -> Strategy:
    """The strategy for `parts`, which are all causal or one span that is not; backward where `given` is."""
    kind = _Kind.of(x, parts, given is not None)
    ranking = _rankings.get(kind)
    if ranking is None:
        gpu = x.q.device.type == "cuda"
        ranking = rank(x, parts, given, BACKENDS, checked=gpu, timed=gpu and not kind.deterministic)
        _rankings[kind] = ranking
    return ranking.strategies[0]


@dataclass(frozen=True, slots=True)
class Launch:
    """Calls of one backend for the same queries, whose results are to be merged."""

    backend: Backend
    group: tuple[Call, ...]
    pairs: int
    """(query, key) pairs that the backend computes for them."""


_launches: dict[tuple[Hashable, ...], tuple[Launch, ...]] = {}
_MOST_REMEMBERED = 8192


def launches(x: Operands, given: Gradients | None = None) -> tuple[Launch, ...]:
    """What computes all that the queries see, backward where gradients are `given`; rows of queries occur once.

    Remembered by position, as every layer asks the same of a chunk: finding it again would take the lane as long as the
    kernel's own launch.
    """
    # Documents that end before the queries are seen by none, those that begin behind them neither.
    documents, call = x.documents, x.call
    shown = documents[bisect_right(documents, x.start) - 1 : bisect_left(documents, x.start + x.q.shape[0])]
    key = (
        *(x.q.device, x.q.dtype, *x.q.shape, *x.v.shape, x.start, x.key_start, call.softcap is None),
        *(call.window, given is None, torch.are_deterministic_algorithms_enabled(), *shown),
    )
    found = _launches.get(key)
    if found is None:
        if len(_launches) >= _MOST_REMEMBERED:
            _launches.clear()
        found = _launches[key] = tuple(_find_launches(x, given))
    return found


def _find_launches(x: Operands, given: Gradients | None) -> Iterator[Launch]:
    end, key_end = x.start + x.q.shape[0], x.key_start + x.k.shape[0]
    parts = spans(x.start, end, x.key_start, key_end, x.documents, x.call.window)
    causal = [span for span in parts if span.causal]
    for unit in (causal, parts[len(causal) :]):
        if unit:
            strategy = select(x, unit, given)
            for group in strategy.groups(unit):
                yield Launch(strategy.backend, tuple(group), sum(strategy.computed_pairs(call) for call in group))


def measure(
    device: torch.device,
    dtype: torch.dtype,
    *,
    heads: int,
    kv_heads: int,
    qk_dim: int,
    v_dim: int,
    chunk: int,
    total: int,
    softmax_scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    """Choose kernels for chunks of a document of `total` tokens now, on random operands, while memory is still free.

    What is not chosen here is chosen when it first occurs.
    """

    def random(rows: int, num_heads: int, width: int) -> Tensor:
        return torch.randn(rows, num_heads, width, dtype=dtype, device=device)

    chunk = min(chunk, total)
    call = AttentionCall(qk_dim**-0.5 if softmax_scale is None else softmax_scale, window, softcap)
    # Later chunks are of the kind of the last one here.
    ends = range(chunk, min(total, 2 * chunk + _MEASURED_KEYS) + 1, chunk)
    for done, end in enumerate(ends):
        preparing.tell(done / len(ends), f"{heads} heads of {qk_dim}, {chunk:,} queries on {end:,} keys")
        q = random(chunk, heads, qk_dim)
        k, v = random(end, kv_heads, qk_dim), random(end, kv_heads, v_dim)
        x = Operands(q, k, v, call, start=end - chunk)
        parts = spans(x.start, end, 0, end, [0], window)
        select(x, parts)
        lse = q.new_full((heads, chunk), math.log(end), dtype=work_dtype(dtype))
        select(x, parts, Gradients(random(chunk, heads, v_dim), random(chunk, heads, v_dim), lse))


def attention_report() -> list[dict[str, Any]]:
    """What has been chosen so far, kind by kind: plain values, fit for JSON.

    Beside the kind's fields: "chosen" (the strategy, best first in "ranking"), "tflops" by strategy where it was
    measured, "refused" (backend or strategy -> reason).
    """
    return [
        {
            **asdict(kind),
            "chosen": ranking.strategies[0].name,
            "ranking": [strategy.name for strategy in ranking.strategies],
            "tflops": {name: round(value, 1) for name, value in ranking.tflops.items()},
            "refused": dict(ranking.refused),
        }
        for kind, ranking in _rankings.items()
    ]


def installed(device: torch.device) -> dict[str, str | None]:
    """Kernels for CUDA -> None where they are there for this GPU, else why they are not."""
    return {backend.name: backend.absent(device) for backend in BACKENDS if isinstance(backend, CudaKernel)}


def chosen(device_type: str) -> dict[str, list[str]]:
    """ "forward" and "backward" -> names of the backends that have been chosen on devices of this type, in order."""
    found: dict[str, list[str]] = {"forward": [], "backward": []}
    for kind, ranking in _rankings.items():
        name, names = ranking.strategies[0].backend.name, found[kind.direction]
        if torch.device(kind.device).type == device_type and name not in names:
            names.append(name)
    return found


def forget() -> None:
    """Drop all rankings: the next problems are checked and measured anew."""
    _rankings.clear()
    _launches.clear()


def rank(
    x: Operands,
    parts: Sequence[Span],
    given: Gradients | None,
    backends: Sequence[Backend],
    *,
    checked: bool,
    timed: bool,
) -> Ranking:
    """The strategies that can compute `parts`, best first; the last of `backends` is the reference.

    `checked`: only those whose results on a small problem are right. `timed`: by measurement, where there is a choice.
    """
    backward = given is not None
    kernels: list[Strategy] = []
    refused: dict[str, str] = {}
    for backend in backends[:-1]:
        reasons: list[str] = []
        strategies = _strategies(backend, parts, backward=backward)
        for strategy in strategies:
            reason = _refusal(strategy, x, parts, backward=backward)
            if reason is None and checked:
                reason = _fault(strategy, x, parts, backward=backward)
                if reason is not None:
                    refused[strategy.name] = reason
            if reason is None:
                kernels.append(strategy)
            else:
                reasons.append(reason)
        if len(reasons) == len(strategies):
            refused[backend.name] = reasons[0]
    tflops: dict[str, float] = {}
    if timed and len(kernels) > 1:
        seconds = {}
        for strategy in kernels:
            try:
                seconds[strategy], tflops[strategy.name] = _measure(strategy, x, parts, given)
            except torch.cuda.OutOfMemoryError:
                seconds[strategy] = math.inf
            except Exception as error:
                refused[strategy.name] = f"fails: {_first_line(error)}"
        kernels = sorted(seconds, key=seconds.__getitem__)
    return Ranking([*kernels, _reference(backends[-1])], tflops, refused)


def _reference(backend: Backend = BACKENDS[-1]) -> Strategy:
    return Strategy(backend, "whole", False, None)


def _strategies(backend: Backend, parts: Sequence[Span], *, backward: bool) -> list[Strategy]:
    keys = backend.backward_keys if backward else backend.forward_keys
    whole = [Strategy(backend, "whole", segments, keys) for segments in ([True, False] if len(parts) > 1 else [False])]
    windows = any(span.window is not None for span in parts)
    earlier = any(span.causal and span.k0 < span.q0 for span in parts)
    # A window is cut into tiles only for a kernel that has none of its own.
    if backend.masks_tiles if windows else earlier:
        return [*whole, Strategy(backend, "split", False, keys)]
    return whole


def _refusal(strategy: Strategy, x: Operands, parts: Sequence[Span], *, backward: bool) -> str | None:
    """Why a call of the strategy cannot be computed by its backend; None where all can."""
    seen = set()
    for group in strategy.groups(parts):
        for call in group:
            if strategy.cut == "whole" and strategy.backend.masks_tiles and call.geometry.needs_mask:
                return "would need a mask of all queries and keys"
            problem = Problem.of(x, call.geometry, backward=backward)
            if problem in seen:
                continue
            seen.add(problem)
            refusal = strategy.backend.refusal(problem)
            if refusal is not None:
                return refusal
    return None


def _fault(strategy: Strategy, x: Operands, parts: Sequence[Span], *, backward: bool) -> str | None:
    """What is wrong with the strategy's results on a small problem of this kind; None where nothing is."""
    sample, small, given = _small_problem(x, parts)
    exact = replace(sample, q=sample.q.float(), k=sample.k.float(), v=sample.v.float())
    if strategy.keys_per_call is not None:
        strategy = replace(strategy, keys_per_call=_SMALL // 2)
    try:
        results = _run(strategy, sample, small, given if backward else None)
    except torch.cuda.OutOfMemoryError:
        return None  # says nothing about the kernel
    except Exception as error:
        return f"fails: {_first_line(error)}"
    expected = _run(_reference(), exact, small, given if backward else None)
    for name, target in expected.items():
        difference = results[name].float() - target.float()
        if name == "lse":
            error_size, allowed = float(difference.abs().max()), _LSE_TOLERANCE
        else:
            error_size, allowed = float(difference.norm() / target.norm()), _TOLERANCE
        if not error_size <= allowed:
            return f"computes {name} incorrectly: off by {error_size:.2g}"
    return None


def _small_problem(x: Operands, parts: Sequence[Span]) -> tuple[Operands, list[Span], Gradients]:
    """Random operands with the dtype, heads and widths of `x`, spans with the features of `parts`, merged gradients."""
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
    merged = _run(_reference(), sample, small, None)
    # As if other keys, elsewhere, had taken half of the weight.
    given = Gradients(random(end - start, x.q, v_dim), merged["out"].to(q.dtype), merged["lse"] + math.log(2))
    return sample, small, given


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
    """Best seconds of a few launches on the operands at hand, waiting for each, and TFLOP/s of the visible pairs."""
    first = parts[0]
    if first.window is None:
        own = first.q0 if first.causal else first.k1
        first = replace(first, k0=max(first.k0, own - _MEASURED_KEYS))
    keys = slice(first.k0 - x.key_start, parts[-1].k1 - x.key_start)
    x = replace(x, k=x.k[keys], v=x.v[keys], key_start=first.k0)
    groups = strategy.groups([first, *parts[1:]])
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


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
