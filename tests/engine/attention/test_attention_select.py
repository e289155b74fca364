"""Which kernels are used: what each refuses, what is checked, what is measured, what the report says. What a plan sets
aside for attention, against what flash-attn's kernels allocate by their sources."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from attention_reference import random
from hypothesis import example, given
from hypothesis import strategies as st
from samples import sampled
from torch import Tensor

from penstock.engine import clock
from penstock.engine.attention import backends
from penstock.engine.attention import select as attention_select
from penstock.engine.attention.backends import AttentionCall, Gradients, Operands, TiledReference, TorchCpuFlash
from penstock.engine.attention.flash_attn import FlashAttention2
from penstock.engine.attention.rank import Ranking, _strategies, rank, timed
from penstock.engine.attention.select import (
    BACKENDS,
    Attends,
    attention_report,
    forget,
    launches,
    prepare,
    rankings,
    select,
)
from penstock.engine.attention.spans import Geometry, spans
from penstock.engine.attention.workspace import MOST_MULTIPROCESSORS, workspace_bytes
from penstock.engine.forecast.request import PlanRequest
from penstock.engine.hf.config import model_config
from penstock.engine.machine.budgets import Budgets

WIDTHS = [(32, 8, 128), (8, 8, 64), (4, 1, 80), (40, 8, 256), (1, 1, 16), (8, 4, 80), (4, 2, 32), (8, 4, 136)]
"""Heads, key and value heads, width."""


Forward = Callable[[TorchCpuFlash, Operands, Geometry], tuple[Tensor, Tensor]]


def pretended(name: str, forward: Forward, **more: Any) -> TorchCpuFlash:
    """A kernel that goes forward in another way."""
    return type(name, (TorchCpuFlash,), {"name": name, "forward": forward, **more})()


def top_left(kernel: TorchCpuFlash, x: Operands, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """Takes the causal limit to be at the top left, as torch's sdpa does."""
    shown, square = slice(0, geometry.n), Geometry(geometry.n, geometry.n, causal=True)
    return TorchCpuFlash.forward(kernel, replace(x, k=x.k[shown], v=x.v[shown]), square)


def other_base(kernel: TorchCpuFlash, x: Operands, geometry: Geometry) -> tuple[Tensor, Tensor]:
    out, lse = TorchCpuFlash.forward(kernel, x, geometry)
    return out, lse * 1.442695  # to the base of 2


def unlaunchable(kernel: TorchCpuFlash, x: Operands, geometry: Geometry) -> tuple[Tensor, Tensor]:
    raise RuntimeError("no kernel image is available\nsecond line")


def slow(kernel: TorchCpuFlash, x: Operands, geometry: Geometry) -> tuple[Tensor, Tensor]:
    return [TorchCpuFlash.forward(kernel, x, geometry) for _ in range(3)][-1]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    forget()
    yield
    forget()


def operands(n: int = 256, earlier: int = 256, dtype: torch.dtype = torch.bfloat16) -> Operands:
    q = random(n, 4, 16, dtype=dtype)
    k, v = random(n + earlier, 2, 16, dtype=dtype), random(n + earlier, 2, 16, dtype=dtype)
    return Operands(q, k, v, AttentionCall(0.3), earlier)


def ranking(x: Operands, *kernels: TorchCpuFlash, window: int | None = None) -> Ranking:
    parts = spans(x.start, x.start + x.q.shape[0], 0, x.k.shape[0], [0], window)
    return rank(x, parts, (*kernels, TiledReference()), backward=False, checked=True)


@pytest.mark.parametrize("window", [None, 100])
def test_kernels_that_compute_something_else_or_fail_are_left_out_by_name(window: int | None) -> None:
    wrong = pretended("other-base", other_base), pretended("unlaunchable", unlaunchable)
    result = ranking(operands(), *wrong, TorchCpuFlash(), window=window)
    assert [s.name for s in result.strategies] == ["torch-cpu-flash, own + earlier", "tiled-reference, one call"]
    assert result.refused["other-base, own + earlier"].startswith("computes ")
    assert result.refused["unlaunchable, own + earlier"] == "fails: RuntimeError: no kernel image is available"
    result = ranking(operands(), pretended("top-left", top_left, masks_tiles=False))
    assert result.refused["top-left, one call"].startswith("computes out incorrectly")
    assert result.strategies[0].name != "top-left, one call"


