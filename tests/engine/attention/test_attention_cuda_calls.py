"""What our calls of torch's CUDA kernels pass, against the operators that this torch declares: on tensors without data.

Nothing is computed. An argument that torch has renamed, moved or dropped ends a call here, and on a card.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.attention import torch_cuda as attention_cuda
from engine.attention.backends import AttentionCall, Gradients, Operands
from engine.attention.spans import Geometry
from engine.attention.torch_cuda import CudaKernel, TorchCudaFlash, TorchCudnn, _on_device

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


@pytest.fixture(autouse=True)
def without_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        attention_cuda, "_on_device", lambda values, device: torch.tensor(values, dtype=torch.int32, device=device)
    )


@pytest.mark.parametrize(("kernel", "geometry"), CALLS)
@pytest.mark.parametrize(("heads", "kv_heads", "qk_dim", "v_dim"), [(32, 8, 128, 128), (4, 4, 64, 64), (4, 2, 20, 12)])
def test_torchs_operators_take_what_we_pass(
    kernel: CudaKernel, geometry: Geometry, heads: int, kv_heads: int, qk_dim: int, v_dim: int
) -> None:
    def make(rows: int, num_heads: int, width: int) -> Tensor:
        return torch.empty(rows, num_heads, width, dtype=torch.bfloat16, device=META)

    n, m = geometry.n, geometry.m
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
