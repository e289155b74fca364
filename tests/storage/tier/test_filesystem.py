"""What lies under a folder: its file system, its drives, their wear and their temperature. The tools are executables on
PATH that print what smartctl and nvme-cli print; the drives are named, not there."""

import json
import os
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.storage.tier import filesystem
from penstock.storage.tier.filesystem import (
    Device,
    check_folder,
    device_of,
    disk_temperature,
    filesystem_id,
    mount_of,
    percentage_used,
)

MOUNTINFO = r"""
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw,discard
24 27 0:23 / /dev/shm rw,relatime - tmpfs tmpfs rw
30 27 0:40 / /mnt/my\040drive\134x rw,relatime shared:7 master:2 - nfs4 server:/export\040a rw,vers=4.2
31 27 259:3 / /mnt/fast rw,relatime - xfs /dev/nvme1n1 rw
32 27 259:9 / /mnt/fast rw,relatime - btrfs /dev/mapper/hidden rw
33 27 0:50 / /mnt/fast/sshfs rw - fuse.sshfs me@host: rw
34 27 0:51 / /mnt/ntfs rw - fuseblk /dev/sdb1 rw
35 27 0:52 / /mnt/layers rw - overlay overlay rw,lowerdir=/a
36 27 0:53 / /mnt/lustre rw - lustre mgs@tcp:/lfs rw
""".strip()


@pytest.mark.parametrize(
    ("folder", "kind", "source"),
    [
        ("/", "ext4", "/dev/nvme0n1p2"),
        ("/mnt/faster", "ext4", "/dev/nvme0n1p2"),  # a longer name is not below /mnt/fast
        ("/mnt/fast", "btrfs", "/dev/mapper/hidden"),  # mounted over: the later one counts
        ("/mnt/fast/a/b", "btrfs", "/dev/mapper/hidden"),
        ("/mnt/fast/sshfs/runs", "fuse.sshfs", "me@host:"),
        ("/mnt/my drive\\x/runs", "nfs4", "server:/export a"),
        ("/dev/shm/state", "tmpfs", "tmpfs"),
    ],
)
def test_longest_mount_point_with_escapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, kind: str, source: str
) -> None:
    (tmp_path / "mountinfo").write_text(MOUNTINFO)
    monkeypatch.setattr(filesystem, "_MOUNTINFO", tmp_path / "mountinfo")
    monkeypatch.setattr(filesystem, "existing", lambda folder: folder)
    mount = mount_of(Path(folder))
    assert (mount.filesystem, mount.source) == (kind, source)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("ext4", None),
        ("fuseblk", None),
        ("tmpfs", "is kept in memory"),
        ("ramfs", "lost at reboot"),
        *((name, "network file system") for name in ("nfs4", "cifs", "9p", "ceph", "lustre", "fuse.sshfs")),
        ("overlay", "container's writable layer"),
    ],
)
def test_warnings_by_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, words: str | None) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(f"1 1 0:1 / / rw - {kind} source rw\n")
    monkeypatch.setattr(filesystem, "_MOUNTINFO", table)
    monkeypatch.setattr(filesystem, "supports_direct", lambda folder: True)
    monkeypatch.setattr(filesystem, "_SYS_BLOCK", tmp_path / "none")
    warnings = check_folder(tmp_path)
    assert len(warnings) == (words is not None)
    assert all(str(words) in text and str(tmp_path) in text for text in warnings)
    monkeypatch.setattr(filesystem, "supports_direct", lambda folder: False)
    through_cache = "budgets.ram does not count" in " ".join(check_folder(tmp_path))
    assert through_cache == (kind not in ("tmpfs", "ramfs"))


