import errno
import os
from pathlib import Path

import pytest
from obstacles import plant
from system_calls import failing

from penstock.storage.disk import (
    atomic_write,
    fsync_dir,
    fsync_file,
    link_or_copy,
    prepare_file,
    publish,
    require_free,
    require_writable,
    sweep_temporaries,
    temporary_name,
)
from penstock.storage.errors import UserError


def test_folders_are_made_and_refused_where_nothing_can_be_written(tmp_path: Path) -> None:
    require_writable(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "file").write_text("")
    # /proc refuses new entries to everyone, root included.
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/penstock"), Path("/proc")):
        with pytest.raises(UserError, match=f"{path}: not a writable folder"):
            require_writable(path)


def test_not_enough_disk(tmp_path: Path) -> None:
    require_free(tmp_path, 1, "a byte")
    with pytest.raises(UserError, match=r"the moon needs 1,000,000,000,000,000,000 bytes.* are free"):
        require_free(tmp_path, 10**18, "the moon")


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EIO])
def test_file_systems_that_cannot_sync_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    failing(monkeypatch, ["fsync"], code)
    if code == errno.EINVAL:
        fsync_dir(tmp_path)
    else:
        with pytest.raises(OSError, match="Input/output error"):
            fsync_dir(tmp_path)


@pytest.mark.parametrize("links", [True, False])
def test_link_or_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(bytes(range(256)) * 40_000)
    if not links:
        failing(monkeypatch, ["link"], errno.EXDEV)
    assert link_or_copy(source, target) in ({"link"} if links else {"reflink", "copy"})
    assert target.read_bytes() == source.read_bytes()
    assert source.stat().st_nlink == 1 + links
    with pytest.raises(FileExistsError):
        link_or_copy(source, target)
    with pytest.raises(FileNotFoundError):
        link_or_copy(tmp_path / "nothing", tmp_path / "new")


@pytest.mark.parametrize("content", ["text", b"bytes", ""])
def test_atomic_write_replaces(tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    atomic_write(path, content)
    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert os.listdir(tmp_path) == ["file"]


def test_full_disk_keeps_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:2]))
    failing(monkeypatch, ["write"], errno.ENOSPC, first=1)  # two bytes are written before
    with pytest.raises(UserError, match=r"file: writing 3 bytes failed: No space left.*free some space"):
        atomic_write(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("kind", ["link", "dangling link", "hard link", "pipe", "folder"])
def test_what_is_planted_under_the_temporary_name_is_never_written_through(tmp_path: Path, kind: str) -> None:
    path, victim = tmp_path / "run" / "file", tmp_path / "victim"
    path.parent.mkdir()
    path.write_text("old")
    victim.write_text("not ours")
    planted = temporary_name(path)
    plant(planted, kind, victim)
    if kind == "hard link":  # looks like a file that a killed process left
        atomic_write(path, "new")
        assert path.read_text() == "new"
    else:
        with pytest.raises(UserError, match=rf"{planted}: writing 3 bytes failed: it is in the way.*move it away"):
            atomic_write(path, "new")
        assert path.read_text() == "old"
        assert os.path.lexists(planted)
    assert victim.read_text() == "not ours"
    assert not (tmp_path / "nothing").exists()


def test_what_a_killed_process_left_is_swept_and_nothing_else(tmp_path: Path) -> None:
    path, other = tmp_path / "file", tmp_path / "other"
    other.write_text("not ours")
    (tmp_path / ".file.1.tmp").write_text("left")
    (tmp_path / ".file.2.tmp").symlink_to(other)
    (tmp_path / ".file.3.tmp").mkdir()
    sweep_temporaries(path)
    assert sorted(os.listdir(tmp_path)) == [".file.2.tmp", ".file.3.tmp", "other"]


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_syncing_waits_for_no_pipe_and_follows_no_link(tmp_path: Path, kind: str) -> None:
    (tmp_path / "target").write_text("")
    plant(tmp_path / "file", kind, tmp_path / "target")
    with pytest.raises(OSError, match=r"Too many levels|Invalid argument"):
        fsync_file(tmp_path / "file")


def test_pieces_are_one_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    publish(prepare_file(path, (b"%d\n" % i for i in range(3))), path)
    assert path.read_bytes() == b"0\n1\n2\n"
