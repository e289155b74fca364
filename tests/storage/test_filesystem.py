import os
from pathlib import Path

import pytest

from penstock.storage import filesystem
from penstock.storage.filesystem import Device, check_folder, device_of, mount_of

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
def test_longest_mount_point_with_escapes(folder: str, kind: str, source: str) -> None:
    mount = filesystem._find_mount(Path(folder), MOUNTINFO)
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
    numbers = tmp_path / "dev-block"
    numbers.mkdir()
    monkeypatch.setattr(filesystem, "_SYS_BLOCK", numbers)
    table = tmp_path / "mountinfo"
    table.write_text("1 1 259:1 / / rw - ext4 /dev/root rw\n")
    monkeypatch.setattr(filesystem, "_MOUNTINFO", table)
    return tmp_path


def _mount_on(sys: Path, block: Path) -> None:
    number = os.stat(sys).st_dev
    (sys / "dev-block" / f"{os.major(number)}:{os.minor(number)}").symlink_to(block)


def test_partition_leads_to_its_drive(sys_block: Path) -> None:
    disk = _block(sys_block, "nvme0n1", model="Samsung SSD 990")
    _mount_on(sys_block, _partition(disk, "nvme0n1p2"))
    assert device_of(sys_block) == Device("nvme0n1p2", ("nvme0n1",), "ext4", False, "Samsung SSD 990")


def test_volume_leads_to_all_its_drives(sys_block: Path) -> None:
    first = _block(sys_block, "nvme0n1", model="A")
    second = _block(sys_block, "sda", rotational=1, model="B")
    raid = _block(sys_block, "md0")
    volume = _block(sys_block, "dm-3")
    (volume / "slaves" / "md0").symlink_to(raid)
    (raid / "slaves" / "nvme0n1p1").symlink_to(_partition(first, "nvme0n1p1"))
    (raid / "slaves" / "nvme0n1p2").symlink_to(_partition(first, "nvme0n1p2"))
    (raid / "slaves" / "sda").symlink_to(second)
    _mount_on(sys_block, volume)
    assert device_of(sys_block) == Device("dm-3", ("nvme0n1", "sda"), "ext4", True, "A")
    assert any("hard disk (A)" in warning for warning in check_folder(sys_block))


@pytest.mark.parametrize("name", ["vda", "xvda", "loop0"])
def test_virtual_drive_does_not_tell_whether_it_spins(sys_block: Path, name: str) -> None:
    assert device_of(sys_block) == Device("/dev/root", (), "ext4", None, None), "no block device yet"
    _mount_on(sys_block, _block(sys_block, name, rotational=1))
    assert device_of(sys_block) == Device(name, (name,), "ext4", None, None)
