"""Chunked attention against one dense softmax; how ranges of queries and keys are cut into kernel calls, and their
visible pairs counted; kernels one by one, and our calls of torch's against what this torch declares."""

import itertools
import math
from random import Random
from typing import Any

import pytest
import torch
from attention_reference import causal_band, dense, random, visible_keys, with_prefixes
from hypothesis import given
from hypothesis import strategies as st
from samples import sampled
from torch import Tensor

from penstock.engine.attention import backends
from penstock.engine.attention import chunk as attention
from penstock.engine.attention import torch_cuda as attention_cuda
from penstock.engine.attention.backends import AttentionCall, Gradients, Operands
from penstock.engine.attention.chunk import attend, attend_backward, finish, merge_, sink_gradient
from penstock.engine.attention.pairs import chunk_pairs, visible_pairs
from penstock.engine.attention.spans import SEGMENT_ROWS, Cut, Geometry, cut, most_segments, spans
from penstock.engine.attention.torch_cuda import CudaKernel, TorchCudaFlash, TorchCudnn, _on_device
from penstock.storage.files.errors import UserError

PLACES = st.integers(0, 60)
SPANS = st.tuples(PLACES, PLACES)
SIZES = [(65, 65), (530, 530), (1, 40), (70, 600)]
KINDS = ["causal", "full", "window", "old keys", "softcap"]
WIDTHS = itertools.cycle([(16, 16), (24, 16), (16, 24)])
PREFIXES = st.lists(st.none() | st.tuples(st.integers(0, 9), st.integers(0, 60)), max_size=4)
"""For each document of a stream but the first: which earlier one it goes on from, and how many of its tokens."""
GRID = [(n, m, case, next(WIDTHS)) for (n, m), case in itertools.product(SIZES, KINDS)]


