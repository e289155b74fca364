"""Kill -9 of a process that writes and commits: the store always opens at a committed generation, bit for bit."""

import itertools
import os
import random
import signal
import time
from contextlib import closing
from functools import partial
from multiprocessing.context import ForkServerContext
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest
from nvme_state import SPECS, advance, assert_whole, make, write_all
from samples import samples
from system_calls import before_calls, is_killed

from penstock.storage.manifest import Manifest
from penstock.storage.nvme import NvmeStore

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


def _step_2(root: Path) -> None:
    with closing(NvmeStore.open(root)) as store:
        advance(store, 2)


@pytest.mark.sampled
def test_killed_at_every_system_call_of_a_step(root: Path, processes: ForkServerContext) -> None:
    """At every third one in `make test`."""
    outcomes, every = [], samples(3, 1)
    for number in itertools.count(step=every):
        killed = is_killed(processes, partial(_step_2, root), number, ("pwritev", "fsync", "replace"))
        step = Manifest.read(root).meta["step"]
        assert killed or (step == 2 and every > 1), "the step has fewer calls than that"
        assert_whole(root, step)
        outcomes.append(step)
        if step == 2:
            break
    # Everything up to and with the manifest's replacement leaves step 1; only the root's sync and the backup follow.
    # On a busy machine another thread's call may overtake the one that kills: the replacement is then a call early.
    # Calls of opening come before all of them.
    assert outcomes[:-1] == [1] * (len(outcomes) - 1)
    assert len(outcomes) >= (NUM_CALLS - 2) // every


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
