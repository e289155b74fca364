"""What a run says of attention kernels: which are there, and what a missing one would bring; how they are timed. What
CUDA's refuse, and why, kernel_query without a GPU: its capability and the packages are given."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from msgspec import structs
from torch import Tensor

from penstock.engine import clock, kernels
from penstock.engine.attention import flash_attn as attention_flash
from penstock.engine.attention import select as attention_select
from penstock.engine.attention import torch_cuda as attention_cuda
from penstock.engine.attention.backends import ALIGNMENT, Problem
from penstock.engine.attention.flash_attn import NOT_INSTALLED, FlashAttention2, FlashAttention3, FlashAttention4
from penstock.engine.attention.select import Attends, installed
from penstock.engine.attention.torch_cuda import CudaKernel, TorchCudaFlash, TorchCudnn
from penstock.engine.hf.config import model_config
from penstock.engine.kernels import Faster, describe, expected_gain, faster_kernel, kernel_query, report_kernels
from penstock.engine.machine.architectures import architecture
from penstock.engine.machine.presets import PRESETS
from penstock.engine.model import sums as model_sums
from penstock.engine.model.sums import GradientSums
from penstock.engine.plan.plan import Plan
from penstock.engine.plan.problem import SampleSpace

CPU = torch.device("cpu")
H200, RTX_4090, RTX_5090 = "NVIDIA H200", "NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 5090"
NOTHING = dict.fromkeys(("flash-attn-2", "flash-attn-3", "flash-attn-4"), NOT_INSTALLED)
PLAIN = Problem(
    device=torch.device("cuda", 0), dtype=torch.bfloat16, heads=8, kv_heads=2, qk_dim=128, v_dim=128, causal=True,
    square=True, window=False, segments=False, aligned=True, softcap=False, backward=True, deterministic=False,
)  # fmt: skip
UNALIGNED = f"would build a plan for every length that is not a multiple of {ALIGNMENT}"


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a package but those that a test brings along."""
    monkeypatch.setattr(attention_cuda, "capability", lambda _: (9, 0))
    monkeypatch.setattr(attention_flash, "_module", lambda *_: NOT_INSTALLED)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)


def kind(direction: str, kernel: str, refused: dict[str, str] = NOTHING) -> dict[str, Any]:
    return {"device": "cuda:0", "direction": direction, "chosen": f"{kernel}, one call", "refused": refused}


def report(forward: str, backward: str, refused: dict[str, str] = NOTHING) -> list[dict[str, Any]]:
    return [kind("forward", forward, refused), kind("backward", backward, refused)]


def faster_than(gpu: str, forward: str, backward: str) -> Any:
    found = faster_kernel(gpu, report(forward, backward))
    assert found is not None
    assert "pip install" in found.words(0.1)
    return found


def test_hopper_with_and_without_flash_attention_3_or_4() -> None:
    found = faster_than(H200, "torch-cudnn", "torch-cuda-flash")
    assert (found.gpus, found.kernels, found.extra) == ("Hopper GPUs", ("flash-attn-3", "flash-attn-4"), "flash4")
    # The paper's cuDNN forward and flash-attn 2 backward, against FlashAttention 3's.
    assert found.now[128] == (539 / 989.5, 322 / 989.5)
    assert found.then[128] == (616 / 989.5, 561 / 989.5)
    # The fastest of the chosen kernels counts.
    both = [entry for kernel in ("torch-cudnn", "torch-cuda-flash") for entry in report(kernel, kernel)]
    mixed: Any = faster_kernel(H200, both)
    assert mixed.now[128] == (539 / 989.5, 516 / 989.5)
    words = faster_than(H200, "torch-cudnn", "torch-cudnn").words
    assert words(0.118) == (
        "attention: flash-attn-3 or flash-attn-4 would be faster on Hopper GPUs, and neither is installed: "
        "pip install 'penstock[flash4]'; by published rates the plan expects 12% of a step's time from it"
    )
    assert words(0.002).endswith("the plan expects less than 1% of a step's time from it")
    # One of them is enough, and one that fails is not missing.
    for there in ("flash-attn-3", "flash-attn-4"):
        others = {name: reason for name, reason in NOTHING.items() if name != there}
        broken = NOTHING | {there: "cannot be imported: ImportError: another torch"}
        # float32: refused before anyone looks for the package.
        for refused in (others, broken, dict.fromkeys(NOTHING, "does not take torch.float32")):
            assert faster_kernel(H200, report("torch-cudnn", "torch-cudnn", refused)) is None
    assert faster_kernel("NVIDIA L40S", report("torch-cuda-flash", "torch-cuda-flash")) is None
    assert faster_kernel(None, []) is None
    assert faster_kernel(H200, []) is None


