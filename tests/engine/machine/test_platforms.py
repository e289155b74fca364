"""Machines that none of us has, as small trees that look like /proc and /sys and as what their drivers would say."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_limits import group_v2, machine, write

from penstock.engine.config import BudgetConfig
from penstock.engine.machine import device as device_module
from penstock.engine.machine.budgets import free_budgets, run_budgets
from penstock.engine.machine.device import configure, why_no_cuda
from penstock.engine.machine.limits import GIB
from penstock.engine.machine.platforms import cpu_quota, gpu_memory, is_wsl, remarks, shares_memory, usable_cpus
from penstock.storage.errors import UserError

CUDA = torch.device("cuda", 0)
WSL_RELEASE = "5.15.153.1-microsoft-standard-WSL2"


def gpu(
    monkeypatch: pytest.MonkeyPatch, name: str, free: int, total: int, integrated: bool = False, hip: str | None = None
) -> None:
    properties = SimpleNamespace(name=name, is_integrated=integrated, total_memory=total)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.version, "hip", hip)


@pytest.mark.parametrize(
    ("file", "text", "wsl"),
    [
        ("proc/sys/kernel/osrelease", WSL_RELEASE, True),
        ("proc/sys/kernel/osrelease", "6.1.0-18-amd64", False),
        ("proc/version", "Linux version 4.4.0-19041-Microsoft (Microsoft@Microsoft.com)", True),
        ("proc/version", "Linux version 6.8.0-1014-azure (buildd@lcy02)", False),
        ("proc/nothing", "", False),
    ],
)
def test_the_kernel_of_wsl_is_known_by_its_release(tmp_path: Path, file: str, text: str, wsl: bool) -> None:
    write(tmp_path / file, text)
    assert is_wsl(tmp_path) is wsl


@pytest.mark.parametrize(("available", "expected"), [(30 * GIB, 16 * GIB), (10 * GIB, 10 * GIB - int(2.56 * GIB))])
def test_wsl_gives_the_ram_tier_what_it_can_pin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, available: int, expected: int
) -> None:
    write(machine(tmp_path, available=available) / "proc/sys/kernel/osrelease", WSL_RELEASE)
    gpu(monkeypatch, name="NVIDIA GeForce RTX 4090", free=20 * GIB, total=24 * GIB)
    free = free_budgets(CUDA, root=tmp_path)
    assert free.ram == expected
    assert ("about what WSL2 can pin" in free.why["ram"]) is (expected == 16 * GIB)
    assert free_budgets(CUDA, ram=24 * GIB, root=tmp_path).ram == 24 * GIB  # who says so has it tried
    both = free_budgets(torch.device("cpu"), root=tmp_path)  # nothing is pinned without a GPU
    assert both.ram + both.gpu == available - int(2.56 * GIB)
    (remark,) = [text for text in remarks(CUDA, tmp_path) if "WSL2" in text]
    assert "about half" in remark


@pytest.mark.parametrize(
    ("name", "integrated", "shared"),
    [
        ("NVIDIA GB10", True, True),
        ("NVIDIA GB10", False, True),
        ("Orin", False, True),
        ("NVIDIA GH200 480GB", False, False),
        ("NVIDIA GB100", False, False),
        ("AMD Radeon 8060S", True, True),
        ("NVIDIA GeForce RTX 4090", False, False),
    ],
)
def test_a_gpu_without_memory_of_its_own(name: str, integrated: bool, shared: bool) -> None:
    assert shares_memory(SimpleNamespace(name=name, is_integrated=integrated)) is shared
    assert shares_memory(SimpleNamespace(name=name)) is (shared and name != "AMD Radeon 8060S")


def test_one_memory_is_counted_once_and_never_taken_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A DGX Spark: 119 GiB, of which the driver calls 80 taken, 70 of them file cache."""
    total, available = 119 * GIB, 110 * GIB
    machine(tmp_path, available=available, total=total)
    gpu(monkeypatch, name="NVIDIA GB10", free=39 * GIB, total=total, integrated=True)
    assert gpu_memory(CUDA, tmp_path) == (available, total)
    free = free_budgets(CUDA, root=tmp_path)
    reserve = int(total * 0.12)
    assert free.gpu + free.ram == available - reserve
    assert free.gpu == pytest.approx(0.4 * (available - reserve), abs=1)
    assert "both tiers share it" in free.why["gpu"]
    given = free_budgets(CUDA, gpu=60 * GIB, root=tmp_path)
    assert (given.gpu, given.ram) == (60 * GIB, available - reserve - 60 * GIB)
    with pytest.raises(UserError, match="both tiers share"):
        run_budgets(BudgetConfig(gpu="80GiB", ram="80GiB"), CUDA, [tmp_path], new=True, root=tmp_path)
    run_budgets(BudgetConfig(gpu="40GiB", ram="40GiB"), CUDA, [tmp_path], new=True, root=tmp_path)


def test_file_cache_does_not_refuse_a_budget_on_one_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[float] = []
    root = machine(tmp_path, available=6 * GIB, total=8 * GIB)
    gpu(monkeypatch, name="NVIDIA GB10", free=GIB, total=8 * GIB, integrated=True)
    monkeypatch.setattr(device_module, "gpu_memory", lambda device: gpu_memory(device, root))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: told.append(share))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    configure(CUDA, 4 * GIB, deterministic=False).restore()
    assert told[0] == 0.5
    with pytest.raises(UserError, match=r"budgets\.gpu"):
        configure(CUDA, 7 * GIB, deterministic=False)


def test_an_amd_gpu_is_taken_for_what_it_is_and_said_to_be_untried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(monkeypatch, name="AMD Instinct MI300X", free=190 * GIB, total=192 * GIB, hip="6.4.43482")
    settings: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append, raising=False)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    configure(CUDA, 100 * GIB, deterministic=False).restore()
    assert settings == []  # expandable segments are for NVIDIA's driver alone
    (remark,) = remarks(CUDA, machine(tmp_path))
    assert "never been tested" in remark
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "rocminfo" in why_no_cuda()
    monkeypatch.setattr(torch.version, "hip", None)
    assert "built without CUDA" in why_no_cuda()


def cpu_v1(folder: Path, quota: int) -> None:
    write(folder / "cpu.cfs_quota_us", quota)
    write(folder / "cpu.cfs_period_us", 100_000)


def test_the_quota_of_a_container_counts_not_the_cpus_that_it_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    machine(tmp_path, cgroup="0::/a/b")
    assert cpu_quota(tmp_path) is None
    assert usable_cpus(tmp_path) == 64
    assert remarks(torch.device("cpu"), tmp_path) == []
    top = tmp_path / "sys/fs/cgroup"
    for folder, text in ((top / "a", "350000 100000"), (top / "a/b", "max 100000")):
        group_v2(folder, "max", 0)
        write(folder / "cpu.max", text)
    assert cpu_quota(tmp_path) == 3.5
    assert usable_cpus(tmp_path) == 4
    assert remarks(torch.device("cpu"), tmp_path) == [
        "a control group limits this process to 4 of the 64 CPUs that it sees; 4 are used"
    ]


def test_quotas_of_version_1(tmp_path: Path) -> None:
    machine(tmp_path, cgroup="3:cpu,cpuacct:/x/y\n4:memory:/x/y")
    top = tmp_path / "sys/fs/cgroup/cpu,cpuacct"
    for folder, quota in ((top, -1), (top / "x", 250_000), (top / "x/y", -1)):
        cpu_v1(folder, quota)
    assert cpu_quota(tmp_path) == 2.5
