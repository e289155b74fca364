"""Generations that are kept: the last one that has proved good, and the one of the lowest validation loss, without a
lower one of which for long a run ends. What cannot be trained on is not committed. Uploads beside a run: due, waiting
for one another, limited, counted by the plan."""

import dataclasses
import json
import math
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import cases

from penstock.engine import validation
from penstock.engine.events import StepMetrics, ValidationMetrics, Want
from penstock.engine.export import export
from penstock.engine.forecast.problem import retained_generations
from penstock.engine.gains import EarlyEnd, Gains
from penstock.engine.plan.problem import LAST_GOOD
from penstock.engine.run_files import run_files
from penstock.engine.runtime.failures import DivergedError
from penstock.engine.runtime.health import LARGEST, LossWatch, require_usable
from penstock.engine.session import Session
from penstock.engine.train import train_step
from penstock.engine.uploads import Uploads
from penstock.storage.files.errors import BudgetError, UserError
from penstock.storage.generations import checkpoints
from penstock.storage.generations.checkpoints import (
    checkpoint_folder,
    checkpoint_names,
    list_checkpoints,
    read_checkpoint,
    resolve_checkpoint,
)
from penstock.storage.generations.retention import Retention
from penstock.storage.generations.store import NvmeStore
from penstock.storage.offsite.location import mover_bytes
from penstock.storage.tier.drives import Locks
from penstock.storage.tier.manifest import Manifest

Losses, Digests = dict[int, float], dict[int, str]
HELD_OUT = tiny.data(validation_documents=7)


def training(**changes: Any) -> Any:
    return tiny.training(**{"steps": 6, "global_batch_size": 1, "chunk_tokens": 48} | changes)


def run(folder: Path, **options: Any) -> tiny.Silent:
    observer = tiny.Silent()
    tiny.train_run(folder, observer, **{"train": training()} | options)
    return observer


def largest(folder: Path) -> float:
    """The largest magnitude of a committed master weight."""
    with closing(NvmeStore.open(folder / "state", read_only=True)) as store:
        found = [(spec.kind, tiny.stored(store, spec)) for spec in store.arrays()]
    assert all(bool(tensor.isfinite().all()) for _, tensor in found)
    return max(float(tensor.abs().max()) for kind, tensor in found if kind == "master")


@pytest.mark.parametrize("lr", cases([1e18, 1e36, 1e39], 1e36))
def test_a_rate_that_destroys_the_weights(tmp_path: Path, lr: float) -> None:
    """Whatever is committed can be trained on, and the message says what there is."""
    every = 2 if lr == 1e36 else 1
    options = {"train": training(lr=lr, lr_schedule="constant"), "storage": tiny.storage(checkpoint_every=every)}
    committed = r"step \d: .*Generation (\d) \(step (\d)\) is committed.*: resume"
    with pytest.raises(DivergedError, match=committed) as told:
        run(tmp_path, **options)
    assert largest(tmp_path) <= LARGEST
    names = tiny.kept(tmp_path)
    if names:
        assert "last-good" in str(told.value) or "had a normal loss" in str(told.value)
    ended = run(tmp_path, resume=True, checkpoint=names[-1] if names else None)
    assert math.isfinite(ended.metrics[-1].loss)
    # The last step is looked at too.
    with pytest.raises(DivergedError, match=r"step 1: master of block \S+ .* after its update, so it is not committed"):
        run(tmp_path / "one", train=training(steps=1, lr=1e30, lr_schedule="constant"))
    assert Manifest.read(tmp_path / "one" / "state").meta["step"] == 0


@pytest.mark.parametrize(("budgets", "kind"), [*zip(tiny.TIERS, ["master", "exp_avg", "exp_avg_sq"], strict=False)])
def test_no_kind_of_state_is_committed_that_is_not_finite(tmp_path: Path, budgets: Any, kind: str) -> None:
    gpu, ram = budgets
    with tiny.session(tmp_path, gpu=gpu, ram=ram, t=training()) as session:
        tiny.steps(session, 1)
        before, step = tiny.digest(session.store), session.runtime.optimizer.step

        def poisoned(state: Any, *rest: Any) -> None:
            step(state, *rest)
            state[kind][-1] = float("inf")

        session.runtime.optimizer.step = poisoned  # type: ignore[method-assign]
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
    observer, root = run(tmp_path), tmp_path / "state"
    assert not observer.checkpoints
    assert resolve_checkpoint(root, "last-good") == "good-000005"
    with closing(NvmeStore.open(checkpoint_folder(root, "good-000005"))) as kept:
        assert kept.meta["step"] == 5
        kept.verify()
    before = tiny.digest_of(tmp_path), tiny.kept(tmp_path)
    run(tmp_path, resume=True, checkpoint="good-000005")
    assert (tiny.digest_of(tmp_path), tiny.kept(tmp_path)) == before == (before[0], ["good-000005"])


