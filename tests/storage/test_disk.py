import errno
import os
from pathlib import Path

import pytest

from storage.disk import atomic_write, fsync_dir, link_or_copy, require_free, require_writable, temporary_name
from storage.errors import UserError


def test_makes_missing_folders(tmp_path: Path) -> None:
    require_writable(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
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
    def refuse(fd: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refuse)
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

        def refuse(source: Path, target: Path) -> None:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

        monkeypatch.setattr(os, "link", refuse)
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


def test_full_disk_keeps_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    temporary_name(path).symlink_to("/dev/full")  # every write to it fails with ENOSPC
    with pytest.raises(UserError, match=r"file: writing 3 bytes failed: No space left.*free some space"):
        atomic_write(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]
