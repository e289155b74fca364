"""Which backend computes a part of attention, and in how many calls.

`prepare` ranks what a run can show, before the run: on a GPU kernels are checked and timed (engine/attention/rank.py),
and a run that is resumed takes up the rankings that it recorded. Nothing is timed where attention is computed: problems
that are of no known kind take the order of `BACKENDS`, of kernels that are checked on a GPU. On a CPU, and where
determinism is required, that order decides everywhere.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.engine import preparing
from penstock.engine.attention.backends import (
    AttentionCall,
    Backend,
    Gradients,
    Operands,
    TiledReference,
    TorchCpuFlash,
    work_dtype,
)
from penstock.engine.attention.flash_attn import FlashAttention2, FlashAttention3, FlashAttention4
from penstock.engine.attention.rank import MEASURED_KEYS, Ranking, Strategy, rank, timed
from penstock.engine.attention.spans import Call, Span, most_segments, spans
from penstock.engine.attention.torch_cuda import CudaKernel, TorchCudaFlash, TorchCudnn, capability

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

MEASURED = frozenset({"cuda"})
"""Types of the devices on which there is a choice of kernels."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """Problems that the same strategies can compute, whatever their lengths."""

    device: str
    dtype: str
    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    causal: bool
    earlier: bool
    several: bool
    """Spans, of as many documents."""
    window: bool
    softcap: bool
    direction: str
    deterministic: bool

    @staticmethod
    def of(x: Operands, parts: Sequence[Span], *, backward: bool) -> _Kind:
        return _Kind(
            device=str(x.q.device),
            dtype=str(x.q.dtype).removeprefix("torch."),
            heads=x.q.shape[1],
            kv_heads=x.v.shape[1],
            qk_dim=x.q.shape[2],
            v_dim=x.v.shape[2],
            causal=parts[0].causal,
            earlier=any(span.k0 < span.q0 for span in parts),
            several=len(parts) > 1,
            window=any(span.window is not None for span in parts),
            softcap=x.call.softcap is not None,
            direction="backward" if backward else "forward",
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )


class _Size(NamedTuple):
    """What decides which of the strategies is fastest."""

    queries: int
    keys: int
    spans: int

    @staticmethod
    def of(parts: Sequence[Span]) -> _Size:
        return _Size(sum(s.q1 - s.q0 for s in parts), sum(s.k1 - s.k0 for s in parts), len(parts))

    def distance(self, other: _Size) -> float:
        return sum(abs(math.log2(a / b)) for a, b in zip(self, other, strict=True))


_rankings: dict[_Kind, dict[_Size, Ranking]] = {}
_chosen: dict[tuple[str, str], dict[str, None]] = {}
"""(device type, direction) -> names of the backends that have computed something."""


def measured(device: torch.device) -> bool:
    """Whether kernels are checked there, and timed unless determinism is required."""
    return device.type in MEASURED


def select(x: Operands, parts: Sequence[Span], given: Gradients | None = None) -> Strategy:
    """The strategy for `parts`, which are all causal or one span that is not; backward where `given` is. The best one
    for the most similar lengths that a ranking is known for."""
    backward = given is not None
    kind, size = _Kind.of(x, parts, backward=backward), _Size.of(parts)
    known = _rankings.get(kind)
    if known is None:
        ranking = rank(x, parts, BACKENDS, backward=backward, checked=measured(x.q.device))
        known = _rankings[kind] = {size: ranking}
    ranking = known[min(known, key=size.distance)]
    strategy = next(s for s in ranking.strategies if s.refusal(x, parts, backward=backward) is None)
    _chosen.setdefault((x.q.device.type, kind.direction), {})[strategy.backend.name] = None
    return strategy


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

    Remembered by position, as every layer asks the same of a chunk: finding it takes as long as the kernel's launch.
    """
    # Documents that end before the queries are seen by none, those that begin behind them neither.
    documents, call = x.documents, x.call
    shown = documents[bisect_right(documents, x.start) - 1 : bisect_left(documents, x.start + x.q.shape[0])]
    key = (
        *(x.q.device, x.q.dtype, *x.q.shape, *x.v.shape, x.start, x.key_start, call.softcap is None),
        *(call.window, given is None, torch.are_deterministic_algorithms_enabled(), *shown),
    )
    result = _launches.get(key)
    if result is None:
        if len(_launches) >= _MOST_REMEMBERED:
            _launches.clear()
        result = _launches[key] = tuple(_find_launches(x, given))
    return result