def test_other_architectures() -> None:
    """Ada and Ampere gain what flash-attn 2 has over torch's copy of it."""
    for gpu in (RTX_4090, RTX_5090, "NVIDIA GeForce RTX 3090"):
        found = faster_than(gpu, "torch-cuda-flash", "torch-cuda-flash")
        assert (found.kernels, found.extra) == (("flash-attn-2",), "flash2")
        assert found.now[128][1] / found.then[128][1] == pytest.approx(186.7 / 190.6)
    # cuDNN's forward is the fastest there is on this card, and its backward counts as flash-attn's.
    cudnn = faster_than(RTX_5090, "torch-cudnn", "torch-cudnn")
    assert cudnn.now[128] == cudnn.then[128]
    for gpu in ("NVIDIA H100 PCIe", "NVIDIA B200", "NVIDIA GB10"):
        assert architecture(gpu) is not None
        faster_than(gpu, "torch-cuda-flash", "torch-cuda-flash")
    # A kernel without published rates.
    soft_capped = faster_than(RTX_4090, "tiled-reference", "tiled-reference")
    assert soft_capped.now is None
    assert soft_capped.words(None) == (
        "attention: flash-attn-2 would be faster on Ada GPUs and is not installed: "
        "pip install --no-build-isolation 'penstock[flash2]'; no published rates compare it with the current kernel"
    )


def plan() -> Plan:
    return tiny.plan_of(tiny.spec_of(model_config(tiny.recipe(), None)), tiny.recipe(), "1GiB", "1GiB")


def faster(now: float, then: float) -> Faster:
    return Faster("X", ("flash-attn-4",), "flash4", {64: (now, now)}, {64: (then, then)})


def test_the_gain_is_of_the_plan_s_step() -> None:
    """A machine on which nothing but attention takes time gains what attention does; another one less."""
    machine = structs.replace(PRESETS["h200-1500"], matmul_flops=1e30, gpu_copy_bytes_per_s=1e30)
    # So slow that an attention op outlasts every launch and copy.
    slow = faster(1e-9, 2e-9)
    only = expected_gain(slow, plan(), machine)
    assert only == pytest.approx(0.5, abs=0.02)
    products = expected_gain(slow, plan(), structs.replace(machine, matmul_flops=1e6))
    assert products is not None
    assert 0 <= products < only
    assert expected_gain(faster(1e-9, 1e-9), plan(), machine) == 0
    assert expected_gain(slow._replace(now=None), plan(), machine) is None
    assert expected_gain(slow, plan(), structs.replace(machine, gpu="AMD Instinct MI300X")) is None


def test_what_is_installed_and_what_would_be_faster_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    there = installed(device)
    assert there == NOTHING | dict.fromkeys(("torch-cudnn", "torch-cuda-flash"))
    assert describe(there) == (
        "attention kernels installed: torch-cudnn, torch-cuda-flash; flash-attn-3 is not installed; "
        "flash-attn-4 is not installed; flash-attn-2 is not installed"
    )
    on_cpu = kind("forward", "torch-cpu-flash", {}) | {"device": "cpu"}
    monkeypatch.setattr(kernels, "attention_report", lambda: [*report("torch-cudnn", "torch-cudnn"), on_cpu])
    observer = tiny.Silent()
    report_kernels(observer, device, PRESETS["h200-1500"], plan())
    assert observer.messages[0] == describe(there)
    assert observer.messages[1].startswith("attention: flash-attn-3 or flash-attn-4 would be faster on Hopper GPUs")
    assert "of a step's time from it" in observer.messages[1]
    monkeypatch.setattr(attention_cuda, "capability", lambda _: (8, 9))
    assert installed(device)["flash-attn-3"] == "needs compute capability 9.x; this GPU has 8.9"


