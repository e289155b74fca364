"""What else a machine does to the folders of a store: gone, limited, mounted twice."""

import mmap
import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from nvme_state import advance, assert_holds, assert_sound, assert_whole, make

from penstock.storage.errors import UserError
from penstock.storage.nvme import NvmeStore


def test_a_drive_that_is_gone_when_a_checkpoint_looks_for_room(tmp_path: Path) -> None:
    drive = tmp_path / "drive"
    with closing(make(tmp_path / "root", 1, drives=[drive])) as store:
        drive.rename(tmp_path / "unmounted")
        with pytest.raises(UserError, match=rf"{drive}: .*free space.* No such file or directory; .*mounted"):
            store.checkpoint("kept")
        assert store.disk_bytes() >= 0
    (tmp_path / "unmounted").rename(drive)
    assert_whole(tmp_path / "root", 1)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """As `ulimit -f` in this process; Python ignores the signal that comes with it."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


@pytest.mark.parametrize("limit", [100, 5000, 9000])
def test_a_limit_on_file_sizes_is_named(tmp_path: Path, workspace: Path, limit: int) -> None:
    """Direct I/O, for which the second source is aligned, calls it an invalid argument."""
    for folder in (tmp_path / "here", workspace / "memory"):
        with closing(make(folder, 1)) as store:
            for source in (torch.zeros(4096), torch.frombuffer(mmap.mmap(-1, 4096 * 4), dtype=torch.float32)):
                with largest_file(limit), pytest.raises(UserError, match=rf"{folder}.*ulimit -f"):
                    store.write("layers.0", "master", 0, source).result()
            with largest_file(limit), pytest.raises(UserError, match=rf"{folder}.*ulimit -f"):
                advance(store, 2)
        assert_sound(folder, 1)


@pytest.mark.skipif(os.geteuid() != 0, reason="a bind mount needs root; run the tests as root to have it")
def test_a_drive_under_two_mount_points_is_one_drive(tmp_path: Path) -> None:
    real, bound = tmp_path / "real", tmp_path / "bound"
    real.mkdir()
    bound.mkdir()
    if subprocess.run(["mount", "--bind", str(real), str(bound)], capture_output=True).returncode != 0:
        pytest.skip("cannot mount here; a container needs CAP_SYS_ADMIN")
    try:
        with pytest.raises(UserError, match="are the same folder; name each drive once"):
            make(tmp_path / "root", drives=[real / "x", bound / "x"])
        make(tmp_path / "root", 1, drives=[real / "x"]).close()
        with closing(NvmeStore.open(tmp_path / "root", drives=[bound / "x"])) as store:
            assert_holds(store, 1)
            advance(store, 2)
    finally:
        subprocess.run(["umount", str(bound)], check=True)
    assert_whole(tmp_path / "root", 2, drives=[real / "x"])
