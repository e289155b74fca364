"""What a run says of attention kernels: which are there, and what a missing one would bring; how they are timed."""

import time
from typing import Any

import pytest
import tiny
import torch
from msgspec import structs

from penstock.engine import clock, kernels
from penstock.engine.attention import flash_attn as attention_flash
from penstock.engine.attention import select as attention_select
from penstock.engine.attention import torch_cuda as attention_cuda
from penstock.engine.attention.flash_attn import NOT_INSTALLED
from penstock.engine.attention.select import installed
from penstock.engine.hf.config import model_config
from penstock.engine.kernels import Faster, describe, expected_gain, faster_kernel, tell_kernels
from penstock.engine.machine.architectures import architecture
from penstock.engine.machine.presets import PRESETS
from penstock.engine.plan.plan import Plan

CPU = torch.device("cpu")
H200, RTX_4090, RTX_5090 = "NVIDIA H200", "NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 5090"
NOTHING = dict.fromkeys(("flash-attn-2", "flash-attn-3", "flash-attn-4"), NOT_INSTALLED)


def kind(direction: str, kernel: str, refused: dict[str, str] = NOTHING) -> dict[str, Any]:
    return {"device": "cuda:0", "direction": direction, "chosen": f"{kernel}, one call", "refused": refused}


def report(forward: str, backward: str, refused: dict[str, str] = NOTHING) -> list[dict[str, Any]]:
    return [kind("forward", forward, refused), kind("backward", backward, refused)]


def faster_than(gpu: str, forward: str, backward: str) -> Any:
    found = faster_kernel(gpu, report(forward, backward))
    assert found is not None
    assert "pip install" in found.words(0.1)
    return found


def test_hopper_without_flash_attention_3_or_4() -> None:
    found = faster_than(H200, "torch-cudnn", "torch-cuda-flash")
    assert (found.gpus, found.kernels, found.extra) == ("Hopper GPUs", ("flash-attn-3", "flash-attn-4"), "flash4")
    # The paper's cuDNN forward and flash-attn 2 backward, against FlashAttention 3's.
    assert found.now[128] == (539 / 989.5, 322 / 989.5)
    assert found.then[128] == (616 / 989.5, 561 / 989.5)
    # The fastest of the chosen kernels counts.
    mixed: Any = faster_kernel(
        H200, [*report("torch-cudnn", "torch-cudnn"), *report("torch-cuda-flash", "torch-cuda-flash")]
    )
    assert mixed.now[128] == (539 / 989.5, 516 / 989.5)
    words = faster_than(H200, "torch-cudnn", "torch-cudnn").words
    assert words(0.118) == (
        "attention: flash-attn-3 or flash-attn-4 would be faster on Hopper GPUs, and neither is installed: "
        "pip install 'penstock[flash4]'; by published rates the plan expects 12% of a step's time from it"
    )
    assert words(0.002).endswith("the plan expects less than 1% of a step's time from it")


def test_one_of_them_is_enough_and_one_that_fails_is_not_missing() -> None:
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


def test_a_kernel_without_published_rates() -> None:
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
    monkeypatch.setattr(attention_cuda, "capability", lambda _: (9, 0))
    monkeypatch.setattr(attention_flash, "_module", lambda *_: NOT_INSTALLED)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
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
    tell_kernels(observer, device, PRESETS["h200-1500"], plan())
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
