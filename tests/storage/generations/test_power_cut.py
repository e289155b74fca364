"""A power cut loses what was not synced: what opens is whole, and never older than the last commit that returned.
And of a copied run directory that is given a state of its own, uses it and deletes from it."""

import errno
import itertools
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from multiprocessing.context import ForkServerContext
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import pytest
import torch
from nvme_state import SPECS, advance, assert_holds, assert_whole, content, make, read_all
from powercut import Disk
from samples import samples
from system_calls import failing

from penstock.storage.files.errors import UserError
from penstock.storage.generations.checkpoints import checkpoint_names, delete_checkpoint, list_checkpoints
from penstock.storage.generations.copying import copy_state
from penstock.storage.generations.store import NvmeStore
from penstock.storage.tier.manifest import ArraySpec, Manifest

State = dict[ArraySpec, int]
"""The step whose content each array has."""


def assert_state(store: NvmeStore, state: State) -> None:
    for spec, step in state.items():
        assert torch.equal(read_all(store, spec), content(spec, step)), (spec, step, store.generation)


class Run:
    """A store whose promises are noted, and must be kept whatever a power cut leaves."""

    def __init__(self, root: Path, disk: Disk, drives: list[Path] | None):
        self.root, self.disk, self.latest = root, disk, State()
        self.states: dict[int, State] = {0: {}}
        """By generation; the newest may be in the making."""
        self.promised, self.seen = 0, set[int]()
        """The last commit that returned, and the generations that images held."""
        self.checkpoints, self.possible = dict[str, State](), dict[str, State]()
        """Made and not being deleted; being made or deleted."""
        disk.check = self.check
        self.store = make(root, drives=drives)

    def check(self, image: Path) -> None:
        """Open what a power cut left, read every bit, and go on training."""
        if self.promised == 0 and not (image / "manifest.json").exists():
            with pytest.raises(UserError, match="no generation was committed here"):
                NvmeStore.open(image)
            return shutil.rmtree(image)
        with closing(NvmeStore.open(image)) as store:
            assert self.promised <= store.generation <= max(self.states), (store.generation, self.promised)
            self.seen.add(store.generation)
            assert_state(store, self.states[store.generation])
            names = set(list_checkpoints(image))
            assert self.checkpoints.keys() <= names <= self.checkpoints.keys() | self.possible.keys()
            for name in names:
                with closing(NvmeStore.open(image / "checkpoints" / name)) as kept:
                    assert_state(kept, (self.checkpoints | self.possible)[name])
            if self.checkpoints and store.generation % 3 == 0:
                name = min(self.checkpoints)
                store.restore(name)
                assert_state(store, self.checkpoints[name])
        shutil.rmtree(image)

    def reopen(self, drives: list[Path]) -> None:
        self.store.close()
        self.store = NvmeStore.open(self.root, drives=drives)

    def step(self, step: int, specs: list[ArraySpec] = SPECS) -> None:
        for spec in specs:
            for part, (start, stop) in enumerate(spec.parts()):
                self.store.write(spec.buffer, spec.kind, part, content(spec, step)[start:stop]).result()
        self.latest = self.latest | dict.fromkeys(specs, step)
        self._keep(self.latest, lambda: self.store.commit({"step": step}))

    def checkpoint(self, name: str) -> None:
        self.possible[name] = self.states[self.promised]
        self.store.checkpoint(name)
        self.checkpoints[name] = self.possible.pop(name)
        self.disk.cut()

    def restore(self, name: str) -> None:
        self.latest = self.checkpoints[name]
        self._keep(self.latest, lambda: self.store.restore(name))

    def delete(self, name: str) -> None:
        self.possible[name] = self.checkpoints.pop(name)
        delete_checkpoint(self.root, name)
        del self.possible[name]
        self.disk.cut()

    def _keep(self, state: State, act: Callable[[], int]) -> None:
        """Act, which makes a generation of `state`."""
        generation = self.promised + 1
        self.states[generation] = state
        assert act() == generation
        self.promised = generation
        self.disk.cut()


@pytest.mark.sampled
@pytest.mark.parametrize(("links", "seed"), [(True, 0), (False, 1)], ids=["two drives, links", "one drive, copies"])
def test_power_cut_at_any_call(workspace: Path, monkeypatch: pytest.MonkeyPatch, links: bool, seed: int) -> None:
    """Creating, writing, committing, checkpoints, restoring, a change of drives: two cuts after calls drawn."""
    if not links:
        failing(monkeypatch, ["link"], errno.EPERM)
    root = workspace / "disk"
    root.mkdir()
    with monkeypatch.context() as patch:
        disk = Disk(root, workspace / "images", patch, seed=seed, share=1 / samples(48, 3))
        run = Run(root, disk, [root] if seed % 2 else [root / "a", root / "b"])
        run.step(1)
        run.checkpoint("one")
        run.step(2)
        run.step(3, SPECS[2:])
        run.checkpoint("three")
        run.step(4)
        run.step(5)
        run.restore("one")
        run.step(6)
        run.delete("one")
        run.reopen([root / "b", root / "c"])
        run.step(7, SPECS[:1])
        run.step(8)
        run.restore("three")
        run.reopen([root / "b", root / "c"])
        run.step(9)
        run.delete("three")
        run.store.close()
        disk.close()
    assert disk.calls > 700
    assert disk.images > samples(50, 400)
    assert len(run.seen) >= 8