def test_chosen_kernels_are_named_by_direction_and_device() -> None:
    attention_select.forget()
    tensor = torch.randn(70, 2, 16)
    x = attention_select.Operands(tensor, tensor, tensor, attention_select.AttentionCall(0.3))
    attention_select.launches(x)
    assert attention_select.chosen("cpu") == {"forward": ["torch-cpu-flash"], "backward": []}
    assert attention_select.chosen("cuda") == {"forward": [], "backward": []}
    given = attention_select.Gradients(tensor, tensor, torch.zeros(2, 70))
    attention_select.launches(x, given)
    assert attention_select.chosen("cpu") == {"forward": ["torch-cpu-flash"], "backward": ["torch-cpu-flash"]}
    attention_select.forget()


def test_what_the_bits_depend_on_is_the_card_torch_and_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_select, "capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: H200)
    version = {"flash-attn": "2.8.3", "nvidia-cutlass-dsl": "4.2"}

    def found(name: str) -> str:
        if name not in version:
            raise attention_select.metadata.PackageNotFoundError
        return version[name]

    monkeypatch.setattr(attention_select.metadata, "version", found)
    card = torch.device("cuda", 0)
    record = kernels.kernel_record(card)
    assert record["environment"] == version | {
        "torch": torch.__version__,
        "GPU": "NVIDIA H200 (compute capability 9.0)",
        "cuDNN": "91900",
    }
    assert kernels.is_kernel_record(json.loads(json.dumps(record)))
    assert kernels.changes(record, card) == []
    version["flash-attn"] = "2.9"
    del version["nvidia-cutlass-dsl"]
    assert set(kernels.changes(record, card)) == {"flash-attn 2.8.3, now 2.9", "nvidia-cutlass-dsl 4.2, now none"}
    assert "GPU NVIDIA H200 (compute capability 9.0), now none" in kernels.changes(record, CPU)


def test_kernels_are_chosen_for_what_the_layers_and_the_plan_ask() -> None:
    """Soft-caps and windows of layers, whole rows or pieces, and prompts that go on behind a chunk."""
    overrides = {"sliding_window": 20, "attn_logit_softcapping": 30.0}
    run = tiny.recipe(model=tiny.model(model_type="gemma2", overrides=overrides))
    spec = tiny.spec_of(model_config(run, None))
    shape: dict[str, Any] = {"heads": 4, "kv_heads": 2, "qk_dim": 8, "v_dim": 8, "chunk": 16, "softcap": 30.0}
    plan = tiny.plan_of(spec, run, "1GiB", "1GiB", streamed=False)
    assert kernel_query(spec, plan).attention == [Attends(**shape, total=48, window=window) for window in (20, None)]
    assert kernel_query(spec, plan).products == [(32, 32), (16, 32), (48, 32), (32, 48)]
    joined = replace(spec, joined=((("mlp.gate_proj", "mlp.up_proj"),),) * 3)
    assert kernel_query(joined, plan).products[-1] == (96, 32)
    pieces = replace(plan, streamed=True)
    assert kernel_query(spec, pieces).attention == [
        Attends(**shape, total=16, window=w, pieces=True) for w in (20, None)
    ]
    samples = replace(pieces.problem, samples=SampleSpace(lengths=(5, 70), keeps=True, vocabulary=300))
    assert {layer.total for layer in kernel_query(spec, replace(pieces, problem=samples)).attention} == {70}


