"""Kill -9 of a process that writes and commits: the store always opens at a committed generation, bit for bit."""

import itertools
import os
import random
import signal
import time
from multiprocessing.context import ForkServerContext
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest
from nvme_state import SPECS, advance, assert_whole, make, write_all
from samples import samples
from system_calls import before_calls

from penstock.storage.manifest import Manifest
from penstock.storage.nvme import NvmeStore


@pytest.fixture
def root(workspace: Path) -> Path:
    make(workspace / "state", 1).close()
    return workspace / "state"


def _steps_until_killed(root: Path, ready: Event) -> None:
    store = NvmeStore.open(root)
    for step in itertools.count(store.meta["step"] + 1):
        advance(store, step)
        ready.set()


@pytest.mark.sampled
def test_killed_at_random_moments(root: Path, processes: ForkServerContext) -> None:
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