def _find_launches(x: Operands, given: Gradients | None) -> Iterator[Launch]:
    end, key_end = x.start + x.q.shape[0], x.key_start + x.k.shape[0]
    parts = spans(x.start, end, x.key_start, key_end, x.documents, x.call.window)
    causal = [span for span in parts if span.causal]
    for unit in (causal, parts[len(causal) :]):
        if unit:
            strategy = select(x, unit, given)
            for group in strategy.groups(unit):
                yield Launch(strategy.backend, tuple(group), sum(strategy.computed_pairs(call) for call in group))


@dataclass(frozen=True, slots=True)
class Attends:
    """What a run needs of a layer's attention."""

    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    chunk: int
    """Queries at once, at most."""
    total: int
    """Keys of a document, at most."""
    window: int | None = None
    softcap: float | None = None
    pieces: bool = False
    """Keys also come without the queries' own: as long as a chunk where they are streamed, or a document's prefix."""

    def cases(self) -> Iterator[_Case]:
        """Problems of every kind that there can be, of lengths the extremes: own keys, as many earlier ones, and
        earlier ones up to where rates no longer change; one document, two, and as many as a kernel takes at once."""
        chunk = min(self.chunk, self.total)
        for window in dict.fromkeys((None, self.window)):
            far = min(self.total - chunk, MEASURED_KEYS if window is None else window)
            near = min(chunk, far) if window is None else far
            for start in (0, near):
                for count in (1, 2, most_segments(chunk)):
                    yield _Case(start, chunk, start + chunk, _documents(start, chunk, count, window), window)
            yield _Case(far, chunk, far + chunk, [0], window)
            if self.pieces:
                yield _Case(chunk if window is None else max(chunk, window - chunk + 1), chunk, chunk, [0], window)


class _Case(NamedTuple):
    """`chunk` queries from `start` and the stream's first `keys` keys."""

    start: int
    chunk: int
    keys: int
    documents: list[int]
    window: int | None

    def operands(self, layer: Attends, device: torch.device, dtype: torch.dtype) -> tuple[Operands, Gradients]:
        """Random ones."""

        def random(rows: int, num_heads: int, width: int) -> Tensor:
            return torch.randn(rows, num_heads, width, dtype=dtype, device=device)

        queries, out = (random(self.chunk, layer.heads, width) for width in (layer.qk_dim, layer.v_dim))
        keys, values = (random(self.keys, layer.kv_heads, width) for width in (layer.qk_dim, layer.v_dim))
        call = AttentionCall(layer.qk_dim**-0.5, self.window, layer.softcap)
        lse = queries.new_full((layer.heads, self.chunk), math.log(self.keys), dtype=work_dtype(dtype))
        return Operands(queries, keys, values, call, self.start), Gradients(random(*out.shape), out, lse)


