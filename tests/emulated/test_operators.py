"""The emulator against the CPU: dtypes, strides, offsets, empty tensors, delays, and memory that is used too early."""

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from computes import emulator
from torch import Tensor
from torch.nn import functional

CUDA = torch.device("cuda", 0)
ELSEWHERE = {
    "aten::_flash_attention_forward",  # tests/gpu/test_gpu_attention.py
    "aten::_flash_attention_backward",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_cudnn_attention_backward",
    "aten::addmm.dtype_out",  # test_half_precision_is_multiplied_into_float32
    "aten::_grouped_mm",  # test_groups
    "aten::normal_",  # test_random_numbers_are_a_seeds
}
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.int64: 0.0}
IDS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 0])
LABELS = torch.tensor([3, 1, -100, 1, 5, 9, 2, 6, 5, 3, 5, 8, 0])
OFFSETS = torch.tensor([5, 5, 13], dtype=torch.int32)


def on(like: Tensor, constant: Tensor) -> Tensor:
    return constant.to(like.device)


def causal(n: int, device: torch.device) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool, device=device).tril()


def in_place(a: Tensor, b: Tensor) -> list[Tensor]:
    a = a.clone()
    a.add_(b, alpha=2).mul_(b).sub_(1).addcmul_(b, b, value=2).clamp_(-2, 2)
    a[1:3] += b[1:3]
    a[:, 2].zero_()
    a[0].fill_(3)
    a[2, 1:].copy_(b[3, 1:].double())
    return [a]


def lists(a: Tensor, b: Tensor) -> list[Tensor]:
    xs, ys = [a.clone(), b.clone()[:3]], [b.clone(), a.clone()[:3]]
    torch._foreach_mul_(xs, 2.0)
    torch._foreach_add_(xs, ys, alpha=0.5)
    torch._foreach_lerp_(xs, ys, 0.1)
    torch._foreach_addcmul_(xs, ys, ys, 0.5)
    torch._foreach_copy_(ys, xs)
    return [*xs, *ys, *torch._foreach_norm(xs), *torch._foreach_sqrt([x.abs() for x in xs])]


def fused_adamw(w: Tensor) -> list[Tensor]:
    w = w.clone().requires_grad_()
    optimizer = torch.optim.AdamW([w], lr=1e-2, fused=True)
    for _ in range(3):
        (w * w).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [w.detach()]