@pytest.mark.parametrize("shortages", [1, 2])
def test_a_kernel_is_not_used_unchecked_where_memory_ran_out(shortages: int) -> None:
    """It is checked again, and left out where there still is none. And so is one that is wrong."""
    left = [shortages]

    def short(kernel: TorchCpuFlash, x: Operands, geometry: Geometry) -> tuple[Tensor, Tensor]:
        if left[0]:
            left[0] -= 1
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return TorchCpuFlash.forward(kernel, x, geometry) if shortages == 1 else other_base(kernel, x, geometry)

    result = ranking(operands(), pretended("short", short))
    assert left == [0]
    names = [strategy.name for strategy in result.strategies]
    if shortages == 1:
        assert names == ["short, own + earlier", "tiled-reference, one call"]
    else:
        assert names == ["tiled-reference, one call"]
        assert result.refused["short, own + earlier"] == "not checked: no GPU memory is free for it"


def test_the_fastest_kernel_is_chosen_and_its_rate_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which every launch takes a second: a busy machine would mix up real ones."""
    now = [0.0]
    real = TorchCpuFlash.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        now[0] += 1
        return real(*args, **kwargs)

    monkeypatch.setattr(TorchCpuFlash, "forward", forward)
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    x = operands(n=1024, earlier=1024)
    parts = spans(1024, 2048, 0, 2048, [0], None)
    result = timed(ranking(x, pretended("slow", slow), TorchCpuFlash()), x, parts, None)
    fastest_first = ["torch-cpu-flash, own + earlier", "slow, own + earlier", "tiled-reference, one call"]
    assert [s.name for s in result.strategies] == fastest_first
    pairs = 1024 * 1024 + 1024 * 1025 // 2
    # Own keys and earlier ones are a launch each: 2 FLOPs for each of 4 heads, 32 products and pair, in 2 s and in 6 s.
    rates = [2 * 4 * 32 * pairs / seconds / 1e12 for seconds in (2, 6)]
    assert list(result.tflops.values()) == pytest.approx([rates[1], rates[0]])
    assert timed(ranking(x, TorchCpuFlash()), x, parts, None).tflops == {}, "one alone is not measured"


@pytest.mark.parametrize("error", [torch.cuda.OutOfMemoryError("out of memory"), RuntimeError("no such kernel")])
def test_a_kernel_that_fails_as_it_is_timed_comes_last_or_not_at_all(error: Exception) -> None:
    def large(kernel: TorchCpuFlash, x: Operands, geometry: Geometry) -> tuple[Tensor, Tensor]:
        if geometry.n > 256:
            raise error
        return TorchCpuFlash.forward(kernel, x, geometry)

    x = operands(n=300, earlier=0)
    parts = spans(0, 300, 0, 300, [0], None)
    result = timed(ranking(x, pretended("large", large), TorchCpuFlash()), x, parts, None)
    names = [strategy.backend.name for strategy in result.strategies]
    fails = not isinstance(error, torch.cuda.OutOfMemoryError)
    assert names == ["torch-cpu-flash", *([] if fails else ["large"]), "tiled-reference"]
    assert result.refused == ({"large, one call": "fails: RuntimeError: no such kernel"} if fails else {})


class Choice:
    """Two kernels on a device that is measured, and a clock on which the one that is `slow` takes twice as long."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slow = "first"
        self.launched: list[str] = []
        self._now = 0.0
        kernels = (self._kernel("first"), self._kernel("second"), TiledReference())
        monkeypatch.setattr(attention_select, "MEASURED", frozenset({"cpu"}))
        monkeypatch.setattr(attention_select, "BACKENDS", kernels)
        monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: self._now))

    def _kernel(self, name: str) -> TorchCpuFlash:
        def forward(kernel: TorchCpuFlash, x: Operands, geometry: Geometry) -> tuple[Tensor, Tensor]:
            self._launch(name)
            return TorchCpuFlash.forward(kernel, x, geometry)

        def backward(kernel: TorchCpuFlash, x: Operands, given: Gradients, geometry: Geometry) -> Any:
            self._launch(name)
            return TorchCpuFlash.backward(kernel, x, given, geometry)

        return pretended(name, forward, backward=backward)

    def _launch(self, name: str) -> None:
        self.launched.append(name)
        self._now += 2 if name == self.slow else 1

    def prepare(self, layer: Attends, recorded: dict[str, list[str]] | None = None) -> list[str]:
        self.launched.clear()
        return prepare(torch.device("cpu"), torch.float32, [layer], recorded)

    def chosen(self) -> set[str]:
        return {entry["chosen"].partition(",")[0] for entry in attention_report()}