@pytest.mark.parametrize("bad", [{2, 4, 6}, pytest.param({1, 2, 3, 4, 5, 6}, marks=pytest.mark.long)])
def test_a_bad_loss_and_the_good_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: set[int]) -> None:
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
    observer = run(tmp_path, train=training(lr=30.0, lr_schedule="constant"))
    told = [text for text in observer.messages if "running mean" in text]
    assert len(told) == 1
    assert told[0].startswith("step 2: the loss, ")
    assert "--checkpoint last-good" in told[0]
    assert tiny.kept(tmp_path) == ["good-000000"]


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
        there = list(list_checkpoints(self._store.root))
        made.append((name, there))
        return "no room" if there else real(self, name)

    monkeypatch.setattr(Retention, "checkpoint", checkpoint)
    observer = run(tmp_path)
    assert tiny.kept(tmp_path) == ["good-000005"]
    assert not observer.checkpoints
    assert ("good-000003", ["good-000002"]) in made


def test_a_checkpoint_that_is_being_read_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its deletion waits for the next time."""
    held, real = Locks(), checkpoints.write_checkpoint

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


@given(st.lists(st.floats(0.01, 20), min_size=1, max_size=40), st.floats(1.5, 10))
def test_the_loss_watch(losses: list[float], multiple: float) -> None:
    untrained = LossWatch(multiple, None)  # of steps without anything to train
    assert [untrained.is_good(loss) for loss in (0.0, 0.0, 5.0, 5.0)] == [True] * 4
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


def run_validated(
    folder: Path,
    stop_after: int | None = None,
    *,
    resume: bool = False,
    observer: tiny.Silent | None = None,
    **options: Any,
) -> Any:
    """Six steps, a validation after each, no generation but what the best and the end call for."""
    train = {"validate_every": 1, "validation_sequences": 2} | options.pop("train", {})
    storage = tiny.storage(**{"keep_best": True, "keep_good": None} | options.pop("storage", {}))
    sections = {"data": HELD_OUT, "train": training(**train), "storage": storage}
    observer = observer or tiny.Silent(stop_after)
    return observer, tiny.train_run(folder, observer, resume=resume, **sections, **options)


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> Losses:
    """Step -> the validation loss that is told in the place of the one that was measured."""
    told: dict[int, float] = {}
    real = validation.validate

    def validate(session: Session) -> ValidationMetrics:
        found = real(session)
        return dataclasses.replace(found, loss=told.get(found.step, found.loss))

    monkeypatch.setattr(validation, "validate", validate)
    return told


def told(losses: Losses, values: Sequence[float]) -> None:
    losses |= dict(enumerate(values, start=1))


def best_step(folder: Path) -> int | None:
    root = folder / "state"
    return read_checkpoint(root, resolve_checkpoint(root, "best")).step


@pytest.fixture(scope="module")
def after(tmp_path_factory: pytest.TempPathFactory) -> Digests:
    """Step -> digest of what a run of the same recipe without validations has then."""
    folder = tmp_path_factory.mktemp("straight")
    kept = tiny.storage(checkpoint_every=1, keep_last=6, keep_good=None)
    tiny.train_run(folder, tiny.Silent(), data=HELD_OUT, train=training(), storage=kept)
    return {step: checkpoint_digest(folder, f"step-{step:06}") for step in range(1, 7)}


def checkpoint_digest(folder: Path, name: str) -> str:
    with closing(NvmeStore.open(checkpoint_folder(folder / "state", name))) as kept:
        kept.verify()
        return tiny.digest(kept)


@pytest.mark.parametrize("every", cases([1000, 1, 2], 2))
def test_the_lowest_validation_loss_is_kept(tmp_path: Path, losses: Losses, after: Digests, every: int) -> None:
    """Whole, of that very step, and with no change to what is trained."""
    told(losses, [3.0, 2.0, 2.5, 1.5, 1.5, math.nan])
    observer, _ = run_validated(tmp_path / "run", storage={"checkpoint_every": every})
    assert tiny.kept(tmp_path / "run") == ["best-000004"]
    assert not observer.checkpoints
    assert checkpoint_digest(tmp_path / "run", "best-000004") == after[4]
    assert tiny.digest_of(tmp_path / "run") == after[6]
    export(tmp_path / "run", tiny.recipe(data=HELD_OUT), out_dir=tmp_path / "model", checkpoint="best-000004")
    assert (tmp_path / "model" / "config.json").exists()


def test_the_best_stands_beside_the_last_good_and_the_last_ones(tmp_path: Path, losses: Losses) -> None:
    """It may be the model that the run begins with."""
    losses |= dict.fromkeys(range(7), 9.0) | {0: 1.0}
    kept = {"checkpoint_every": 1, "keep_good": 100.0, "keep_last": 2}
    run_validated(tmp_path, train={"validate_first": True}, storage=kept)
    assert set(tiny.kept(tmp_path)) == {"best-000000", "good-000005", "step-000005", "step-000006"}


def test_one_whose_loss_no_generation_tells_is_measured_again(tmp_path: Path, losses: Losses) -> None:
    """The last step of a run that is made longer: it is not due any more, and still the one to beat."""
    told(losses, [9.0, 9.0, 2.0, 9.0, 5.0, 3.0])
    run_validated(tmp_path, train={"steps": 3, "validate_every": 2})
    assert best_step(tmp_path) == 3
    observer, _ = run_validated(tmp_path, resume=True, train={"validate_every": 2})
    assert [v.step for v in observer.validations] == [3, 4, 6]
    assert best_step(tmp_path) == 3


def test_a_run_that_goes_back_says_that_the_best_is_repeated(tmp_path: Path, losses: Losses) -> None:
    told(losses, [3.0, 2.5, 9.0, 2.0, 9.0, 9.0])
    every = {"keep_every": 1, "checkpoint_every": 1}
    run_validated(tmp_path, storage=every)
    told(losses, [3.0, 2.5, 2.4, 9.0, 9.0, 9.0])
    observer, _ = run_validated(tmp_path, resume=True, checkpoint="step-000002", storage=every)
    assert any("best-000004 is of a step that is being repeated" in text for text in observer.messages)
    assert best_step(tmp_path) == 3
    assert sum(name.startswith("best-") for name in tiny.kept(tmp_path)) == 1


def test_a_damaged_best_is_said(tmp_path: Path, losses: Losses) -> None:
    told(losses, [3.0, 2.5, 9.0, 9.0, 9.0, 9.0])
    run_validated(tmp_path, stop_after=4)
    (tmp_path / "state/checkpoints/best-000002/manifest.json").write_text("{")
    observer, result = run_validated(tmp_path, resume=True)
    assert result.steps == 6
    assert any("the checkpoint best cannot be read: " in text for text in observer.messages)


def test_no_room_for_the_best_is_said(tmp_path: Path, losses: Losses, monkeypatch: pytest.MonkeyPatch) -> None:
    told(losses, [3.0, 2.0, 9.0, 9.0, 9.0, 9.0])
    monkeypatch.setattr(Retention, "checkpoint", lambda self, name: "no room")
    observer, result = run_validated(tmp_path)
    assert observer.checkpoints == [("best", 1, "no room"), ("best", 2, "no room")]
    assert result.steps == 6
    with pytest.raises(UserError, match=r"has no best checkpoint: no generation was kept .*storage\.keep_best"):
        resolve_checkpoint(tmp_path / "state", "best")
    with pytest.raises(UserError, match="has no last-good checkpoint"):  # nor is there one: keep_good is None
        resolve_checkpoint(tmp_path / "state", "last-good")


def test_a_run_without_a_lower_loss_ends_committed(tmp_path: Path, losses: Losses, after: Digests) -> None:
    told(losses, [3.0, 2.0, 2.5, 2.0])
    observer, result = run_validated(tmp_path, train={"early_stopping_patience": 2})
    parts = observer.plan["tiers"]["nvme"]["parts"]
    assert parts["kept generations"] * 2 == parts["state, two generations"], "room for the best is planned"
    assert result.steps == result.steps_done == 4
    assert not result.stopped
    assert result.early_end == EarlyEnd(2, 2.0, 2)
    assert observer.messages[-1] == "ended early after step 4: no gain in 2 validations; best 2 at step 2"
    assert [v.step for v in observer.validations] == [1, 2, 3, 4]
    assert Manifest.read(tmp_path / "state").step == 4
    assert tiny.digest_of(tmp_path) == after[4]
    assert best_step(tmp_path) == 2


@pytest.mark.parametrize("stop_after", cases([1, 2, 3], 3))
def test_the_best_and_patience_survive_a_stop(tmp_path: Path, losses: Losses, after: Digests, stop_after: int) -> None:
    told(losses, [3.0, 2.0, 2.5, 2.2, 2.1])
    run_validated(tmp_path, stop_after, train={"early_stopping_patience": 3})
    _, result = run_validated(tmp_path, resume=True, train={"early_stopping_patience": 3})
    assert (result.steps, result.early_end) == (5, EarlyEnd(3, 2.0, 2))
    assert tiny.kept(tmp_path) == ["best-000002"]
    assert checkpoint_digest(tmp_path, "best-000002") == after[2]


def test_more_patience_goes_on_to_a_straight_runs_bits(tmp_path: Path, losses: Losses, after: Digests) -> None:
    told(losses, [3.0, 4.0, 4.0, 2.0, 4.0, 4.0])
    run_validated(tmp_path, train={"early_stopping_patience": 2})
    _, again = run_validated(tmp_path, resume=True, train={"early_stopping_patience": 2})
    assert (again.steps, again.steps_done, again.early_end) == (3, 0, EarlyEnd(2, 3.0, 1))
    _, result = run_validated(tmp_path, resume=True, train={"early_stopping_patience": 3})
    assert (result.steps, result.early_end, result.stopped) == (6, None, False), "the last step is no early end"
    assert best_step(tmp_path) == 4
    assert tiny.digest_of(tmp_path) == after[6]


@given(
    st.lists(st.sampled_from([1.0, 2.0, 3.0, math.nan, math.inf]), min_size=1, max_size=12),
    st.integers(1, 4),
    st.booleans(),
)
def test_gains(losses: list[float], patience: int, rises: bool) -> None:
    """As a record of it, taken up again after every loss, finds them. Rewards, which rise, are losses turned around."""
    gains, sign = Gains(), -1.0 if rises else 1.0
    for step, loss in enumerate(losses):
        gains = Gains.of(gains.to_json())
        finite = [value for value in losses[:step] if math.isfinite(value)]
        better = math.isfinite(loss) and all(loss < value for value in finite)
        assert gains.take(step, sign * loss, 100, rises=rises) == better
        finite = [value for value in losses[: step + 1] if math.isfinite(value)]
        assert gains.best == (sign * min(finite) if finite else None)
        since = step + 1 if gains.best is None else step - losses.index(sign * gains.best)
        assert gains.without == since
        assert (gains.exhausted(patience) is not None) == (since >= patience)
        assert gains.exhausted(None) is None
    assert gains.take(50, 99.0, 101), "measured on other tokens"
    strings = {"best": "x", "best_step": 1, "without": 0, "tokens": 1}
    for record in (None, 3, {}, strings, {"best": 1.0, "best_step": None}):
        assert Gains.of(record) == Gains(), "a record of something else"


def uploading(folder: Path, observer: tiny.Silent, **storage: Any) -> Any:
    return tiny.train_run(folder, observer, train=training(), storage=tiny.storage(**storage))


def entries(place: Path) -> list[int]:
    """Steps of what is whole at a place."""
    return [entry["step"] for entry in json.loads((place / "penstock.json").read_text())["entries"]]


def test_every_so_many_steps_and_the_last_one(tmp_path: Path) -> None:
    place, observer = tmp_path / "place", tiny.Silent()
    offsite = {"offsite": str(place), "offsite_every": 4, "offsite_keep": 9}
    result = uploading(tmp_path / "run", observer, **offsite)
    assert entries(place) in ([4, 6], [6]), "the last step is there, whatever was on its way"
    assert [message for message in observer.messages if f"step 6 is at {place}: " in message]
    assert tiny.kept(tmp_path / "run") == ["good-000004"], "committed for the upload, and good"
    tier = result.tiers["nvme"]
    assert observer.plan["tiers"]["nvme"]["peak_bytes"] >= tier["peak_bytes"]
    assert observer.plan["tiers"]["ram"]["parts"]["uploads"] == mover_bytes(20480)


def test_one_at_a_time_and_the_newest_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload that takes longer than the steps after it: told once, never two generations aside."""
    place, most, trained, begins = tmp_path / "place", 0, threading.Event(), Uploads._begins

    class Counts(tiny.Silent):
        def on_step(self, metrics: StepMetrics) -> None:
            nonlocal most
            names = checkpoint_names(tmp_path / "run" / "state")
            most = max(most, sum(name.startswith("offsite-") for name in names))
            super().on_step(metrics)
            if metrics.step == 6:
                trained.set()

    def slow(self: Uploads, total: int) -> None:
        begins(self, total)
        assert trained.wait(300)

    monkeypatch.setattr(Uploads, "_begins", slow)
    observer = Counts()
    offsite = {"offsite": str(place), "offsite_every": 1, "offsite_bandwidth": "2GiB"}
    uploading(tmp_path / "run", observer, keep_good=None, **offsite)
    said = [message for message in observer.messages if "is due for upload, but the upload of step" in message]
    assert len(said) == 1
    assert most == 1
    assert entries(place)[-1] == 6
    assert len(entries(place)) == 2
    assert not any(name.startswith("offsite-") for name in checkpoint_names(tmp_path / "run" / "state"))


