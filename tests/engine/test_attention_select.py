"""Which kernels are used: what each refuses, what is checked, what is measured, what the report says."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_reference import random
from torch import Tensor

from engine import clock
from engine.attention import chunk as attention
from engine.attention import select as attention_select
from engine.attention.backends import Problem, TiledReference, TorchCpuFlash
from engine.attention.chunk import AttentionCall
from engine.attention.compute import Gradients, Operands
from engine.attention.select import BACKENDS, Ranking, attention_report, forget, launches, measure, rank, select
from engine.attention.spans import Geometry, spans


class TopLeft(TorchCpuFlash):
    """A kernel that takes the causal limit to be at the top left, as torch's sdpa does."""

    name = "top-left"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, geometry: Geometry, *, scale: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        square = Geometry(geometry.n, geometry.n, causal=True)
        shown = slice(0, geometry.n)
        return super().forward(q, k[shown], v[shown], square, scale=scale, softcap=softcap)


class OtherBase(TorchCpuFlash):
    """A kernel whose log-sum-exp is to the base of 2."""

    name = "other-base"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, geometry: Geometry, *, scale: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        out, lse = super().forward(q, k, v, geometry, scale=scale, softcap=softcap)
        return out, lse * 1.442695


class Unlaunchable(TorchCpuFlash):
    """A kernel that this machine cannot launch."""

    name = "unlaunchable"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, geometry: Geometry, *, scale: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        raise RuntimeError("no kernel image is available\nsecond line")


class Slow(TorchCpuFlash):
    """A kernel that computes everything three times."""

    name = "slow"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, geometry: Geometry, *, scale: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        for _ in range(2):
            super().forward(q, k, v, geometry, scale=scale, softcap=softcap)
        return super().forward(q, k, v, geometry, scale=scale, softcap=softcap)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    forget()
    yield
    forget()


def operands(n: int = 256, earlier: int = 256, dtype: torch.dtype = torch.bfloat16) -> Operands:
    q = random(n, 4, 16, dtype=dtype)
    k, v = random(n + earlier, 2, 16, dtype=dtype), random(n + earlier, 2, 16, dtype=dtype)
    return Operands(q, k, v, earlier, 0, 0.3, None)


def ranking(x: Operands, *kernels: TorchCpuFlash, timed: bool = False, window: int | None = None) -> Ranking:
    parts = spans(x.start, x.start + x.q.shape[0], 0, x.k.shape[0], [0], window)
    return rank(x, parts, None, (*kernels, TiledReference()), checked=True, timed=timed)


@pytest.mark.parametrize("window", [None, 100])
def test_kernels_that_compute_something_else_or_fail_are_left_out_by_name(window: int | None) -> None:
    result = ranking(operands(), OtherBase(), Unlaunchable(), TorchCpuFlash(), window=window)
    assert [s.name for s in result.strategies] == ["torch-cpu-flash, own + earlier", "tiled-reference, one call"]
    assert result.refused["other-base, own + earlier"].startswith("computes a wrong")
    assert result.refused["unlaunchable, own + earlier"] == "fails: RuntimeError: no kernel image is available"


def test_a_kernel_aligned_at_the_top_left_is_found_out() -> None:
    class Unmasked(TopLeft):
        masks_tiles = False

    result = ranking(operands(), Unmasked())
    assert result.refused["top-left, one call"].startswith("computes a wrong out")
    assert result.strategies[0].name != "top-left, one call"


