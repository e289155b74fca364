"""Compiled code on the stand-in that computes: Triton's kernels run in its interpreter, in the order of their streams.

Against the same functions without compilation on the CPU in float64, from the same inputs. STANDIN_DELAY_US shakes the
order of streams; results are the same.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from computes import emulator
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

CUDA = torch.device("cuda", 0)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-4, torch.float16: 2**-7}
"""Of a result, of the largest of its absolute values: in half precision gradients read results that were rounded."""

Case = tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...], int]
"""A function of floating-point tensors of these sizes, and of indices below a number, if there is one."""

CASES: dict[str, Case] = {
    "pointwise": (lambda x, y: torch.sin(x) * y + F.gelu(x) + torch.erf(y), ((37, 53), (53,)), 0),
    "strides": (lambda x, y: x.t()[::2] * 2 + y.sigmoid(), ((40, 31), (16, 40)), 0),
    "swiglu": (lambda x, y: F.silu(x) * y, ((37, 53), (37, 53)), 0),
    "softmax": (lambda x: torch.softmax(x, -1), ((37, 53),), 0),
    "softmax, looped": (lambda x: torch.softmax(x, -1), ((5, 9001),), 0),
    "rms norm": (lambda x, w: F.rms_norm(x, (96,), w), ((37, 96), (96,)), 0),
    "layer norm, looped": (lambda x, w: F.layer_norm(x, (5000,), w), ((3, 5000), (5000,)), 0),
    "variance": (lambda x: torch.var(x, -1), ((7, 3000),), 0),
    "largest": (lambda x: x.amax(-1) + x.argmax(-1) / 1024, ((37, 301),), 0),
    "running sum": (lambda x: torch.cumsum(x, -1), ((7, 301),), 0),
    "over rows": (lambda x: x.sum(0) * x.mean(), ((129, 65),), 0),
    "joined": (lambda x, y: torch.cat([x.cos(), -y.sin()], -1) * 2, ((33, 7), (33, 5)), 0),
    "cross entropy": (lambda x, t: F.cross_entropy(x, t % 301), ((37, 301),), 301),
    "gather": (lambda x, t: torch.gather(x, 1, t[:, None]).exp(), ((37, 301),), 301),
    "embedding": (lambda x, t: F.embedding(t, x) * 2, ((31, 16),), 31),
}


def compared(want: Tensor, got: Tensor, dtype: torch.dtype) -> None:
    assert got.device.type == "cuda"
    assert got.shape == want.shape
    difference = (got.cpu().double() - want.double()).abs().max().item()
    assert difference <= TOLERANCE[dtype] * max(want.abs().max().item(), 1e-30)


IN_HALF = [(name, torch.bfloat16) for name in ("softmax", "rms norm", "cross entropy")] + [("swiglu", torch.float16)]


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.float32) for name in CASES), *IN_HALF])
def test_a_function_and_its_gradients(name: str, dtype: torch.dtype) -> None:
    function, sizes, below = CASES[name]
    torch.manual_seed(0)
    inputs = [torch.randn(size).to(dtype) for size in sizes]
    indices = [torch.randint(below, (37,))] if below else []
    found = []
    for device, wide, call in (("cpu", torch.float64, function), (CUDA, dtype, torch.compile(function))):
        leaves = [x.to(device, wide, copy=True).requires_grad_() for x in inputs]
        result = call(*leaves, *(t.to(device) for t in indices))
        gradient = torch.linspace(-1, 1, result.numel()).to(dtype).reshape(result.shape)
        found.append([result.detach(), *torch.autograd.grad(result, leaves, gradient.to(device, wide))])
    for want, got in zip(*found, strict=True):
        compared(want, got, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_values_are_rounded_to_nearest_even(dtype: torch.dtype) -> None:
    """Every exponent, ties among them; float8 within its range, as beyond it a card gives the largest number."""
    most = torch.finfo(dtype).max
    bits = torch.arange(0, 1 << 32, 40503 << 4).to(torch.int32)  # all signs and exponents
    values = bits.view(torch.float32)
    whole = torch.arange(-4096, 4096) / 256
    values = torch.cat([values, whole, whole * 2**-14, whole * 2**-130])
    values = values[(values.abs() <= most) | (torch.tensor(dtype.itemsize > 1) & ~values.isnan())]
    got = torch.compile(lambda x: x.to(dtype))(values.to(CUDA))
    assert torch.equal(got.cpu().float(), values.to(dtype).float())
    assert torch.equal(torch.compile(lambda x: x.float())(got).cpu(), values.to(dtype).float())


def test_integers_and_truths() -> None:
    x = torch.randint(-100, 100, (33, 7))

    def function(x: Tensor) -> Tensor:
        return torch.where(((x > 3) & (x < 50)).any(-1, keepdim=True), x // 7 + x % 5 - (x >> 2), x & 3)

    assert torch.equal(torch.compile(function)(x.to(CUDA)).cpu(), function(x))


def test_dynamic_sizes() -> None:
    function = lambda x: torch.softmax(x * 2, -1).sum(0)  # noqa: E731
    compiled = torch.compile(function, dynamic=True)
    for size in ((3, 5), (129, 67), (1000, 31)):
        x = torch.randn(size)
        compared(function(x.double()), compiled(x.to(CUDA)), torch.float32)


SHAPE: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 1}
SHAPE |= {"num_key_value_heads": 2, "head_dim": 8, "attn_implementation": "sdpa"}
LAYERS: dict[str, tuple[Any, Any, Any]] = {
    "llama": (LlamaConfig(**SHAPE), modeling_llama.LlamaDecoderLayer, modeling_llama.LlamaRotaryEmbedding),
    "qwen3": (Qwen3Config(**SHAPE), modeling_qwen3.Qwen3DecoderLayer, modeling_qwen3.Qwen3RotaryEmbedding),
}


@pytest.mark.parametrize(("name", "dtype"), [("llama", torch.float32), ("qwen3", torch.bfloat16)])
def test_a_decoder_layer(name: str, dtype: torch.dtype) -> None:
    config, kind, rotary = LAYERS[name]
    torch.manual_seed(0)
    weights = {key: value.to(dtype) for key, value in kind(config, 0).state_dict().items()}
    x = torch.randn(2, 19, 32).to(dtype)
    found = []
    for device, wide in (("cpu", torch.float64), (CUDA, dtype)):
        layer = kind(config, 0).to(device, wide)
        layer.load_state_dict(weights)
        inputs = x.to(device, wide, copy=True).requires_grad_()
        places = rotary(config).to(device)(inputs, torch.arange(19, device=device)[None])
        call = torch.compile(layer) if device is CUDA else layer
        result = call(inputs, position_embeddings=places)
        result = result[0] if isinstance(result, tuple) else result
        result.backward(torch.linspace(-1, 1, result.numel()).reshape(result.shape).to(device, wide))
        found.append([result.detach(), inputs.grad, *(p.grad for p in layer.parameters())])
    for want, got in zip(*found, strict=True):
        # bfloat16 is rounded after every product
        difference = (got.cpu().double() - want.double()).norm() / want.double().norm()
        assert difference < (1e-5 if dtype == torch.float32 else 2e-2)


@triton.jit
def _half(x):  # type: ignore[no-untyped-def]
    return x * 0.5


@triton.jit
def _own_kernel(x, out, count, total, n, scale, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < n
    values = _half(tl.load(x + index, mask, other=0.0).to(tl.float32)) * scale
    tl.store(out + index, values.to(tl.bfloat16), mask)
    tl.atomic_add(count + index % 3, 1, mask)
    tl.atomic_add(total, tl.sum(values, 0))


@pytest.mark.parametrize("through", ["triton", "inductor"])
def test_a_persons_own_kernel(through: str) -> None:
    n = 1001
    x = torch.randn(n).to(torch.float16)

    def launch(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out = torch.empty(n, dtype=torch.bfloat16, device=CUDA)
        count, total = torch.zeros(3, dtype=torch.int32, device=CUDA), torch.zeros(1, device=CUDA)
        _own_kernel[(triton.cdiv(n, 128),)](x, out, count, total, n, 3.0, BLOCK=128)
        return out, count, total

    out, count, total = (torch.compile(launch) if through == "inductor" else launch)(x.to(CUDA))
    assert torch.equal(out.cpu(), (x.float() * 1.5).to(torch.bfloat16))
    assert count.tolist() == [334, 334, 333]
    assert total.item() == pytest.approx((x.float() * 1.5).sum().item(), rel=1e-4)


def test_a_kernel_reads_what_lies_there_when_its_stream_comes_to_it() -> None:
    """Its memory is overwritten from another stream, which does not wait: a race, and both orders are seen."""
    double = torch.compile(lambda x: x * 2)
    x = torch.ones(100, device=CUDA)
    double(x)
    late, go = torch.cuda.Stream(), threading.Event()
    hold = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: go.wait(60))
    torch.cuda.synchronize()
    assert ctypes.CDLL(None).cudaLaunchHostFunc(ctypes.c_void_p(late.cuda_stream), hold, None) == 0
    with torch.cuda.stream(late):
        raced = double(x)
    before = double(x)
    x.fill_(3)
    torch.cuda.current_stream().synchronize()
    go.set()
    torch.cuda.synchronize()
    assert before.tolist() == [2.0] * 100
    assert raced.tolist() == [6.0] * 100


REFUSED = """
import torch, triton, triton.language as tl
@triton.jit
def strange_kernel(x):
    value = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tl.load(x)], tl.int32, True, 1)
    tl.store(x, value)
