"""What is under a folder: its file system, its drives, what a user should know before storing state there, and how
worn and how warm the drives are, as smartctl or nvme-cli say where they are installed and may be used (they usually
need root), and the kernel's sensors. Without a tool or a sound answer within a few seconds a figure is absent.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from fcntl import ioctl
from pathlib import Path
from typing import Any, NamedTuple

from penstock.storage.files.disk import held
from penstock.storage.tier.chunk import supports_direct

_MOUNTINFO = Path("/proc/self/mountinfo")
_SYS_BLOCK = Path("/sys/dev/block")
_DEV = Path("/dev")

_GET_UUID = 0x80111500
"""ioctl FS_IOC_GETFSUUID: a byte with a length, and up to 16 bytes."""

MEMORY = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"}
_NETWORK = re.compile(
    "9p|afs|beegfs|ceph|cifs|coda|glusterfs|gpfs|lustre|ncpfs|nfs4?|ocfs2|orangefs|panfs|smb3|smbfs|virtiofs|wekafs"
)
_LOCAL_FUSE = {"fuseblk", "fuse.ext2", "fuse.ntfs", "fuse.ntfs-3g", "fuse.exfat", "fuse.fuse-overlayfs"}
_LAYERED = {"overlay", "aufs", "fuse.fuse-overlayfs"}
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


class Mount(NamedTuple):
    """One line of /proc/self/mountinfo."""

    point: Path
    filesystem: str
    """Type, for example ext4 or nfs4."""
    source: str
    """What is mounted: a device, server:/path, or a name without meaning."""


@dataclass(frozen=True, slots=True)
class Device:
    """The block device that a folder's file system is on."""

    name: str
    """The kernel's name, for example nvme0n1p2 or dm-0; the mount's source where there is no block device."""
    disks: tuple[str, ...]
    """Whole drives under it, for example nvme0n1; several under RAID or LVM, none under memory and network."""
    filesystem: str
    """Type of the file system."""
    rotational: bool | None
    """Whether any of the drives is a spinning disk; None where that is not known, as on virtual drives."""
    model: str | None
    """Model of the first drive; None where it has none."""


def mount_of(folder: Path) -> Mount:
    """The mount that `folder` (or its nearest existing parent) is on: the one with the longest path that holds it; of
    several on one path the last, which hides the others."""
    folder = existing(folder)
    best = Mount(Path("/"), "unknown", "unknown")
    for line in _MOUNTINFO.read_text(errors="surrogateescape").splitlines():
        fields, _, tail = line.partition(" - ")
        point = Path(_unescape(fields.split()[4]))
        if folder.is_relative_to(point) and len(point.parts) >= len(best.point.parts):
            filesystem, source = tail.split()[:2]
            best = Mount(point, filesystem, _unescape(source))
    return best


def filesystem_id(folder: Path) -> str:
    """What the file system of `folder` calls itself; "" where it has no name. A clone of it has the same one.

    Its UUID, else `f_fsid` of statvfs. Neither changes with the mount point; `f_fsid` may with the device.
    """
    with contextlib.suppress(OSError):  # older kernels, file systems that have none, a folder that may not be read
        with held(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
            result = ioctl(fd, _GET_UUID, bytes(17))
        if any(uuid := result[1 : 1 + result[0]]):
            return uuid.hex()
    with contextlib.suppress(OSError):
        if number := os.statvfs(folder).f_fsid:
            return f"{number:x}"
    return ""


def check_folder(folder: Path) -> list[str]:
    """What makes `folder` a doubtful place for state, one sentence each; empty for a local drive with direct I/O.

    A missing folder is judged by its nearest existing parent. Writes and removes a probe file where it may.
    """
    kind = mount_of(folder).filesystem
    if kind in MEMORY:
        return [
            f"{folder}: {kind} is kept in memory: files here take RAM on top of budgets.ram and are lost at reboot; "
            "choose a folder on a drive"
        ]
    device = device_of(folder)
    disk = device.model or device.name
    is_network = _NETWORK.fullmatch(kind) or (kind.startswith("fuse") and kind not in _LOCAL_FUSE)
    doubts = {
        f"{kind} is a network file system: locks and durability depend on the server, and speed on the network; a "
        "local drive is safer and faster": is_network,
        f"{kind} is a container's writable layer: it is lost with the container and slower than the drive beneath it; "
        "mount a host folder and use that": kind in _LAYERED,
        f"{kind} here does not support direct I/O: reads and writes go through the page cache, which is slower and "
        "takes memory that budgets.ram does not count": not supports_direct(existing(folder)),
        f"on a hard disk ({disk}), which reaches a few percent of an SSD's speed": device.rotational,
    }
    return [f"{folder}: {doubt}" for doubt, holds in doubts.items() if holds]


def device_of(folder: Path) -> Device:
    """The device under `folder` (or its nearest existing parent), followed through partitions and volumes to drives."""
    location = existing(folder)
    mount = mount_of(location)
    block = _block_folder(os.stat(location).st_dev)
    if block is None and mount.source.startswith(f"{_DEV}/"):  # btrfs: files have a device number of their own
        with contextlib.suppress(OSError):
            block = _block_folder(os.stat(mount.source).st_rdev)
    if block is None:
        return Device(mount.source, (), mount.filesystem, None, None)
    disks = _disks(block)
    flags = [flag for disk in disks if (flag := _rotational(disk)) is not None]
    models = [text for disk in disks if (text := _read(disk / "device" / "model")) is not None]
    return Device(
        name=block.name,
        disks=tuple(disk.name for disk in disks),
        filesystem=mount.filesystem,
        rotational=any(flags) if flags else None,
        model=models[0] if models else None,
    )


def existing(folder: Path) -> Path:
    """`folder`, or its nearest parent that is there."""
    folder = folder.resolve()
    while not os.path.isdir(folder):  # False where a parent may not be looked into
        folder = folder.parent
    return folder


def _unescape(text: str) -> str:
    """Undo mountinfo's octal escapes of space, tab, newline and backslash."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _block_folder(number: int) -> Path | None:
    """The folder below /sys of block device `number`; None where it is no block device (memory, network, layers)."""
    link = _SYS_BLOCK / f"{os.major(number)}:{os.minor(number)}"
    return link.resolve() if link.exists() else None


def _disks(block: Path) -> list[Path]:
    """The whole drives under block device folder `block`: a partition's disk, the members of a RAID or LVM volume."""
    if (block / "partition").exists():
        return _disks(block.parent)
    members = sorted((block / "slaves").iterdir()) if (block / "slaves").is_dir() else []
    if not members:
        return [block]
    result = [disk for member in members for disk in _disks(member.resolve())]
    return list(dict.fromkeys(result))


def _rotational(disk: Path) -> bool | None:
    if disk.name.startswith(("vd", "xvd", "loop")):  # these claim to spin, whatever is under them
        return None
    text = _read(disk / "queue" / "rotational")
    return None if text is None else text == "1"


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except OSError:
        return None


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
