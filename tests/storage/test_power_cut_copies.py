"""A power cut while a copied run directory is given a state of its own, uses it and deletes from it."""

import os
import shutil
from contextlib import closing
from pathlib import Path

import pytest
from nvme_state import advance, assert_holds, make
from powercut import Disk
from samples import samples

from penstock.storage.checkpoints import checkpoint_names, delete_checkpoint
from penstock.storage.copying import copy_state
from penstock.storage.nvme import NvmeStore


def sync_all(top: Path) -> None:
    for path in (top, *top.rglob("*")):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


class Copies:
    """Run `one` on drive `a`, and its copy `two`, which is to have its state on drive `b`; what each must hold."""

    def __init__(self, workspace: Path, patch: pytest.MonkeyPatch, *, seed: int, share: float) -> None:
        self.top = top = workspace / "disk"
        with closing(make(top / "one", 1, drives=[top / "a"])) as store:
            store.checkpoint("kept")
            advance(store, 2)
        shutil.copytree(top / "one", top / "two")
        self.steps, self.kept, self.promised = {2}, {True}, False
        self.disk = Disk(top, workspace / "images", patch, seed=seed, share=share)
        sync_all(top)
        self.disk.check = self.check

    def check(self, image: Path) -> None:
        """Both are whole: `one` as it was, `two` with one of the steps that it may hold."""
        drives = [image / "a", image / "b"]
        assert self.state(image / "one", drives[:1]) == 2
        assert self.state(image / "one/checkpoints/kept", drives[:1]) == 1
        own = drives[1:] if self.promised else drives
        assert self.state(image / "two", own) in self.steps
        listed = checkpoint_names(image / "two")
        assert (listed == ["kept"]) in self.kept
        for name in listed:
            assert self.state(image / "two/checkpoints" / name, own) == 1
        shutil.rmtree(image)

    @staticmethod
    def state(root: Path, drives: list[Path]) -> int:
        there = [drive for drive in drives if drive.exists()]
        with closing(NvmeStore.open(root, drives=there, read_only=True)) as store:
            for drive in store._drives:
                assert drive.folder in [folder / inner for folder in there for inner in ("", "checkpoints/kept")]
            step = int(store.meta["step"])
            assert_holds(store, step)
            return step


@pytest.mark.sampled
def test_power_cut_while_a_copy_gets_its_own_state(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        copies = Copies(workspace, patch, seed=3, share=1 / samples(12, 3))
        top = copies.top
        assert copy_state(top / "two", [top / "b"]) > 0
        copies.promised = True
        copies.disk.cut()
        assert copy_state(top / "two", [top / "b"]) == 0
        with closing(NvmeStore.open(top / "two", drives=[top / "b"])) as store:
            copies.steps = {2, 3}
            advance(store, 3)
            copies.steps = {3}
            copies.disk.cut()
        copies.kept = {True, False}
        delete_checkpoint(top / "two", "kept")
        copies.kept = {False}
        copies.disk.cut()
        copies.disk.close()
    assert copies.disk.images > samples(25, 100)
