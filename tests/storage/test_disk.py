"""Files and folders that appear whole or not at all, whatever is in their place."""

import errno
import os
from pathlib import Path

import pytest
from obstacles import plant
from system_calls import failing

from penstock.storage import disk
from penstock.storage.errors import UserError


def test_folders_are_made_and_refused_where_nothing_can_be_written(tmp_path: Path) -> None:
    disk.require_writable(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "file").write_text("")
    # /proc refuses new entries to everyone, root included.
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/penstock"), Path("/proc")):
        with pytest.raises(UserError, match=f"{path}: not a writable folder"):
            disk.require_writable(path)


def test_not_enough_disk(tmp_path: Path) -> None:
    disk.require_free(tmp_path, 1, "a byte")
    with pytest.raises(UserError, match=r"the moon needs 1,000,000,000,000,000,000 bytes.* are free"):
        disk.require_free(tmp_path, 10**18, "the moon")


def test_file_systems_that_cannot_sync_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, ["fsync"], errno.EINVAL)
    disk.fsync_dir(tmp_path)
    failing(monkeypatch, ["fsync"], errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        disk.fsync_dir(tmp_path)


@pytest.mark.parametrize("links", [True, False])
def test_link_or_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(bytes(range(256)) * 40_000)
    if not links:
        failing(monkeypatch, ["link"], errno.EXDEV)
    assert disk.link_or_copy(source, target) in ({"link"} if links else {"reflink", "copy"})
    assert target.read_bytes() == source.read_bytes()
    assert source.stat().st_nlink == 1 + links
    with pytest.raises(FileExistsError):
        disk.link_or_copy(source, target)
    with pytest.raises(FileNotFoundError):
        disk.link_or_copy(tmp_path / "nothing", tmp_path / "new")


def test_atomic_write_replaces(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in ("text", b"bytes", ""):
        disk.atomic_write(path, content)
        assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
        assert os.listdir(tmp_path) == ["file"]
    disk.publish(disk.prepare_file(path, (b"%d\n" % i for i in range(3))), path)
    assert path.read_bytes() == b"0\n1\n2\n"


def test_full_disk_keeps_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:2]))
    failing(monkeypatch, ["write"], errno.ENOSPC, first=1)  # two bytes are written before
    with pytest.raises(UserError, match=r"file: writing 3 bytes failed: No space left.*free some space"):
        disk.atomic_write(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("kind", ["link", "dangling link", "hard link", "pipe", "folder"])
def test_what_is_planted_under_the_temporary_name_is_never_written_through(tmp_path: Path, kind: str) -> None:
    path, victim = tmp_path / "run" / "file", tmp_path / "victim"
    path.parent.mkdir()
    path.write_text("old")
    victim.write_text("not ours")
    planted = disk.temporary_name(path)
    plant(planted, kind, victim)
    if kind == "hard link":  # looks like a file that a killed process left
        disk.atomic_write(path, "new")
        assert path.read_text() == "new"
    else:
        with pytest.raises(UserError, match=rf"{planted}: writing 3 bytes failed: it is in the way.*move it away"):
            disk.atomic_write(path, "new")
        assert path.read_text() == "old"
        assert os.path.lexists(planted)
    assert victim.read_text() == "not ours"
    assert not (tmp_path / "nothing").exists()


def test_what_a_killed_process_left_is_swept_and_nothing_else(tmp_path: Path) -> None:
    for number, kind in enumerate(("file", "link", "folder")):
        plant(tmp_path / f".file.{number}.tmp", kind, tmp_path / "other")
    disk.sweep_temporaries(tmp_path / "file")
    assert sorted(os.listdir(tmp_path)) == [".file.1.tmp", ".file.2.tmp"]


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_syncing_waits_for_no_pipe_and_follows_no_link(tmp_path: Path, kind: str) -> None:
    (tmp_path / "target").write_text("")
    plant(tmp_path / "file", kind, tmp_path / "target")
    with pytest.raises(OSError, match=r"Too many levels|Invalid argument"):
        disk.fsync_file(tmp_path / "file")


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    for content in ("old", "new"):
        with disk.build_folder(folder) as temporary:
            (temporary / content).write_text("")
    assert os.listdir(folder) == ["new"]
    with pytest.raises(KeyError), disk.build_folder(folder):
        raise KeyError
    assert os.listdir(tmp_path) == ["made"]
    assert os.listdir(folder) == ["new"]


@pytest.mark.parametrize("where", ["made", "made.building-PID"])
@pytest.mark.parametrize("kind", ["link", "dangling link", "file"])
def test_nothing_is_written_or_deleted_through_a_link(tmp_path: Path, where: str, kind: str) -> None:
    target, place = tmp_path / "target", tmp_path / "run" / where.replace("PID", str(os.getpid()))
    place.parent.mkdir()
    target.mkdir()
    (target / "thesis.tex").write_text("not ours")
    plant(place, kind, target)
    refusal = pytest.raises(UserError, match=f"{place.name}: is where a folder has to be made; move it away")
    with refusal, disk.build_folder(place.with_name("made")):
        pass
    assert os.path.lexists(place)
    assert os.listdir(target) == ["thesis.tex"]
    assert not (tmp_path / "nothing").exists()
