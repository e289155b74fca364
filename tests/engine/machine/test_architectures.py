"""What is published of GPU architectures: found by the driver's names, and worked by hand."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from penstock.engine.attention.flash_attn import FlashAttention2, FlashAttention3, FlashAttention4
from penstock.engine.attention.select import BACKENDS
from penstock.engine.machine.architectures import ARCHITECTURES, Architecture, architecture, peak_of
from penstock.engine.machine.peaks import peak_flops
from penstock.engine.machine.presets import GENERIC, PRESETS, generic_gpu

PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"
BY_NAME = {found.name: found for found in ARCHITECTURES}
PACKAGES = {kernel.name for kernel in (FlashAttention2(), FlashAttention3(), FlashAttention4())}


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "Hopper"),
        ("NVIDIA H200", "Hopper"),
        ("NVIDIA GH200 480GB", "Hopper"),
        ("NVIDIA B200", "data-centre Blackwell"),
        ("NVIDIA GeForce RTX 4090", "Ada"),
        ("NVIDIA GeForce RTX 3090", "Ampere"),
        ("NVIDIA GeForce RTX 5090", "Blackwell"),
        ("NVIDIA GB10", "GB10"),
        ("NVIDIA GB100", None),
        ("NVIDIA A100-SXM4-80GB", None),
        (None, None),
    ],
)
def test_architectures_by_the_driver_s_name(gpu: str | None, name: str | None) -> None:
    found = architecture(gpu)
    assert (found and found.name) == name


@pytest.mark.parametrize("found", ARCHITECTURES, ids=lambda found: found.name)
def test_kernels_are_backends_and_what_to_install_is_an_extra(found: Architecture) -> None:
    assert set(found.kernels) <= {backend.name for backend in BACKENDS}
    assert set(found.wanted) <= PACKAGES & set(found.kernels)
    extras = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    (package,) = extras[found.extra]
    brought = Requirement(package).name
    assert any(brought == kernel.removesuffix("-2") for kernel in found.wanted)
    for shares in found.kernels.values():
        assert all(0 < share < 1 for both in shares.values() for share in both)


def test_shares_by_hand() -> None:
    hopper, ada, ampere, blackwell = (BY_NAME[name] for name in ("Hopper", "Ada", "Ampere", "Blackwell"))
    assert hopper.fastest() == {64: (473 / 989.5, 474 / 989.5), 128: (616 / 989.5, 561 / 989.5)}
    assert hopper.shares("torch-cudnn", 128) == (539 / 989.5, 516 / 989.5)
    assert hopper.shares("torch-cudnn", 80) == hopper.shares("torch-cudnn", 64), "the nearest"
    assert hopper.shares("torch-cpu-flash", 128) is None
    # cuDNN's forward 203.6 of 209.5 x 0.861; flash-attn's backward 190.6 of 209.5 x 0.861 x 2.5 x 51.43 / 131.34.
    assert ada.fastest()[128] == pytest.approx((0.8365, 0.7666), abs=1e-4)
    # FlashAttention 4 is faster forward only: 94.5 of 125 x 0.861 at heads of 64.
    assert blackwell.fastest()[64] == pytest.approx((0.6507, 0.6028), abs=1e-4)
    assert ampere.fastest() == {64: (81.9 / 111.1, 77.4 / 111.1), 128: (81.9 / 111.1, 77.4 / 111.1)}


def test_a_derived_peak_counts_for_plans_only() -> None:
    assert peak_of("NVIDIA GB10") == 125e12
    assert peak_flops("NVIDIA GB10") is None
    assert peak_of("NVIDIA H200") == peak_flops("NVIDIA H200") == 989.5e12
    assert peak_of("AMD Instinct MI300X") is None


def test_an_unknown_card_keeps_assumed_shares() -> None:
    known, unknown = generic_gpu("NVIDIA GeForce RTX 4090"), generic_gpu("NVIDIA L40S")
    assert known.attention == PRESETS["rtx4090-128"].attention
    assert known.matmul_flops == PRESETS["rtx4090-128"].matmul_flops
    assert unknown.matmul_flops == pytest.approx(0.70 * 362.05e12)
    assert [rate.forward_flops for rate in unknown.attention] == pytest.approx([0.45 * 362.05e12, 0.60 * 362.05e12])
    assert unknown.drives == GENERIC.drives
