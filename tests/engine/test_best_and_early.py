"""The generation with the lowest validation loss is kept, and a run ends once there has been none lower for long."""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import os
import random
import signal
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from samples import cases, samples

from penstock.engine import validation
from penstock.engine.events import ValidationMetrics
from penstock.engine.export import export
from penstock.engine.gains import EarlyEnd, Gains
from penstock.engine.session import Session
from penstock.storage.checkpoints import checkpoint_folder, read_checkpoint, resolve_checkpoint
from penstock.storage.errors import UserError
from penstock.storage.manifest import Manifest
from penstock.storage.nvme import NvmeStore
from penstock.storage.retention import Retention

HELD_OUT = tiny.data(validation_documents=7)
KILLS = samples(1, 8)
EVENTS = ("os.link", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "open")
"""What changes a disk, as Python's audit hooks name it."""


def run(folder: Path, stop_after: int | None = None, *, resume: bool = False, **options: Any) -> Any:
    """Six steps, a validation after each, no generation but what the best and the end call for."""
    train = {"steps": 6, "validate_every": 1, "validation_sequences": 2} | options.pop("train", {})
    storage = {"keep_best": True, "keep_good": None} | options.pop("storage", {})
    observer = options.pop("observer", None) or tiny.Silent(stop_after)
    result = tiny.train_run(
        folder,
        observer,
        resume=resume,
        data=HELD_OUT,
        train=tiny.training(**train),
        storage=tiny.storage(**storage),
        **options,
    )
    return observer, result


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Step -> the validation loss that is told in the place of the one that was measured."""
    told: dict[int, float] = {}
    real = validation.validate

    def validate(session: Session) -> ValidationMetrics:
        found = real(session)
        return dataclasses.replace(found, loss=told.get(found.step, found.loss))

    monkeypatch.setattr(validation, "validate", validate)
    return told


def told(losses: dict[int, float], values: Sequence[float]) -> None:
    losses |= dict(enumerate(values, start=1))


def best_step(folder: Path) -> int | None:
    root = folder / "state"
    return read_checkpoint(root, resolve_checkpoint(root, "best")).step


@pytest.fixture(scope="module")
def after(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Step -> digest of what a run of the same recipe without validations has then."""
    folder = tmp_path_factory.mktemp("straight")
    kept = tiny.storage(checkpoint_every=1, keep_last=6, keep_good=None)
    tiny.train_run(folder, tiny.Silent(), data=HELD_OUT, train=tiny.training(steps=6), storage=kept)
    return {step: checkpoint_digest(folder, f"step-{step:06}") for step in range(1, 7)}


def checkpoint_digest(folder: Path, name: str) -> str:
    with closing(NvmeStore.open(checkpoint_folder(folder / "state", name))) as kept:
        kept.verify()
        return tiny.digest(kept)


@pytest.mark.parametrize("every", cases([1000, 1, 2], 1000, 2))
def test_the_generation_of_the_lowest_validation_loss_is_kept(
    tmp_path: Path, losses: dict[int, float], after: dict[int, str], every: int
) -> None:
    """Whole, of that very step, and with no change to what is trained."""
    told(losses, [3.0, 2.0, 2.5, 1.5, 1.5, math.nan])
    observer, _ = run(tmp_path / "run", storage={"checkpoint_every": every})
    assert tiny.kept(tmp_path / "run") == ["best-000004"]
    assert not observer.checkpoints
    assert checkpoint_digest(tmp_path / "run", "best-000004") == after[4]
    assert tiny.digest_of(tmp_path / "run") == after[6]
    export(tmp_path / "run", tiny.recipe(data=HELD_OUT), out_dir=tmp_path / "model", checkpoint="best-000004")
    assert (tmp_path / "model" / "config.json").exists()


def test_the_model_that_it_begins_with_may_be_the_best(tmp_path: Path, losses: dict[int, float]) -> None:
    losses |= dict.fromkeys(range(7), 9.0) | {0: 1.0}
    run(tmp_path, train={"validate_first": True})
    assert best_step(tmp_path) == 0


def test_it_stands_beside_the_last_good_and_the_last_ones(tmp_path: Path, losses: dict[int, float]) -> None:
    told(losses, [3.0, 2.0, 9.0, 9.0, 9.0, 9.0])
    run(tmp_path, storage={"checkpoint_every": 1, "keep_good": 100.0, "keep_last": 2})
    assert set(tiny.kept(tmp_path)) == {"best-000002", "good-000005", "step-000005", "step-000006"}


