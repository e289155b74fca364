"""What a plan sets aside for attention, against what flash-attn's kernels allocate by their sources."""

from __future__ import annotations

from typing import Any

import tiny
from hypothesis import example, given
from hypothesis import strategies as st
from samples import sampled

from penstock.engine.attention.flash_attn import FlashAttention2
from penstock.engine.attention.select import _strategies
from penstock.engine.attention.spans import Geometry, spans
from penstock.engine.attention.workspace import MOST_MULTIPROCESSORS, workspace_bytes
from penstock.engine.forecast.request import PlanRequest
from penstock.engine.hf.config import model_config
from penstock.engine.machine.budgets import Budgets

SHAPES = [(32, 8, 128), (8, 8, 64), (4, 1, 80), (40, 8, 256), (1, 1, 16)]
"""Heads, key and value heads, width."""


def flash2_backward(geometry: Geometry, heads: int, kv_heads: int, dim: int, multiprocessors: int | None) -> int:
    """Bytes beside operands and windows; `multiprocessors`: the GPU's, in deterministic mode.

    flash_api.cpp, mha_bwd and mha_varlen_bwd: softmax_d, dq_accum, dk_expanded and dv_expanded, the results; ours: dout
    and out as plain tensors, and dq's sum in float32.
    """
    n, m, segments = geometry.n, geometry.m, max(1, len(geometry.cu_q) - 1)
    rows = n + 128 * segments if geometry.cu_q else -(-n // 128) * 128
    rounded = -(-dim // 32) * 32 if dim <= 192 else 256
    copies = 1 if multiprocessors is None else -(-multiprocessors // (segments * heads))
    sums = 4 * heads * rows * (copies * rounded + 1)
    expanded = 2 * 2 * m * heads * dim if heads != kv_heads else 0
    results = 2 * n * heads * dim + 2 * 2 * m * kv_heads * dim
    return sums + expanded + results + n * heads * dim * (2 + 2 + 4)


def flash3_backward(geometry: Geometry, heads: int, kv_heads: int, dim: int) -> int:
    """hopper/flash_api.cpp, mha_bwd: sums in float32 of dq, and for shared heads of dk and dv, in tiles of 128 rows."""
    n, m, segments = geometry.n, geometry.m, max(1, len(geometry.cu_q) - 1)
    rounded = -(-dim // 32) * 32 if dim <= 192 else 256
    rows, keys = (length + 128 * segments for length in (n, m))
    sums = 4 * heads * rows * (rounded + 2) + (4 * 2 * kv_heads * keys * rounded if heads != kv_heads else 0)
    results = 2 * n * heads * dim + 2 * 2 * m * kv_heads * dim
    return sums + results + n * heads * dim * (2 + 2 + 4)


@sampled(50, 200)
@given(st.data(), st.sampled_from(SHAPES), st.integers(1, 20000), st.integers(1, 4), st.integers(1, 2000))
@example(None, (32, 8, 128), 8192, 4, 30)
@example(None, (4, 1, 80), 12000, 3, 64)
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
