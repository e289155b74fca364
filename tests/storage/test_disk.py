import os
from pathlib import Path

import pytest

from storage.disk import atomic_write, require_free, require_writable, temporary_name
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