@pytest.mark.parametrize("stop_after", cases([3, 4], 4))
def test_a_resumed_run_keeps_the_same_one(
    tmp_path: Path, losses: dict[int, float], after: dict[int, str], stop_after: int
) -> None:
    told(losses, [3.0, 2.0, 2.5, 1.5, 1.7, 1.6])
    run(tmp_path, stop_after)
    run(tmp_path, resume=True)
    assert tiny.kept(tmp_path) == ["best-000004"]
    assert checkpoint_digest(tmp_path, "best-000004") == after[4]


def test_one_whose_loss_no_generation_tells_is_measured_again(tmp_path: Path, losses: dict[int, float]) -> None:
    """The last step of a run that is made longer: it is not due any more, and still the one to beat."""
    told(losses, [9.0, 9.0, 2.0, 9.0, 5.0, 3.0])
    run(tmp_path, train={"steps": 3, "validate_every": 2})
    assert best_step(tmp_path) == 3
    observer, _ = run(tmp_path, resume=True, train={"validate_every": 2})
    assert [v.step for v in observer.validations] == [3, 4, 6]
    assert best_step(tmp_path) == 3


def test_a_run_that_goes_back_says_that_the_best_is_of_steps_done_again(
    tmp_path: Path, losses: dict[int, float]
) -> None:
    told(losses, [3.0, 2.5, 9.0, 2.0, 9.0, 9.0])
    run(tmp_path, storage={"keep_every": 1, "checkpoint_every": 1})
    told(losses, [3.0, 2.5, 2.4, 9.0, 9.0, 9.0])
    observer, _ = run(tmp_path, resume=True, checkpoint="step-000002", storage={"keep_every": 1, "checkpoint_every": 1})
    assert any("best-000004 is of a step that is being repeated" in text for text in observer.messages)
    assert best_step(tmp_path) == 3
    assert sum(name.startswith("best-") for name in tiny.kept(tmp_path)) == 1


