"""flash-attn's packages on the emulated GPU: plain attention, and what the real ones refuse at the call."""

import importlib
from collections.abc import Callable, Iterator

import pytest
import torch
from computes import emulator
from torch import Tensor
from torch.nn import functional

CUDA = torch.device("cuda", 0)
VERSIONS = (2, 3, 4)


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    with emulator.packages():
        yield


def random(n: int = 33, heads: int = 4, width: int = 64, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(1, n, heads, width, device=CUDA, dtype=dtype)


def forward(version: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Causal."""
    if version == 2:
        module = importlib.import_module("flash_attn.flash_attn_interface")
        return module._wrapped_flash_attn_forward(q, k, v, 0.0, 0.1, True, -1, 0, 0.0, None, False)[:2]
    if version == 3:
        importlib.import_module("flash_attn_3._C")
        return torch.ops.flash_attn_3.fwd(q, k, v, softmax_scale=0.1, is_causal=True)[:2]
    module = importlib.import_module("flash_attn.cute.interface")
    return module._flash_attn_fwd(q, k, v, softmax_scale=0.1, causal=True, return_lse=True)[:2]


def backward(version: int, given: list[Tensor], *, deterministic: bool = False) -> tuple[Tensor, ...]:
    """`given`: dout, q, k, v, out and lse, as 2 and 3 take them."""
    dout, q, k, v, out, lse = given
    grads = tuple(torch.empty_like(tensor) for tensor in (q, k, v))
    if version == 2:
        module = importlib.import_module("flash_attn.flash_attn_interface")
        options = (0.0, 0.1, True, -1, 0, 0.0, None, deterministic)
        module._wrapped_flash_attn_backward(*given, *grads, *options)
    elif version == 3:
        importlib.import_module("flash_attn_3._C")
        torch.ops.flash_attn_3.bwd(*given, *grads, softmax_scale=0.1, is_causal=True, deterministic=deterministic)
    else:
        module = importlib.import_module("flash_attn.cute.interface")
        options = {"softmax_scale": 0.1, "causal": True, "deterministic": deterministic}
        return module._flash_attn_bwd(q, k, v, out, dout, lse, **options)
    return grads


@pytest.mark.parametrize("version", VERSIONS)
def test_it_is_attention(version: int) -> None:
    torch.manual_seed(0)
    q, k, v, dout = random(), random(heads=2), random(heads=2), random()
    out, lse = forward(version, q, k, v)
    grads = backward(version, [dout, q, k, v, out, lse])
    plain = [t.cpu().float().transpose(1, 2).requires_grad_() for t in (q, k, v)]
    expected = functional.scaled_dot_product_attention(*plain, is_causal=True, scale=0.1, enable_gqa=True)
    expected.backward(dout.cpu().float().transpose(1, 2))
    assert lse.shape == (1, 4, 33)
    for found, target in zip((out, *grads), (expected, *(tensor.grad for tensor in plain)), strict=True):
        assert target is not None
        torch.testing.assert_close(found.cpu().float().transpose(1, 2), target, atol=2e-2, rtol=2e-2)


REFUSED: dict[str, Callable[[], tuple[Tensor, Tensor, Tensor]]] = {
    "float32": lambda: (random(dtype=torch.float32),) * 3,
    "two dtypes": lambda: (random(), random(dtype=torch.float16), random()),
    "a width that is no multiple of 8": lambda: (random(width=20),) * 3,
    "a width over 256": lambda: (random(width=264),) * 3,
    "widths that do not go together": lambda: (random(width=72), random(width=72), random(width=40)),
    "heads that do not divide": lambda: (random(heads=3), random(heads=2), random(heads=2)),
    "a last dimension with holes": lambda: (random(width=128)[..., ::2],) * 3,
    "an address that is no multiple of 16": lambda: (random(width=72)[..., 4:68],) * 3,
    "rows at no multiples of 16 bytes": lambda: (random(width=68)[..., :64],) * 3,
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("version", VERSIONS)
def test_what_the_package_does_not_take_it_refuses(version: int, case: str) -> None:
    if version == 2 and case == "a last dimension with holes":
        forward(version, *REFUSED[case]())  # copied
    elif version == 4 and case == "widths that do not go together":
        forward(version, *REFUSED[case]())
    else:
        with pytest.raises((RuntimeError, AssertionError)):
            forward(version, *REFUSED[case]())


def test_flash_attn_3_has_no_deterministic_backward_of_wide_heads() -> None:
    for width, deterministic in ((256, False), (192, True)):
        given = [random(width=width) for _ in range(5)]
        backward(3, [*given, torch.zeros(1, 4, 33, device=CUDA)], deterministic=deterministic)
    given = [random(width=256) for _ in range(5)]
    with pytest.raises(RuntimeError, match="Deterministic backward not supported for hdim 256"):
        backward(3, [*given, torch.zeros(1, 4, 33, device=CUDA)], deterministic=True)
