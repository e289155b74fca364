"""Chunked attention and its kernels against one dense softmax."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine import attention
from engine.attention import AttentionCall, AttentionState, pieces
from engine.attention_backends import BACKENDS, Backend, TiledReference, TorchCpuFlash, choose_backend
from storage.errors import UserError


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention written out: q [n, heads, d], k and v [m, kv_heads, d], visible [n, m]."""
    groups = q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = torch.einsum("nhd,mhd->hnm", q, keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, scores.shape[1], 1)], dim=-1)
    probabilities = scores.softmax(dim=-1)[..., : visible.shape[1]]
    return torch.einsum("hnm,mhd->nhd", probabilities, values)


def random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def sliding(n: int, m: int, window: int) -> Tensor:
    """Queries m - n .. m of a stream of m tokens."""
    queries, keys = torch.arange(m - n, m)[:, None], torch.arange(m)
    return (keys <= queries) & (keys > queries - window)


@pytest.mark.parametrize("backend", [TorchCpuFlash(), TiledReference()], ids=lambda b: b.name)
@pytest.mark.parametrize("widths", [(16, 16), (24, 16), (16, 24)], ids=str)
@pytest.mark.parametrize("case", ["causal", "full", "mask", "softcap"])
def test_backend_equals_dense_softmax(backend: Backend, widths: tuple[int, int], case: str) -> None:
    torch.manual_seed(0)
    n, m = (530, 530) if case in ("causal", "softcap") else (70, 600)
    softcap = 3.0 if case == "softcap" else None
    mask = sliding(n, m, 50) if case == "mask" else None
    q, k, v = random(n, 4, widths[0]), random(m, 2, widths[0]), random(m, 2, widths[1])
    if not backend.supports(q, v, softcap=softcap, mask=mask):
        assert (backend.name, case) == ("torch-cpu-flash", "softcap")
        return
    causal = case in ("causal", "softcap")
    visible = mask if mask is not None else torch.ones(n, m, dtype=torch.bool).tril(0 if causal else m)
    for tensor in (q, k, v):
        tensor.requires_grad_()
    expected = dense(q, k, v, visible, 0.3, softcap)
    dout = random(*expected.shape)
    gradients = torch.autograd.grad(expected, (q, k, v), dout)
    options = {"causal": causal, "scale": 0.3, "mask": mask, "softcap": softcap}
    with torch.no_grad():
        out, lse = backend.forward(q, k, v, **options)
        computed = backend.backward(dout, q, k, v, out, lse, **options)
    torch.testing.assert_close(out, expected)
    for grad, reference in zip(computed, gradients, strict=True):
        torch.testing.assert_close(grad, reference)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_row_without_keys_has_no_weight(backend: Backend) -> None:
    q, k, v = random(3, 2, 8), random(5, 2, 8), random(5, 2, 8)
    mask = torch.tensor([[True] * 5, [False] * 5, [True] * 5])
    if not backend.supports(q, v, softcap=None, mask=mask):
        return
    out, lse = backend.forward(q, k, v, causal=False, scale=1.0, mask=mask)
    assert torch.equal(out[1], torch.zeros(2, 8, dtype=torch.float64))
    assert bool(torch.isneginf(lse[:, 1]).all())
    assert bool(torch.isfinite(lse[:, 0]).all())


def test_bfloat16_is_as_close_as_its_rounding() -> None:
    torch.manual_seed(0)
    q, k, v = (random(200, heads, 32, dtype=torch.bfloat16) for heads in (4, 2, 2))
    backend = choose_backend(q, v, softcap=None, mask=None)
    out, lse = backend.forward(q, k, v, causal=True, scale=0.2)
    expected = dense(q.double(), k.double(), v.double(), torch.ones(200, 200, dtype=torch.bool).tril(), 0.2)
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, atol=0.02, rtol=0.02)


@st.composite
def chunked_stream(draw: st.DrawFn) -> tuple[int, list[int], int, int | None]:
    total = draw(st.integers(1, 400))
    documents = sorted({0, *draw(st.lists(st.integers(0, total - 1), max_size=6))})
    return total, documents, draw(st.integers(1, total)), draw(st.none() | st.integers(1, 300))


