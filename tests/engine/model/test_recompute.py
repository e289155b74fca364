"""What backward's recomputation leaves out, and that it is found by trying."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING

from engine.model.anatomy import take_apart
from engine.model.recompute import GradientOnlyLinear, unread_linear
from engine.model.shrink import shrink


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_are_those_of_the_linear_layer(bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(6, 4, bias=bias, dtype=torch.float64)
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(2, 3, 4, dtype=torch.float64)
    expected = torch.autograd.grad(linear(x), [x, *linear.parameters()], dy)
    y = GradientOnlyLinear(linear)(x)
    assert torch.equal(y, torch.zeros_like(dy))
    computed = torch.autograd.grad(y, [x, *linear.parameters()], dy)
    torch.testing.assert_close(computed, expected)


class _Layer(nn.Module):
    """`residual + up` with something done to the sum."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(8, 4), nn.Linear(4, 8)
        self.norm = nn.LayerNorm(8) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x + self.up(torch.tanh(self.down(x))))
        return out


@pytest.mark.parametrize(("norm", "expected"), [(False, "up"), (True, None)])
def test_last_projection_is_left_out_only_if_nothing_reads_it(norm: bool, expected: str | None) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 8, requires_grad=True)
    layer = _Layer(norm)
    assert unread_linear(layer, lambda module: module(x), x) == expected
    assert isinstance(layer.up, nn.Linear)


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [("llama", "mlp.down_proj"), ("cohere", "mlp.down_proj"), ("gemma2", None), ("mixtral", None)],
)
def test_architectures(model_type: str, expected: str | None) -> None:
    spec = take_apart(shrink(CONFIG_MAPPING[model_type]())[0])
    assert set(spec.unread) == {expected}