def test_missing_folder_is_judged_by_its_parent(tmp_path: Path) -> None:
    assert mount_of(tmp_path / "a" / "b") == mount_of(tmp_path)
    assert device_of(tmp_path / "a" / "b") == device_of(tmp_path)
    assert not (tmp_path / "a").exists()
    check_folder(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []
    shared = Path("/dev/shm")
    if not shared.is_dir() or mount_of(shared).filesystem != "tmpfs":
        pytest.skip("no tmpfs at /dev/shm")
    (warning,) = check_folder(shared)
    assert "tmpfs is kept in memory" in warning
    assert device_of(shared).disks == ()


def _block(sys: Path, name: str, *, rotational: int = 0, model: str = "") -> Path:
    """A block device's folder as /sys has it."""
    folder = sys / "devices" / name
    for inner in ("queue", "slaves", "device"):
        (folder / inner).mkdir(parents=True)
    (folder / "queue/rotational").write_text(f"{rotational}\n")
    if model:
        (folder / "device/model").write_text(f"{model}   \n")
    return folder


def _partition(disk: Path, name: str) -> Path:
    (disk / name).mkdir()
    (disk / name / "partition").write_text("1\n")
    return disk / name


@pytest.fixture
def sys_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "dev-block").mkdir()
    monkeypatch.setattr(filesystem, "_SYS_BLOCK", tmp_path / "dev-block")
    table = tmp_path / "mountinfo"
    table.write_text("1 1 259:1 / / rw - ext4 /dev/root rw\n")
    monkeypatch.setattr(filesystem, "_MOUNTINFO", table)
    return tmp_path


def _mount_on(sys: Path, block: Path) -> None:
    number = os.stat(sys).st_dev
    place = sys / "dev-block" / f"{os.major(number)}:{os.minor(number)}"
    place.unlink(missing_ok=True)
    place.symlink_to(block)


def test_a_partition_and_a_volume_lead_to_their_drives(sys_block: Path) -> None:
    assert device_of(sys_block) == Device("/dev/root", (), "ext4", None, None), "no block device yet"
    for name in ("vda", "xvda", "loop0"):  # a virtual drive does not tell whether it spins
        _mount_on(sys_block, _block(sys_block, name, rotational=1))
        assert device_of(sys_block) == Device(name, (name,), "ext4", None, None)
    first = _block(sys_block, "nvme0n1", model="Samsung SSD 990")
    _mount_on(sys_block, _partition(first, "nvme0n1p2"))
    assert device_of(sys_block) == Device("nvme0n1p2", ("nvme0n1",), "ext4", False, "Samsung SSD 990")
    second = _block(sys_block, "sda", rotational=1, model="B")
    raid = _block(sys_block, "md0")
    volume = _block(sys_block, "dm-3")
    (volume / "slaves" / "md0").symlink_to(raid)
    (raid / "slaves" / "nvme0n1p1").symlink_to(_partition(first, "nvme0n1p1"))
    (raid / "slaves" / "nvme0n1p2").symlink_to(first / "nvme0n1p2")
    (raid / "slaves" / "sda").symlink_to(second)
    _mount_on(sys_block, volume)
    assert device_of(sys_block) == Device("dm-3", ("nvme0n1", "sda"), "ext4", True, "Samsung SSD 990")
    assert any("hard disk (Samsung SSD 990)" in warning for warning in check_folder(sys_block))