@given(chunked_stream())
@settings(max_examples=150, deadline=None)
def test_pieces_cover_the_visible_keys_exactly_once(stream: tuple[int, list[int], int, int | None]) -> None:
    total, documents, chunk, window = stream
    seen = torch.zeros(total, total, dtype=torch.int32)
    for start in range(0, total, chunk):
        for group in pieces(start, min(start + chunk, total), documents, window):
            assert len({(piece.q0, piece.q1) for piece in group}) == 1
            assert group[0].k1 == group[0].q1, "the first piece must give every query a key"
            for piece in group:
                mask = piece.mask(window or 0, torch.device("cpu"))
                block = torch.ones(piece.q1 - piece.q0, piece.k1 - piece.k0, dtype=torch.int32)
                if piece.kind == "causal":
                    assert (piece.q0, piece.q1) == (piece.k0, piece.k1)
                    block = block.tril()
                seen[piece.q0 : piece.q1, piece.k0 : piece.k1] += block if mask is None else mask.int()
    starts = torch.tensor(documents)
    owner = torch.bucketize(torch.arange(total), starts, right=True)
    visible = (owner[:, None] == owner) & sliding(total, total, total if window is None else window)
    assert torch.equal(seen, visible.int())


@pytest.mark.parametrize("chunk", [120, 30, 7, 49])
@pytest.mark.parametrize(
    ("window", "softcap", "with_sinks", "v_dim"),
    [(None, None, False, 8), (None, None, True, 12), (13, None, False, 8), (70, None, True, 8), (13, 2.0, True, 6)],
)
def test_chunks_equal_whole_attention(
    chunk: int, window: int | None, softcap: float | None, with_sinks: bool, v_dim: int
) -> None:
    torch.manual_seed(1)
    total, documents = 120, [0, 41, 45, 100]
    q, k, v = random(total, 4, 8), random(total, 2, 8), random(total, 2, v_dim)
    sinks = random(4) if with_sinks else None
    inputs = [tensor.requires_grad_() for tensor in (q, k, v, *([sinks] if sinks is not None else []))]
    owner = torch.bucketize(torch.arange(total), torch.tensor(documents), right=True)
    visible = (owner[:, None] == owner) & sliding(total, total, window or total)
    expected = dense(q, k, v, visible, 0.4, softcap, sinks)
    dout = random(*expected.shape)
    reference = torch.autograd.grad(expected, inputs, dout)

    windows = [torch.full_like(tensor, float("nan")).detach() for tensor in (k, v)]
    gradient_windows = [torch.zeros_like(tensor).detach() for tensor in (k, v)]
    call = AttentionCall(scale=0.4, window=window, softcap=softcap, sinks=sinks)
    states = []
    for start in range(0, total, chunk):
        end = min(start + chunk, total)
        lse = torch.zeros(4, end - start, dtype=torch.float64)
        out = torch.zeros(end - start, 4, v_dim, dtype=torch.float64)
        states.append(AttentionState(*windows, out, lse, start, end, documents, *gradient_windows))
    with torch.no_grad():
        for state in states:
            rows = slice(state.start, state.end)
            out = attention.forward_handler(state)(q[rows], k[rows], v[rows], call)
            torch.testing.assert_close(out, expected[rows])
    totals = [torch.zeros_like(tensor) for tensor in inputs]
    for state in reversed(states):
        rows = slice(state.start, state.end)
        out = attention.backward_handler(state)(q[rows], k[rows], v[rows], call)
        for sum_, grad in zip(totals, torch.autograd.grad(out, inputs, dout[rows]), strict=True):
            sum_ += grad
    for computed, expected_grad in zip(totals, reference, strict=True):
        torch.testing.assert_close(computed, expected_grad)


def test_chunked_masks_are_documents_of_their_own() -> None:
    assert attention.split_documents([0, 10, 13], 20, 4) == [0, 4, 8, 10, 13, 17]


def test_what_would_be_computed_wrongly_is_refused() -> None:
    module = torch.nn.Linear(2, 2)
    q = torch.zeros(1, 2, 3, 4)
    with attention.use(lambda q, k, v, call: q):
        with pytest.raises(UserError, match="mask of its own"):
            attention.penstock_attention(module, q, q, q, torch.zeros(1, 1, 3, 3))
        with pytest.raises(UserError, match="position bias"):
            attention.penstock_attention(module, q, q, q, None, position_bias=torch.zeros(1, 2, 3, 3))
        with pytest.raises(UserError, match="not causal"):
            attention.penstock_attention(module, q, q, q, None, is_causal=False)