def test_the_fastest_kernel_is_chosen_and_its_rate_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which every launch takes a second: a busy machine would mix up real ones."""
    now = [0.0]
    real = TorchCpuFlash.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        now[0] += 1
        return real(*args, **kwargs)

    monkeypatch.setattr(TorchCpuFlash, "forward", forward)
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    result = ranking(operands(n=1024, earlier=1024), Slow(), TorchCpuFlash(), timed=True)
    assert [s.name for s in result.strategies] == [
        "torch-cpu-flash, own + earlier",
        "slow, own + earlier",
        "tiled-reference, one call",
    ]
    pairs = 1024 * 1024 + 1024 * 1025 // 2
    # Own keys and earlier ones are a launch each: 2 FLOPs for each of 4 heads, 32 products and pair, in 2 s and in 6 s.
    rates = [2 * 4 * 32 * pairs / seconds / 1e12 for seconds in (2, 6)]
    assert list(result.tflops.values()) == pytest.approx([rates[1], rates[0]])


def test_one_kernel_alone_is_not_measured() -> None:
    assert ranking(operands(), TorchCpuFlash(), timed=True).tflops == {}


def test_on_a_cpu_the_order_decides_and_the_report_names_the_reasons() -> None:
    x = operands(n=70, earlier=3)
    parts = spans(3, 73, 0, 73, [0], None)
    given = Gradients(
        random(70, 4, 16, dtype=torch.bfloat16), random(70, 4, 16, dtype=torch.bfloat16), torch.zeros(4, 70)
    )
    assert select(x, parts).name == "torch-cpu-flash, own + earlier"
    assert select(x, parts, given) is select(x, parts, given)
    forward, backward = json.loads(json.dumps(attention_report()))
    assert (forward["direction"], backward["direction"]) == ("forward", "backward")
    assert (forward["device"], forward["dtype"], forward["queries"], forward["keys"]) == ("cpu", "bfloat16", 128, 128)
    assert forward["chosen"] == "torch-cpu-flash, own + earlier"
    assert forward["tflops"] == {}
    cuda = {"flash-attn-2", "flash-attn-3", "flash-attn-4", "torch-cudnn", "torch-cuda-flash"}
    assert {name: forward["refused"][name] for name in cuda} == dict.fromkeys(cuda, "computes on CUDA devices only")


def test_calls_are_found_once_for_all_layers_and_anew_for_other_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    real = attention_select.spans
    monkeypatch.setattr(attention_select, "spans", lambda *args: found.append(1) or real(*args))
    x = operands(n=256, earlier=256)
    gradients = Gradients(x.q, x.q, torch.zeros(4, 256))
    first = launches(x, [0, 100, 300, 512, 700], None)
    assert launches(replace(x, q=x.q + 1), [0, 100, 300, 512, 700], None) is first, "another layer's operands"
    assert launches(x, [0, 50, 100, 300], None) is first, "documents before and behind the chunk's are not seen"
    assert len(found) == 1
    others = [
        launches(x, [0, 100, 301], None),
        launches(x, [0, 101, 300], None),
        launches(x, [0, 100, 300], 20),
        launches(x, [0, 100, 300], None, gradients),
        launches(replace(x, softcap=3.0), [0, 100, 300], None),
        launches(replace(x, start=255), [0, 100, 300], None),
        launches(replace(x, k=x.k[:400], v=x.v[:400]), [0, 100, 300], None),
        launches(replace(x, q=x.q.float(), k=x.k.float(), v=x.v.float()), [0, 100, 300], None),
    ]
    assert len(found) == 1 + len(others)
    assert all(other is not first for other in others)
    forget()
    assert launches(x, [0, 100, 300], None) == first
    assert len(found) == 2 + len(others)


def test_what_no_kernel_can_is_left_to_the_reference() -> None:
    x = Operands(*(random(65, heads, 16) for heads in (4, 2, 2)), 0, 0, 0.3, 5.0)
    assert select(x, spans(0, 65, 0, 65, [0], None)).name == "tiled-reference, one call"
    assert attention_report()[0]["refused"]["torch-cpu-flash"] == "has no soft-cap"


def test_measuring_ahead_covers_what_training_asks_for() -> None:
    shape = {"heads": 4, "kv_heads": 2, "qk_dim": 16, "v_dim": 16}
    measure(torch.device("cpu"), torch.float32, **shape, chunk=256, total=1024)
    known = len(attention_report())
    call = AttentionCall(0.25, None, None, None)
    for start in range(0, 1024, 256):
        q, k = torch.randn(256, 4, 16), torch.randn(start + 256, 2, 16)
        out, lse = attention.attend(q, k, k, start=start, key_start=0, documents=[0], call=call)
        grads = {"dq": torch.zeros_like(q), "dk": torch.zeros_like(k), "dv": torch.zeros_like(k)}
        attention.attend_backward(out, q, k, k, out, lse, start=start, key_start=0, documents=[0], call=call, **grads)
    assert len(attention_report()) == known


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_deterministic_mode_measures_nothing_and_repeats_bit_by_bit(dtype: torch.dtype) -> None:
    def run() -> list[Tensor]:
        x = operands(n=200, earlier=130, dtype=dtype)
        call = AttentionCall(0.3, 150, None, None)
        where = {"start": x.start, "key_start": 0, "documents": [0, 190], "call": call}
        out, lse = attention.attend(x.q, x.k, x.v, **where)
        grads = [torch.zeros(t.shape) for t in (x.q, x.k, x.v)]
        dq, dk, dv = grads
        attention.attend_backward(out, x.q, x.k, x.v, out, lse, **where, dq=dq, dk=dk, dv=dv)
        return [out, lse, *grads]

    torch.use_deterministic_algorithms(True)
    try:
        torch.manual_seed(0)
        first = run()
        torch.manual_seed(0)
        second = run()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(entry["deterministic"] and not entry["tflops"] for entry in attention_report())


def test_cuda_kernels_import_nothing_and_say_why_on_a_cpu() -> None:
    q = random(4, 2, 8, dtype=torch.bfloat16)
    problem = Problem.of(q, q, Geometry(4, 4, causal=True), softcap=None, backward=True)
    for backend in BACKENDS[:-2]:
        assert backend.refusal(problem) == "computes on CUDA devices only"
    assert not any(name.startswith("flash_attn") for name in sys.modules)