@pytest.fixture
def choice(monkeypatch: pytest.MonkeyPatch) -> Choice:
    return Choice(monkeypatch)


def layer(**changes: Any) -> Attends:
    shape: dict[str, Any] = {"heads": 4, "kv_heads": 2, "qk_dim": 16, "v_dim": 16, "chunk": 64, "total": 256}
    return Attends(**(shape | changes))


def test_what_was_recorded_is_taken_up_without_timing_and_every_kernel_is_checked(choice: Choice) -> None:
    assert choice.prepare(layer()) == []
    recorded = json.loads(json.dumps(rankings()))
    assert choice.chosen() == {"second"}
    assert any(entry["tflops"] for entry in attention_report())
    timings = len(choice.launched)
    choice.slow = "second"
    assert choice.prepare(layer(), recorded) == []
    assert choice.chosen() == {"second"}
    assert not any(entry["tflops"] for entry in attention_report())
    assert rankings() == recorded
    assert {"first", "second"} == set(choice.launched)
    assert len(choice.launched) < timings / 3, "checked once for each kind, not for each of its lengths"
    choice.prepare(layer())
    assert choice.chosen() == {"first"}, "or there would be nothing to keep"


def test_a_recorded_kernel_that_is_not_right_any_more_is_named_and_its_kinds_are_chosen_anew(
    choice: Choice, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice.prepare(layer())
    recorded = rankings()
    first, _, reference = attention_select.BACKENDS
    monkeypatch.setattr(attention_select, "BACKENDS", (first, pretended("second", other_base), reference))
    lost = choice.prepare(layer(), recorded)
    assert lost
    assert all(re.fullmatch(r"second, (one call|own \+ earlier): computes (out|lse) .*", reason) for reason in lost)
    forward = [entry for entry in attention_report() if entry["direction"] == "forward"]
    assert {entry["chosen"].partition(",")[0] for entry in forward} == {"first"}
    monkeypatch.setattr(attention_select, "BACKENDS", (first, reference))
    assert set(choice.prepare(layer(), recorded)) == {
        f"second, {how}: is not there" for how in ("one call", "own + earlier")
    }


@pytest.mark.parametrize("prepared", [True, False])
def test_nothing_is_launched_to_choose_for_lengths_that_were_not_seen(choice: Choice, prepared: bool) -> None:
    """Where a kind was not prepared kernels are checked once, and never timed: their order decides."""
    if prepared:
        choice.prepare(layer())
    x = operands(n=37, earlier=64, dtype=torch.float32)
    launches(x)
    first = len(choice.launched)
    for n, documents in ((36, [0]), (35, [0, 66]), (50, [0, 70, 80, 90])):
        choice.launched.clear()
        unseen = launches(replace(operands(n=n, earlier=64, dtype=torch.float32), documents=documents))
        assert [launch.backend.name for launch in unseen] == ["second" if prepared else "first"] * len(unseen)
        assert prepared <= (not choice.launched)
    assert prepared or first
    choice.launched.clear()
    launches(replace(x, q=x.q[:30]))
    assert not choice.launched
    assert prepared or not any(entry["tflops"] for entry in attention_report())


@sampled(60, 300)
@given(st.data(), st.integers(1, 96), st.integers(1, 5), st.none() | st.integers(1, 200), st.booleans())
def test_all_that_a_run_can_ask_for_is_of_a_kind_that_was_prepared(
    data: st.DataObject, chunk: int, chunks: int, window: int | None, pieces: bool
) -> None:
    total = chunk * chunks
    prepare(torch.device("cpu"), torch.float32, [layer(chunk=chunk, total=total, window=window, pieces=pieces)])
    known = {name.partition(" queries=")[0] for name in rankings()}
    start = data.draw(st.sampled_from(range(0, total, chunk)))
    end = data.draw(st.integers(start + 1, start + chunk))
    documents = sorted({0, *data.draw(st.lists(st.integers(0, total - 1), max_size=8))})
    q, k = torch.zeros(end - start, 4, 16), torch.zeros(total, 2, 16)
    ranges = range(0, end, chunk) if pieces else [0]
    for first in ranges:
        keys = slice(first, min(first + chunk, end) if pieces else end)
        x = Operands(q, k[keys], k[keys], AttentionCall(0.25, window), start, first, documents)
        launches(x)
        launches(x, Gradients(q, q, torch.zeros(4, end - start)))
    assert {name.partition(" queries=")[0] for name in rankings()} == known
    assert len(rankings()) <= 2 * (2 * 7 + 2), "and there are few"


def test_on_a_cpu_the_order_decides_and_the_report_names_the_reasons() -> None:
    x = operands(n=70, earlier=3)
    parts = spans(3, 73, 0, 73, [0], None)
    given = Gradients(x.q, x.q, torch.zeros(4, 70))
    assert select(x, parts).name == "torch-cpu-flash, own + earlier"
    assert select(x, parts, given) is select(x, parts, given)
    forward, backward = json.loads(json.dumps(attention_report()))
    assert (forward["direction"], backward["direction"]) == ("forward", "backward")
    assert (forward["device"], forward["dtype"], forward["queries"], forward["keys"]) == ("cpu", "bfloat16", 70, 73)
    assert forward["chosen"] == "torch-cpu-flash, own + earlier"
    assert forward["tflops"] == {}
    assert forward["refused"]["flash-attn-2"] == "computes on CUDA devices only"
    forget()
    capped = Operands(*(random(65, heads, 16) for heads in (4, 2, 2)), AttentionCall(0.3, softcap=5.0))
    assert select(capped, spans(0, 65, 0, 65, [0], None)).name == "tiled-reference, one call"
    assert attention_report()[0]["refused"]["torch-cpu-flash"] == "has no soft-cap"


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
    calls = ({"call": AttentionCall(0.3, window=20)}, {"call": AttentionCall(0.3, softcap=3.0)}, {"start": 255})
    streams = ({"documents": [0, 100, 301]}, {"documents": [0, 101, 300]}, {"k": x.k[:400], "v": x.v[:400]})
    float32 = {"q": x.q.float(), "k": x.k.float(), "v": x.v.float()}
    changes: tuple[Any, ...] = (*calls, *streams, float32)
    others = [launches(x, gradients), *(launches(replace(x, **change)) for change in changes)]
    assert len(found) == 1 + len(others)
    assert all(other is not first for other in others)
    forget()
    assert launches(x) == first
    assert len(found) == 2 + len(others)


def test_cuda_kernels_import_nothing_and_say_why_on_a_cpu() -> None:
    q = random(4, 2, 8, dtype=torch.bfloat16)
    problem = backends.Problem.of(Operands(q, q, q, AttentionCall(0.3)), Geometry(4, 4, causal=True), backward=True)
    refusals = {backend.name: backend.refusal(problem) for backend in BACKENDS}
    here = dict.fromkeys(["torch-cpu-flash", "tiled-reference"])
    assert refusals == dict.fromkeys(refusals, "computes on CUDA devices only") | here
    assert not any(name.startswith("flash_attn") for name in sys.modules)


def flash2_backward(geometry: Geometry, heads: int, kv_heads: int, dim: int, multiprocessors: int | None) -> int:
    """Bytes beside operands and windows; `multiprocessors`: the GPU's, in deterministic mode.

    flash_api.cpp, mha_bwd and mha_varlen_bwd: softmax_d, dq_accum, dk_expanded and dv_expanded, the results; ours: dout
    and out as plain tensors, and dq's sum in float32.
    """
    n, m, segments = geometry.n, geometry.m, max(1, len(geometry.cu_q) - 1)
    rows = n + 128 * segments if geometry.cu_q else -(-n // 128) * 128
    multiple = 32 if dim <= 128 else 64
    rounded = -(-dim // multiple) * multiple
    copies = 1 if multiprocessors is None else -(-multiprocessors // (segments * heads))
    sums = 4 * heads * rows * (copies * rounded + 1)
    expanded = 2 * 2 * m * heads * dim if heads != kv_heads else 0
    results = 2 * n * heads * dim + 2 * 2 * m * kv_heads * dim
    return sums + expanded + results + n * heads * dim * (2 + 2 + 4)


def flash3_backward(geometry: Geometry, heads: int, kv_heads: int, dim: int) -> int:
    """hopper/flash_api.cpp, mha_bwd: sums in float32 of dq, and for shared heads of dk and dv, in tiles of 128 rows."""
    n, m, segments = geometry.n, geometry.m, max(1, len(geometry.cu_q) - 1)
    rounded = next(width for width in (64, 96, 128, 192, 256) if dim <= width)
    rows, keys = (length + 128 * segments for length in (n, m))
    sums = 4 * heads * rows * (rounded + 2) + (4 * 2 * kv_heads * keys * rounded if heads != kv_heads else 0)
    results = 2 * n * heads * dim + 2 * 2 * m * kv_heads * dim
    return sums + results + n * heads * dim * (2 + 2 + 4)


@sampled(50, 200)
@given(st.data(), st.sampled_from(WIDTHS), st.integers(1, 20000), st.integers(1, 4), st.integers(1, 2000))
@example(None, (32, 8, 128), 8192, 4, 30)
@example(None, (4, 1, 80), 12000, 3, 64)
@example(None, (8, 4, 80), 4096, 3, 5000)
@example(None, (8, 4, 136), 2048, 1, 5000)
def test_no_call_allocates_more_than_is_set_aside(
    data: st.DataObject | None, shape: tuple[int, int, int], chunk: int, chunks: int, length: int
) -> None:
    heads, kv_heads, dim = shape
    total = chunk * chunks
    documents = list(range(0, total, length))
    if data is not None and len(documents) > 1:  # a long one first, so that a chunk begins with earlier keys
        del documents[1 : data.draw(st.integers(1, len(documents)))]
    given_shape: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "qk_dim": dim, "v_dim": dim}
    plain, deterministic = (
        workspace_bytes(**given_shape, chunk=chunk, total=total, deterministic=switch) for switch in (False, True)
    )
    for start in range(0, total, chunk):
        parts = spans(start, start + chunk, 0, start + chunk, documents, None)
        for strategy in _strategies(FlashAttention2(), parts, backward=True):
            for group in strategy.groups(parts):
                for call in group:
                    assert flash2_backward(call.geometry, heads, kv_heads, dim, None) <= plain
                    assert flash3_backward(call.geometry, heads, kv_heads, dim) <= plain
                    for multiprocessors in (46, 132, MOST_MULTIPROCESSORS):
                        needed = flash2_backward(call.geometry, heads, kv_heads, dim, multiprocessors)
                        assert needed <= deterministic


def planned(rows: int, row_tokens: int, chunk: int, *, deterministic: bool = False) -> int:
    """Workspace of a small model's problem on a GPU, whose steps all have 4,096 tokens."""
    d = tiny.data(sequence_length=row_tokens)
    t = tiny.training(global_batch_size=rows, micro_batch_size=rows, deterministic=deterministic)
    run = tiny.recipe(data=d, train=t)
    spec = tiny.spec_of(model_config(run, None))
    budgets = Budgets(1 << 34, 1 << 34, None, {})
    return PlanRequest(spec=spec, recipe=run, budgets=budgets, device_type="cuda").problem(chunk).workspace_bytes


def test_a_chunk_over_several_rows_has_the_keys_of_all_of_them() -> None:
    """Rows of one micro-batch are documents of one stream, and one call may look at all of a chunk's."""
    for chunk in (512, 2048, 4096):
        assert planned(8, 512, chunk) == planned(1, 4096, chunk)


def test_a_deterministic_run_is_planned_with_the_sums_that_it_takes() -> None:
    shape: dict[str, Any] = {"heads": 4, "kv_heads": 2, "qk_dim": 8, "v_dim": 8, "chunk": 1024, "total": 4096}
    more = workspace_bytes(**shape, deterministic=True) - workspace_bytes(**shape)
    # And with the holes that they leave between them.
    assert planned(1, 4096, 1024, deterministic=True) - planned(1, 4096, 1024) == more + more // 8 > 0