def test_work_that_only_the_host_takes_long_for_is_not_repeated_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = []

    def launch() -> None:
        launches.append(time.sleep(0.002))

    def on_a_device(work: object, device: torch.device, count: int = 1) -> float:
        for _ in range(count):
            launch()
        return count * 1e-9  # by its own events it was done at once

    monkeypatch.setattr(clock, "elapsed_s", on_a_device)
    assert clock.clock(launch, CPU, 0.02) == pytest.approx(1e-9)
    assert len(launches) <= 2 + 3 * 3  # a third of 20 ms holds three of 2 ms
    # Work longer than the time given runs three times: to warm up, to look, to measure.
    monkeypatch.undo()
    launches.clear()
    assert clock.clock(lambda: launches.append(time.sleep(0.01)), CPU, 0.005) >= 0.01
    assert len(launches) == 3


def has(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    monkeypatch.setattr(attention_flash, "_module", lambda *_: SimpleNamespace(**functions))


@pytest.mark.parametrize(("kernel", "change", "reason"), [
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
])  # fmt: skip
def test_torch_s_kernels(kernel: CudaKernel, change: Any, reason: str | None) -> None:
    assert kernel.refusal(replace(PLAIN, **change)) == reason


def test_a_gpu_of_another_age_and_an_old_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    from_8, from_9 = "8.x, 9.x, 10.x, 11.x, 12.x", "9.x, 10.x, 11.x, 12.x"
    old: list[tuple[CudaKernel, tuple[int, int], str]] = [(FlashAttention3(), of, "9.x") for of in ((8, 6), (10, 0))]
    old += [(TorchCudaFlash(), (7, 5), from_8), (FlashAttention4(), (8, 9), from_9)]
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
    assert kernel.refusal(PLAIN) == NOT_INSTALLED
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


@pytest.mark.parametrize("deterministic", [False, True])
def test_products_into_float32_are_chosen_before_they_are_needed_and_as_they_were(
    monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    """Where determinism is kernel_query for, and where a choice is recorded, no clock is looked at."""
    timed: list[float] = []
    factor = 1.0

    def add_into(total: Tensor, dy: Tensor, x: Tensor, *, beta: int) -> None:
        total.mul_(beta).addmm_(dy.float().t(), x.float(), alpha=factor)

    def clock(*args: Any) -> float:
        timed.append(1.0 if len(timed) % 2 else seconds)
        return timed[-1]

    monkeypatch.setattr(model_sums, "_add_into", add_into)
    monkeypatch.setattr(model_sums, "emulated", lambda tensor: False)  # else a CPU without bfloat16 chooses nothing
    monkeypatch.setattr(model_sums, "clock", clock)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    shapes = [(24, 16), (300, 16)]

    def chosen(recorded: dict[str, bool] | None = None) -> tuple[dict[str, bool], list[str]]:
        lost = model_sums.prepare(shapes, 40, torch.device("cpu"), torch.bfloat16, recorded)
        return model_sums.choices(), lost

    def summed(rows: int) -> Tensor:
        x, dy = (torch.linspace(-1, 1, rows * width).view(rows, width).bfloat16() for width in (16, 24))
        sums = GradientSums({"w": torch.full((24, 16), 0.3)})
        sums.add_product(["w"], dy, x)
        return sums["w"]

    names = ["24 x 16 bfloat16", "300 x 16 bfloat16"]
    seconds, factor = 2.0, 1.0
    slow = chosen()
    two = summed(33)
    assert slow == (dict.fromkeys(names, deterministic), [])
    seconds = 0.5
    fast = chosen()
    assert fast == (dict.fromkeys(names, True), [])
    assert bool(timed) != deterministic
    one = summed(33)
    assert torch.equal(one, two) == deterministic, "the bits depend on it, and not on the number of rows"
    timed.clear()
    for name in (True, False):
        assert chosen(dict.fromkeys(names, name)) == (dict.fromkeys(names, name), [])
    assert not timed
    factor = 1.1
    found, lost = chosen(dict.fromkeys(names, True))
    assert found == dict.fromkeys(names, False)
    assert lost == [f"a product into float32 ({name}): computes something else, or fails" for name in names]
    model_sums.prepare([], 40, torch.device("cpu"), torch.bfloat16)
    assert model_sums.choices() == {}