def test_a_late_commit_of_the_step_before_is_not_uploaded_as_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lane commits it while the run's end is already wanted."""
    ends, commit, finish = threading.Event(), NvmeStore.commit, Session.finish

    def late(self: NvmeStore, meta: dict[str, Any]) -> int:
        assert meta["step"] != 5 or ends.wait(300)
        return commit(self, meta)

    def end(self: Session) -> None:
        threading.Timer(0.2, ends.set).start()
        finish(self)

    monkeypatch.setattr(NvmeStore, "commit", late)
    monkeypatch.setattr(Session, "finish", end)
    offsite = {"offsite": str(tmp_path / "place"), "offsite_every": 100, "offsite_keep": 9}
    uploading(tmp_path / "run", tiny.Silent(), checkpoint_every=1, **offsite)
    assert entries(tmp_path / "place") == [6]


@pytest.mark.parametrize("paused", [False, True])
def test_the_generation_with_which_a_run_ends_early_is_uploaded(tmp_path: Path, losses: Losses, paused: bool) -> None:
    """Also where a pause has committed it before it was known to be the last."""
    told(losses, [3.0, 2.0, 2.5, 2.0])
    offsite = {"offsite": str(tmp_path / "place"), "offsite_every": 100, "offsite_keep": 9}
    observer = Pausing(4 if paused else None)
    train = {"early_stopping_patience": 2}
    run = tmp_path / "run"
    for resume in (False, True):
        _, result = run_validated(run, train=train, storage=offsite, observer=observer, resume=resume)
        assert result.steps == 4
        assert entries(tmp_path / "place") == [4], "once"
    assert observer.paused == ([True, False] if paused else [])


