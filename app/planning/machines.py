"""The machines that a recipe can be planned for, in words. Nothing heavy is imported."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from penstock.engine.machine.limits import machine_memory
from penstock.engine.machine.presets import PRESETS, profile_path
from penstock.engine.machine.profile import Machine, load_machine
from penstock.storage.files.errors import UserError
from penstock.storage.files.units import bytes_text


@dataclass(frozen=True, slots=True)
class MachineInfo:
    name: str
    """What a recipe's `machine` and `penstock plan --machine` take; empty for this machine."""
    title: str
    text: str
    """What it has, on one line."""
    source: str
    """Where its rates come from."""


def this_machine_info() -> MachineInfo:
    """This machine, with its stored profile where it was probed."""
    path = profile_path()
    text = f"{os.cpu_count()} cores, {bytes_text(machine_memory())} RAM"
    source = "rates assumed: `penstock probe` measures them in a minute"
    try:
        if path.exists():
            stored = load_machine(path)
            text, source = describe(stored), stored.source
    except UserError as error:
        source = f"its profile cannot be used: {error}"
    return MachineInfo("", "this machine", text, source)


def machine_infos() -> list[MachineInfo]:
    """This machine first, then every preset."""
    return [this_machine_info()] + [
        MachineInfo(name, name, describe(machine), machine.source) for name, machine in PRESETS.items()
    ]


def profile_info(path: Path) -> MachineInfo:
    """The machine of a profile file. Raises UserError where it is none."""
    machine = load_machine(path.expanduser())
    return MachineInfo(str(path), machine.name, describe(machine), machine.source)


def describe(machine: Machine) -> str:
    """GPU with its memory, RAM, drives, on one line."""
    gpu = "no GPU" if machine.gpu is None else f"{machine.gpu.removeprefix('NVIDIA ')} {bytes_text(machine.gpu_bytes)}"
    gpu = f"{machine.gpus} x {gpu}" if machine.gpus > 1 else gpu
    count = len(machine.drives)
    drives = f"{'drive' if count == 1 else f'{count} drives'} {bytes_text(machine.nvme_bytes)}"
    return f"{gpu}, {bytes_text(machine.ram_bytes)} RAM, {drives}"
