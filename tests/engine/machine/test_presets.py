"""Presets: complete, checked by hand against their sheets, and found by name; peaks and architectures by the driver's
names, and utilisation."""

import json
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from packaging.requirements import Requirement

from penstock.engine.attention.flash_attn import FlashAttention2, FlashAttention3, FlashAttention4
from penstock.engine.attention.select import BACKENDS
from penstock.engine.machine.architectures import ARCHITECTURES, Architecture, architecture, peak_of
from penstock.engine.machine.peaks import hfu, mfu, peak_flops
from penstock.engine.machine.presets import GENERIC, PRESETS, find_machine, generic_gpu, profile_path, stored_machine
from penstock.engine.machine.profile import VERSION, Machine, from_json
from penstock.storage.errors import UserError


def test_all_presets_are_there_and_survive_being_saved() -> None:
    names = "gh200-480 h200-1500 h100-pcie-512 rtx4090-64 rtx4090-128 rtx4090-256 rtx5090-192 rtx3090-64 dgx-spark"
    assert " ".join(PRESETS) == names
    assert "assumed" in GENERIC.source
    for machine in (*PRESETS.values(), GENERIC):
        assert from_json(json.loads(json.dumps(machine.to_json())), machine.name) == machine


@pytest.mark.parametrize("name", PRESETS)
def test_rates_stay_below_the_sheet(name: str) -> None:
    machine = PRESETS[name]
    assert machine.source.startswith("data sheets, not measured")
    peak = peak_flops(machine.gpu)
    if name == "dgx-spark":
        assert peak is None, "no bfloat16 rate is published"
        assert "derived, not published" in machine.source
        peak = 125e12
    assert machine.matmul_flops < peak
    assert {rate.head_dim for rate in machine.attention} == {64, 128}
    for rate in machine.attention:
        # Attention is products and softmax: never faster than the products alone.
        assert max(rate.forward_flops, rate.backward_flops) < machine.matmul_flops
    assert all(0 < share <= 1 for share in (machine.duplex_share, machine.drives_share, machine.drive_duplex_share))
    # A link cannot be faster than the memories at its ends.
    assert machine.h2d_bytes_per_s <= machine.ram_copy_bytes_per_s
    both = (machine.h2d_bytes_per_s + machine.d2h_bytes_per_s) * machine.duplex_share
    assert both <= machine.ram_copy_bytes_per_s * 1.01
    assert machine.optimizer_params_per_s == pytest.approx(machine.ram_copy_bytes_per_s / 30)


def test_a_desktop_by_hand() -> None:
    machine = PRESETS["rtx4090-128"]
    assert (machine.gpu_bytes, machine.ram_bytes) == (25_254_407_700, 137_438_953_472)  # 24 GiB x 0.98
    assert machine.matmul_flops == pytest.approx(158.92e12, rel=1e-4)  # 165.2 x 0.962: see below
    assert machine.h2d_bytes_per_s == pytest.approx(26.775e9)  # 31.5 x 0.85
    assert machine.gpu_copy_bytes_per_s == pytest.approx(856.8e9)  # 1,008 x 0.85
    assert machine.optimizer_params_per_s == pytest.approx(1.632e9)  # 57.6e9 x 0.85 / 30
    assert [drive.endurance_bytes for drive in machine.drives] == [2_400 * 10**12] * 2
    assert machine.nvme_bytes == 7_200 * 10**9
    assert machine.nvme_read_bytes_per_s == pytest.approx(12.03175e9)  # 2 x 7.45 x 0.85 x 0.95
    assert machine.nvme_write_bytes_per_s == pytest.approx(2.584e9)  # 2 x 1.6 x 0.85 x 0.95


