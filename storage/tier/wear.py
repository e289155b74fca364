"""How worn a drive is, as it says itself: asked of smartctl or nvme-cli where they are installed and may be used.

Both usually need root. Nothing here fails or delays a run: no tool, no permission, an odd answer or none within a few
seconds all mean that the figure is absent.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.storage.tier.filesystem import device_of

_TIMEOUT_S = 5.0
_EXTRA_PATH = "/usr/local/sbin:/usr/sbin:/sbin"
"""Where the tools lie on systems that leave these folders out of a user's PATH."""
_NVME_UNIT_BYTES = 512_000
"""An NVMe data unit: 1,000 times 512 bytes (NVMe base specification, SMART / health log, data units written)."""


@dataclass(frozen=True, slots=True)
class Wear:
    """What one drive says about its age."""

    disk: str
    """The kernel's name, for example nvme0n1."""
    percentage_used: float | None
    """Of the life that its maker rates it for; may exceed 100."""
    written_bytes: int | None
    """Written by hosts over the drive's life."""


def percentage_used(folder: Path) -> float | None:
    """The most worn drive's percentage used among the drives under `folder`; None where none tells. May exceed 100."""
    told = [wear.percentage_used for wear in wear_of(folder) if wear.percentage_used is not None]
    return max(told, default=None)


def wear_of(folder: Path) -> list[Wear]:
    """What each drive under `folder` says, in the order of its name; drives that say nothing are left out."""
    found = (_query(disk) for disk in device_of(folder).disks)
    return [wear for wear in found if wear is not None]


def _query(disk: str) -> Wear | None:
    path = f"/dev/{disk}"
    tools: list[tuple[list[str], Callable[[str, dict[str, Any]], Wear]]] = [
        (["smartctl", "-j", "-a", path], _from_smartctl)
    ]
    if disk.startswith("nvme"):
        tools.append((["nvme", "smart-log", path, "-o", "json"], _from_nvme_cli))
    for command, parse in tools:
        answer = _run(command)
        wear = None if answer is None else parse(disk, answer)
        if wear is not None and (wear.percentage_used is not None or wear.written_bytes is not None):
            return wear
    return None


def _run(command: list[str]) -> dict[str, Any] | None:
    """The JSON object that `command` prints, whatever its exit code (smartctl's tells the drive's health)."""
    tool = shutil.which(command[0], path=f"{os.environ.get('PATH', os.defpath)}:{_EXTRA_PATH}")
    if tool is None:
        return None
    try:
        process = subprocess.Popen(
            [tool, *command[1:]], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        try:
            output, _ = process.communicate(timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()  # and not waited for: a drive that does not answer holds it in the kernel
            return None
        answer = json.loads(output)
    except (OSError, ValueError):
        return None
    return answer if isinstance(answer, dict) else None


def _from_smartctl(disk: str, answer: dict[str, Any]) -> Wear:
    health = _object(answer, "nvme_smart_health_information_log")
    percentage = _number(health.get("percentage_used"))
    if percentage is None:  # SATA and SAS, from smartmontools 7.3 on
        percentage = _number(_object(answer, "endurance_used").get("current_percent"))
    units = _number(health.get("data_units_written"))
    written = None if units is None else units * _NVME_UNIT_BYTES
    if written is None:
        blocks = _ata_raw(answer, "Total_LBAs_Written")
        written = None if blocks is None else blocks * (_number(answer.get("logical_block_size")) or 512)
    return Wear(disk, percentage, None if written is None else int(written))


def _from_nvme_cli(disk: str, answer: dict[str, Any]) -> Wear:
    percentage = _number(answer.get("percent_used"))
    if percentage is None:
        percentage = _number(answer.get("percentage_used"))
    units = _number(answer.get("data_units_written"))
    return Wear(disk, percentage, None if units is None else int(units * _NVME_UNIT_BYTES))


def _ata_raw(answer: dict[str, Any], name: str) -> float | None:
    table = _object(answer, "ata_smart_attributes").get("table")
    for row in table if isinstance(table, list) else []:
        if isinstance(row, dict) and row.get("name") == name:
            return _number(_object(row, "raw").get("value"))
    return None


def _object(parent: dict[str, Any], key: str) -> dict[str, Any]:
    value = parent.get(key)
    return value if isinstance(value, dict) else {}


def _number(value: object) -> float | None:
    """A count; some versions of the tools print large ones as text, with or without thousands separators."""
    if isinstance(value, str):
        value = value.replace(",", "").strip()
        return float(value) if value.isdigit() else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
