"""A run goes on with other budgets, drives or tiers than it was saved with, and back from its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny

from penstock.engine.machine import budgets
from penstock.engine.session import require_record
from penstock.engine.train import train_step
from penstock.storage.disk import publish
from penstock.storage.errors import UserError
from penstock.storage.manifest import FILE_NAME, Manifest
from penstock.storage.nvme import NvmeStore
from penstock.storage.retention import automatic_name


def training(**changes: Any) -> tiny.TrainConfig:
    """Steps that take little time."""
    return tiny.training(**{"steps": 3, "global_batch_size": 1, "chunk_tokens": 48} | changes)


QUICK = training(steps=6)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of four steps without interruption."""
    with tiny.session(tmp_path_factory.mktemp("straight"), t=QUICK) as session:
        tiny.steps(session, 4)
        return tiny.digest(session.store)


@pytest.mark.parametrize("start", range(len(tiny.TIERS)))
@pytest.mark.parametrize("away", [1, *(pytest.param(number, marks=pytest.mark.long) for number in (0, 2, 3))])
def test_other_budgets(tmp_path: Path, straight: str, start: int, away: int) -> None:
    """From every tier to the next, and to all others."""
    for step, place in ((0, start), (2, start + away)):
        gpu, ram = tiny.TIERS[place % len(tiny.TIERS)]
        with tiny.session(tmp_path, t=QUICK, gpu=gpu, ram=ram) as session:
            assert session.step == step
            tiny.steps(session, 2)
            found = tiny.digest(session.store)
    assert found == straight


def test_other_drives(tmp_path: Path, straight: str) -> None:
    """One drive, then two others, then one of these; a step on each."""
    drives = [[tmp_path / "a"], [tmp_path / "b", tmp_path / "c"], [tmp_path / "c"], [tmp_path / "c", tmp_path / "a"]]
    for folders in drives:
        with tiny.session(tmp_path, t=QUICK, gpu=tiny.FLOOR, ram=tiny.FLOOR, drives=folders) as session:
            tiny.steps(session, 1)
            moved = session.store.traffic()
            assert all(moved[folder].bytes_written > 0 for folder in folders)
            result = tiny.digest(session.store)
    assert result == straight
    left = [path for path in (tmp_path / "b").rglob("*") if path.is_file() and path.name.startswith("c.")]
    assert left == []


def test_two_drives_share_the_work_evenly(tmp_path: Path) -> None:
    drives = [tmp_path / "a", tmp_path / "b"]
    options = {"m": tiny.model(num_layers=8), "t": QUICK, "gpu": tiny.FLOOR, "ram": tiny.FLOOR}
    with tiny.session(tmp_path, drives=drives, **options) as session:
        tiny.steps(session, 1)
        first, second = (session.store.traffic()[drive] for drive in drives)
    for one, other in ((first.bytes_read, second.bytes_read), (first.bytes_written, second.bytes_written)):
        assert one > 0
        assert 0.9 < one / other < 1.1


def test_each_step_tells_what_it_moved(tmp_path: Path) -> None:
    with tiny.session(tmp_path, t=QUICK, gpu=tiny.FLOOR, ram=tiny.FLOOR) as session:
        root = str(session.store.root)
        metrics = [train_step(session) for _ in range(3)]
        before = session.store.traffic()[session.store.root].bytes_written
        numel = sum(buffer.numel for buffer in session.plan.buffers.values())
        session.finish()
    assert sum(m.nvme_written_bytes[root] for m in metrics) <= before
    # Twelve bytes of state, four of float32 weights, four of gradient; files round up to pages.
    assert metrics[1].nvme_written_bytes[root] >= 20 * numel * 0.9
    assert metrics[1].nvme_read_bytes[root] > 0


def test_generations_are_kept_as_the_recipe_says(tmp_path: Path) -> None:
    kept = tiny.storage(checkpoint_every=1, keep_last=2, keep_every=3, keep_good=None)
    tiny.train_run(tmp_path, tiny.Silent(), train=QUICK, storage=kept)
    assert tiny.kept(tmp_path) == [automatic_name(step) for step in (3, 5, 6)]
    with closing(NvmeStore.open(tmp_path / "state" / "checkpoints" / automatic_name(3))) as store:
        assert store.meta["step"] == 3
        store.verify()


def test_back_to_a_checkpoint_and_on_ends_in_the_same_bits(tmp_path: Path) -> None:
    """And one that cannot be made stops nothing."""
    observer = tiny.Silent(asks={2: "before-{step}", 4: "bad/name"})
    rarely: dict[str, Any] = {"train": QUICK, "storage": tiny.storage(checkpoint_every=100)}
    tiny.train_run(tmp_path, observer, **rarely)
    assert observer.checkpoints[0] == ("before-{step}", 2, None)
    ((name, step, error),) = observer.checkpoints[1:]
    assert (name, step) == ("bad/name", 4)
    assert "bad/name" in error
    expected = tiny.digest_of(tmp_path)
    again = tiny.Silent()
    tiny.train_run(tmp_path, again, resume=True, checkpoint="before-2", **rarely)
    assert [m.step for m in again.metrics] == [3, 4, 5, 6]
    assert [m.loss for m in again.metrics] == [m.loss for m in observer.metrics[2:]]
    assert tiny.digest_of(tmp_path) == expected


