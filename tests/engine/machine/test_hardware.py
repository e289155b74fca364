"""Peaks by name, and utilisation worked by hand."""

from __future__ import annotations

import pytest

from engine.machine.peaks import hfu, mfu, peak_flops


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA GH200 480GB", 989.5),
        ("NVIDIA GH200 144G HBM3e", 989.5),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA L4", 121.0),
        ("NVIDIA GeForce RTX 3090", 71.0),
        ("NVIDIA GeForce RTX 3090 Ti", 80.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 5090", 209.5),
        # Unknown ones get no other's figure.
        ("", None),
        ("cpu", None),
        ("NVIDIA GB10", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA H100 80GB HBM2e", None),
        ("AMD Instinct MI300X", None),
        ("Tesla V100-SXM2-32GB", None),
    ],
)
def test_peaks_by_name(name: str, tera: float | None) -> None:
    assert peak_flops(name) == (None if tera is None else pytest.approx(tera * 1e12))


def test_utilisation_by_hand() -> None:
    # 6 TFLOP in 2 s are 3 TFLOP/s, 30 % of 10; 8 TFLOP, recomputation included, are 40 %.
    assert mfu(6e12, 2.0, 1e13) == pytest.approx(0.3)
    assert hfu(8e12, 2.0, 1e13) == pytest.approx(0.4)
    assert mfu(6e12, 2.0, None) is None
    assert hfu(8e12, 2.0, None) is None
