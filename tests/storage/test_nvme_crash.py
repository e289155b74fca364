"""Kill -9 of a process that writes and commits: the store always opens at a committed generation, bit for bit."""

import multiprocessing
import os
import random
import signal
import time
from multiprocessing.context import ForkServerContext
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
from nvme_state import SPECS, assert_holds, write_all

from storage import drives
from storage.nvme import NvmeStore

# System calls of one step: a chunk file is written by two pwritev (bytes, checksum); a commit syncs the 7 chunk files,
# their 3 folders and the new manifest, replaces the manifest, syncs the root and replaces the manifest's backup.
NUM_PARTS = sum(len(spec.parts()) for spec in SPECS)
NUM_CALLS = 2 * NUM_PARTS + NUM_PARTS + len(SPECS) + 4


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    """Children forked from a clean process that has the imports: forking this one would inherit torch's threads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["storage.nvme", "nvme_state"])
    return context


@pytest.fixture
def root(workspace: Path) -> Path:
    store = NvmeStore.create(workspace / "state", SPECS, budget_bytes=None)
    write_all(store, 1)
    store.commit({"step": 1})
    store.close()
    return store.root


def _steps_until_killed(root: Path, ready: Event) -> None:
    store = NvmeStore.open(root)
    ready.set()
    step = store.meta["step"]
    while True:
        step += 1
        write_all(store, step)
        store.commit({"step": step})


def _one_step_killed_at(root: Path, number: int) -> None:
    """Do step 2 and kill the process in the place of its system call `number` (from 0) that changes the disk."""
    drives.WRITE_THREADS = 1  # one call after the other, so that the number names a place
    store = NvmeStore.open(root)
    count = 0
    real = {name: getattr(os, name) for name in ("pwritev", "fsync", "replace")}

    def counted(name: str):  # type: ignore[no-untyped-def]
        def call(*args):  # type: ignore[no-untyped-def]
            nonlocal count
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)
            count += 1
            return real[name](*args)

        return call

    for name in real:
        setattr(os, name, counted(name))
    write_all(store, 2)
    store.commit({"step": 2})
    assert count == NUM_CALLS, count


def test_killed_at_every_system_call_of_a_step(root: Path, processes: ForkServerContext) -> None:
    outcomes = []
    for number in range(NUM_CALLS + 1):
        child = processes.Process(target=_one_step_killed_at, args=(root, number))
        child.start()
        child.join(30)
        assert child.exitcode == (0 if number == NUM_CALLS else -signal.SIGKILL)
        store = NvmeStore.open(root)
        step = store.meta["step"]
        store.verify()
        assert_holds(store, step)
        store.close()
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
        store = NvmeStore.open(root)
        steps.append(store.meta["step"])
        assert store.generation == steps[-1]
        store.verify()
        assert_holds(store, steps[-1])
        store.close()
    assert steps == sorted(steps)
    assert steps[-1] > 1, "no commit was reached: the children were killed too early to test anything"


def test_everything_is_durable_before_the_manifest_moves(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut loses what was not synced, which no kill can show: check the order of the system calls."""
    store = NvmeStore.open(root)
    write_all(store, 2)
    calls: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def synced(fd: int) -> None:
        calls.append(("fsync", os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    def replaced(src: Path, dst: Path) -> None:
        calls.append(("replace", str(dst)))
        replace(src, dst)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
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
