"""A generation that takes another's place can be trained on, and one that has proved good is kept."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.plan.problem import LAST_GOOD
from penstock.engine.runtime.failures import DivergedError
from penstock.engine.runtime.health import LARGEST, LossWatch, require_usable
from penstock.engine.train import train_step
from penstock.storage import checkpoints
from penstock.storage.checkpoints import checkpoint_folder, list_checkpoints, resolve_checkpoint
from penstock.storage.drives import Locks
from penstock.storage.errors import UserError
from penstock.storage.manifest import Manifest
from penstock.storage.nvme import NvmeStore
from penstock.storage.retention import Retention


def run(folder: Path, **options: Any) -> tiny.Silent:
    observer = tiny.Silent()
    tiny.train_run(folder, observer, **options)
    return observer


def largest(folder: Path) -> float:
    """The largest magnitude of a committed master weight."""
    found = 0.0
    with closing(NvmeStore.open(folder / "state", read_only=True)) as store:
        for spec in store.arrays():
            out = tiny.stored(store, spec)
            assert bool(out.isfinite().all()), spec
            found = max(found, float(out.abs().max())) if spec.kind == "master" else found
    return found


@pytest.mark.parametrize(("lr", "every"), [(1e36, 2), (1e18, 1), pytest.param(1e39, 1, marks=pytest.mark.long)])
def test_a_rate_that_destroys_the_weights(tmp_path: Path, lr: float, every: int) -> None:
    """Whatever is committed can be trained on, and the message says what there is."""
    with pytest.raises(DivergedError, match=r"step \d: .*Generation (\d) \(step (\d)\) is committed.*: resume") as told:
        run(
            tmp_path,
            train=tiny.training(steps=6, lr=lr, lr_schedule="constant"),
            storage=tiny.storage(checkpoint_every=every),
        )
    assert largest(tmp_path) <= LARGEST
    names = tiny.kept(tmp_path)
    if names:
        assert "last-good" in str(told.value) or "had a normal loss" in str(told.value)
    ended = run(tmp_path, resume=True, checkpoint=names[-1] if names else None)
    assert math.isfinite(ended.metrics[-1].loss)


def test_the_last_step_is_looked_at_too(tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match=r"step 1: master of block \S+ .* after its update, so it is not committed"):
        run(tmp_path, train=tiny.training(steps=1, lr=1e30, lr_schedule="constant"))
    assert Manifest.read(tmp_path / "state").meta["step"] == 0


@pytest.mark.parametrize(("budgets", "kind"), [*zip(tiny.TIERS, ["master", "exp_avg", "exp_avg_sq"], strict=False)])
def test_no_kind_of_state_is_committed_that_is_not_finite(tmp_path: Path, budgets: Any, kind: str) -> None:
    gpu, ram = budgets
    with tiny.session(tmp_path, gpu=gpu, ram=ram) as session:
        tiny.steps(session, 1)
        before = tiny.digest(session.store)
        optimizer = session.runtime.optimizer
        step = optimizer.step

        def poisoned(state: Any, *rest: Any) -> None:
            step(state, *rest)
            state[kind][-1] = float("inf")

        optimizer.step = poisoned  # type: ignore[method-assign]
        train_step(session)
        with pytest.raises(DivergedError, match=rf"step 2: {kind} of block \S+ is not finite after its update"):
            session.finish()
    assert tiny.digest_of(tmp_path) == before


def test_usable_state() -> None:
    require_usable("master", "head", 1, torch.tensor([0.0, -1e19, 1e19]))
    require_usable("exp_avg_sq", "head", 1, torch.tensor([3e38]))
    for kind, value in (("master", 2e19), ("master", -2e19), ("exp_avg", math.inf), ("exp_avg", math.nan)):
        with pytest.raises(DivergedError, match=f"step 7: {kind} of block head .* so it is not committed"):
            require_usable(kind, "head", 7, torch.tensor([1.0, value, 2.0]))


def test_the_last_good_generation_is_kept(tmp_path: Path) -> None:
    """Whole, and a run that goes on from it repeats the bits."""
    observer = run(tmp_path)
    assert tiny.kept(tmp_path) == ["good-000005"]
    assert not observer.checkpoints
    root = tmp_path / "state"
    assert resolve_checkpoint(root, "last-good") == "good-000005"
    with closing(NvmeStore.open(checkpoint_folder(root, "good-000005"))) as kept:
        assert kept.meta["step"] == 5
        kept.verify()
    before = tiny.digest_of(tmp_path)
    run(tmp_path, resume=True, checkpoint="good-000005")
    assert tiny.digest_of(tmp_path) == before
    assert tiny.kept(tmp_path) == ["good-000005"]


@pytest.mark.parametrize("bad", [{2, 4, 6}, {1, 2, 3, 4, 5, 6}])
def test_a_generation_that_a_bad_loss_follows_is_not_the_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: set[int]
) -> None:
    """Generation k has proved good if the loss of step k + 1 was; the last one is never known to be."""
    step = 0

    def judge(self: LossWatch, loss: float) -> bool:
        nonlocal step
        step += 1
        return step not in bad

    monkeypatch.setattr(LossWatch, "is_good", judge)
    run(tmp_path)
    proved = [k for k in range(6) if k + 1 not in bad]
    assert tiny.kept(tmp_path) == [f"good-{k:06}" for k in proved[-1:]]


def test_a_loss_that_leaps_is_told_once(tmp_path: Path) -> None:
    """A rate that ruins the model without any number that is not finite."""
    observer = run(tmp_path, train=tiny.training(steps=6, lr=30.0, lr_schedule="constant"))
    told = [text for text in observer.messages if "running mean" in text]
    assert len(told) == 1
    assert told[0].startswith("step 2: the loss, ")
    assert "--checkpoint last-good" in told[0]
    assert tiny.kept(tmp_path) == ["good-000000"]


def test_without_keep_good_none_is_kept(tmp_path: Path) -> None:
    run(tmp_path, storage=tiny.storage(checkpoint_every=1, keep_good=None))
    assert tiny.kept(tmp_path) == []
    with pytest.raises(UserError, match="has no last-good checkpoint"):
        resolve_checkpoint(tmp_path / "state", "last-good")


def test_no_room_for_it_is_said_once_and_training_goes_on(tmp_path: Path) -> None:
    with tiny.session(tmp_path / "probe") as session:
        parts = session.plan.tiers["nvme"].parts
        generation = parts[LAST_GOOD]
        need = sum(parts.values()) - generation
    budgets = tiny.BudgetConfig(gpu="1GiB", ram="1GiB", nvme=need + generation // 2)
    observer = run(tmp_path / "run", budgets=budgets)
    assert [(name, step) for name, step, _ in observer.checkpoints] == [("last-good", 0)]
    assert "room" in str(observer.checkpoints[0][2])
    assert tiny.kept(tmp_path / "run") == []
    assert len(observer.metrics) == 6


def test_a_full_disk_meanwhile_keeps_the_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The room for a second one lacks: the older goes first, as the committed generation has proved good itself."""
    made: list[tuple[str, list[str]]] = []
    real = Retention.checkpoint

    def checkpoint(self: Retention, name: str) -> str | None:
        there = [info.name for info in list_checkpoints(self._store.root)]
        made.append((name, there))
        return "no room" if there else real(self, name)

    monkeypatch.setattr(Retention, "checkpoint", checkpoint)
    observer = run(tmp_path)
    assert tiny.kept(tmp_path) == ["good-000005"]
    assert not observer.checkpoints
    assert ("good-000003", ["good-000002"]) in made


