"""Every operation with one of its system calls failing, or being the last of its process: nothing is lost.
Kill -9 of a process that writes and commits: the store always opens at a committed generation, bit for bit."""

import errno
import itertools
import os
import random
import shutil
import signal
import time
from contextlib import closing
from functools import partial
from multiprocessing.context import ForkServerContext
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest
from nvme_state import SPECS, advance, assert_holds, assert_whole, make, write_all
from samples import cases, samples
from system_calls import CHANGING, before_calls, failing, is_killed, said_by

from penstock.storage.generations.checkpoints import delete_checkpoint, list_checkpoints
from penstock.storage.generations.store import NvmeStore
from penstock.storage.tier import drives as drives_module
from penstock.storage.tier.manifest import Manifest

MOMENTS, EVERY = samples(4, 10), samples(29, 17)
"""Calls of each operation that are made to fail, chosen at random; of how many calls the process is killed behind one.
All of them were tried, which takes minutes."""
OPERATIONS = {name: {3} for name in ("create", "checkpoint", "checkpoint by copies", "delete")}
OPERATIONS |= {"commit": {3, 4}, "change of drives": {3, 4, 5}, "restore": {3, 1}, "restore by copies": {3, 1}}
"""The steps that may be committed after each."""


def act(operation: str, root: Path) -> None:
    if operation == "create":
        return make(root / "new", drives=[root / "new", root / "new2"]).close()
    if operation == "delete":
        return delete_checkpoint(root, "one")
    drives = [root / "b", root / "c"] if operation == "change of drives" else None
    with pytest.MonkeyPatch.context() as patch, closing(NvmeStore.open(root, drives=drives)) as store:
        if "copies" in operation:
            failing(patch, ["link"], errno.EPERM)
        match operation.split()[0]:
            case "checkpoint":
                store.checkpoint("three")
            case "restore":
                store.restore("one")
            case _:
                advance(store, *range(4, 1 + max(OPERATIONS[operation])))


HOW = ("it fails", "all fail from then on", "the process is killed")
BOTH = [(operation, how) for operation in OPERATIONS for how in HOW]
FEW = [(operation, how) for operation, how in BOTH if how != HOW[2] or operation in ("commit", "delete")]
"""A kill leaves less than a power cut does (test_power_cut.py)."""


@pytest.mark.sampled
@pytest.mark.parametrize("case", cases(BOTH, *FEW), ids="-".join)
def test_at_any_call(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, processes: ForkServerContext, case: tuple[str, str]
) -> None:
    """That all calls fail from one on, but syncs, is what ext4 does after an error."""
    monkeypatch.setattr(drives_module, "WRITE_THREADS", 1)
    operation, how = case
    base, root, operate = workspace / "base", workspace / "state", partial(act, operation)
    with closing(make(base, 1, drives=[base, base / "b"])) as store:
        store.checkpoint("one")
        advance(store, 2, 3)
    names = CHANGING if how == "it fails" else tuple(name for name in CHANGING if name != "fsync")
    shutil.copytree(base, root)
    with monkeypatch.context() as patch:
        calls = failing(patch, names, 0, times=0)
        operate(root)
    count, rng, failed, outcomes = len(calls), random.Random(operation), 0, set()
    assert count >= 7
    every_few, some = range(0, count + EVERY, EVERY), sorted(rng.sample(range(count), min(count, MOMENTS)))
    for number in every_few if "killed" in how else some:
        shutil.rmtree(root)
        shutil.copytree(base, root)
        said = None
        if "killed" in how:
            failed += is_killed(processes, partial(operate, root), number, names)
        else:
            once, code = how == "it fails", rng.choice([errno.EIO, errno.ENOSPC])
            with monkeypatch.context() as patch:
                failing(patch, names, code if once else errno.EROFS, first=number, times=1 if once else 10**9)
                said = said_by(partial(operate, root))
            failed += said is not None
            assert said is None or str(root) in said, (number, calls[number], said)
            assert said is None or once or "Read-only file system" in said
        with closing(NvmeStore.open(root)) as store:
            step = store.meta["step"]
            assert step in OPERATIONS[operation]
            assert_holds(store, step)
            store.verify()
            kept = {name: content.meta["step"] for name, content in list_checkpoints(root).items()}
            for name, kept_step in kept.items():
                assert_whole(root / "checkpoints" / name, kept_step)
            assert {path.name for drive in store.drives for path in drive.glob("checkpoints/*")} == set(kept)
            advance(store, 8, 9)
            assert_holds(store, 9)
        outcomes.add((step, *kept))
        assert operation == "delete" or "one" in kept
        if not (kept.keys() - {"one"} or operation == "delete"):
            operate(root)  # what was begun is in nobody's way
    assert failed >= MOMENTS // 3
    assert "killed" not in how or operation == "create" or len(outcomes) > 1, outcomes


def _steps_until_killed(root: Path, ready: Event) -> None:
    store = NvmeStore.open(root)
    for step in itertools.count(store.meta["step"] + 1):
        advance(store, step)
        ready.set()


@pytest.mark.sampled
def test_killed_at_random_moments(workspace: Path, processes: ForkServerContext) -> None:
    root = workspace / "state"
    make(root, 1).close()
    rng = random.Random(0)
    steps = [1]
    for _ in range(samples(4, 12)):
        ready = processes.Event()
        child = processes.Process(target=_steps_until_killed, args=(root, ready))
        child.start()
        assert ready.wait(30)
        time.sleep(rng.uniform(0, 0.08))
        child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL
        steps.append(Manifest.read(root).meta["step"])
        assert_whole(root, steps[-1], generation=steps[-1])
    assert steps == sorted(set(steps)), "each child has committed before it was killed"


def test_everything_is_durable_before_the_manifest_moves(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut loses what was not synced, which no kill can show: check the order of the system calls."""
    store = make(workspace / "state", 1)
    root = store.root
    write_all(store, 2)
    calls: list[tuple[str, str]] = []

    def note(number: int, name: str, args: Any) -> None:
        calls.append((name, str(args[1]) if name == "replace" else os.readlink(f"/proc/self/fd/{args[0]}")))

    before_calls(monkeypatch, ("fsync", "replace"), note)
    store.commit({"step": 2})
    moved = calls.index(("replace", f"{root}/manifest.json"))
    before = {path for call, path in calls[:moved] if call == "fsync"}
    folders = {f"{root}/{spec.buffer}/{spec.kind}/1" for spec in SPECS}
    files = {f"{root}/{s.buffer}/{s.kind}/1/c.{part}.0" for s in SPECS for part in range(len(s.parts()))}
    assert folders | files <= before
    assert any(path.startswith(f"{root}/.manifest.json.") for path in before)
    assert calls[moved + 1 :] == [("fsync", str(root)), ("replace", f"{root}/manifest.backup.json")]
    last_file = max(calls.index(("fsync", path)) for path in files)
    assert last_file < min(calls.index(("fsync", path)) for path in folders)
    store.close()
