"""What a run may use of each tier: what its recipe says, else what is really free, less what others have planned."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.engine.config import Budget, BudgetConfig, Share
from penstock.engine.machine.limits import (
    GPU_RESERVE,
    GPU_TIER_SHARE,
    RAM_RESERVE,
    UNIFIED_RESERVE,
    free_disk,
    free_memory,
    reserve_bytes,
    total_memory,
)
from penstock.engine.machine.platforms import WSL_PINNED_SHARE, gpu_memory, is_shared, is_wsl
from penstock.engine.machine.profile import Machine
from penstock.storage.files.disk import disk_bytes
from penstock.storage.files.errors import UserError
from penstock.storage.files.units import bytes_text
from penstock.storage.files.untrusted import printable
from penstock.storage.tier.filesystem import existing

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Budgets:
    """Bytes that a run may use of each tier."""

    gpu: int
    ram: int
    nvme: int | None
    """None: what the drives have."""
    why: dict[str, str]
    """Tier -> how its figure came about, in words."""
    nvme_capacity: int | None = None
    """What the drives have for the run, free or held by it already, where `nvme` is None."""
    least: frozenset[str] = frozenset()
    """Tiers that shall have no more than a plan needs: until that is known (PlanRequest.settled) all that is there."""
    shared: int | None = None
    """Bytes of one memory that holds both tiers, where `ram` is what `gpu` leaves of it."""

    def with_size(self, tier: str, size: int, why: str) -> Budgets:
        """The same with a tier's bytes decided."""
        changed: dict[str, Any] = {tier: size}
        if tier == "gpu" and self.shared is not None:
            changed["ram"] = self.shared - size
        return replace(self, **changed, why=self.why | {tier: why}, least=self.least - {tier})

    def of_rank(self, count: int, *, shares_gpu: bool) -> Budgets:
        """The share of one of `count` processes, which have the RAM in common; `shares_gpu`: and the memory that is the
        gpu tier."""
        shares = count if shares_gpu else 1
        shared = None if self.shared is None else self.shared // count
        return replace(self, ram=self.ram // count, gpu=self.gpu // shares, shared=shared)

    def of_all(self, count: int) -> Budgets:
        """What `count` processes with such a share have together, but for the GPUs, of which each has its own."""
        return replace(self, ram=self.ram * count)


@dataclass(frozen=True, slots=True)
class Reserved:
    """What another live process has planned and does not hold yet."""

    run: str
    """Path of its run directory."""
    pid: int
    ram_bytes: int
    gpu_bytes: Mapping[str, int]
    """Of each GPU, by `gpu_name`."""

    def __str__(self) -> str:
        with contextlib.suppress(OSError, ValueError):
            return printable(f"{Path(self.run).relative_to(Path.cwd())} (process {self.pid})")
        return printable(f"{self.run} (process {self.pid})")


def words(others: Sequence[Reserved], gpu: str | None = None) -> str:
    """Which run has how much reserved: of RAM, or of a GPU."""
    held = [(other, other.ram_bytes if gpu is None else other.gpu_bytes.get(gpu, 0)) for other in others]
    return ", ".join(f"{other} has {bytes_text(size)} reserved" for other, size in held if size)


def gpu_name(device: torch.device) -> str:
    """The same for all processes, whichever GPUs they see."""
    import torch

    return str(getattr(torch.cuda.get_device_properties(device), "uuid", device.index))


def run_budgets(
    config: BudgetConfig,
    device: torch.device,
    drives: Sequence[Path],
    *,
    new: bool,
    others: Sequence[Reserved] = (),
) -> Budgets:
    """What a run on this machine may use: what its recipe says, else what is really free.

    `new`: nothing of the run is on the drives yet. `others`: what other runs have reserved. Raises UserError for a
    budget beyond what the machine has at all.
    """
    gpu, ram, nvme = config.given()
    free = free_budgets(device, gpu=gpu, ram=ram, others=others)
    total = total_memory()
    _require("ram", ram, total, "this machine")
    if is_shared(device):
        _require("gpu", gpu, total, "this machine, whose memory is also the gpu tier,")
        if isinstance(gpu, int) and isinstance(ram, int) and gpu + ram > total:
            raise UserError(
                f"budgets.gpu and budgets.ram: {gpu:,} and {ram:,} bytes, but here both tiers share the {total:,} of "
                "this machine's memory; lower them, or leave one out to give it the rest"
            )
    capacity = None
    if nvme is not None:
        why = "the recipe's"
    elif new:
        nvme = _free_on(drives)
        why = "free on the drives, less a reserve"
    else:
        capacity = _free_on(drives) + disk_bytes(drives)
        why = "free on the drives, less a reserve, and what the run holds there"
    return replace(free, nvme=nvme, nvme_capacity=capacity, why=free.why | {"nvme": why})


def machine_budgets(config: BudgetConfig, machine: Machine) -> Budgets:
    """What a run on `machine` could use were nothing else running there, or what the recipe says.

    Raises UserError for budgets beyond what the machine has.
    """
    gpu, ram, nvme = config.given()
    sizes = {"gpu": machine.gpu_bytes, "ram": machine.ram_bytes, "nvme": machine.nvme_bytes}
    for tier, value in (("gpu", gpu), ("ram", ram), ("nvme", nvme)):
        _require(tier, value, sizes[tier], f"machine {machine.name}")
    reserved = machine.ram_bytes - reserve_bytes(RAM_RESERVE, machine.ram_bytes, machine.ram_bytes)
    why = {tier: f"{machine.name} has {size / 2**30:,.1f} GiB, less a reserve" for tier, size in sizes.items()}
    if machine.gpu is not None:
        left = machine.gpu_bytes - reserve_bytes(GPU_RESERVE, machine.gpu_bytes, machine.gpu_bytes)
        budgets = _apart(left, reserved, gpu, ram, why)
    elif gpu is None and ram is None:
        budgets = Budgets(machine.gpu_bytes, reserved, None, why)
    else:
        budgets = _together(machine.gpu_bytes + reserved, gpu, ram, why)
    return replace(
        budgets,
        nvme=machine.nvme_bytes if nvme is None else nvme,
        why=budgets.why | {"nvme": _reason(nvme, why["nvme"])},
    )


def _apart(gpu_bytes: int, ram_bytes: int, gpu: Budget, ram: Budget, why: dict[str, str]) -> Budgets:
    """The budgets where each tier has memory of its own, of which so much is there; `why`: tier -> why so much."""
    return _budgets((_size(gpu, gpu_bytes), _size(ram, ram_bytes)), gpu, ram, why)


def _together(total_bytes: int, gpu: Budget, ram: Budget, why: dict[str, str]) -> Budgets:
    """The budgets where one memory holds both tiers: what a recipe gives one leaves the rest to the other."""
    if isinstance(gpu, Share) and isinstance(ram, Share) and gpu.part + ram.part > 1:
        raise UserError(
            f"budgets.gpu and budgets.ram: {gpu} and {ram}, but here both tiers share the same memory; give shares "
            "that come to 100% at most, or leave one out to give it the rest"
        )
    known = [None if given in (None, "least") else _size(given, total_bytes) for given in (gpu, ram)]
    shared = None
    if gpu == "least":  # until it is known what that is, either tier may have all that the recipe leaves
        shared = total_bytes if known[1] is None else None
        both = max(0, total_bytes - (known[1] or 0)), total_bytes if known[1] is None else known[1]
    else:
        both = split_shared(total_bytes, *known)
    return _budgets(both, gpu, ram, why, shared)


def _budgets(
    sizes: tuple[int, int], gpu: Budget, ram: Budget, why: dict[str, str], shared: int | None = None
) -> Budgets:
    given = {"gpu": gpu, "ram": ram}
    reasons = why | {tier: _reason(budget, why[tier]) for tier, budget in given.items()}
    least = frozenset(tier for tier, budget in given.items() if budget == "least")
    return Budgets(*sizes, None, reasons, least=least, shared=shared)


def _size(given: Budget, there: int) -> int:
    """Bytes of a budget where so many are there."""
    if isinstance(given, Share):
        return int(there * given.part)
    return given if isinstance(given, int) else there


def _reason(given: Budget, why: str) -> str:
    if isinstance(given, Share):
        return f"{given} of what is free: {why}"
    return "the recipe's" if isinstance(given, int) else why


def _require(tier: str, given: Budget, size: int, where: str) -> None:
    if isinstance(given, int) and given > size:
        raise UserError(
            f"budgets.{tier}: {given:,} bytes, but {where} has {size:,}; lower it, or leave budgets.{tier} out to take "
            "what is free"
        )


def _free_on(drives: Sequence[Path]) -> int:
    """Free bytes on the drives together when each takes the same share."""
    devices = [os.stat(existing(drive)).st_dev for drive in drives]
    shares = [free_disk(drive) // devices.count(device) for drive, device in zip(drives, devices, strict=True)]
    return len(drives) * min(shares)


def split_shared(total_bytes: int, gpu_bytes: int | None = None, ram_bytes: int | None = None) -> tuple[int, int]:
    """(gpu, ram) bytes of memory that both tiers share; what a recipe gives one leaves the rest to the other."""
    if gpu_bytes is None:
        gpu_bytes = int(total_bytes * GPU_TIER_SHARE) if ram_bytes is None else max(0, total_bytes - ram_bytes)
    if ram_bytes is None:
        ram_bytes = max(0, total_bytes - gpu_bytes)
    return gpu_bytes, ram_bytes


def free_budgets(
    device: torch.device,
    *,
    gpu: Budget = None,
    ram: Budget = None,
    others: Sequence[Reserved] = (),
) -> Budgets:
    """What a run on `device` may use of each tier; `gpu` and `ram` are what its recipe says of them.

    `others`: what other runs have planned, which is still free. On a GPU it makes a CUDA context, as the run will.
    """
    memory = free_memory()
    left = max(0, memory.free_bytes - sum(other.ram_bytes for other in others))
    no_own = device.type == "cuda" and is_shared(device)
    ram_reserve = reserve_bytes(UNIFIED_RESERVE if no_own else RAM_RESERVE, memory.total_bytes, left)
    ram_free = left - ram_reserve
    planned = f", of which {words(others)}" if left < memory.free_bytes else ""
    ram_why = (
        f"{bytes_text(memory.free_bytes)} free ({memory.where}){planned}, less {bytes_text(ram_reserve)} for the system"
    )
    if device.type != "cuda":
        shared = f"{ram_why}; without a GPU both tiers share it"
        return _together(ram_free, gpu, ram, {"gpu": shared, "ram": shared})
    import torch

    free, total = gpu_memory(device)
    free += torch.cuda.memory_reserved(device)
    name = gpu_name(device) if others else ""
    left = max(0, free - sum(other.gpu_bytes.get(name, 0) for other in others))
    gpu_reserve = reserve_bytes(GPU_RESERVE, total, left)
    gpu_free = left - gpu_reserve
    planned = f"of which {words(others, name)}, " if left < free else ""
    gpu_why = (
        f"{bytes_text(free)} free, {planned}{bytes_text(total - free)} of {bytes_text(total)} taken by other processes "
        f"and by CUDA, less {bytes_text(gpu_reserve)} for what CUDA loads later"
    )
    if no_own:
        shared = f"{ram_why}; this GPU has no memory of its own, both tiers share it"
        return _together(min(ram_free, gpu_free), gpu, ram, {"gpu": shared, "ram": shared})
    if is_wsl() and (most := int(total_memory() * WSL_PINNED_SHARE)) < ram_free:
        ram_free = most
        ram_why += f"; no more than {bytes_text(most)}, about what WSL2 can pin"
    return _apart(gpu_free, ram_free, gpu, ram, {"gpu": gpu_why, "ram": ram_why})
