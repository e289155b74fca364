"""How worn a drive is, as smartctl or nvme-cli say where they are installed and may be used, and how warm.

The tools usually need root; the kernel's sensors in /sys do not (of SATA and SAS drives with its module drivetemp).
Without a tool, a permission, or a sound answer within a few seconds a figure is absent.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from penstock.storage.tier.filesystem import device_of

_TIMEOUT_S = 5.0
_EXTRA_PATH = "/usr/local/sbin:/usr/sbin:/sbin"
"""Where the tools are on systems that leave these folders out of a user's PATH."""
_FIGURES = (
    ("nvme_smart_health_information_log", "percentage_used"),  # smartctl, of an NVMe drive
    ("endurance_used", "current_percent"),  # smartctl 7.3 and newer, of any other
    ("percent_used",),  # nvme-cli
    ("percentage_used",),
)
"""Where an answer has the percentage."""
_SENSORS = ("hwmon*", "hwmon/hwmon*", "nvme*/hwmon*", "nvme*/hwmon/hwmon*")
"""Where a drive's sensors are below its device: by kernel, and by whether it is reached over several paths."""


def percentage_used(folder: Path) -> float | None:
    """Of the life that its maker rates it for, the most worn drive's under `folder`; may exceed 100. None: unknown."""
    result = [used for disk in device_of(folder).disks if (used := _used(disk)) is not None]
    return max(result, default=None)


def _used(disk: str) -> float | None:
    path = f"/dev/{disk}"
    commands = [["smartctl", "-j", "-a", path]]
    if disk.startswith("nvme"):
        commands.append(["nvme", "smart-log", path, "-o", "json"])
    for command in commands:
        answer = _run(command)
        for keys in _FIGURES:
            value: Any = answer
            for key in keys:
                value = value.get(key) if isinstance(value, dict) else None
            if isinstance(value, int | float) and not isinstance(value, bool):
                return float(value)
    return None


def _run(command: list[str]) -> Any:
    """The JSON that `command` prints, whatever its exit code (smartctl's tells the drive's health); None for none."""
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
        return json.loads(output)
    except (OSError, ValueError):
        return None


def disk_temperature(disks: Iterable[str], sys: Path = Path("/sys")) -> float | None:
    """Degrees Celsius of the warmest of `disks`, named as the kernel does (nvme0n1), by the first sensor of each: an
    NVMe drive's composite temperature."""
    result = [celsius for disk in disks if (celsius := _temperature(sys / "block" / disk / "device")) is not None]
    return max(result, default=None)


def _temperature(device: Path) -> float | None:
    for place in _SENSORS:
        for sensor in sorted(device.glob(f"{place}/temp1_input")):
            try:
                return int(sensor.read_text()) / 1000  # the file counts in thousandths
            except (OSError, ValueError):
                continue
    return None