strange_kernel[(1,)](torch.zeros(1, dtype=torch.int32, device="cuda"))
torch.cuda.synchronize()
print("computed nothing")
"""
HELD = """
import ctypes, torch
y = torch.compile(lambda x: x * 2)(torch.ones(9, device="cuda"))
ctypes.PyDLL(None).cudaDeviceSynchronize()  # keeps the lock of Python's threads
print(y.tolist())
"""


def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    file = folder / "program.py"
    file.write_text(program)
    return subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=300)


def test_a_kernel_that_cannot_be_interpreted_ends_the_process(tmp_path: Path) -> None:
    done = run(REFUSED, tmp_path)
    assert done.returncode < 0
    assert "kernel strange_kernel of grid (1, 1, 1) failed in Triton's interpreter" in done.stderr
    assert not done.stdout


def test_a_thread_that_waits_does_not_keep_python(tmp_path: Path) -> None:
    done = run(HELD, tmp_path)
    assert done.stdout.strip() == str([2.0] * 9), done.stderr[-2000:]


def test_importing_torch_does_not_import_triton(tmp_path: Path) -> None:
    assert os.environ["COMPUTES_LIBRARY"]
    done = run("import sys, torch\nprint([m for m in ('triton', 'torch._inductor') if m in sys.modules])", tmp_path)
    assert done.stdout.strip() == "[]", done.stderr[-2000:]


def test_a_compiled_session_equals_the_cpus(tmp_path: Path) -> None:
    """Layers, loss and optimizer compiled, as a run is by default."""
    found = {}
    for name, device, compiled in (("cpu", tiny.CPU, "off"), ("cuda", CUDA, "on")):
        settings = tiny.training(compile=compiled)
        with emulator.races() as races, tiny.session(tmp_path / name, t=settings, device=device) as session:
            metrics = tiny.steps(session)
            found[name] = (
                [m.loss for m in metrics],
                [m.grad_norm for m in metrics],
                tiny.parameters(session.store, session.spec),
            )
        assert races == []
    for want, got in zip(found["cpu"][:2], found["cuda"][:2], strict=True):
        assert got == pytest.approx(want, rel=1e-4)
    weights = found["cuda"][2]
    for name, want in found["cpu"][2].items():
        torch.testing.assert_close(weights[name], want, rtol=0, atol=1e-4)
