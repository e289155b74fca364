"""The CUDA attention kernel against the tiled reference on the same GPU."""

from __future__ import annotations

import pytest
import torch

from engine.attention_backends import Problem, TiledReference
from engine.attention_cuda import TorchCudaFlash
from engine.attention_pieces import Geometry

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(("n", "m", "causal"), [(257, 257, True), (130, 700, False), (1, 33, False)])
@pytest.mark.parametrize("widths", [(64, 64), (128, 128), (192, 128), (20, 20)], ids=str)
def test_flash_equals_reference_with_merged_statistics(n: int, m: int, causal: bool, widths: tuple[int, int]) -> None:
    torch.manual_seed(0)
    half = {"dtype": torch.bfloat16, "device": "cuda"}
    q, k = torch.randn(n, 8, widths[0], **half), torch.randn(m, 2, widths[0], **half)
    v, dout = torch.randn(m, 2, widths[1], **half), torch.randn(n, 8, widths[1], **half)
    flash, reference = TorchCudaFlash(), TiledReference()
    geometry, options = Geometry(n, m, causal), {"scale": 0.1, "softcap": None}
    assert flash.refusal(Problem.of(q, v, geometry, softcap=None, backward=True)) is None
    out, lse = flash.forward(q, k, v, geometry, **options)
    expected_out, expected_lse = reference.forward(q.float(), k.float(), v.float(), geometry, **options)
    torch.testing.assert_close(out.float(), expected_out, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse, expected_lse, atol=1e-3, rtol=1e-3)
    # As if other keys, elsewhere, had taken half of the weight.
    lse = lse + torch.tensor(2.0).log().item()
    computed = flash.backward(dout, q, k, v, out, lse, geometry, **options)
    expected = reference.backward(dout.float(), q.float(), k.float(), v.float(), out.float(), lse, geometry, **options)
    for grad, target in zip(computed, expected, strict=True):
        assert (grad.float() - target).norm() <= 2e-2 * target.norm()
