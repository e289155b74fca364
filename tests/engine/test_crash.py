"""Kill -9 at random moments of every phase: whatever is on disk then, resuming ends in an uninterrupted run's bits."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from collections import Counter
from contextlib import closing
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import tiny
from samples import samples

from engine.schedule.ops import Op
from engine.train import train_step
from storage.checkpoints import good_name, list_checkpoints
from storage.nvme import NvmeStore
from storage.retention import automatic_name

STEPS = 5
KILLS = samples(6, 18)
"""For each of three placements."""

PHASES = {
    "forward": ("embed_forward", "layer_forward"),
    "head": ("head",),
    "backward": ("layer_backward", "embed_backward"),
    "activations": ("spill_x", "spill_kv", "unspill_saved", "unspill_kv"),
    "update": ("read_state", "update", "write_state", "write_weights", "checkpoint_state"),
    "commit": ("commit",),
}
"""Phase -> actions at one of which the process dies; "opening" is the time before the first op."""

PLACEMENTS = [(tiny.FLOOR, tiny.FLOOR, 1), (1_100_000, 1_000_000, 1), (tiny.FLOOR, tiny.FLOOR, 2)]


def train_until_killed(folder: Path, seed: int | None, gpu: str | int, ram: str | int, num_drives: int) -> None:
    """Train to the end, committing every other step; with a seed, die by SIGKILL at a moment drawn from it."""
    chance = random.Random(seed)
    phase = chance.choice([*PHASES, "commit", "opening"])
    often = {"commit": 3, "head": 4, "forward": 40, "activations": 40}.get(phase, 30)
    countdown = chance.randrange(1, often)
    delay_s = chance.random() * 3e-3
    if seed is not None and phase == "opening":
        threading.Thread(target=_die, args=(folder, phase, chance.random() * 0.4), daemon=True).start()
    settings = tiny.training(steps=STEPS, global_batch_size=1)
    kept = tiny.storage(checkpoint_every=2, keep_last=2)
    drives = [folder / "state", folder / "second"][:num_drives]
    with tiny.session(folder, t=settings, s=kept, gpu=gpu, ram=ram, drives=drives) as session:
        perform = session.runtime.perform
        lock = threading.Lock()

        def watched(op: Op) -> Any:
            nonlocal countdown
            with lock:
                countdown -= op.action.name in PHASES.get(phase, ())
                due = countdown == 0
                countdown -= due
            if due:
                threading.Thread(target=_die, args=(folder, phase, delay_s), daemon=True).start()
            return perform(op)

        if seed is not None:
            session.executor._perform = watched
        while session.step < STEPS:
            train_step(session)
        session.finish()


def _die(folder: Path, phase: str, delay_s: float) -> None:
    time.sleep(delay_s)
    (folder / "died-in").write_text(phase)
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


@pytest.mark.sampled
@pytest.mark.parametrize(("gpu", "ram", "drives"), PLACEMENTS)
def test_kill_9_at_random_moments_resumes_bit_for_bit(
    tmp_path: Path, processes: ForkServerContext, gpu: str | int, ram: str | int, drives: int
) -> None:
    assert run_child(processes, tmp_path / "straight", None, gpu, ram, drives) == 0
    with closing(NvmeStore.open(tmp_path / "straight" / "state")) as store:
        expected = tiny.digest(store)
    died: Counter[str] = Counter()
    finished = seed = 0
    while died.total() < KILLS or not finished:
        folder = tmp_path / f"run{finished}"
        folder.mkdir(exist_ok=True)
        before = committed_step(folder)
        # Every run gets through in the end: past some kills it is left alone.
        exitcode = run_child(processes, folder, seed if died.total() < KILLS else None, gpu, ram, drives)
        seed += 1
        assert exitcode in (0, -signal.SIGKILL), exitcode
        if exitcode:
            died[(folder / "died-in").read_text()] += 1
            assert committed_step(folder) >= before
            continue
        with closing(NvmeStore.open(folder / "state")) as store:
            assert store.meta["step"] == STEPS
            assert tiny.digest(store) == expected
        check_kept(folder)
        finished += 1
    print(f"killed in {dict(died)}; {finished} runs finished")
    assert len(died) >= samples(2, 4), died


def check_kept(folder: Path) -> None:
    """Every checkpoint that survived the kills is whole."""
    for info in list_checkpoints(folder / "state"):
        with closing(NvmeStore.open(folder / "state" / "checkpoints" / info.name)) as store:
            assert store.verify() > 0
            assert info.name in (automatic_name(step := store.meta["step"]), good_name(step))


def committed_step(folder: Path) -> int:
    """Step of the committed generation; -1 before the first."""
    if not (folder / "state" / "manifest.json").exists():
        return -1
    with closing(NvmeStore.open(folder / "state")) as store:
        return int(store.meta["step"])