def test_a_checkpoint_that_is_being_read_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its deletion waits for the next time."""
    held = Locks()
    real = checkpoints.write_checkpoint

    def write(name: str, *rest: Any) -> None:
        real(name, *rest)
        if name in ("good-000002", "step-000003"):
            held.take(checkpoint_folder(tmp_path / "state", name))

    monkeypatch.setattr(checkpoints, "write_checkpoint", write)
    try:
        observer = run(tmp_path, storage=tiny.storage(checkpoint_every=1, keep_last=2))
    finally:
        held.release()
    assert len(observer.metrics) == 6
    assert {name for name, _, _ in observer.checkpoints} == {"good-000002", "step-000003"}
    assert set(tiny.kept(tmp_path)) == {"good-000002", "good-000005", "step-000003", "step-000005", "step-000006"}


@pytest.mark.parametrize("multiple", [None, 2.0])
def test_steps_without_anything_to_train_judge_no_loss(multiple: float | None) -> None:
    watch = LossWatch(multiple, None)
    assert [watch.is_good(loss) for loss in (0.0, 0.0, 5.0, 5.0)] == [True] * 4


@given(st.lists(st.floats(0.01, 20), min_size=1, max_size=40), st.floats(1.5, 10))
def test_the_loss_watch(losses: list[float], multiple: float) -> None:
    watch = LossWatch(multiple, None)
    for i, loss in enumerate(losses):
        before = watch.mean
        assert watch.is_good(loss) == (before is None or loss <= multiple * before)
        assert min(losses[: i + 1]) * 0.999 <= watch.mean <= max(losses[: i + 1]) * 1.001
        if before is not None:  # one loss, however high, moves the mean little
            assert watch.mean <= before * (1 + 0.05 * (multiple - 1)) * 1.001
    assert not watch.is_good(math.nan)
    assert not watch.is_good(math.inf)
    for _ in range(2000):  # a loss that stays high is the new mean in the end
        fine = watch.is_good(1000.0)
    assert fine
