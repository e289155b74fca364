"""What processors, memories and the links between them give to the work that training does."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from msgspec import structs
from torch import Tensor

from penstock.engine.attention import chunk as attention
from penstock.engine.clock import clock
from penstock.engine.config import TrainConfig
from penstock.engine.machine.affinity import place_threads
from penstock.engine.machine.compilers import optimizer_compiles
from penstock.engine.machine.precision import usual_dtype
from penstock.engine.machine.profile import AttentionRate
from penstock.engine.optim.base import UpdateRange, find_optimizer
from penstock.storage.tier.arena import HostArena
from penstock.storage.tier.layout import FlatLayout, ParamSpec

_COPIES = 4
"""Pairs of buffers that copies go round, so that no cache holds them."""
_STATE_PARTS = 4
"""Parts of optimizer state that are updated in turn."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Operands that are measured: like those of training on such a device."""

    rows: int
    """Tokens of a chunk in matrix products."""
    matrices: tuple[tuple[int, int], ...]
    """A layer's weights [out, in]."""
    heads: int
    kv_heads: int
    head_dims: tuple[int, ...]
    chunks: tuple[int, ...]
    earlier_tokens: int
    """Keys before the chunk that attention is measured on."""
    copy_bytes: int
    """One copy between RAM and the compute device."""
    pass_bytes: int
    """One operand of a pass over memory: beyond all caches."""
    state_numel: int
    """Parameters that are updated at once: a part."""
    compiled: bool = True
    """AdamW under torch.compile, where there is a compiler."""

    @property
    def ram_bytes(self) -> int:
        """RAM that the most demanding of the measurements takes."""
        copies = 4 * _COPIES * self.copy_bytes
        return max(3 * self.pass_bytes, copies, _STATE_PARTS * 5 * 4 * self.state_numel)

    @property
    def gpu_bytes(self) -> int:
        """Memory of the compute device likewise; products and attention take less than passes and copies."""
        return max(3 * self.pass_bytes, 2 * _COPIES * self.copy_bytes)


CPU_SIZES = Sizes(
    rows=1024,
    matrices=((1024, 1024), (2816, 1024), (1024, 2816)),
    heads=8,
    kv_heads=2,
    head_dims=(64, 128),
    chunks=(512, 2048),
    earlier_tokens=2048,
    copy_bytes=32 << 20,
    pass_bytes=256 << 20,
    state_numel=8 << 20,
)
GPU_SIZES = Sizes(
    rows=4096,
    matrices=((4096, 4096), (14336, 4096), (4096, 14336)),
    heads=32,
    kv_heads=8,
    head_dims=(64, 128),
    chunks=(4096, 16384),
    earlier_tokens=32768,
    copy_bytes=128 << 20,
    pass_bytes=512 << 20,
    state_numel=8 << 20,
)


def matmul_flops(device: torch.device, sizes: Sizes, seconds: float) -> float:
    """FLOP/s of a layer's products with a chunk, forward and both gradients, in this device's usual dtype."""
    dtype = getattr(torch, usual_dtype(device))
    total_s = flops = 0.0
    for matrix in sizes.matrices:
        for product in products_of(matrix, sizes.rows, device, dtype):
            total_s += clock(product, device, seconds / (3 * len(sizes.matrices)))
            flops += 2 * sizes.rows * matrix[0] * matrix[1]
    return flops / total_s


def products_of(
    matrix: tuple[int, ...], rows: int, device: torch.device, dtype: torch.dtype
) -> Iterator[Callable[[], object]]:
    """A matrix's (out_features, in_features) product with rows [rows, in_features], and those of both gradients."""
    out_features, in_features = matrix
    weight = random_operand((out_features, in_features), device, dtype)
    x, dy = (random_operand((rows, width), device, dtype) for width in (in_features, out_features))
    for left, right, like in ((x, weight.t(), dy), (dy, weight, x), (dy.t(), x, weight)):
        yield partial(torch.mm, left, right, out=torch.empty_like(like))


