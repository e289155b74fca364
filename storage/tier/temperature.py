"""How warm drives are, as the kernel says in /sys; nobody needs to be root for it.

NVMe drives tell it by themselves; SATA and SAS drives where the kernel's module drivetemp is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

_SYS = Path("/sys")

_PLACES = ("hwmon*", "hwmon/hwmon*", "nvme*/hwmon*", "nvme*/hwmon/hwmon*")
"""Where a drive's sensors are below its device: by kernel, and by whether it is reached over several paths."""


def disk_temperature(disks: Iterable[str], sys: Path = _SYS) -> float | None:
    """Degrees Celsius of the warmest of `disks`, named as the kernel does (nvme0n1), by the first sensor of each.

    An NVMe drive's first sensor is its composite temperature, which its own limits are about.
    """
    found = [celsius for disk in disks if (celsius := _one(sys / "block" / disk / "device")) is not None]
    return max(found, default=None)


def _one(device: Path) -> float | None:
    for place in _PLACES:
        for sensor in sorted(device.glob(f"{place}/temp1_input")):
            try:
                return int(sensor.read_text()) / 1000  # the file counts in thousandths
            except (OSError, ValueError):
                continue
    return None
