"""From a recipe to the best plan for a machine: this one, or one of which only the profile is here."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.config import BudgetConfig, Recipe, parse_bytes
from engine.forecast.costs import Calibration
from engine.forecast.search import Found, chunk_options, search, why_not
from engine.hf.prepare import make_problem
from engine.machine.limits import (
    GPU_RESERVE,
    RAM_RESERVE,
    free_budgets,
    free_disk,
    reserve_bytes,
    split_shared,
    total_memory,
)
from engine.machine.presets import GENERIC, generic_gpu, stored_machine
from engine.machine.profile import Machine
from engine.machine.reservations import Reserved
from engine.model.spec import ModelSpec
from engine.plan.plan import Choice, Plan, Problem
from engine.plan.planner import make_plan
from storage.errors import BudgetError, UserError


@dataclass(frozen=True, slots=True)
class Budgets:
    """Bytes that a run may use of each tier."""

    gpu: int
    ram: int
    nvme: int | None
    """None: what the drives have."""
    why: dict[str, str]
    """Tier -> how its figure came about, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What a plan is made for: a model, a batch and a machine."""

    spec: ModelSpec
    recipe: Recipe
    budgets: Budgets
    device_type: str
    """cuda or cpu."""
    device_reads: bool = True
    """NVMe reads reach the compute device's memory without a stage in RAM."""
    reader_bytes: int = 0
    """Pinned RAM that the reader takes for itself."""
    graph_bytes: Mapping[str, int] | None = None
    """Calibration.graph_bytes_per_token, once there is one."""

    def problem(self, chunk_tokens: int) -> Problem:
        """What the planner has to solve with chunks of that length."""
        return make_problem(
            self.spec,
            self.recipe,
            self.device_type,
            (self.budgets.gpu, self.budgets.ram, self.budgets.nvme),
            chunk_tokens,
            device_reads=self.device_reads,
            reader_bytes=self.reader_bytes,
            graph_bytes=self.graph_bytes,
        )

    @property
    def chunks(self) -> list[int]:
        """Chunk lengths among which the plan may choose."""
        data, train = self.recipe.data, self.recipe.train
        if self.spec.recurrent:
            return [data.sequence_length]
        if train.chunk_tokens is not None:
            return [train.chunk_tokens]
        return chunk_options(train.sequences_per_micro_batch * data.sequence_length)

    def plan(self, choice: Choice) -> Plan:
        """The plan of one choice, with the longest chunk there is. Raises BudgetError."""
        return make_plan(self.problem(self.chunks[-1]), choice)

    def refusal(self) -> BudgetError | None:
        """Why no plan fits, of the combination that needs least; None where one does."""
        return why_not(self.problem, self.chunks)

    def search(
        self,
        machine: Machine,
        calibration: Calibration | None = None,
        documents: Sequence[Sequence[int]] | None = None,
        known: tuple[int, Choice] | None = None,
        only: tuple[int, Choice] | None = None,
        before: Found | None = None,
        rough: bool = False,
    ) -> Found:
        """The best plan: see engine.forecast.search.search. Raises BudgetError where none fits."""
        return search(
            self.problem,
            self.chunks,
            machine,
            calibration,
            documents,
            known=known,
            only=only,
            before=before,
            rough=rough,
        )


def run_budgets(
    config: BudgetConfig,
    device: torch.device,
    drives: Sequence[Path],
    *,
    new: bool,
    others: Sequence[Reserved] = (),
    root: Path = Path("/"),
) -> Budgets:
    """What a run on this machine may use: what its recipe says, else what is really free.

    `new`: nothing of the run is on the drives yet. `others`: what other runs have reserved. `root`: where memory is
    looked at. Raises UserError for budgets beyond what the machine has at all.
    """
    gpu, ram, nvme = _given(config)
    free = free_budgets(device, gpu_bytes=gpu, ram_bytes=ram, others=others, root=root)
    why = {
        tier: "the recipe's" if given is not None else free.why[tier] for tier, given in (("gpu", gpu), ("ram", ram))
    }
    total = total_memory(root)
    _require("ram", ram, total, "this machine")
    if device.type == "cpu":
        _require("gpu", gpu, total, "this machine, whose memory is also the gpu tier,")
    if nvme is None and new:
        nvme = _free_on(drives)
        why["nvme"] = "free on the drives, less a reserve"
    else:
        why["nvme"] = "what the drives have" if nvme is None else "the recipe's"
    return Budgets(free.gpu_bytes, free.ram_bytes, nvme, why)


def machine_budgets(config: BudgetConfig, machine: Machine) -> Budgets:
    """What a run on `machine` could use were nothing else running there, or what the recipe says.

    Raises UserError for budgets beyond what the machine has.
    """
    gpu, ram, nvme = _given(config)
    sizes = {"gpu": machine.gpu_bytes, "ram": machine.ram_bytes, "nvme": machine.nvme_bytes}
    for tier, given in (("gpu", gpu), ("ram", ram), ("nvme", nvme)):
        _require(tier, given, sizes[tier], f"machine {machine.name}")
    reserved = machine.ram_bytes - reserve_bytes(RAM_RESERVE, machine.ram_bytes, machine.ram_bytes)
    if machine.gpu is None:
        both = split_shared(machine.gpu_bytes + machine.ram_bytes, gpu, ram)
        own = (machine.gpu_bytes, reserved) if gpu is None and ram is None else both
    else:
        left = machine.gpu_bytes - reserve_bytes(GPU_RESERVE, machine.gpu_bytes, machine.gpu_bytes)
        own = (left if gpu is None else gpu, reserved if ram is None else ram)
    why = {
        tier: "the recipe's"
        if given is not None
        else f"{machine.name} has {sizes[tier] / 2**30:,.1f} GiB, less a reserve"
        for tier, given in (("gpu", gpu), ("ram", ram), ("nvme", nvme))
    }
    return Budgets(own[0], own[1], machine.nvme_bytes if nvme is None else nvme, why)


def _given(config: BudgetConfig) -> tuple[int | None, int | None, int | None]:
    """(gpu, ram, nvme) bytes that the recipe gives."""

    def read(tier: str) -> int | None:
        value = getattr(config, tier)
        return None if value is None else parse_bytes(value, f"budgets.{tier}")

    return read("gpu"), read("ram"), read("nvme")


def _require(tier: str, given: int | None, size: int, where: str) -> None:
    if given is not None and given > size:
        raise UserError(
            f"budgets.{tier}: {given:,} bytes, but {where} has {size:,}; lower it, or leave budgets.{tier} out to take "
            "what is free"
        )


def _free_on(drives: Sequence[Path]) -> int:
    """Free bytes on the drives together when each takes the same share."""
    places = []
    for drive in drives:
        while not drive.is_dir():
            drive = drive.parent
        places.append((os.stat(drive).st_dev, drive))
    sharing = [device for device, _ in places]
    return len(places) * min(free_disk(place) // sharing.count(device) for device, place in places)


def this_machine(device: torch.device) -> Machine:
    """The stored profile of this machine, or assumed rates where it was never probed with that device."""
    stored = stored_machine()
    if stored is not None and (stored.gpu is not None) == (device.type == "cuda"):
        return stored
    return GENERIC if device.type == "cpu" else generic_gpu(torch.cuda.get_device_name(device))
