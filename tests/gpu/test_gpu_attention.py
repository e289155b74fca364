"""Every attention kernel that this machine has, against the tiled reference in float32 on the same GPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from penstock.engine.attention import chunk as attention
from penstock.engine.attention.backends import ALIGNMENT, AttentionCall, Gradients, Operands, Problem, TiledReference
from penstock.engine.attention.flash_attn import FlashAttention4
from penstock.engine.attention.select import BACKENDS, Attends, attention_report, forget, prepare, rankings
from penstock.engine.attention.spans import Geometry
from penstock.engine.attention.torch_cuda import CudaKernel, TorchCudaFlash, TorchCudnn
from penstock.engine.attention.workspace import KEYS_PER_CALL, workspace_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("kernels"),
]

CUDA = torch.device("cuda")
MAJOR = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 9
KERNELS = [backend for backend in BACKENDS if isinstance(backend, CudaKernel) and MAJOR in backend.capabilities]
CHUNK = 512
GEOMETRIES = {
    **{str(n): Geometry(n, n, True) for n in (1, 63, 64, 65, CHUNK - 1, CHUNK, CHUNK + 1)},
    "earlier": Geometry(130, 700, False),
    "earlier chunks": Geometry(CHUNK, 3 * CHUNK, False),
    "one query": Geometry(1, 33, False),
    "own and earlier": Geometry(257, 700, True),
    "own and one chunk": Geometry(CHUNK, 2 * CHUNK, True),
    "window": Geometry(300, 300, True, 100),
    "window over earlier": Geometry(257, 700, True, 450),
    "window over one chunk": Geometry(CHUNK, CHUNK + 128, True, 128),
    "edge of a window": Geometry(128, 200, False, 72),
    "documents": Geometry(300, 400, True, None, (0, 100, 101, 300), (0, 200, 201, 400)),
    "documents and window": Geometry(300, 400, True, 50, (0, 100, 101, 300), (0, 200, 201, 400)),
}
SHAPES = [((8, 2), (width, width), None) for width in (20, 64, 128, 256)]
SHAPES += [((4, 4), (128, 128), None), ((6, 1), (64, 64), None), ((8, 2), (192, 128), None), ((8, 2), (128, 128), 20.0)]


def takes(backend: CudaKernel, geometry: Geometry, widths: tuple[int, int], softcap: float | None) -> bool:
    """Whether it computes this on a GPU as here."""
    if isinstance(backend, TorchCudnn):
        plain = not (geometry.left or geometry.cu_q or softcap or geometry.n % ALIGNMENT or geometry.m % ALIGNMENT)
        return plain and (geometry.n == geometry.m or not geometry.causal)
    if isinstance(backend, FlashAttention4):
        return MAJOR != 12 or max(widths) < 256  # more than its blocks' shared memory
    return softcap is None or not isinstance(backend, TorchCudaFlash)


PROBLEMS = [
    pytest.param(*problem, id="-".join((problem[0].name, problem[1], *map(str, problem[2]))))
    for problem in itertools.product(KERNELS, GEOMETRIES, SHAPES)
]
TAKEN = [
    problem for problem in PROBLEMS if takes(problem.values[0], GEOMETRIES[problem.values[1]], *problem.values[2][1:])
]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    forget()
    yield
    forget()
    torch.use_deterministic_algorithms(False)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, dtype=dtype, device=CUDA)


def assert_near(computed: Tensor, expected: Tensor) -> None:
    """Within half precision; where exact gradients cancel out, within that of what cancelled."""
    error = (computed.float() - expected.float()).norm()
    assert error <= 2e-2 * expected.float().norm() + 1e-3 * math.sqrt(expected.numel())


def reference(whole: Geometry) -> list[tuple[slice, slice, Geometry]]:
    """Rows, keys and geometry of every segment: the reference takes one at a time."""
    ends = zip(whole.cu_q or (0, whole.n), whole.cu_k or (0, whole.m), strict=True)
    return [
        (slice(q0, q1), slice(k0, k1), Geometry(q1 - q0, k1 - k0, whole.causal, whole.left))
        for (q0, k0), (q1, k1) in itertools.pairwise(ends)
    ]


def present(backend: CudaKernel) -> CudaKernel:
    missing = backend.absent(CUDA)
    if missing is not None:
        pytest.skip(f"{backend.name} {missing}")
    return backend


@pytest.mark.parametrize(("backend", "case", "shape"), TAKEN)
def test_kernel_equals_reference_with_merged_statistics(
    backend: CudaKernel, case: str, shape: tuple[tuple[int, int], tuple[int, int], float | None]
) -> None:
    torch.manual_seed(0)
    present(backend)
    geometry, (heads, widths, softcap) = GEOMETRIES[case], shape
    q, k = random(geometry.n, heads[0], widths[0]), random(geometry.m, heads[1], widths[0])
    v, dout = random(geometry.m, heads[1], widths[1]), random(geometry.n, heads[0], widths[1])
    call = AttentionCall(widths[0] ** -0.5, softcap=softcap)
    x = Operands(q, k, v, call)
    assert not any(backend.refusal(Problem.of(x, geometry, backward=backward)) for backward in (False, True))
    exact = TiledReference()
    expected_out = torch.zeros_like(dout, dtype=torch.float32)
    expected_lse = torch.zeros(heads[0], geometry.n, device="cuda")
    for rows, keys, part in reference(geometry):
        wide = Operands(q[rows].float(), k[keys].float(), v[keys].float(), call)
        expected_out[rows], expected_lse[:, rows] = exact.forward(wide, part)
    out, lse = backend.forward(x, geometry)
    assert (out.dtype, lse.dtype, out.shape, lse.shape) == (q.dtype, torch.float32, dout.shape, expected_lse.shape)
    torch.testing.assert_close(out.float(), expected_out, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse, expected_lse, atol=1e-3 if softcap is None else 3e-2, rtol=1e-3)

    # As if other keys, elsewhere, had taken half of the weight.
    out, lse = expected_out.to(q.dtype), expected_lse + math.log(2)
    expected = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in (q, k, v)]
    for rows, keys, part in reference(geometry):
        wide = Operands(q[rows].float(), k[keys].float(), v[keys].float(), call)
        grads = exact.backward(wide, Gradients(dout[rows].float(), out[rows].float(), lse[:, rows]), part)
        for total, grad, where in zip(expected, grads, (rows, keys, keys), strict=True):
            total[where] += grad
    for grad, target in zip(backend.backward(x, Gradients(dout, out, lse), geometry), expected, strict=True):
        assert_near(grad, target)


def test_what_a_kernel_does_not_take_it_refuses() -> None:
    refusals = {}
    for backend, case, (heads, widths, softcap) in (problem.values for problem in PROBLEMS if problem not in TAKEN):
        geometry = GEOMETRIES[case]
        q, k, v = (
            random(geometry.n, heads[0], widths[0]),
            random(geometry.m, heads[1], widths[0]),
            random(geometry.m, heads[1], widths[1]),
        )
        x = Operands(q, k, v, AttentionCall(1.0, softcap=softcap))
        refusals[backend.name, case, softcap] = backend.refusal(Problem.of(x, geometry, backward=False))
    assert {name for name, *_ in refusals} >= {"torch-cudnn", "torch-cuda-flash"}
    assert [problem for problem, refusal in refusals.items() if refusal is None and problem[0] != "flash-attn-4"] == []


@pytest.mark.parametrize("backend", KERNELS, ids=lambda backend: backend.name)
def test_operands_may_be_slices_and_transposes(backend: CudaKernel) -> None:
    torch.manual_seed(0)
    present(backend)
    geometry = Geometry(CHUNK, CHUNK, True)
    q, dout = (random(8, CHUNK + 1, 64).transpose(0, 1)[1:] for _ in range(2))
    k, v = (random(3 * CHUNK, 2, 64)[CHUNK : 2 * CHUNK] for _ in range(2))
    saved, lse = random(2 * CHUNK + 3, 8, 64)[3 : CHUNK + 3], (random(8, 2 * CHUNK, dtype=torch.float32) + 6)[:, :CHUNK]
    x = Operands(q, k, v, AttentionCall(0.125))
    copies = Operands(*(tensor.contiguous() for tensor in (q, k, v)), x.call)
    wide = Operands(q.float(), k.float(), v.float(), x.call)
    computed = *backend.forward(x, geometry), *backend.backward(x, Gradients(dout, saved, lse), geometry)
    exact = TiledReference().backward(wide, Gradients(dout.float(), saved.float(), lse), geometry)
    for tensor, target in zip(computed, (*backend.forward(copies, geometry), *exact), strict=True):
        assert_near(tensor, target)


def stream(
    total: int, chunk: int, documents: list[int], call: AttentionCall, dtype: torch.dtype, heads: int = 8
) -> list[Tensor]:
    """Out, dq, dk and dv of a whole stream, chunk by chunk; the operands are always the same."""
    torch.manual_seed(0)
    q, k, v, dout = (random(total, count, 64).to(dtype) for count in (heads, 2, 2, heads))
    outs, lses = [], []
    dq, dk, dv = (torch.zeros_like(tensor, dtype=torch.float32) for tensor in (q, k, v))
    for start in range(0, total, chunk):
        end = min(start + chunk, total)
        x = Operands(q[start:end], k[:end], v[:end], call, start, documents=documents)
        out, lse = attention.attend(x)
        outs.append(out)
        lses.append(lse)
        attention.attend_backward(x, Gradients(dout[start:end], out, lse), dq[start:end], dk[:end], dv[:end])
    return [torch.cat(outs), dq, dk, dv]


CASES = {
    "whole": (2048, 512, [0], None, None),
    "uneven": (1500, 511, [0], None, None),
    "documents": (1500, 512, [0, 5, 700, 701, 765, 1300], None, None),
    "window": (1500, 512, [0, 700], 200, None),
    "window of several chunks": (2048, 256, [0], 700, None),
    "softcap": (700, 256, [0, 100], None, 20.0),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("deterministic", [False, True], ids=["measured", "deterministic"])
def test_chunks_with_the_chosen_kernels_equal_the_reference(case: str, deterministic: bool, emulated: bool) -> None:
    """And themselves, to the bit, where that is asked for."""
    total, chunk, documents, window, softcap = CASES[case]
    heads = 4 if emulated else 8
    call = AttentionCall(0.125, window, softcap)
    expected = stream(total, total, documents, call, torch.float32, heads)
    torch.use_deterministic_algorithms(deterministic)
    layer = Attends(heads, 2, 64, 64, chunk=chunk, total=total, window=window, softcap=softcap)
    prepare(CUDA, torch.bfloat16, [layer])
    known = rankings()
    computed = stream(total, chunk, documents, call, torch.bfloat16, heads)
    for tensor, target in zip(computed, expected, strict=True):
        assert_near(tensor, target)
    for _ in range(3 if deterministic else 0):
        again = stream(total, chunk, documents, call, torch.bfloat16, heads)
        assert all(torch.equal(a, b) for a, b in zip(computed, again, strict=True))
    report = [entry for entry in attention_report() if entry["dtype"] == "bfloat16"]
    assert {name: rankings()[name] for name in known} == known
    assert len(report) == len(known), "all kinds were prepared"
    assert all(entry["deterministic"] == deterministic for entry in report)
    assert not (deterministic and any(entry["tflops"] for entry in report))
    if softcap is None:
        assert not any(entry["chosen"].startswith("tiled-reference") for entry in report)


def test_kernels_are_measured_once_and_the_rest_is_named() -> None:
    layer = Attends(heads=8, kv_heads=2, qk_dim=64, v_dim=64, chunk=512, total=2048)
    prepare(CUDA, torch.bfloat16, [layer])
    report = attention_report()
    assert {entry["direction"] for entry in report} == {"forward", "backward"}
    for entry in report:
        assert not entry["chosen"].startswith("tiled-reference")
        names = {name.split(",")[0] for name in [*entry["ranking"], *entry["refused"]]}
        assert names == {backend.name for backend in BACKENDS}
        if len(entry["ranking"]) > 2:
            assert entry["tflops"][entry["chosen"]] == max(entry["tflops"].values())
    recorded = rankings()
    assert prepare(CUDA, torch.bfloat16, [layer], recorded) == []
    assert rankings() == recorded
    assert not any(entry["tflops"] for entry in attention_report())
    print(*report, sep="\n")


def test_the_steady_state_does_not_wait_for_the_gpu() -> None:
    call = AttentionCall(0.125)
    documents = [0, 5, 700, 701, 765, 1300]
    stream(1536, 512, documents, call, torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        stream(1536, 512, documents, call, torch.bfloat16)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_attention_allocates_no_more_than_it_says_however_long_the_stream(emulated: bool) -> None:
    total, chunk, heads, width = (3 * KEYS_PER_CALL, 64, 4, 32) if emulated else (1 << 17, 4096, 32, 128)
    shape = {"heads": heads, "kv_heads": heads // 4, "qk_dim": width, "v_dim": width}
    q, dout = random(chunk, heads, width), random(chunk, heads, width)
    k, v = random(total, heads // 4, width), random(total, heads // 4, width)
    dq, dk, dv = (torch.zeros_like(tensor, dtype=torch.float32) for tensor in (q, k, v))
    x = Operands(q, k, v, AttentionCall(width**-0.5), start=total - chunk)

    def step() -> None:
        attention.attend_backward(x, Gradients(dout, *attention.attend(x)), dq, dk, dv)

    step()  # checks
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= workspace_bytes(**shape, chunk=chunk, total=total)