NVME_LOG = {"critical_warning": 0, "percentage_used": 3, "data_units_read": 91234567, "data_units_written": 123456789}
SMARTCTL_NVME = {
    "device": {"name": "/dev/nvme0n1", "type": "nvme", "protocol": "NVMe"},
    "nvme_smart_health_information_log": NVME_LOG,
    "endurance_used": {"current_percent": 3},
}
SMARTCTL_SATA = {
    "device": {"name": "/dev/sda", "type": "sat", "protocol": "ATA"},
    "logical_block_size": 512,
    "endurance_used": {"current_percent": 12},
}
SMARTCTL_REFUSED = {"smartctl": {"exit_status": 2, "messages": [{"string": "Smartctl open device: Permission denied"}]}}
NVME_CLI = {"critical_warning": 0, "temperature": 314, "percent_used": 104, "data_units_written": "1,000"}

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put an executable on an otherwise empty PATH that prints `answer`, after `seconds`, and exits with `code`."""
    tools = tmp_path / "bin"
    tools.mkdir()
    monkeypatch.setattr(filesystem, "device_of", lambda folder: Device("fs", ("nvme0n1",), "ext4", False, None))
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setattr(filesystem, "_EXTRA_PATH", str(tools))

    def install(tool: str, answer: object, *, code: int = 0, seconds: float = 0) -> None:
        text = answer if isinstance(answer, str) else json.dumps(answer)
        script = tools / tool
        calls = f'echo "$@" >> {tmp_path}/{tool}.calls'
        script.write_text(f"#!/bin/sh\n{calls}\n/bin/sleep {seconds}\necho {shlex.quote(text)}\nexit {code}\n")
        script.chmod(0o755)

    return install


REFUSED_BUT_NVME = {"smartctl": (SMARTCTL_REFUSED, 2), "nvme": (NVME_CLI, 0)}


@pytest.mark.parametrize(
    ("names", "answers", "expected"),
    [
        (["nvme0n1"], {}, None),
        ([], {"smartctl": (SMARTCTL_NVME, 0)}, None),
        (["nvme0n1"], {"smartctl": (SMARTCTL_NVME, 0)}, 3.0),
        (["nvme0n1"], {"smartctl": (SMARTCTL_NVME, 8)}, 3.0),  # it is worn
        (["sda"], {"smartctl": (SMARTCTL_SATA, 0)}, 12.0),
        (["nvme0n1"], REFUSED_BUT_NVME, 104.0),
        (["sda", "nvme0n1"], REFUSED_BUT_NVME, 104.0),
    ],
)
def test_what_the_tools_say(
    tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch, names: list[str], answers: Any, expected: Any
) -> None:
    monkeypatch.setattr(filesystem, "device_of", lambda folder: Device("fs", tuple(names), "ext4", False, None))
    for tool, (answer, code) in answers.items():
        install(tool, answer, code=code)
    assert percentage_used(tmp_path) == expected
    calls = {file.stem: file.read_text().splitlines() for file in tmp_path.glob("*.calls")}
    assert calls.get("smartctl", []) == ([f"-j -a /dev/{name}" for name in names] if answers else [])
    assert calls.get("nvme", []) == ["smart-log /dev/nvme0n1 -o json"] * ("nvme" in answers)


@pytest.mark.parametrize(
    "answer",
    ["", "not json", "[1]", "null", SMARTCTL_REFUSED, {"nvme_smart_health_information_log": "soon"}]
    + [{"nvme_smart_health_information_log": {"percentage_used": value}} for value in (None, "n/a", True, [3])],
)
def test_odd_answers_are_absent(tmp_path: Path, install: Install, answer: object) -> None:
    install("smartctl", answer, code=1)
    install("nvme", answer, code=1)
    assert percentage_used(tmp_path) is None


def test_a_drive_that_hangs_costs_a_moment(tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem, "_TIMEOUT_S", 0.2)
    install("smartctl", SMARTCTL_NVME, seconds=60)
    start = time.monotonic()
    assert percentage_used(tmp_path) is None
    assert time.monotonic() - start < 30


def test_the_warmest_composite_sensor_wherever_the_kernel_puts_it(tmp_path: Path) -> None:
    def sensor(place: str, text: str) -> None:
        path = tmp_path / "block" / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    for number, place in enumerate(("hwmon3", "hwmon/hwmon3", "nvme0/hwmon3", "nvme0/hwmon/hwmon3")):
        sensor(f"nvme{number}n1/device/{place}/temp1_input", "41850\n")
        sensor(f"nvme{number}n1/device/{place}/temp2_input", "99000\n")
        assert disk_temperature([f"nvme{number}n1"], tmp_path) == 41.85
    for name, text in (("sdd", "38000"), ("sda", "44000\n"), ("sdb", "warm"), ("vda", "")):
        sensor(f"{name}/device/hwmon/hwmon1/temp1_input", text)
    assert disk_temperature(["sdd", "sda", "sdb", "sdc"], tmp_path) == 44.0
    assert disk_temperature(["sdb", "vda", "sdc"], tmp_path) is None
    assert disk_temperature([], tmp_path) is None


def test_a_file_system_has_one_name(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    assert filesystem_id(tmp_path) == filesystem_id(tmp_path / "a/b")
    assert filesystem_id(tmp_path / "nowhere") == ""
    shm = Path("/dev/shm")
    if shm.is_dir() and shm.stat().st_dev != tmp_path.stat().st_dev:
        assert filesystem_id(shm) != filesystem_id(tmp_path)
