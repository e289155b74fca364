"""Chunked attention and its kernels against one dense softmax."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import pytest
import torch
from attention_reference import causal_band, dense, random, visible_keys
from hypothesis import given
from hypothesis import strategies as st
from samples import sampled
from torch import Tensor

from penstock.engine.attention import chunk as attention
from penstock.engine.attention.backends import AttentionCall, Gradients, Operands
from penstock.engine.attention.chunk import (
    AttentionState,
    KeptAttention,
    attend,
    attend_backward,
    finish,
    merge_,
    sink_gradient,
)
from penstock.storage.errors import UserError


@st.composite
def divided_streams(draw: st.DrawFn) -> dict[str, Any]:
    total = draw(st.integers(1, 150))
    size = st.sampled_from([1, 7, 63, 64, 65, total])
    return {
        "total": total,
        "documents": sorted({0, *draw(st.lists(st.integers(0, total - 1), max_size=4))}),
        "chunk": draw(size),
        "key_piece": draw(size),
        "window": draw(st.none() | st.integers(1, 90)),
        "softcap": draw(st.sampled_from([None, None, 2.0])),
        "with_sinks": draw(st.booleans()),
        "heads": draw(st.sampled_from([(2, 2), (4, 2), (3, 1)])),
        "widths": draw(st.sampled_from([(8, 8), (12, 8), (6, 10)])),
        "seed": draw(st.integers(0, 99)),
    }


@given(divided_streams())
@sampled(3, 60)
def test_any_ranges_of_keys_in_any_order_are_exact(case: dict[str, Any]) -> None:
    total, documents, window, chunk, piece = (
        case[name] for name in ("total", "documents", "window", "chunk", "key_piece")
    )
    (heads, kv_heads), (qk_dim, v_dim) = case["heads"], case["widths"]
    torch.manual_seed(case["seed"])
    order = Random(case["seed"])
    sinks = random(heads) if case["with_sinks"] else None
    q, k, v = random(total, heads, qk_dim), random(total, kv_heads, qk_dim), random(total, kv_heads, v_dim)
    inputs = [tensor.requires_grad_() for tensor in (q, k, v, *([] if sinks is None else [sinks]))]
    expected = dense(q, k, v, visible_keys(total, documents, window), 0.4, case["softcap"], sinks)
    dout = random(*expected.shape)
    reference = torch.autograd.grad(expected, inputs, dout)

    call = AttentionCall(softmax_scale=0.4, window=window, softcap=case["softcap"], sinks=sinks)
    dq, dk, dv = (torch.zeros_like(tensor).detach() for tensor in (q, k, v))
    dsinks = torch.zeros(heads, dtype=torch.float64)
    with torch.no_grad():
        for start in range(0, total, chunk):
            rows = slice(start, min(start + chunk, total))
            pieces = [slice(first, min(first + piece, total)) for first in range(0, total, piece)]
            order.shuffle(pieces)
            parts = [Operands(q[rows], k[keys], v[keys], call, start, keys.start, documents) for keys in pieces]
            out, lse = torch.zeros_like(expected[rows]), torch.full((heads, rows.stop - start), -math.inf).double()
            for x in parts:
                merge_(out, lse, *attend(x))
            out, lse = finish(out, lse, sinks)
            torch.testing.assert_close(out, expected[rows])
            given_rows = Gradients(dout[rows], out, lse)
            for x, keys in zip(parts, pieces, strict=True):
                attend_backward(x, given_rows, dq[rows], dk[keys], dv[keys])
            of_sinks = sink_gradient(given_rows, call)
            assert (of_sinks is None) == (sinks is None)
            if of_sinks is not None:
                dsinks += of_sinks
    for computed, expected_grad in zip((dq, dk, dv, dsinks), reference, strict=False):
        torch.testing.assert_close(computed, expected_grad)


def by_chunks(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, call: AttentionCall, chunk: int) -> list[Tensor]:
    outs, (dq, dk, dv) = [], (torch.zeros(tensor.shape) for tensor in (q, k, v))
    for start in range(0, q.shape[0], chunk):
        rows = slice(start, min(start + chunk, q.shape[0]))
        x = Operands(q[rows], k[: rows.stop], v[: rows.stop], call, start)
        out, lse = attend(x)
        assert (out.dtype, lse.dtype) == (q.dtype, torch.float32)
        outs.append(out)
        attend_backward(x, Gradients(dout[rows], out, lse), dq[rows], dk[: rows.stop], dv[: rows.stop])
    return [torch.cat(outs), dq, dk, dv]


def test_bfloat16_is_as_close_as_its_rounding() -> None:
    torch.manual_seed(0)
    total = 200
    q, k, v, dout = (random(total, heads, 32, dtype=torch.bfloat16) for heads in (4, 2, 2, 4))
    exact = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    expected = dense(*exact, causal_band(total, total), 0.2)
    out, *gradients = by_chunks(q, k, v, dout, AttentionCall(softmax_scale=0.2, window=None), 70)
    torch.testing.assert_close(out.double(), expected, atol=0.02, rtol=0.02)
    for computed, target in zip(gradients, torch.autograd.grad(expected, exact, dout.double()), strict=True):
        assert (computed - target).norm() <= 0.01 * target.norm()


@pytest.mark.parametrize(
    ("window", "pairs"),
    # Four chunks of 64: the triangle; with a window the own triangles, and rectangles of the 64, 99 and 99 earlier keys
    # that the chunk's first query sees, of which some are masked.
    [(None, 256 * 257 // 2), (100, 4 * 64 * 65 // 2 + 64 * (64 + 99 + 99))],
    ids=["causal", "window"],
)
def test_executed_flops_are_counted_as_the_kernel_computes_them(window: int | None, pairs: int) -> None:
    q, k, v, dout = (torch.randn(256, *size) for size in ((4, 8), (2, 8), (2, 6), (4, 6)))
    attention.COUNTS.reset()
    by_chunks(q, k, v, dout, AttentionCall(softmax_scale=1.0, window=window), 64)
    assert attention.COUNTS.forward_flops == 2 * 4 * (8 + 6) * pairs
    assert attention.COUNTS.backward_flops == 2 * 4 * (3 * 8 + 2 * 6) * pairs


def test_chunked_masks_are_documents_of_their_own() -> None:
    assert attention.split_documents([0, 10, 13], 20, 4) == [0, 4, 8, 10, 13, 17]


def test_what_would_be_computed_wrongly_is_refused() -> None:
    module = torch.nn.Linear(2, 2)
    q = torch.zeros(1, 2, 3, 4)
    cases: list[tuple[str, Tensor | None, dict[str, Any]]] = [
        ("its own attention mask", torch.zeros(1, 1, 3, 3), {}),
        ("position bias", None, {"position_bias": torch.zeros(1, 2, 3, 3)}),
        ("not causal", None, {"is_causal": False}),
    ]
    with attention.use(lambda q, k, v, call: q):
        for message, mask, options in cases:
            with pytest.raises(UserError, match=message):
                attention.penstock_attention(module, q, q, q, mask, **options)


@pytest.mark.parametrize("apart", [True, False])
def test_a_graph_that_is_kept_writes_attentions_output_once_and_where_it_is_to_be(apart: bool) -> None:
    """Apart from the state's place, which serves other chunks by the time of backward, or in it."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(6, heads, 4, generator=generator) for heads in (2, 1, 1, 2))
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    call = AttentionCall(softmax_scale=0.5)
    place, lse = torch.full((6, 2, 4), 7.0), torch.zeros(2, 6)
    state = AttentionState(torch.zeros(6, 1, 4), torch.zeros(6, 1, 4), place, lse, 0, 6, [0])
    kept = KeptAttention(state, apart=apart)
    out = kept.forward(*leaves, call)
    expected = dense(*leaves, causal_band(6, 6), 0.5)
    torch.testing.assert_close(out, expected)
    assert (out.data_ptr() == place.data_ptr()) is not apart
    assert bool((place == 7.0).all()) is apart
    kept.state.dk, kept.state.dv = torch.zeros(6, 1, 4), torch.zeros(6, 1, 4)
    if apart:  # another chunk has been there
        place.fill_(float("nan"))
        lse.fill_(float("nan"))
    for computed, wanted in zip(
        torch.autograd.grad(out, leaves, dout), torch.autograd.grad(expected, leaves, dout), strict=True
    ):
        torch.testing.assert_close(computed, wanted)
