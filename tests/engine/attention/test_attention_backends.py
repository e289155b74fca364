"""Attention kernels one by one against one dense softmax, and our calls of torch's against what this torch declares."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from attention_reference import causal_band, dense, random
from torch import Tensor

from penstock.engine.attention import torch_cuda as attention_cuda
from penstock.engine.attention.backends import (
    AttentionCall,
    Backend,
    Gradients,
    Operands,
    Problem,
    TiledReference,
    TorchCpuFlash,
)
from penstock.engine.attention.spans import Geometry
from penstock.engine.attention.torch_cuda import CudaKernel, TorchCudaFlash, TorchCudnn, _on_device

SIZES = [(1, 1), (64, 64), (65, 65), (530, 530), (1, 40), (70, 600), (513, 800)]
KINDS = ["causal", "full", "window", "old keys", "softcap"]
WIDTHS = itertools.cycle([(16, 16), (24, 16), (16, 24)])
GRID = [(n, m, case, next(WIDTHS)) for (n, m), case in itertools.product(SIZES, KINDS)]


@pytest.mark.parametrize("backend", [TorchCpuFlash(), TiledReference()], ids=lambda b: b.name)
@pytest.mark.parametrize(("n", "m", "case", "widths"), GRID)
def test_backend_equals_dense_softmax(backend: Backend, widths: tuple[int, int], case: str, n: int, m: int) -> None:
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
    refusal = backend.refusal(Problem.of(x, geometry, backward=True))
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