def test_where_no_room_is_left_it_is_said_and_training_goes_on(
    tmp_path: Path, losses: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    told(losses, [3.0, 2.0, 9.0, 9.0, 9.0, 9.0])
    monkeypatch.setattr(Retention, "checkpoint", lambda self, name: "no room")
    observer, result = run(tmp_path)
    assert observer.checkpoints == [("best", 1, "no room"), ("best", 2, "no room")]
    assert result.steps == 6
    with pytest.raises(UserError, match=r"has no best checkpoint: no generation was kept .*storage\.keep_best"):
        resolve_checkpoint(tmp_path / "state", "best")


def test_its_room_is_planned(tmp_path: Path) -> None:
    with tiny.session(tmp_path, d=HELD_OUT, t=tiny.training(validate_every=1), s=tiny.storage(keep_best=True)) as found:
        parts = found.plan.tiers["nvme"].parts
        assert parts["kept generations"] * 2 == parts["state, two generations"]


# ---------------------------------------------------------------- early


def test_a_run_without_a_lower_loss_ends_with_its_step_committed(
    tmp_path: Path, losses: dict[int, float], after: dict[int, str]
) -> None:
    told(losses, [3.0, 2.0, 2.5, 2.0])
    observer, result = run(tmp_path, train={"early_stopping_patience": 2})
    assert result.steps == result.steps_done == 4
    assert not result.stopped
    assert result.early_end == EarlyEnd(2, 2.0, 2)
    assert observer.messages[-1] == "ended early after step 4: no gain in 2 validations; best 2 at step 2"
    assert [v.step for v in observer.validations] == [1, 2, 3, 4]
    assert Manifest.read(tmp_path / "state").step == 4
    assert tiny.digest_of(tmp_path) == after[4]
    assert best_step(tmp_path) == 2


@pytest.mark.parametrize("stop_after", cases([2, 3], 3))
def test_patience_survives_a_stop(tmp_path: Path, losses: dict[int, float], stop_after: int) -> None:
    told(losses, [3.0, 2.0, 2.5, 2.2, 2.1])
    run(tmp_path, stop_after, train={"early_stopping_patience": 3}, storage={"checkpoint_every": 1})
    _, result = run(tmp_path, resume=True, train={"early_stopping_patience": 3}, storage={"checkpoint_every": 1})
    assert (result.steps, result.early_end) == (5, EarlyEnd(3, 2.0, 2))


def test_with_more_patience_it_goes_on_to_the_bits_of_a_straight_run(
    tmp_path: Path, losses: dict[int, float], after: dict[int, str]
) -> None:
    told(losses, [3.0, 4.0, 4.0, 2.0, 4.0, 4.0])
    run(tmp_path, train={"early_stopping_patience": 2})
    _, again = run(tmp_path, resume=True, train={"early_stopping_patience": 2})
    assert (again.steps, again.steps_done, again.early_end) == (3, 0, EarlyEnd(2, 3.0, 1))
    _, result = run(tmp_path, resume=True, train={"early_stopping_patience": 3})
    assert (result.steps, result.early_end) == (6, None)
    assert best_step(tmp_path) == 4
    assert tiny.digest_of(tmp_path) == after[6]


def test_the_last_step_is_no_early_end(tmp_path: Path, losses: dict[int, float]) -> None:
    told(losses, [1.0, 2.0, 2.0, 2.0, 2.0, 2.0])
    observer, result = run(tmp_path, train={"early_stopping_patience": 5})
    assert (result.steps, result.early_end, result.stopped) == (6, None, False)
    assert [v.step for v in observer.validations] == [1, 2, 3, 4, 5, 6]


@given(st.lists(st.sampled_from([1.0, 2.0, 3.0, math.nan, math.inf]), min_size=1, max_size=12), st.integers(1, 4))
def test_gains(losses: list[float], patience: int) -> None:
    """As a record of it, taken up again after every loss, finds them."""
    gains = Gains()
    for step, loss in enumerate(losses):
        gains = Gains.of(gains.to_json())
        finite = [value for value in losses[:step] if math.isfinite(value)]
        assert gains.take(step, loss, 100) == (math.isfinite(loss) and all(loss < value for value in finite))
        finite = [value for value in losses[: step + 1] if math.isfinite(value)]
        assert gains.best == min(finite, default=None)
        since = step + 1 if gains.best is None else step - losses.index(gains.best)
        assert gains.without == since
        assert (gains.exhausted(patience) is not None) == (since >= patience)
        assert gains.exhausted(None) is None
    assert gains.take(50, 99.0, 101), "measured on other tokens"


@pytest.mark.parametrize(
    "record", [None, 3, {}, {"best": "x", "best_step": 1, "without": 0, "tokens": 1}, {"best": 1.0, "best_step": None}]
)
def test_a_record_of_something_else_begins_anew(record: Any) -> None:
    assert Gains.of(record) == Gains()


# ---------------------------------------------------------------- kill -9


def train_until_killed(folder: Path, moment: int | None) -> None:
    """Train with patience and a best generation, and die by SIGKILL at the change number `moment` of the run's disk.

    Without one the number of them is left in the file "changes" beside the folder.
    """
    count = 0

    def watch(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        if event in EVENTS and str(folder) in str(args[0]):
            count += 1
            if count == moment:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    losses = {1: 5.0, 2: 4.0, 3: 4.5, 4: 3.0, 5: 3.5, 6: 2.0, 7: 2.5, 8: 2.5, 9: 2.0}
    real = validation.validate
    validation.validate = lambda session: dataclasses.replace(real(session), loss=losses[session.step])
    resume = (folder / "state" / "manifest.json").exists()
    _, result = run(
        folder,
        resume=resume,
        train={"steps": 20, "early_stopping_patience": 3},
        storage={"checkpoint_every": 3, "keep_good": 2.0},
    )
    assert (result.steps, result.early_end) == (9, EarlyEnd(3, 2.0, 6))
    (folder.parent / "changes").write_text(str(count))


@pytest.mark.sampled
def test_kill_9_leaves_the_best_of_a_straight_run(tmp_path: Path) -> None:
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["tiny", "penstock.engine.train"])

    def child(folder: Path, moment: int | None) -> int | None:
        process = processes.Process(target=train_until_killed, args=(folder, moment))
        process.start()
        process.join(600)
        return process.exitcode

    straight, parts = tmp_path / "straight", tmp_path / "parts"
    straight.mkdir()
    assert child(straight, None) == 0
    changes = int((tmp_path / "changes").read_text())
    chance, died = random.Random(7), 0
    expected = tiny.kept(straight), checkpoint_digest(straight, "best-000006"), tiny.digest_of(straight)
    for number in range(KILLS):
        folder = parts / str(number)
        folder.mkdir(parents=True)
        for most in (changes, changes // 2):
            died += child(folder, chance.randrange(1, most)) == -signal.SIGKILL
        assert child(folder, None) == 0
        assert (tiny.kept(folder), checkpoint_digest(folder, "best-000006"), tiny.digest_of(folder)) == expected
    assert died >= KILLS