def _documents(start: int, chunk: int, count: int, window: int | None) -> list[int]:
    """Starts of up to `count` documents of a chunk: the first, which began before it, shows its window if one can."""
    count = min(count, chunk)
    first = max(chunk // count, min((window or 0) + 1, chunk - count + 1))
    rest = chunk - first
    return [0, *(start + first + rest * i // (count - 1) for i in range(count - 1))]


def prepare(
    device: torch.device,
    dtype: torch.dtype,
    layers: Sequence[Attends],
    recorded: Mapping[str, Sequence[str]] | None = None,
) -> list[str]:
    """Choose kernels for all that the layers can show, on random operands, while memory is still free; forget all
    others.

    `recorded`: what `rankings` said on an equal machine; kinds that it knows are not timed. Returns why recorded
    kernels cannot be used any more; their kinds are then chosen anew.
    """
    forget()
    checked: dict[_Kind, Ranking] = {}
    lost: dict[str, None] = {}
    cases = [(layer, case) for layer in dict.fromkeys(layers) for case in layer.cases()]
    for done, (layer, case) in enumerate(cases):
        what = f"{layer.heads} heads of {layer.qk_dim}, {case.chunk:,} queries on {case.keys:,} keys"
        preparing.report(done / len(cases), what)
        parts = spans(case.start, case.start + case.chunk, 0, case.keys, case.documents, case.window)
        x, gradients = case.operands(layer, device, dtype)
        for given in (None, gradients) if parts else ():
            kind, size = _Kind.of(x, parts, backward=given is not None), _Size.of(parts)
            known = _rankings.setdefault(kind, {})
            if size in known:
                continue
            if kind not in checked:  # what is right does not depend on lengths
                checked[kind] = rank(x, parts, BACKENDS, backward=given is not None, checked=measured(x.q.device))
            result = checked[kind]
            names = (recorded or {}).get(_label(kind, size))
            by_name = {strategy.name: strategy for strategy in result.strategies}
            missing = [name for name in names or () if name not in by_name]
            lost |= dict.fromkeys(f"{name}: {result.why_not(name)}" for name in missing)
            if names is not None and not missing:
                ranked = [by_name[name] for name in names]
                result = replace(result, strategies=[*ranked, result.strategies[-1]])
            elif measured(x.q.device) and not kind.deterministic:
                result = timed(result, x, parts, given)
            known[size] = result
    return list(lost)


def rankings() -> dict[str, list[str]]:
    """What `prepare` takes as recorded: kind and lengths -> names of strategies, best first, without the reference."""
    return {
        _label(kind, size): [strategy.name for strategy in ranking.strategies[:-1]]
        for kind, known in _rankings.items()
        for size, ranking in known.items()
    }


def _label(kind: _Kind, size: _Size) -> str:
    """In words, whichever the GPU's number is."""
    values = asdict(kind) | size._asdict()
    del values["device"]
    shown = {name: value for name, value in values.items() if value is not False}
    return " ".join(name if value is True else f"{name}={value}" for name, value in shown.items())


def environment(device: torch.device) -> dict[str, str]:
    """What may not change if rankings and bits are to be the same: versions, and the GPU or the CPU's instructions."""
    result = {"torch": str(torch.__version__)}
    if device.type == "cuda":
        major, minor = capability(device)
        result["GPU"] = f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor})"
        result["cuDNN"] = str(torch.backends.cudnn.version())
    else:
        result["CPU"] = torch.backends.cpu.get_cpu_capability()
    packages = [name for backend in BACKENDS for name in getattr(backend, "packages", ()) if measured(device)]
    for package in dict.fromkeys(packages):
        with suppress(metadata.PackageNotFoundError):
            result[package] = metadata.version(package)
    return result


def attention_report() -> list[dict[str, Any]]:
    """What has been chosen so far, kind by kind: plain values, fit for JSON.

    Beside the kind's fields and lengths: "chosen" (the strategy, best first in "ranking"), "tflops" by strategy where
    it was measured, "refused" (backend or strategy -> reason).
    """
    return [
        {
            **asdict(kind),
            **size._asdict(),
            "chosen": ranking.strategies[0].name,
            "ranking": [strategy.name for strategy in ranking.strategies],
            "tflops": {name: round(value, 1) for name, value in ranking.tflops.items()},
            "refused": dict(ranking.refused),
        }
        for kind, known in _rankings.items()
        for size, ranking in known.items()
    ]


def installed(device: torch.device) -> dict[str, str | None]:
    """Kernels for CUDA -> None where they are there for this GPU, else why they are not."""
    return {backend.name: backend.absent(device) for backend in BACKENDS if isinstance(backend, CudaKernel)}


def chosen(device_type: str) -> dict[str, list[str]]:
    """ "forward" and "backward" -> names of the backends that have been chosen on devices of this type, in order."""
    return {direction: list(_chosen.get((device_type, direction), ())) for direction in ("forward", "backward")}


def forget() -> None:
    """Drop all rankings: the next problems are checked anew."""
    _rankings.clear()
    _launches.clear()
    _chosen.clear()