class Pausing(tiny.Silent):
    """Pauses once after a step."""

    def __init__(self, step: int | None) -> None:
        super().__init__()
        self._step = step
        self.paused: list[bool] = []

    def wanted(self) -> Want:
        return "pause" if len(self.metrics) == self._step and not self.paused else super().wanted()

    def on_pause(self, paused: bool) -> None:
        self.paused.append(paused)


def test_the_plan_counts_what_an_upload_takes(tmp_path: Path) -> None:
    storage = tiny.storage(offsite=str(tmp_path / "place"))
    assert retained_generations(tiny.recipe(storage=storage)) == retained_generations(tiny.recipe()) + 1
    with pytest.raises(BudgetError, match=r"budgets\.ram: .* uploads \(storage\.offsite\) 96\.2 MiB"):
        tiny.train_run(tmp_path, tiny.Silent(), storage=storage, budgets=tiny.BudgetConfig(gpu="64MiB", ram="64MiB"))


def test_links_and_odd_names_are_not_uploaded(tmp_path: Path) -> None:
    data = tmp_path / "run" / "data"
    data.mkdir(parents=True)
    (data / "tokens.bin").write_bytes(b"1")
    (data / ".hidden").write_bytes(b"1")
    (data / "a\nb").write_bytes(b"1")
    (data / "link").symlink_to("/etc/passwd")
    (tmp_path / "run" / "recipe.json").write_text("{}")
    assert set(run_files(tmp_path / "run", tiny.recipe())) == {"recipe.json", "data/tokens.bin"}