def random_operand(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=device, dtype=dtype)


def attention_rates(device: torch.device, sizes: Sizes, seconds: float) -> tuple[AttentionRate, ...]:
    """Of the kernels that the engine takes for a chunk that ends a document, at each head size and chunk: the faster of
    two short measurements, as other work on this machine meets one easily."""
    cases = [(head_dim, chunk) for head_dim in sizes.head_dims for chunk in sizes.chunks]
    passes = [[_attention_rate(device, sizes, *case, seconds / (2 * len(cases))) for case in cases] for _ in range(2)]
    return tuple(
        structs.replace(
            one,
            forward_flops=max(one.forward_flops, two.forward_flops),
            backward_flops=max(one.backward_flops, two.backward_flops),
        )
        for one, two in zip(*passes, strict=True)
    )


def _attention_rate(device: torch.device, sizes: Sizes, head_dim: int, chunk: int, seconds: float) -> AttentionRate:
    start = sizes.earlier_tokens
    keys = start + chunk
    dtype = getattr(torch, usual_dtype(device))

    q, dout = (random_operand((chunk, sizes.heads, head_dim), device, dtype) for _ in range(2))
    k, v = (random_operand((keys, sizes.kv_heads, head_dim), device, dtype) for _ in range(2))
    dq, dk, dv = (torch.zeros_like(each, dtype=torch.float32) for each in (q, k, v))
    x = attention.Operands(q, k, v, attention.AttentionCall(head_dim**-0.5), start)
    given = attention.Gradients(dout, *attention.attend(x))

    pairs = chunk * start + chunk * (chunk + 1) // 2
    flops = head_dim * sizes.heads * pairs
    with torch.no_grad():
        forward_s = clock(lambda: attention.attend(x), device, seconds / 3)
        backward_s = clock(lambda: attention.attend_backward(x, given, dq, dk, dv), device, seconds * 2 / 3)
    return AttentionRate(
        head_dim=head_dim,
        chunk_tokens=chunk,
        forward_flops=4 * flops / forward_s,
        backward_flops=10 * flops / backward_s,
    )


def pass_bytes_per_s(device: torch.device, sizes: Sizes, seconds: float) -> float:
    """Bytes read and written per second by a + s b over memory of `device`, with all cores where that is a CPU."""
    numel = sizes.pass_bytes // 4
    a, b, out = (torch.ones(numel, device=device) for _ in range(3))
    return 3 * 4 * numel / clock(lambda: torch.add(a, b, alpha=0.5, out=out), device, seconds)


class LinkRates(NamedTuple):
    """Bytes/s between RAM and the compute device."""

    h2d: float
    d2h: float
    duplex_share: float


def link_rates(device: torch.device, sizes: Sizes, seconds: float) -> LinkRates:
    """Copies each way alone, then both ways at once: pinned memory and streams on CUDA, the lanes' copies elsewhere."""
    nbytes = sizes.copy_bytes
    on_gpu = device.type == "cuda"
    pairs = 2 * _COPIES
    total = (1 if on_gpu else 2) * pairs * nbytes
    placement = place_threads(device)
    with contextlib.ExitStack() as cleanup:
        if placement is not None:
            cleanup.enter_context(placement.near_gpu())
        arena = HostArena(total, budget_bytes=total)
        cleanup.callback(arena.close)
        host = [arena.slot(f"host {index}", nbytes).zero_() for index in range(pairs)]
        if on_gpu:
            arena.pin()
            there = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(pairs)]
        else:
            there = [arena.slot(f"device {index}", nbytes).zero_() for index in range(pairs)]
        to_device = list(zip(there, host, strict=True))[:_COPIES]
        to_host = list(zip(host, there, strict=True))[_COPIES:]
        _copies(arena, [to_device, to_host], device, 0)  # first touch
        ((h2d,), (d2h,), both) = (
            _copies(arena, each, device, seconds / 3) for each in ([to_device], [to_host], [to_device, to_host])
        )
        return LinkRates(h2d, d2h, min(1.0, sum(both) / (h2d + d2h)))


