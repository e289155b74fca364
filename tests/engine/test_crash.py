"""Kill -9 at random moments: whatever is on disk then, resuming ends in the bits of an uninterrupted run."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from contextlib import closing
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import tiny

from engine.ops import Op
from engine.train import train_step
from storage.nvme import NvmeStore

STEPS = 5
KILLS = 20


def train_until_killed(folder: Path, seed: int | None, gpu: str | int, ram: str | int) -> None:
    """Train to the end, committing every other step; with a seed, die by SIGKILL at a moment drawn from it."""
    chance = random.Random(seed)
    in_commit = chance.random() < 0.4
    countdown = chance.randrange(1, 3) if in_commit else chance.randrange(1, 600)
    delay_s = chance.random() * (2e-3 if in_commit else 5e-3)
    training = tiny.training(steps=STEPS, sequences_per_step=1)
    with tiny.session(folder, t=training, s=tiny.storage(checkpoint_every=2), gpu=gpu, ram=ram) as session:
        perform = session.runtime.perform
        lock = threading.Lock()

        def watched(op: Op) -> Any:
            nonlocal countdown
            with lock:
                countdown -= op.action == "commit" if in_commit else 1
                due = countdown == 0
                countdown -= due
            if due:
                threading.Thread(target=_die, args=(delay_s,)).start()
            return perform(op)

        if seed is not None:
            session.executor._perform = watched
        while session.step < STEPS:
            train_step(session)
        session.finish()


def _die(delay_s: float) -> None:
    time.sleep(delay_s)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    """Children start from a server that has imported everything and computed nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tiny", "engine.train"])
    return context


def run_child(processes: ForkServerContext, *args: Any) -> int | None:
    child = processes.Process(target=train_until_killed, args=args)
    child.start()
    child.join(120)
    return child.exitcode


@pytest.mark.parametrize(("gpu", "ram"), [(tiny.FLOOR, tiny.FLOOR), (1_100_000, 1_000_000)])
def test_kill_9_at_random_moments_resumes_bit_for_bit(
    tmp_path: Path, processes: ForkServerContext, gpu: str | int, ram: str | int
) -> None:
    assert run_child(processes, tmp_path / "straight", None, gpu, ram) == 0
    with closing(NvmeStore.open(tmp_path / "straight" / "state")) as store:
        expected = tiny.digest(store)
    kills = finished = seed = 0
    while kills < KILLS // 2 or not finished:
        folder = tmp_path / f"run{finished}"
        before = committed_step(folder)
        # Every run gets through in the end: past some kills it is left alone.
        exitcode = run_child(processes, folder, seed if kills < KILLS // 2 else None, gpu, ram)
        seed += 1
        assert exitcode in (0, -signal.SIGKILL), exitcode
        if exitcode:
            kills += 1
            assert committed_step(folder) >= before
            continue
        with closing(NvmeStore.open(folder / "state")) as store:
            assert store.meta["step"] == STEPS
            assert tiny.digest(store) == expected
        finished += 1


def committed_step(folder: Path) -> int:
    """Step of the committed generation; -1 before the first."""
    if not (folder / "state" / "manifest.json").exists():
        return -1
    with closing(NvmeStore.open(folder / "state")) as store:
        return int(store.meta["step"])
