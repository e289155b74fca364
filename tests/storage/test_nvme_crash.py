"""Kill -9 of a process that writes and commits: the store always opens at a committed generation, bit for bit."""

import errno
import itertools
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import closing
from multiprocessing.context import ForkServerContext
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest
from nvme_state import SPECS, advance, assert_holds, assert_whole, make, write_all
from system_calls import CHANGING, before_calls, failing

from storage import drives
from storage.checkpoints import delete_checkpoint, list_checkpoints
from storage.manifest import Manifest
from storage.nvme import NvmeStore

# System calls of one step: a chunk file is written by two pwritev (bytes, checksum); a commit syncs the 7 chunk files,
# their 3 folders and the new manifest, replaces the manifest, syncs the root and replaces the manifest's backup.
NUM_PARTS = sum(len(spec.parts()) for spec in SPECS)
NUM_CALLS = 2 * NUM_PARTS + NUM_PARTS + len(SPECS) + 4


@pytest.fixture
def root(workspace: Path) -> Path:
    make(workspace / "state", 1).close()
    return workspace / "state"


def _steps_until_killed(root: Path, ready: Event) -> None:
    store = NvmeStore.open(root)
    ready.set()
    for step in itertools.count(store.meta["step"] + 1):
        advance(store, step)


ACTIONS: dict[str, tuple[Callable[[NvmeStore], object], tuple[str, ...]]] = {
    "commit": (lambda store: advance(store, 2), ("pwritev", "fsync", "replace")),
    "checkpoint": (lambda store: store.checkpoint("new"), CHANGING),
    "restore": (lambda store: store.restore("one"), CHANGING),
    "delete": (lambda store: delete_checkpoint(store.root, "one"), CHANGING),
}
"""What is done, and the system calls that are counted."""


def _act(root: Path, action: str, number: int, links: bool) -> None:
    """Do it, and kill the process in the place of its system call `number` (from 0) that changes the disk."""
    drives.WRITE_THREADS = 1  # one call after the other, so that the number names a place
    act, names = ACTIONS[action]
    patch = pytest.MonkeyPatch()
    if not links:
        failing(patch, ["link"], errno.EPERM)

    def kill(count: int, name: str, args: Any) -> None:
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)

    store = NvmeStore.open(root)
    before_calls(patch, names, kill)
    act(store)
    os._exit(0)


def is_killed(processes: ForkServerContext, *arguments: Any) -> bool:
    """Run `_act`; whether it was killed before it was done."""
    child = processes.Process(target=_act, args=arguments)
    child.start()
    child.join(30)
    assert child.exitcode in (0, -signal.SIGKILL)
    return child.exitcode != 0


def test_killed_at_every_system_call_of_a_step(root: Path, processes: ForkServerContext) -> None:
    outcomes = []
    for number in range(NUM_CALLS):
        assert is_killed(processes, root, "commit", number, True)
        step = Manifest.read(root).meta["step"]
        assert_whole(root, step)
        outcomes.append(step)
        if step == 2:
            break
    # Everything up to and with the manifest's replacement leaves step 1; only the root's sync and the backup follow.
    # On a busy machine another thread's call may overtake the one that kills: the replacement is then a call early.
    assert outcomes[:-1] == [1] * (len(outcomes) - 1)
    assert outcomes[-1] == 2
    assert NUM_CALLS - 2 <= len(outcomes) <= NUM_CALLS - 1


def test_killed_at_random_moments(root: Path, processes: ForkServerContext) -> None:
    rng = random.Random(0)
    steps = [1]
    for _ in range(12):
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
    assert steps == sorted(steps)
    assert steps[-1] > 1, "no commit was reached: the children were killed too early to test anything"


def test_everything_is_durable_before_the_manifest_moves(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut loses what was not synced, which no kill can show: check the order of the system calls."""
    store = NvmeStore.open(root)
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


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("action", ["checkpoint", "restore", "delete"])
def test_killed_in_the_middle(workspace: Path, processes: ForkServerContext, action: str, links: bool) -> None:
    """Generation 3, checkpoint 'one' of step 1: whatever the moment, both or their successors are whole."""
    base = workspace / "base"
    with closing(make(base, 1, drives=[base, base / "b"])) as store:
        store.checkpoint("one")
        advance(store, 2, 3)
    number, killed, outcomes = 0, True, set()
    while killed:
        root = workspace / f"state{number}"
        shutil.copytree(base, root)
        killed = is_killed(processes, root, action, number, links)
        with closing(NvmeStore.open(root)) as store:
            step = store.meta["step"]
            assert (store.generation, step) in ((3, 3), (4, 1))
            assert_holds(store, step)
            store.verify()
            kept = {info.name: 3 if info.name == "new" else 1 for info in list_checkpoints(root)}
            outcomes.add((step, *kept))
            assert {path.name for drive in store.drives for path in drive.glob("checkpoints/*")} == set(kept)
            if number % 2 == 0:
                advance(store, 8, 9)
                assert_holds(store, 9)
        for name, step in kept.items():
            assert_whole(root / "checkpoints" / name, step)
        shutil.rmtree(root)
        number += 11
    expected = {
        "checkpoint": {(3, "one"), (3, "one", "new")},
        "restore": {(3, "one"), (1, "one")},
        "delete": {(3, "one"), (3,)},
    }
    assert outcomes == expected[action]
