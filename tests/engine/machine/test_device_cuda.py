"""What is done with a CUDA device outside of any lane, on a card that only answers questions."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from streams_on_cpu import streams_on_cpu

from penstock.engine.clock import elapsed_s
from penstock.engine.machine import probe, probe_compute
from penstock.engine.machine.device import LEAST_LIMIT_BYTES, configure, memory_use, resolve_device
from penstock.engine.machine.presets import this_machine
from penstock.storage.errors import UserError

GIB = 2**30
CUDA = torch.device("cuda", 1)


@dataclass
class Card:
    """A GPU of 24 GiB of which 2 are taken by others; counts what it is told."""

    name: str = "NVIDIA GeForce RTX 4090"
    capability: tuple[int, int] = (8, 9)
    is_integrated: bool = False
    total_memory: int = 24 * GIB
    uuid: str = "a0b1"
    reserved: int = GIB
    fractions: list[tuple[float, torch.device]] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card()
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "current_device": lambda: 1,
        "get_device_name": lambda device: card.name,
        "get_device_capability": lambda device: card.capability,
        "get_arch_list": lambda: ["sm_80", "sm_90"],
        "get_device_properties": lambda device: card,
        "mem_get_info": lambda device: (card.total_memory - 2 * GIB - card.reserved, card.total_memory),
        "memory_reserved": lambda device: card.reserved,
        "set_per_process_memory_fraction": lambda share, device: card.fractions.append((share, device)),
        "reset_peak_memory_stats": lambda device: None,
        "max_memory_allocated": lambda device: 3 * GIB,
        "max_memory_reserved": lambda device: 4 * GIB,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", card.settings.append, raising=False)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    return card


def test_the_device_has_an_index_and_old_cards_are_refused(card: Card) -> None:
    """set_per_process_memory_fraction wants an index."""
    assert resolve_device(tiny.training(device="auto")) == CUDA
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    card.name, card.capability = "Tesla T4", (7, 5)
    with pytest.raises(UserError, match=r"train\.device: Tesla T4 has compute capability 7\.5"):
        resolve_device(tiny.training(device="cuda"))
    assert resolve_device(tiny.training(device="cpu")) == torch.device("cpu")


def test_the_allocator_gets_the_budget_and_no_more(card: Card) -> None:
    matmul = torch.backends.cuda.matmul
    before = torch.get_float32_matmul_precision(), matmul.allow_bf16_reduced_precision_reduction
    settings = configure(CUDA, 12 * GIB, deterministic=False)
    try:
        assert card.fractions == [(0.5, CUDA)]
        assert card.settings == ["expandable_segments:True"]
        assert torch.get_float32_matmul_precision() == "highest"
        assert not matmul.allow_bf16_reduced_precision_reduction
        assert (
            "12.0 GiB of 24.0 GiB are this run's budget; other processes and CUDA itself use 2.0 GiB"
            in settings.message
        )
    finally:
        settings.restore()
    assert card.fractions[1:] == [(1.0, CUDA)]
    assert (torch.get_float32_matmul_precision(), matmul.allow_bf16_reduced_precision_reduction) == before


def test_small_budgets_are_not_enforced_and_given_settings_stay(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    configure(CUDA, 1, deterministic=False).restore()
    assert card.fractions[0] == (LEAST_LIMIT_BYTES / card.total_memory, CUDA)
    assert card.settings == []


def test_a_budget_that_others_have_taken_is_refused_and_nothing_stays_set(card: Card) -> None:
    with pytest.raises(UserError, match=r"budgets\.gpu: 23,622,320,129 bytes, but 2,147,483,648 of the GPU's"):
        configure(CUDA, 22 * GIB + 1, deterministic=True)
    assert card.fractions == []
    assert not torch.are_deterministic_algorithms_enabled()
    configure(CUDA, 22 * GIB, deterministic=False).restore()


def test_peaks_are_the_allocators(card: Card) -> None:
    assert memory_use(CUDA) == {
        "allocated_bytes": 3 * GIB,
        "reserved_bytes": 4 * GIB,
        "fragmentation_bytes": GIB,
    }


def test_the_probe_asks_for_gpu_memory_and_finds_both_tiers(card: Card) -> None:
    probe._require_memory(CUDA, probe_compute.CPU_SIZES)
    name, gpu, ram = probe.memories(CUDA)
    assert (name, gpu) == (card.name, 24 * GIB)
    card.is_integrated = True  # one memory: each tier has a part of what the machine has
    assert probe.memories(CUDA)[0] == card.name
    assert sum(probe.memories(CUDA)[1:]) == pytest.approx(ram, rel=0.01)
    card.is_integrated, card.total_memory = False, 2 * GIB  # nothing is left
    with pytest.raises(UserError, match="bytes of GPU memory and -"):
        probe._require_memory(CUDA, probe_compute.CPU_SIZES)


def test_the_boards_power_limit_is_what_nvidia_smi_says(
    card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert probe.power_limit_w(CUDA) is None  # there is none
    smi = tmp_path / "nvidia-smi"
    for said, watts in (("450.00", 450.0), ("[N/A]", None), ("nan", None)):
        smi.write_text(f'#!/bin/sh\ncase "$*" in *--id=GPU-*power.limit*) echo "{said}";; esac\n')
        smi.chmod(0o755)
        assert probe.power_limit_w(CUDA) == watts


def test_a_machine_never_probed_is_planned_by_its_gpus_name(card: Card) -> None:
    assert this_machine(CUDA).source.startswith(f"assumed: {card.name}")


def test_work_is_timed_between_two_events() -> None:
    counted: list[None] = []
    with streams_on_cpu():
        seconds = elapsed_s(lambda: counted.append(None), CUDA, 5)
    assert len(counted) == 5
    assert 0 <= seconds < 20


def test_copies_of_the_probe_go_through_a_stream_each() -> None:
    here, there = torch.arange(64), torch.zeros(64, dtype=torch.int64)
    back = torch.zeros(64, dtype=torch.int64)
    threads = threading.active_count()
    with streams_on_cpu():
        rates = probe_compute._copies([[(there, here)], [(back, here)]], CUDA, 0.0)
    assert torch.equal(there, here)
    assert torch.equal(back, here)
    assert min(rates) > 0
    assert threading.active_count() <= threads + 4
