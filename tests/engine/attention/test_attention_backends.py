"""Attention kernels one by one against one dense softmax."""

from __future__ import annotations

import pytest
import torch
from attention_reference import causal_band, dense, random

from engine.attention.backends import (
    AttentionCall,
    Backend,
    Gradients,
    Operands,
    Problem,
    TiledReference,
    TorchCpuFlash,
)
from engine.attention.select import BACKENDS
from engine.attention.spans import Geometry
from engine.attention.torch_cuda import TorchCudaFlash, TorchCudnn

SIZES = [(1, 1), (63, 63), (64, 64), (65, 65), (530, 530), (1, 40), (64, 65), (70, 600), (530, 531), (513, 1100)]


@pytest.mark.parametrize("backend", [TorchCpuFlash(), TiledReference()], ids=lambda b: b.name)
@pytest.mark.parametrize("widths", [(16, 16), (24, 16), (16, 24)], ids=str)
@pytest.mark.parametrize("case", ["causal", "full", "window", "old keys", "softcap"])
@pytest.mark.parametrize(("n", "m"), SIZES)
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


@pytest.mark.parametrize("backend", [TorchCudaFlash(), TorchCudnn()], ids=lambda b: b.name)
@pytest.mark.parametrize("widths", [(64, 64), (192, 128), (20, 12)], ids=str)
@pytest.mark.parametrize("left", [None, 100])
def test_torch_declares_the_operators_that_are_called(
    backend: Backend, widths: tuple[int, int], left: int | None
) -> None:
    # Tensors without data: torch's own shape functions stand in for the kernels.
    geometry = Geometry(256, 512, causal=False, left=left)
    q, k, v, dout = (
        torch.empty(rows, heads, width, dtype=torch.bfloat16, device="meta")
        for rows, heads, width in ((256, 8, widths[0]), (512, 2, widths[0]), (512, 2, widths[1]), (256, 8, widths[1]))
    )
    x = Operands(q, k, v, AttentionCall(0.1))
    out, lse = backend.forward(x, geometry)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (dout.shape, q.dtype, (8, 256), torch.float32)
    grads = backend.backward(x, Gradients(dout, out, lse), geometry)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]


def test_every_other_backend_says_why_it_cannot_compute_on_a_cpu() -> None:
    x = Operands(*(random(4, 2, 8, dtype=torch.bfloat16) for _ in range(3)), AttentionCall(0.3))
    problem = Problem.of(x, Geometry(4, 4, causal=True), backward=False)
    refusals = {backend.name: backend.refusal(problem) for backend in BACKENDS}
    assert [name for name, refusal in refusals.items() if refusal is None] == ["torch-cpu-flash", "tiled-reference"]
    assert all("CUDA" in refusal for refusal in refusals.values() if refusal is not None)