def out_and_in_place_products(c: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    out = torch.empty_like(c)
    torch.mm(a, b, out=out)
    return [out, torch.addmm(c, a, b, out=out.clone()), c.clone().addmm_(a, b, beta=0, alpha=2)]


def grouped(x: Tensor, w: Tensor) -> Tensor:
    if x.is_cuda:
        return functional.grouped_mm(x, w, offs=on(x, OFFSETS))
    return torch.cat([x[:5] @ w[0], x[5:] @ w[2]])


FLOAT_CASES: dict[str, tuple[Callable[..., Any], Sequence[tuple[int, ...]]]] = {
    "sums": (lambda a, b: [a + b, a - b, a * b, 2 * a + 1, b - 3, a / (b.abs() + 1)], [(7, 5), (5,)]),
    "mm": (lambda a, b: a @ b, [(17, 33), (33, 9)]),
    "mm transposed": (lambda a, b: a.t() @ b.t(), [(33, 17), (9, 33)]),
    "bmm": (lambda a, b: a @ b, [(3, 17, 33), (3, 33, 9)]),
    "addmm": (lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2), [(9,), (17, 33), (33, 9)]),
    "baddbmm": (lambda c, a, b: torch.baddbmm(c, a, b, alpha=0.5), [(3, 17, 9), (3, 17, 33), (3, 33, 9)]),
    "linear": (functional.linear, [(2, 17, 33), (9, 33), (9,)]),
    "outer and vectors": (lambda a, b: [torch.outer(a, b), torch.dot(a, a), torch.outer(a, b) @ b], [(7,), (9,)]),
    "einsum": (lambda a, b: torch.einsum("bij,bkj->bik", a, b), [(2, 7, 9), (2, 5, 9)]),
    "softmax": (lambda a: [a.softmax(-1), a.log_softmax(-1), a.logsumexp(-1), a.softmax(0)], [(7, 50)]),
    "embedding": (lambda w: functional.embedding(on(w, IDS), w), [(10, 8)]),
    "index": (lambda w: [w[on(w, IDS)], w.index_select(0, on(w, IDS)), w[on(w, IDS), 2]], [(10, 8)]),
    "index_add": (lambda w, v: w.index_add(0, on(w, IDS), v), [(10, 8), (13, 8)]),
    "index_copy": (lambda w, v: w.index_copy(0, on(w, torch.tensor([4, 2])), v), [(10, 8), (2, 8)]),
    "index_put": (lambda w, v: w.index_put((on(w, IDS),), v, accumulate=True), [(10, 8), (13, 8)]),
    "gather, scatter": (
        lambda w, v: [w.gather(1, on(w, IDS)[:, None]), w.scatter_add(1, on(w, IDS)[:, None], v)],
        [(13, 10), (13, 1)],
    ),
    "layer norm": (lambda x, w, b: functional.layer_norm(x, (24,), w, b), [(7, 24), (24,), (24,)]),
    "rms norm": (lambda x, w: functional.rms_norm(x, (24,), w, 1e-6), [(7, 24), (24,)]),
    "rms norm, no weight": (lambda x: functional.rms_norm(x, (24,), None, 1e-6), [(2, 7, 24)]),
    "rms norm by hand": (lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w, [(7, 24), (24,)]),
    "activations": (
        lambda x: [
            *(functional.silu(x), functional.gelu(x), functional.gelu(x, approximate="tanh"), functional.relu(x)),
            *(x.sigmoid(), x.tanh(), x.exp(), functional.softplus(x), functional.mish(x), torch.square(x.relu())),
        ],
        [(7, 24)],
    ),
    "pointwise": (
        lambda x: [
            x.abs().sqrt(),
            (x.abs() + 1).log(),
            x.clamp(-1, 1),
            -x,
            x.cos(),
            x.sin(),
            x.abs().pow(1.5),
            x.erf(),
        ],
        [(7, 24)],
    ),
    "halves": (lambda x: functional.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], [(7, 24)]),
    "cross entropy": (lambda x: functional.cross_entropy(x.float(), on(x, LABELS), reduction="sum"), [(13, 10)]),
    "cross entropy, mean": (lambda x: functional.cross_entropy(x, on(x, LABELS)), [(13, 10)]),
    "reductions": (
        lambda x: [x.sum(), x.mean(0), x.var(1), x.amax(-1), x.norm(), x.sum((0, 1)), x.std(), x.max(1).values],
        [(13, 10)],
    ),
    "norms": (lambda x: [torch.linalg.vector_norm(x), torch.linalg.vector_norm(x, torch.inf)], [(13, 10)]),
    "laid together": (
        lambda a, b: [torch.cat([a, b]), torch.stack([a, b]), *a.split(3, 1), a.repeat(2, 1)],
        [(7, 12)] * 2,
    ),
    "choices": (
        lambda a, b: [torch.where(a > 0, a, b), a.masked_fill(a > 0, -3.0), torch.maximum(a, b), a.triu(1), a.tril()],
        [(7, 7), (7, 7)],
    ),
    "casts": (lambda a: [a.float().mul(3).to(a.dtype), a.double().to(a.dtype), a.to(torch.float32)], [(7, 12)]),
    "moved about": (
        lambda a: [
            a.transpose(0, 2).contiguous()[1:, :, ::2].clone(),
            a.flip(1),
            a.roll(2, 1),
            functional.pad(a, (1, 2)),
        ],
        [(4, 5, 6)],
    ),
    "ordered": (lambda a: [a.cumsum(-1), a.sort(-1).values, a.topk(3).values, a.cummax(1).values], [(7, 12)]),
    "repeated": (lambda a: [a.repeat_interleave(3, 0), a[:, None].expand(7, 4, 12).reshape(28, 12)], [(7, 12)]),
    "rotary": (lambda x, c: torch.cat([-x[..., 8:], x[..., :8]], -1) * c.cos() + x * c.sin(), [(9, 4, 16), (9, 1, 16)]),
    "convolution": (lambda x, w: functional.conv1d(x, w, padding=3, groups=6), [(2, 6, 20), (6, 1, 4)]),
}
INT_CASES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "arithmetic": lambda a, b: [
        a + b,
        a - b,
        a * b,
        -a,
        a // (b.abs() + 1),
        a % (b.abs() + 1),
        a.abs(),
        a.clamp(-1, 1),
    ],
    "comparisons": lambda a, b: [
        a == b,
        a < b,
        (a > 1) & (b > 1),
        (a > 1) | (b > 1),
        ~(a > 1),
        (a > 1).any(),
        (a > 1).all(0),
    ],
    "reductions": lambda a, b: [
        a.sum(),
        a.amax(1),
        a.argmax(1),
        a.cumsum(0),
        (a > 0).sum(1),
        a.amin(),
        a.max(0).values,
    ],
    "found": lambda a, b: [a.nonzero(), a[a > 1], torch.unique(a), torch.bincount(a.abs().flatten(), minlength=9)],
    "moved": lambda a, b: [torch.cat([a, b]), a.t().contiguous(), a.sort(1).values, a.flip(0), a.repeat_interleave(2)],
    "one-hot": lambda a, b: [functional.one_hot(a.abs(), 20), torch.histc(a.float(), 5, -9, 9)],
    "bits": lambda a, b: [a & b, a | b, a ^ b, a << 1],
    "searched": lambda a, b: [torch.searchsorted(a.flatten().sort().values, b), torch.isin(a, b)],
    "in place": in_place,
    "new": lambda a, b: [
        *(
            torch.arange(5, device=a.device),
            torch.zeros_like(a),
            torch.ones_like(b),
            torch.full((3,), 7, device=a.device),
        ),
        *(torch.eye(3, dtype=a.dtype, device=a.device), a.new_zeros(3, 2), torch.linspace(0, 1, 5, device=a.device)),
    ],
}
WITHOUT_GRADIENT: dict[str, tuple[Callable[..., Any], Sequence[tuple[int, ...]]]] = {
    "in place": (in_place, [(7, 12), (7, 12)]),
    "lists": (lists, [(7, 12), (7, 12)]),
    "fused AdamW": (fused_adamw, [(7, 12)]),
    "products into memory": (out_and_in_place_products, [(17, 9), (17, 33), (33, 9)]),
    "merged": (
        lambda a, b: [torch.logaddexp(a, b), a.isneginf(), a.max(), a.clone().index_copy_(0, on(a, IDS[:3]), b[:3])],
        [(7, 12)] * 2,
    ),
    "compared": (lambda a, b: [a > b, a.isnan(), a.isfinite().all(), a.argmax(1), torch.isclose(a, b)], [(7, 12)] * 2),
}