def test_the_model_finds_what_is_not_synced(tmp_path: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that forgets to sync its chunk files, or its folders, is caught."""
    for forgotten in ("file", "folder"):
        top = tmp_path / forgotten
        top.mkdir()
        with monkeypatch.context() as patch:
            disk = Disk(top, workspace / forgotten, patch, seed=0, share=0)
            run = Run(top, disk, None)
            run.step(1)
            fsync = os.fsync

            def forgetful(fd: int, fsync: Any = fsync, forgotten: str = forgotten) -> None:
                path = os.readlink(f"/proc/self/fd/{fd}")
                if not (os.path.basename(path).startswith("c.") if forgotten == "file" else path.endswith("/1")):
                    fsync(fd)

            patch.setattr(os, "fsync", forgetful)
            with pytest.raises((AssertionError, UserError)):
                run.step(2)
            disk.close()


def _train(root: Path, committed: "Synchronized[int]") -> None:
    store = NvmeStore.open(root)
    for step in itertools.count(store.meta["step"] + 1):
        advance(store, step)
        committed.value = step
        if step % 5 == 0:
            store.checkpoint(f"step-{step}")
        old = f"step-{step - 3}"  # missing where the process before was killed between commit and checkpoint
        if step % 5 == 3 and old in list_checkpoints(root):
            delete_checkpoint(root, old)


def _mount(image: Path, place: Path) -> None:
    place.mkdir(exist_ok=True)
    if subprocess.run(["mount", "-o", "loop", str(image), str(place)], capture_output=True).returncode != 0:
        pytest.skip("cannot mount a loop device here; a container needs CAP_SYS_ADMIN and /dev/loop*")


def _loop_state(image: Path) -> str:
    """Requests that the loop device of `image` has completed and has in flight."""
    device = subprocess.run(["losetup", "-j", str(image)], capture_output=True, text=True, check=True).stdout
    return Path("/sys/block", Path(device.split(":")[0]).name, "stat").read_text()


def _copy_at_rest(image: Path, copy: Path) -> None:
    """Copy a mounted image while nothing is written to it: what is on the disk in one moment."""
    for _ in range(100):
        before = _loop_state(image)
        shutil.copyfile(image, copy)
        if _loop_state(image) == before and before.split()[8] == "0":
            return
        time.sleep(0.02)
    raise AssertionError("the loop device never rested")


def _stopped(pid: int) -> bool:
    states = [path.read_text().rsplit(")", 1)[1].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(state in "TZ" for state in states)


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a loop device; run the tests as root to have it")
@pytest.mark.skipif(shutil.which("mkfs.ext4") is None, reason="needs mkfs.ext4 (e2fsprogs) and losetup (util-linux)")
def test_power_cut_of_an_ext4_image(tmp_path: Path, processes: ForkServerContext) -> None:
    """The image of a mounted file system, copied while the process is stopped: its page cache goes with the power."""
    image, copy, place, other = (tmp_path / name for name in ("disk.img", "copy.img", "mnt", "copy"))
    image.write_bytes(bytes(48 << 20))
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    _mount(image, place)
    committed = processes.Value("q", 1)
    rng, steps = random.Random(1), [1]

    def look(promised: int) -> None:
        _copy_at_rest(image, copy)
        _mount(copy, other)
        try:
            step = Manifest.read(other / "state").meta["step"]
            assert promised <= step <= promised + 1
            assert_whole(other / "state", step)
            steps.append(step)
            for name, content in list_checkpoints(other / "state").items():
                assert_whole(other / "state/checkpoints" / name, content.meta["step"])
        finally:
            subprocess.run(["umount", str(other)], check=True)

    def wait_for_commit(child: Any) -> None:
        """However slowly it goes on."""
        before = committed.value
        while committed.value == before and child.is_alive():
            time.sleep(0.01)

    try:
        make(place / "state", 1).close()
        for _ in range(2):
            child = processes.Process(target=_train, args=(place / "state", committed))
            child.start()
            wait_for_commit(child)
            try:
                for _ in range(5):
                    wait_for_commit(child)
                    time.sleep(rng.uniform(0, 0.05))
                    os.kill(child.pid or 0, signal.SIGSTOP)
                    while not _stopped(child.pid or 0):
                        time.sleep(0.001)
                    look(committed.value)
                    os.kill(child.pid or 0, signal.SIGCONT)
            finally:
                child.kill()
                child.join()
            look(committed.value)
            committed.value = Manifest.read(place / "state").meta["step"]
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
    assert steps == sorted(steps)
    assert len(set(steps)) > 5


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
