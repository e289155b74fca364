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

from penstock.engine import clock
from penstock.engine.attention import chunk as attention
from penstock.engine.attention import select as attention_select
from penstock.engine.attention.backends import (
    AttentionCall,
    Gradients,
    Operands,
    Problem,
    TiledReference,
    TorchCpuFlash,
)
from penstock.engine.attention.select import (
    BACKENDS,
    Ranking,
    attention_report,
    forget,
    launches,
    measure,
    rank,
    select,
)
from penstock.engine.attention.spans import Geometry, spans


class TopLeft(TorchCpuFlash):
    """A kernel that takes the causal limit to be at the top left, as torch's sdpa does."""

    name = "top-left"
    masks_tiles = False

    def forward(self, x: Operands, geometry: Geometry) -> tuple[Tensor, Tensor]:
        square = Geometry(geometry.n, geometry.n, causal=True)
        shown = slice(0, geometry.n)
        return super().forward(replace(x, k=x.k[shown], v=x.v[shown]), square)


class OtherBase(TorchCpuFlash):
    """A kernel whose log-sum-exp is to the base of 2."""

    name = "other-base"

    def forward(self, x: Operands, geometry: Geometry) -> tuple[Tensor, Tensor]:
        out, lse = super().forward(x, geometry)
        return out, lse * 1.442695


class Unlaunchable(TorchCpuFlash):
    name = "unlaunchable"

    def forward(self, x: Operands, geometry: Geometry) -> tuple[Tensor, Tensor]:
        raise RuntimeError("no kernel image is available\nsecond line")


class Slow(TorchCpuFlash):
    name = "slow"

    def forward(self, x: Operands, geometry: Geometry) -> tuple[Tensor, Tensor]:
        for _ in range(2):
            super().forward(x, geometry)
        return super().forward(x, geometry)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    forget()
    yield
    forget()


def operands(n: int = 256, earlier: int = 256, dtype: torch.dtype = torch.bfloat16) -> Operands:
    q = random(n, 4, 16, dtype=dtype)
    k, v = random(n + earlier, 2, 16, dtype=dtype), random(n + earlier, 2, 16, dtype=dtype)
    return Operands(q, k, v, AttentionCall(0.3), earlier)


def ranking(x: Operands, *kernels: TorchCpuFlash, timed: bool = False, window: int | None = None) -> Ranking:
    parts = spans(x.start, x.start + x.q.shape[0], 0, x.k.shape[0], [0], window)
    return rank(x, parts, None, (*kernels, TiledReference()), checked=True, timed=timed)


@pytest.mark.parametrize("window", [None, 100])
def test_kernels_that_compute_something_else_or_fail_are_left_out_by_name(window: int | None) -> None:
    result = ranking(operands(), OtherBase(), Unlaunchable(), TorchCpuFlash(), window=window)
    assert [s.name for s in result.strategies] == ["torch-cpu-flash, own + earlier", "tiled-reference, one call"]
    assert result.refused["other-base, own + earlier"].startswith("computes ")
    assert result.refused["unlaunchable, own + earlier"] == "fails: RuntimeError: no kernel image is available"
    result = ranking(operands(), TopLeft())
    assert result.refused["top-left, one call"].startswith("computes out incorrectly")
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
    given = Gradients(x.q, x.q, torch.zeros(4, 70))
    assert select(x, parts).name == "torch-cpu-flash, own + earlier"
    assert select(x, parts, given) is select(x, parts, given)
    forward, backward = json.loads(json.dumps(attention_report()))
    assert (forward["direction"], backward["direction"]) == ("forward", "backward")
    assert (forward["device"], forward["dtype"], forward["queries"], forward["keys"]) == ("cpu", "bfloat16", 128, 128)
    assert forward["chosen"] == "torch-cpu-flash, own + earlier"
    assert forward["tflops"] == {}
    assert forward["refused"]["flash-attn-2"] == "computes on CUDA devices only"


def test_calls_are_found_once_for_all_layers_and_anew_for_other_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    real = attention_select.spans
    monkeypatch.setattr(attention_select, "spans", lambda *args: found.append(1) or real(*args))
    x = replace(operands(n=256, earlier=256), documents=[0, 100, 300])
    gradients = Gradients(x.q, x.q, torch.zeros(4, 256))
    first = launches(replace(x, documents=[0, 100, 300, 512, 700]))
    assert launches(replace(x, q=x.q + 1)) is first, "another layer's operands"
    assert launches(replace(x, documents=[0, 50, 100, 300])) is first, "documents that no query is of are not seen"
    assert len(found) == 1
    others = [
        launches(replace(x, documents=[0, 100, 301])),
        launches(replace(x, documents=[0, 101, 300])),
        launches(replace(x, call=AttentionCall(0.3, window=20))),
        launches(x, gradients),
        launches(replace(x, call=AttentionCall(0.3, softcap=3.0))),
        launches(replace(x, start=255)),
        launches(replace(x, k=x.k[:400], v=x.v[:400])),
        launches(replace(x, q=x.q.float(), k=x.k.float(), v=x.v.float())),
    ]
    assert len(found) == 1 + len(others)
    assert all(other is not first for other in others)
    forget()
    assert launches(x) == first
    assert len(found) == 2 + len(others)


def test_what_no_kernel_can_is_left_to_the_reference() -> None:
    x = Operands(*(random(65, heads, 16) for heads in (4, 2, 2)), AttentionCall(0.3, softcap=5.0))
    assert select(x, spans(0, 65, 0, 65, [0], None)).name == "tiled-reference, one call"
    assert attention_report()[0]["refused"]["torch-cpu-flash"] == "has no soft-cap"


def test_measuring_ahead_covers_what_training_asks_for() -> None:
    shape = {"heads": 4, "kv_heads": 2, "qk_dim": 16, "v_dim": 16}
    measure(torch.device("cpu"), torch.float32, **shape, chunk=256, total=1024)
    known = len(attention_report())
    for start in range(0, 1024, 256):
        q, k = torch.randn(256, 4, 16), torch.randn(start + 256, 2, 16)
        x = Operands(q, k, k, AttentionCall(0.25), start)
        out, lse = attention.attend(x)
        attention.attend_backward(x, Gradients(out, out, lse), *(torch.zeros_like(t) for t in (q, k, k)))
    assert len(attention_report()) == known


def test_deterministic_mode_measures_nothing_and_repeats_bit_by_bit() -> None:
    def run() -> list[Tensor]:
        torch.manual_seed(0)
        x = operands(n=200, earlier=130)
        x = replace(x, call=AttentionCall(0.3, window=150), documents=[0, 190])
        out, lse = attention.attend(x)
        grads = [torch.zeros(t.shape) for t in (x.q, x.k, x.v)]
        attention.attend_backward(x, Gradients(out, out, lse), *grads)
        return [out, lse, *grads]

    torch.use_deterministic_algorithms(True)
    try:
        first, second = run(), run()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(entry["deterministic"] and not entry["tflops"] for entry in attention_report())


def test_cuda_kernels_import_nothing_and_say_why_on_a_cpu() -> None:
    q = random(4, 2, 8, dtype=torch.bfloat16)
    problem = Problem.of(Operands(q, q, q, AttentionCall(0.3)), Geometry(4, 4, causal=True), backward=True)
    refusals = {backend.name: backend.refusal(problem) for backend in BACKENDS}
    here = dict.fromkeys(["torch-cpu-flash", "tiled-reference"])
    assert refusals == dict.fromkeys(refusals, "computes on CUDA devices only") | here
    assert not any(name.startswith("flash_attn") for name in sys.modules)