def test_what_a_resumed_run_cannot_change_is_named(stopped: Path) -> None:
    with pytest.raises(UserError, match=r"storage\.part_bytes: .*16KiB"):
        tiny.train_run(stopped, tiny.Silent(), resume=True, train=QUICK, storage=tiny.storage(part_bytes="8KiB"))
    with pytest.raises(UserError, match="another model"):
        tiny.train_run(stopped, tiny.Silent(), resume=True, train=QUICK, model=tiny.model(num_layers=4))
    with pytest.raises(UserError, match=r"has no checkpoint 'x'; it has good-00000\d"):
        tiny.train_run(stopped, tiny.Silent(), resume=True, train=QUICK, checkpoint="x")


def test_an_open_nvme_budget_is_what_the_drives_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a new run what is free, of a resumed one what it holds there as well: never what it holds alone."""
    free = 7 * 2**30
    monkeypatch.setattr(budgets, "free_disk", lambda place: free)
    new = tiny.train_run(tmp_path, tiny.Silent(stop_after=1), train=QUICK).tiers["nvme"]
    assert new["budget_bytes"] == free
    resumed = tiny.train_run(tmp_path, tiny.Silent(stop_after=0), resume=True, train=QUICK).tiers["nvme"]
    assert free + new["peak_bytes"] / 2 < resumed["budget_bytes"] < free + 2 * new["peak_bytes"]


def test_going_on_with_another_recipe_is_said(stopped: Path) -> None:
    generation, lr = Manifest.read(stopped / "state").generation, tiny.training().lr
    for changes, said in (
        ({"budgets": tiny.BudgetConfig(gpu="500MiB", ram="500MiB")}, []),
        ({"train": training(lr=1e-3)}, [f"train.lr was {lr} and is 0.001"]),
        ({"train": training(steps=9)}, ["train.steps was 3 and is 9"]),
    ):
        observer = tiny.Silent(stop_after=0)
        tiny.train_run(stopped, observer, resume=True, **THREE_STEPS | changes)
        begins = f"since generation {generation} the recipe has changed: "
        told = [text.removeprefix(begins) for text in observer.messages if "recipe has changed" in text]
        assert told == [f"{change}; going on with the present one" for change in said]


def test_the_manifest_says_where_a_generation_comes_from(stopped: Path) -> None:
    meta = Manifest.read(stopped / "state").meta
    assert meta["step"] == 2
    assert len(meta["recipe"]) == 64
    assert meta["rng"] == {"train.seed": 0, "data.seed": 0}
    assert set(meta["versions"]) == {"torch", "transformers", "python"}
    assert meta["cursor"]


THREE_STEPS: dict[str, Any] = {"train": training(), "storage": tiny.storage()}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopped")
    tiny.train_run(folder, tiny.Silent(stop_after=2), **THREE_STEPS)
    return folder


@pytest.mark.parametrize(
    "change",
    [
        {"step": None},
        {"step": -1},
        {"step": True},
        {"step": 2.0},
        {"step": 10**30},
        {"tokens": None},
        {"tokens": [1]},
        {"recipe": 7},
        {"cursor": []},
        {"plan": {"chunk_tokens": "16"}},
        {"plan": {"chunk_tokens": 16, "of_a_later_version": 1}},
        {"plan": {"chunk_tokens": 16, "stages": True}},
        {"plan": {"chunk_tokens": 16, "gpu_first": 3}},
        {"plan": {"chunk_tokens": 16, "compiled": "no"}},
    ],
    ids=str,
)
def test_a_record_that_makes_no_sense_is_one_message(stopped: Path, change: dict[str, Any]) -> None:
    """Its checksum is right: somebody made it, or a later version did."""
    with (
        recorded(stopped, change) as root,
        closing(NvmeStore.open(root)) as store,
        pytest.raises(UserError, match=r"does not record .*another version"),
    ):
        require_record(store)


@contextmanager
def recorded(run: Path, change: dict[str, Any]) -> Iterator[Path]:
    """The state of a run whose last generation's record is another meanwhile."""
    root = run / "state"
    current = Manifest.read(root)
    meta = {name: value for name, value in (current.meta | change).items() if value is not None}
    publish(replace(current, meta=meta).prepare(root), root / FILE_NAME)
    try:
        yield root
    finally:
        publish(current.prepare(root), root / FILE_NAME)


def test_a_run_does_not_go_on_from_such_a_record(stopped: Path) -> None:
    """But from the record as it was."""
    for change in ({"step": 10**30}, {"cursor": {"piece": -1}}):
        with recorded(stopped, change) as root:
            before = Manifest.read(root).meta
            with pytest.raises(UserError, match=r"does not record the run.s position|record of the generation"):
                tiny.train_run(stopped, tiny.Silent(), resume=True, **THREE_STEPS)
            assert Manifest.read(root).meta == before
    observer = tiny.Silent()
    tiny.train_run(stopped, observer, resume=True, **THREE_STEPS)
    assert [metrics.step for metrics in observer.metrics] == [3]