def all_links(devices: Sequence[torch.device], sizes: Sizes, seconds: float) -> tuple[float, float]:
    """Bytes/s of the links of all these GPUs at once, together: to the GPUs, and back."""
    total = len(devices) * _COPIES * sizes.copy_bytes
    with contextlib.closing(HostArena(total, budget_bytes=total)) as arena:
        directions: list[tuple[list[Copies], list[Copies]]] = []
        for number, device in enumerate(devices):
            host = [arena.slot(f"host {number} {index}", sizes.copy_bytes).zero_() for index in range(_COPIES)]
            there = [torch.zeros(sizes.copy_bytes, dtype=torch.uint8, device=device) for _ in host]
            directions.append(([list(zip(there, host, strict=True))], [list(zip(host, there, strict=True))]))
        arena.pin()
        with ThreadPoolExecutor(len(devices)) as threads:

            def together(way: int, seconds: float) -> float:
                each = [
                    threads.submit(_copies, arena, directions[i][way], devices[i], seconds) for i in range(len(devices))
                ]
                return sum(rate for one in each for rate in one.result())

            together(0, 0)  # first touch
            return together(0, seconds / 2), together(1, seconds / 2)


Copies = Sequence[tuple[Tensor, Tensor]]
"""(target, source) pairs."""


def _copies(arena: HostArena, directions: Sequence[Copies], device: torch.device, seconds: float) -> list[float]:
    """Bytes/s of each direction, all at once: a thread each that copies as a lane's does, on CUDA with a stream."""
    on_gpu = device.type == "cuda"
    streams = [torch.cuda.Stream(device) if on_gpu else None for _ in directions]
    if on_gpu:
        torch.cuda.synchronize(device)
    start = time.perf_counter()

    def lane(stream: torch.cuda.Stream | None, copies: Copies) -> float:
        moved = 0
        with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
            while not moved or time.perf_counter() < start + seconds:
                for target, source in copies:
                    arena.copy(target, source)
                    moved += source.nbytes
                if stream is not None:
                    stream.synchronize()
        return moved / (time.perf_counter() - start)

    with ThreadPoolExecutor(len(directions)) as threads:
        return list(threads.map(lane, streams, directions))


def optimizer_params_per_s(device: torch.device, sizes: Sizes, seconds: float) -> float:
    """Parameters per second of AdamW on state in RAM, on the cores that a run on `device` gives its optimizer."""
    placement = place_threads(device)

    def lane() -> float:
        if placement is not None:
            placement.enter_lane("optimizer")
        return _updates_per_s(sizes, seconds)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lane).result()


def _updates_per_s(sizes: Sizes, seconds: float) -> float:
    cpu, numel = torch.device("cpu"), sizes.state_numel
    compiled = sizes.compiled and optimizer_compiles().ok
    spec, layout = find_optimizer(TrainConfig()), FlatLayout.build([ParamSpec("all", (numel,), True)])
    optimizer, where = spec.make("compiled" if compiled else "fused"), UpdateRange(layout, 0, numel)
    values = optimizer.scalars(TrainConfig(), TrainConfig().lr, 1, 1.0, cpu)
    total = _STATE_PARTS * (len(spec.state_kinds) + 2) * numel * 4
    arena = HostArena(total, budget_bytes=total)
    try:

        def floats(name: str) -> Tensor:
            return arena.slot(name, numel * 4).view(torch.float32).fill_(0.01)

        parts = []
        for part in range(_STATE_PARTS):
            state = {kind: floats(f"{kind} {part}") for kind in spec.state_kinds}
            weights = arena.slot(f"weights {part}", numel * 2).view(torch.bfloat16).zero_()
            parts.append((state, floats(f"gradient {part}"), weights))

        def update() -> None:
            for state, gradient, weights in parts:
                optimizer.step(state, gradient, weights, where, values)

        return _STATE_PARTS * numel / clock(update, cpu, seconds)
    finally:
        arena.close()