def inputs(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, *, strided: bool = False) -> list[Tensor]:
    """Equal values for every device; `strided`: each is every second column, behind an offset, of a larger tensor."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for shape in shapes:
        wide = (*shape[:-1], 2 * shape[-1] + 3) if strided else shape
        if dtype == torch.int64:
            values = torch.randint(-9, 9, wide, generator=generator)
        else:
            values = torch.randn(wide, generator=generator, dtype=torch.float64).to(dtype)
        found.append(values[..., 3::2] if strided else values)
    return found


def results(function: Callable[..., Any], tensors: Sequence[Tensor], device: torch.device, grad: bool) -> list[Tensor]:
    """What the function returns, and the gradients of a weighted sum of it."""
    leaves = []
    for tensor in tensors:
        base = tensor if tensor._base is None else tensor._base
        there = base.to(device)
        if tensor._base is not None:
            there = there.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        leaves.append(there.requires_grad_() if grad else there)
    out = function(*leaves)
    outs = list(out) if isinstance(out, list | tuple) else [out]
    if not grad:
        return outs
    total = sum((o.double() * torch.arange(1, o.numel() + 1, device=device).view(o.shape).cos()).sum() for o in outs)
    return [*outs, *torch.autograd.grad(total, leaves)]


def assert_equal(found: Sequence[Tensor], expected: Sequence[Tensor], dtype: torch.dtype) -> None:
    assert len(found) == len(expected)
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.shape == b.shape, number
        a, b = a.detach().cpu().double(), b.detach().double()
        error = (a - b).norm()
        allowed = TOLERANCE[dtype] * (b.norm() + math.sqrt(max(1, b.numel())))
        assert error <= allowed, f"result {number} is off by {error:.2g}, {allowed:.2g} is allowed"


def compare(function: Callable[..., Any], tensors: Sequence[Tensor], grad: bool) -> None:
    dtype = tensors[0].dtype
    # Of the same values in float64: half precision is rounded once, behind each operator.
    exact = [t if dtype == torch.int64 else t.double() for t in tensors]
    assert_equal(results(function, tensors, CUDA, grad), results(function, exact, torch.device("cpu"), grad), dtype)


@pytest.mark.parametrize("strided", [False, True], ids=["whole", "strided"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("case", FLOAT_CASES)
def test_values_and_gradients(case: str, dtype: torch.dtype, strided: bool) -> None:
    function, shapes = FLOAT_CASES[case]
    compare(function, inputs(shapes, dtype, strided=strided), grad=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("case", WITHOUT_GRADIENT)
def test_values(case: str, dtype: torch.dtype) -> None:
    function, shapes = WITHOUT_GRADIENT[case]
    compare(function, inputs(shapes, dtype), grad=False)


@pytest.mark.parametrize("strided", [False, True], ids=["whole", "strided"])
@pytest.mark.parametrize("case", INT_CASES)
def test_integers(case: str, strided: bool) -> None:
    compare(INT_CASES[case], inputs([(7, 12), (7, 12)], torch.int64, strided=strided), grad=False)


EMPTY: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "elementwise": lambda a, b: [a + b, a.exp(), a * 2, torch.cat([a, b]), a.sum(), a.sum(0), a.clone(), a.softmax(-1)],
    "products": lambda a, b: [a @ b.t(), a.t() @ b],
    "indexed": lambda a, b: [a[torch.zeros(0, dtype=torch.int64, device=a.device)], a.nonzero(), a[a > 0]],
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("case", EMPTY)
def test_nothing(case: str, dtype: torch.dtype) -> None:
    compare(EMPTY[case], inputs([(0, 5), (0, 5)], dtype), grad=False)


@pytest.mark.parametrize("overload", ["dtype", "dtype_out"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_multiplied_into_float32(dtype: torch.dtype, overload: str) -> None:
    a, b = inputs([(17, 33), (33, 9)], dtype)
    total = torch.full((17, 9), 2.0, device=CUDA)
    product = getattr(torch.ops.aten.addmm, overload)
    out = {"out": total} if overload == "dtype_out" else {}
    found = product(total, a.to(CUDA), b.to(CUDA), torch.float32, beta=1, **out)
    assert_equal([found], [a.double() @ b.double() + 2], torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_groups(dtype: torch.dtype) -> None:
    compare(grouped, inputs([(13, 32), (3, 32, 16)], dtype), grad=False)


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "mask"])
@pytest.mark.parametrize("dtype", FLOATS[1:], ids=str)
def test_attention_of_torch(dtype: torch.dtype, masked: bool) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = causal(32, q.device) if masked else None
        return functional.scaled_dot_product_attention(q, k, v, mask, is_causal=not masked)

    compare(attend, inputs([(2, 4, 32, 16)] * 3, dtype), grad=True)


def test_random_numbers_are_a_seeds() -> None:
    """Not those that CUDA draws: nothing here compares them with any."""
    torch.manual_seed(3)
    first = torch.randn(1000, device=CUDA)
    other = torch.randn(1000, device=CUDA)
    torch.manual_seed(3)
    assert torch.equal(torch.randn(1000, device=CUDA), first)
    assert not torch.equal(first, other)
    assert abs(float(first.std()) - 1) < 0.1
    assert abs(float(first.mean())) < 0.1


def test_copies_between_host_and_device() -> None:
    here = torch.randn(5, 7).pin_memory()
    there = here.to(CUDA, non_blocking=True).t().to(torch.bfloat16)
    assert torch.equal(there.cpu(), here.t().bfloat16())
    assert torch.equal(here.t().to(CUDA).cpu(), here.t())
    strided = torch.zeros(7, 10, device=CUDA)
    strided[:, ::2] = here.t().to(CUDA)
    assert torch.equal(strided[:, ::2].cpu(), here.t())


def test_a_result_is_in_the_order_of_its_stream_under_delays() -> None:
    for seed in range(5):
        with emulator.delays(seed, 300):
            a = torch.zeros(64, 64, device=CUDA)
            for step in range(20):
                a = a + step
            assert torch.equal(a.cpu(), torch.full((64, 64), 190.0))


# ---------------------------------------------------------------------- what must be wrong


def chain(seed: int, *, waits: bool) -> bool:
    """Whether a stream that reads what another one computes sees it, with or without waiting for its event."""
    with emulator.delays(seed, 300):
        side = torch.cuda.Stream()
        x = torch.zeros(64, 64, device=CUDA)
        torch.cuda.synchronize()
        y = x + (seed + 1)  # the memory may hold the seed's before
        for _ in range(5):
            y = y * 1.0
        done = torch.cuda.current_stream().record_event()
        with torch.cuda.stream(side):
            if waits:
                side.wait_event(done)
            z = y + 0
        torch.cuda.synchronize()
        return bool((z == seed + 1).all())


def reused(seed: int, *, recorded: bool) -> bool:
    """Whether memory that is freed while another stream still has to read it keeps its values; it does where the
    allocator was told of that stream."""
    with emulator.delays(seed, 300):
        side = torch.cuda.Stream()
        x = torch.full((64, 64), 7.0, device=CUDA)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                torch.ones(8, device=CUDA) * 2
            z = x + 0
        if recorded:
            x.record_stream(side)
        del x
        torch.full((64, 64), -5.0, device=CUDA)
        torch.cuda.synchronize()
        return bool((z == 7).all())


@pytest.mark.parametrize("race", [chain, reused], ids=["a missing wait", "early reuse"])
def test_a_race_gives_wrong_numbers_within_twenty_seeds(race: Callable[..., bool]) -> None:
    right = "waits" if race is chain else "recorded"
    assert all(race(seed, **{right: True}) for seed in range(20))
    assert not all(race(seed, **{right: False}) for seed in range(20))


ENDS = torch.tensor([1, 2], dtype=torch.int32, device=CUDA)
WAITING: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "nonzero": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 0],
    "unique": lambda x: x.unique(),
    "to the host": lambda x: x.cpu(),
    "from pageable memory": lambda x: x.copy_(torch.ones(64)),
    "numbers in a tensor": lambda x: torch.tensor([1.0, 2.0], device=CUDA),
    "experts in float32": lambda x: functional.grouped_mm(x.view(2, 32), x.view(2, 32, 1).repeat(1, 1, 16), offs=ENDS),
}


@pytest.mark.parametrize("name", WAITING)
def test_what_waits_on_a_card_is_refused_in_torchs_debug_mode(name: str) -> None:
    """And arithmetic, copies from pinned memory and events are not."""
    x, pinned, half = torch.ones(64, device=CUDA), torch.ones(64, pin_memory=True), torch.bfloat16
    experts = torch.ones(2, 32, 16, device=CUDA, dtype=half)
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = torch.softmax(x.to(half) * 2, 0).float() @ x
        functional.grouped_mm(x.to(half).view(2, 32), experts, offs=ENDS)
        x.copy_(pinned, non_blocking=True).add_(y)
        torch.cuda.current_stream().record_event()
        with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
            WAITING[name](x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---------------------------------------------------------------------- nothing is used that is not compared


def test_steps_use_no_operator_that_is_not_compared_above(tmp_path: Path) -> None:
    """Of models with and without experts and an adapter, in both dtypes; fresh memory has no values."""
    before = emulator.calls()
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 20}
    experts["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    cases: list[dict[str, Any]] = [
        {"gpu": tiny.FLOOR, "ram": tiny.FLOOR},
        {"m": tiny.model(model_type="gpt_oss", overrides=experts)},
        {"adapter": tiny.AdapterConfig(method="dora", rank=4)},
    ]
    for number, (case, dtype) in enumerate(itertools.product(cases, ("float32", "bfloat16"))):
        with tiny.session(tmp_path / str(number), t=tiny.training(compute_dtype=dtype), device=CUDA, **case) as session:
            tiny.steps(session, 1)
    used = {name for name in emulator.calls() - before if not name.startswith("aten::empty")}
    before = emulator.calls()
    for function, shapes in (FLOAT_CASES | WITHOUT_GRADIENT).values():
        for dtype in (torch.float32, torch.bfloat16):
            results(function, inputs(shapes, dtype), CUDA, (function, shapes) in FLOAT_CASES.values())
    for function in INT_CASES.values():
        results(function, inputs([(7, 12), (7, 12)], torch.int64), CUDA, grad=False)
    torch.cuda.synchronize()
    compared = set(emulator.calls() - before) | ELSEWHERE
    print(f"{len(used)} operators used, {len(compared)} compared, {emulator.operators()} there")
    assert used <= compared, sorted(used - compared)