@st.composite
def divided_streams(draw: st.DrawFn) -> dict[str, Any]:
    total = draw(st.integers(1, 150))
    size = st.sampled_from([1, 7, 63, 64, 65, total])
    return {
        "total": total,
        "documents": with_prefixes(sorted({0, *draw(st.lists(st.integers(0, total - 1), max_size=4))}), draw(PREFIXES)),
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
    total, documents, window, chunk, piece = map(case.get, ("total", "documents", "window", "chunk", "key_piece"))
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


@pytest.mark.parametrize("multiplies", [True, False])
def test_bfloat16_is_as_close_as_its_rounding(monkeypatch: pytest.MonkeyPatch, multiplies: bool) -> None:
    """Whether or not the CPU multiplies it."""
    monkeypatch.setattr(backends, "_CPU_MULTIPLIES_BFLOAT16", multiplies)
    torch.manual_seed(0)
    total = 200
    q, k, v, dout = (random(total, heads, 32, dtype=torch.bfloat16) for heads in (4, 2, 2, 4))
    exact = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    expected = dense(*exact, causal_band(total, total), 0.2)
    dq, dk, dv = (torch.zeros(tensor.shape) for tensor in (q, k, v))
    for start in range(0, total, 70):
        rows, keys = slice(start, min(start + 70, total)), slice(0, min(start + 70, total))
        x = Operands(q[rows], k[keys], v[keys], AttentionCall(softmax_scale=0.2, window=None), start)
        out, lse = attend(x)
        assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
        torch.testing.assert_close(out.double(), expected[rows], atol=0.02, rtol=0.02)
        attend_backward(x, Gradients(dout[rows], out, lse), dq[rows], dk[keys], dv[keys])
    for computed, target in zip((dq, dk, dv), torch.autograd.grad(expected, exact, dout.double()), strict=True):
        assert (computed - target).norm() <= 0.01 * target.norm()


def test_what_would_be_computed_wrongly_is_refused() -> None:
    """A chunked mask is none of it: its chunks are documents of their own."""
    assert attention.split_documents([0, 10, 13], 20, 4) == [0, 4, 8, 10, 13, 17]
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


def visible(geometry: Geometry) -> Tensor:
    """Int32 [n, m], written out from the definition."""
    table = torch.zeros(geometry.n, geometry.m, dtype=torch.int32)
    ends_q, ends_k = geometry.cu_q or (0, geometry.n), geometry.cu_k or (0, geometry.m)
    for i in range(len(ends_q) - 1):
        n, m = ends_q[i + 1] - ends_q[i], ends_k[i + 1] - ends_k[i]
        rows, keys = torch.arange(n)[:, None] + m - n, torch.arange(m)
        seen = keys <= rows if geometry.causal else torch.ones(n, m, dtype=torch.bool)
        if geometry.left is not None:
            seen &= keys >= rows - geometry.left
        table[ends_q[i] : ends_q[i + 1], ends_k[i] : ends_k[i + 1]] = seen.int()
    return table


@st.composite
def divided_stream(draw: st.DrawFn) -> tuple[int, list[int], int, int, int | None]:
    total = draw(st.integers(1, 400))
    documents = sorted({0, *draw(st.lists(st.integers(0, total - 1), max_size=6))})
    length = st.integers(-(-total // 40), total)  # of at most 40 chunks and 40 pieces
    return total, documents, draw(length), draw(length), draw(st.none() | st.integers(1, 300))


@given(divided_stream(), st.sampled_from(["whole", "split"]), st.booleans(), st.none() | st.integers(1, 100))
@sampled(20, 150)
def test_calls_cover_the_visible_keys_exactly_once(
    stream: tuple[int, list[int], int, int, int | None], how: Cut, segments: bool, keys_per_call: int | None
) -> None:
    total, documents, chunk, piece, window = stream
    seen = torch.zeros(total, total, dtype=torch.int32)
    for start in range(0, total, chunk):
        for first in range(0, total, piece):
            found = spans(start, min(start + chunk, total), first, min(first + piece, total), documents, window)
            causal = [span for span in found if span.causal]
            assert len(found) - len(causal) <= 1
            for parts in (causal, found[len(causal) :]):
                for group in cut(parts, how, segments=segments, keys_per_call=keys_per_call) if parts else []:
                    assert len({(call.q0, call.q1) for call in group}) == 1
                    for call in group:
                        geometry = call.geometry
                        assert (geometry.n, geometry.m) == (call.q1 - call.q0, call.k1 - call.k0)
                        table = visible(geometry)
                        assert bool(table.any(dim=1).all()), "kernels need not know rows without keys"
                        assert geometry.left is None or geometry.left >= 0, "kernels take -1 for no limit"
                        assert int(table.sum()) == geometry.pairs
                        if keys_per_call is not None and window is None and len(geometry.cu_q) <= 2:
                            own = geometry.n if geometry.causal else 0
                            assert geometry.m - own <= keys_per_call
                        seen[call.q0 : call.q1, call.k0 : call.k1] += table
    assert torch.equal(seen, visible_keys(total, documents, window).int())


@given(st.integers(1, 60), st.integers(1, 40), st.none() | st.integers(1, 50))
def test_short_documents_are_shared_out_among_few_calls(count: int, length: int, keys_per_call: int | None) -> None:
    """Rows that a kernel adds to each segment are at most half of the queries, or 1,024."""
    rows = count * length
    parts = spans(0, rows, 0, rows, list(range(0, rows, length)), None)
    calls = [call for (call,) in cut(parts, "whole", segments=True, keys_per_call=keys_per_call)]
    sizes = [max(1, len(call.geometry.cu_q) - 1) for call in calls]
    assert sum(sizes) == count
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) * SEGMENT_ROWS <= max(1024, rows / 2)
    assert len(calls) == -(-count // most_segments(rows)), "more calls than there need be"


@given(st.sets(PLACES), PREFIXES, st.none() | st.integers(1, 70), st.booleans(), PLACES, PLACES, st.none() | SPANS)
def test_chunk_pairs_are_those_of_the_mask(
    starts: set[int],
    prefixes: list[tuple[int, int] | None],
    reach: int | None,
    windows: bool,
    a: int,
    b: int,
    keys: tuple[int, int] | None,
) -> None:
    """Of documents in a stream of 60 tokens, with a window, spans within which alone is attended, or neither."""
    documents = sorted({0, *starts} - {60})
    window, span = (reach, None) if windows else (None, reach)
    ends = [*documents[1:], 60]
    apart = [at for first, last in zip(documents, ends, strict=True) for at in range(first, last, span or 60)]
    if span is None:
        apart = documents = with_prefixes(documents, prefixes)
    (start, end), among = sorted((a, b)), (0, 60) if keys is None else (min(keys), max(keys))
    counted = int(visible_keys(60, apart, window)[start:end, slice(*among)].sum())
    assert chunk_pairs(start, end, documents, window, span, None if keys is None else among) == counted
    assert visible_pairs(end, window, span) == chunk_pairs(0, end, [0], window, span, None)


@pytest.mark.parametrize("backend", [backends.TorchCpuFlash(), backends.TiledReference()], ids=lambda b: b.name)
@pytest.mark.parametrize(("n", "m", "case", "widths"), GRID)
def test_backend_equals_dense_softmax(backend: Any, widths: tuple[int, int], case: str, n: int, m: int) -> None:
    torch.manual_seed(0)
    left = {"window": m // 3, "old keys": m - 1}.get(case)
    geometry = Geometry(n, m, causal=case not in ("full", "old keys"), left=left)
    visible = causal_band(n, m, left) if geometry.causal else torch.ones(n, m, dtype=torch.bool)
    if case == "old keys":  # the second half of a window: the oldest keys are hidden from the last queries
        geometry = Geometry(n, m, causal=False, left=m // 2)
        visible = torch.arange(m) >= torch.arange(m - n, m)[:, None] - m // 2
    softcap = 3.0 if case == "softcap" else None
    q, k, v = random(n, 4, widths[0]), random(m, 2, widths[0]), random(m, 2, widths[1])
    x = Operands(q, k, v, AttentionCall(0.3, softcap=softcap))
    refusal = backend.refusal(backends.Problem.of(x, geometry, backward=True))
    if refusal is not None:
        assert (backend.name, case, refusal) == ("torch-cpu-flash", "softcap", "has no soft-cap")
        return
    for tensor in (q, k, v):
        tensor.requires_grad_()
    expected = dense(q, k, v, visible, 0.3, softcap)
    dout = random(*expected.shape)
    gradients = torch.autograd.grad(expected, (q, k, v), dout)
    with torch.no_grad():
        out, lse = backend.forward(x, geometry)
        computed = backend.backward(x, Gradients(dout, out, lse), geometry)
    torch.testing.assert_close(out, expected)
    for grad, reference in zip(computed, gradients, strict=True):
        torch.testing.assert_close(grad, reference)


META = torch.device("meta")
SEGMENTS = Geometry(300, 400, causal=True, cu_q=(0, 100, 300), cu_k=(0, 200, 400))
CALLS = [
    (TorchCudaFlash(), Geometry(512, 512, causal=True)),
    (TorchCudaFlash(), Geometry(512, 1024, causal=True)),
    (TorchCudaFlash(), Geometry(512, 1024, causal=False)),
    (TorchCudaFlash(), Geometry(512, 1024, causal=True, left=99)),
    (TorchCudaFlash(), SEGMENTS),
    (TorchCudnn(), Geometry(512, 512, causal=True)),
    (TorchCudnn(), Geometry(512, 1024, causal=False)),
]


@pytest.mark.parametrize(("kernel", "geometry"), CALLS)
@pytest.mark.parametrize("shape", [(32, 8, 128, 128), (8, 2, 192, 128), (4, 4, 64, 64), (4, 2, 20, 12)])
def test_torchs_operators_take_what_we_pass(
    monkeypatch: pytest.MonkeyPatch, kernel: CudaKernel, geometry: Geometry, shape: tuple[int, int, int, int]
) -> None:
    """On tensors without data: nothing is computed, but an argument that torch has renamed, moved or dropped ends the
    call here, and on a card."""
    monkeypatch.setattr(
        attention_cuda, "_on_device", lambda values, device: torch.tensor(values, dtype=torch.int32, device=device)
    )

    def make(rows: int, num_heads: int, width: int) -> Tensor:
        return torch.empty(rows, num_heads, width, dtype=torch.bfloat16, device=META)

    n, m = geometry.n, geometry.m
    heads, kv_heads, qk_dim, v_dim = shape
    q, k, v = make(n, heads, qk_dim), make(m, kv_heads, qk_dim), make(m, kv_heads, v_dim)
    x = Operands(q, k, v, AttentionCall(0.1))
    out, lse = kernel.forward(x, geometry)
    assert (out.shape, lse.shape) == ((n, heads, v_dim), (heads, n))
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    dout = make(n, heads, v_dim)
    grads = kernel.backward(x, Gradients(dout, out, lse), geometry)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]


def test_lengths_of_segments_are_made_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a copy to the device: of a step's chunks, forward and backward, all layers share them."""
    made: list[Any] = []
    real = torch.tensor

    def tensor(values: Any, *, pin_memory: bool, **kwargs: Any) -> Tensor:
        assert pin_memory, "a pageable copy waits for the device"
        made.append(values)
        return real(values, **kwargs)

    monkeypatch.setattr(torch, "tensor", tensor)
    _on_device.cache_clear()
    chunks = [(0, 7, 1000 + i) for i in range(1024)]  # 2 M tokens in chunks of 4,096, queries and keys
    for _ in range(3):
        for values in chunks:
            assert _on_device(values, META).shape == (3,)
    assert made == chunks
    _on_device.cache_clear()