def test_data_centre_machines_by_hand() -> None:
    gh200, h200 = PRESETS["gh200-480"], PRESETS["h200-1500"]
    assert gh200.ram_bytes == 515_396_075_520
    assert gh200.h2d_bytes_per_s == pytest.approx(326.4e9)  # 384 x 0.85, less than C2C's 450
    assert gh200.duplex_share == pytest.approx(0.5)  # 384 for both ways, of 2 x 384
    assert PRESETS["rtx3090-64"].duplex_share == pytest.approx(0.8127, abs=1e-4)  # 51.2 of 2 x 31.5
    assert gh200.matmul_flops == h200.matmul_flops == pytest.approx(664.46e12, rel=1e-4)
    # 989.5 x 0.6715: a token's 254.3e9 FLOPs at 0.624 of the peak take 411.9 us, of which 82.97e6 bytes at 0.85 of
    # 3,350 GB/s are 29.1.
    assert pytest.approx(h200.matmul_flops) == 254.3e9 / (254.3e9 / (0.624 * 989.5e12) - 82.97e6 / (0.85 * 3350e9))
    assert h200.numa_nodes == 2
    assert h200.h2d_bytes_per_s == pytest.approx(53.55e9)  # 63 x 0.85
    assert h200.nvme_read_bytes_per_s == pytest.approx(41.99e9)  # 4 x 13 x 0.85 x 0.95
    assert h200.drives[0].endurance_bytes == 28_032 * 10**12  # 15.36 TB x 1,825
    assert PRESETS["h100-pcie-512"].drives[0].endurance_bytes == 14_016 * 10**12
    spark = PRESETS["dgx-spark"]
    assert spark.gpu_bytes + spark.ram_bytes == 128 * 10**9, "one memory is counted once"
    assert "40 GB count as the GPU's and 88 GB as RAM" in spark.source
    assert spark.h2d_bytes_per_s == pytest.approx(116.025e9)  # 273 / 2 x 0.85


def test_finds_a_preset_and_a_profile(tmp_path: Path) -> None:
    assert find_machine("gh200-480") is PRESETS["gh200-480"]
    mine = structs.replace(GENERIC, name="mine", source="measured")
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(mine.to_json()))
    assert find_machine(str(file)) == mine
    file.write_text(json.dumps(mine.to_json() | {"version": VERSION + 1}))
    with pytest.raises(UserError, match=rf"{file}: a profile of version {VERSION + 1}.*penstock probe"):
        find_machine(str(file))
    for name, nearest in (("rtx4090", "rtx4090-64"), ("GH200", "gh200-480"), ("h100-pcie", "h100-pcie-512")):
        with pytest.raises(UserError, match=f"machine '{name}': .*no preset.*did you mean .*{nearest}"):
            find_machine(name)
    with pytest.raises(UserError, match=r"machine '\?\?\?': .*presets are gh200-480, .*dgx-spark"):
        find_machine("???")


@given(st.text(max_size=200))
def test_any_other_content_is_refused(tmp_path_factory: pytest.TempPathFactory, content: str) -> None:
    file = tmp_path_factory.getbasetemp() / "odd.json"
    file.write_text(content)
    with pytest.raises(UserError, match=r"odd\.json"):
        find_machine(str(file))


@given(
    st.sampled_from([field.name for field in structs.fields(Machine) if field.name.endswith(("_s", "_flops"))]),
    st.sampled_from([0, -1.0, float("nan"), float("inf"), "fast", None]),
)
def test_a_figure_that_is_no_rate_is_refused(name: str, value: object) -> None:
    with pytest.raises(UserError, match=name):
        from_json(GENERIC.to_json() | {name: value}, "profile")


def test_profile_path_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert profile_path() == tmp_path / "penstock/machine.json"
    assert stored_machine() is None
    profile_path().parent.mkdir()
    profile_path().write_text(json.dumps(GENERIC.to_json()))
    assert stored_machine() == GENERIC
    profile_path().write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        stored_machine()
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert profile_path() == tmp_path / ".config/penstock/machine.json"


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA GH200 480GB", 989.5),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA GeForce RTX 3090", 71.0),
        ("NVIDIA GeForce RTX 3090 Ti", 80.0),
        # Unknown ones get no other's figure.
        ("", None),
        ("NVIDIA GB10", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA H100 80GB HBM2e", None),
        ("AMD Instinct MI300X", None),
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


PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"
BY_NAME = {found.name: found for found in ARCHITECTURES}
PACKAGES = {kernel.name for kernel in (FlashAttention2(), FlashAttention3(), FlashAttention4())}


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "Hopper"),
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
