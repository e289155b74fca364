"""What CUDA's attention kernels refuse, and why, asked without a GPU: its capability and the packages are given."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.engine.attention import flash_attn as attention_flash
from penstock.engine.attention import torch_cuda as attention_cuda
from penstock.engine.attention.backends import ALIGNMENT, Problem
from penstock.engine.attention.flash_attn import FlashAttention2, FlashAttention3, FlashAttention4
from penstock.engine.attention.torch_cuda import CudaKernel, TorchCudaFlash, TorchCudnn

PLAIN = Problem(
    device=torch.device("cuda", 0), dtype=torch.bfloat16, heads=8, kv_heads=2, qk_dim=128, v_dim=128, causal=True,
    square=True, window=False, segments=False, aligned=True, softcap=False, backward=True, deterministic=False,
)  # fmt: skip


UNALIGNED = f"would build a plan for every length that is not a multiple of {ALIGNMENT}"


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_cuda, "capability", lambda _: (9, 0))
    # No package but those that a test brings along.
    monkeypatch.setattr(attention_flash, "_module", lambda *_: "is not installed")


def has(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    monkeypatch.setattr(attention_flash, "_module", lambda *_: SimpleNamespace(**functions))


@pytest.mark.parametrize(
    ("kernel", "change", "reason"),
    [
        (TorchCudaFlash(), {}, None),
        (TorchCudaFlash(), {"device": torch.device("cpu")}, "computes on CUDA devices only"),
        (TorchCudaFlash(), {"dtype": torch.float32}, "does not take torch.float32"),
        (TorchCudaFlash(), {"v_dim": 257}, "takes heads up to 256 wide"),
        (TorchCudaFlash(), {"softcap": True}, "has no soft-cap"),
        (TorchCudaFlash(), {"window": True, "segments": True, "square": False, "deterministic": True}, None),
        (TorchCudnn(), {}, None),
        (TorchCudnn(), {"causal": False, "square": False}, None),
        (TorchCudnn(), {"deterministic": True}, "is not deterministic"),
        (TorchCudnn(), {"window": True}, "has no sliding window"),
        (TorchCudnn(), {"segments": True}, "computes one segment at a time"),
        (TorchCudnn(), {"square": False}, "aligns its causal limit at the top left"),
        (TorchCudnn(), {"aligned": False}, UNALIGNED),
    ],
)
def test_torch_s_kernels(kernel: CudaKernel, change: Any, reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    assert kernel.refusal(replace(PLAIN, **change)) == reason


def test_a_gpu_of_another_age_and_an_old_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    from_8, from_9 = "8.x, 9.x, 10.x, 11.x, 12.x", "9.x, 10.x, 11.x, 12.x"
    old: list[tuple[CudaKernel, tuple[int, int], str]] = [(TorchCudaFlash(), (7, 5), from_8)]
    old += [
        (FlashAttention3(), (8, 6), "9.x"),
        (FlashAttention3(), (10, 0), "9.x"),
        (FlashAttention4(), (8, 9), from_9),
    ]
    for kernel, capability, wanted in old:
        monkeypatch.setattr(attention_cuda, "capability", lambda _, capability=capability: capability)
        found = "{}.{}".format(*capability)
        assert kernel.refusal(PLAIN) == f"needs compute capability {wanted}; this GPU has {found}"
    monkeypatch.setattr(attention_cuda, "capability", lambda _: (9, 0))
    for there, version in ((False, 91900), (True, None), (True, 8907)):
        monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda there=there: there)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda version=version: version)
        assert TorchCudnn().refusal(PLAIN) == "needs cuDNN 9.1 or newer"


@pytest.mark.parametrize("kernel", [FlashAttention2(), FlashAttention3(), FlashAttention4()], ids=lambda k: k.name)
def test_a_package_that_is_not_there_or_lacks_functions(kernel: CudaKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernel.refusal(PLAIN) == "is not installed"
    has(monkeypatch)
    assert kernel.refusal(PLAIN) in (
        "is too old: 2.7 or newer is needed",
        "registers no operators with torch: too old",
        "does not have the functions that keep the log-sum-exp",
    )


def test_flash_attention_2(monkeypatch: pytest.MonkeyPatch) -> None:
    def new(q: Any, window_size_left: int, window_size_right: int) -> None: ...

    def old(q: Any, window_size: tuple[int, int]) -> None: ...

    has(monkeypatch, _wrapped_flash_attn_forward=new)
    assert FlashAttention2().refusal(replace(PLAIN, softcap=True, deterministic=True)) is None
    has(monkeypatch, _wrapped_flash_attn_forward=old)
    assert FlashAttention2().refusal(PLAIN) == "is too old: 2.7 or newer is needed"


def _operators(monkeypatch: pytest.MonkeyPatch, fwd: Callable[..., Any], bwd: Callable[..., Any]) -> None:
    has(monkeypatch)
    monkeypatch.setattr(torch.ops, "flash_attn_3", SimpleNamespace(fwd=fwd, bwd=bwd), raising=False)


def _fwd(q: Any, softmax_scale: Any, is_causal: Any, window_size_left: Any, window_size_right: Any, softcap: Any,
         cu_seqlens_q: Any) -> None: ...  # fmt: skip


def _bwd(dq: Any, dk: Any, dv: Any, softmax_scale: Any, is_causal: Any, window_size_left: Any, window_size_right: Any,
         softcap: Any, cu_seqlens_q: Any) -> None: ...  # fmt: skip


def test_flash_attention_3(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = FlashAttention3()
    _operators(monkeypatch, _fwd, _bwd)
    assert kernel.refusal(replace(PLAIN, softcap=True)) is None
    wide = replace(PLAIN, qk_dim=200, deterministic=True)
    assert kernel.refusal(wide) == "has no deterministic backward for heads over 192 wide"
    assert kernel.refusal(replace(wide, backward=False)) is None
    # Heads whose values are narrower than their keys keep both widths where the kernel has such a variant.
    assert kernel.refusal(replace(wide, qk_dim=192, v_dim=128)) is None
    wanted = {(192, 128): (192, 128), (190, 126): (192, 128), (192, 96): (192, 192), (64, 30): (64, 64)}
    assert {dims: kernel._widths(*dims) for dims in wanted} == wanted
    for other in (_fwd, torch.ops.aten.add):
        _operators(monkeypatch, other, other)
        assert kernel.refusal(PLAIN) == "declares operators with unknown arguments"


def _cute(softmax_scale: Any, causal: Any, softcap: Any, window_size_left: Any, window_size_right: Any,
          cu_seqlens_q: Any, return_lse: bool = False) -> None: ...  # fmt: skip


def _cute_deterministic(softmax_scale: Any, causal: Any, softcap: Any, window_size_left: Any, window_size_right: Any,
                        cu_seqlens_q: Any, deterministic: bool = False) -> None: ...  # fmt: skip


def test_flash_attention_4(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, fixed = FlashAttention4(), replace(PLAIN, deterministic=True)
    has(monkeypatch, _flash_attn_fwd=_cute, _flash_attn_bwd=_cute)
    assert kernel.refusal(PLAIN) is None
    assert kernel.refusal(fixed) == "has no deterministic backward"
    assert kernel.refusal(replace(fixed, backward=False)) is None
    has(monkeypatch, _flash_attn_fwd=_cute, _flash_attn_bwd=_cute_deterministic)
    assert kernel.refusal(fixed) is None
    assert kernel._widths(100, 60) == (104, 64)
    has(monkeypatch, _flash_attn_fwd=_cute_deterministic, _flash_attn_bwd=_cute)
    assert kernel.refusal(PLAIN) == "declares functions with unknown arguments"


def test_packages_are_looked_for_in_turn(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    (tmp_path / "broken_attention.py").write_text("raise OSError('built for another driver')")
    (tmp_path / "halved_attention.py").write_text("import no_such_part")
    (tmp_path / "whole_attention.py").write_text("found = 1")
    monkeypatch.syspath_prepend(tmp_path)
    attention_flash._module.cache_clear()
    assert attention_flash._module("no_attention._C", "no_attention.interface") == "is not installed"
    assert attention_flash._module("no_attention", "whole_attention").found == 1
    reason = attention_flash._module("broken_attention")
    assert reason == "cannot be imported: OSError: built for another driver"
    assert attention_flash._module("halved_attention").startswith("cannot be imported: No module named 'no_such_part'")
    attention_flash._module.cache_clear()
