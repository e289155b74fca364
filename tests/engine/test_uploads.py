"""Uploads beside a run: due, waiting for one another, limited, counted by the plan; to a folder of another disk."""

import json
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import tiny

from penstock.engine.events import StepMetrics
from penstock.engine.forecast.problem import kept_generations
from penstock.engine.run_files import run_files
from penstock.engine.uploads import Uploads
from penstock.storage.checkpoints import checkpoint_names
from penstock.storage.errors import BudgetError, UserError
from penstock.storage.nvme import NvmeStore
from penstock.storage.offsite_place import mover_bytes


def run(folder: Path, observer: tiny.Silent, *, resume: bool = False, **storage: Any) -> Any:
    """Six steps that take little time."""
    train = tiny.training(steps=6, global_batch_size=1, chunk_tokens=48)
    return tiny.train_run(folder, observer, resume=resume, train=train, storage=tiny.storage(**storage))


def entries(place: Path) -> list[int]:
    """Steps of what is whole at a place."""
    return [entry["step"] for entry in json.loads((place / "penstock.json").read_text())["entries"]]


def test_every_so_many_steps_and_the_last_one(tmp_path: Path) -> None:
    place, observer = tmp_path / "place", tiny.Silent()
    offsite = {"offsite": str(place), "offsite_every": 4, "offsite_keep": 9}
    result = run(tmp_path / "run", observer, **offsite)
    assert entries(place) in ([4, 6], [6]), "the last step is there, whatever was on its way"
    assert [message for message in observer.messages if f"step 6 is at {place}: " in message]
    assert tiny.kept(tmp_path / "run") == ["good-000004"], "committed for the upload, and good"
    tier = result.tiers["nvme"]
    assert observer.plan["tiers"]["nvme"]["peak_bytes"] >= tier["peak_bytes"]
    assert observer.plan["tiers"]["ram"]["parts"]["uploads"] == mover_bytes(20480)
    plain = run(tmp_path / "plain", tiny.Silent())
    assert tiny.digest_of(tmp_path / "run") == tiny.digest_of(tmp_path / "plain")
    assert plain.last_loss == result.last_loss


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
    run(tmp_path / "run", observer, keep_good=None, **offsite)
    said = [message for message in observer.messages if "is due for upload, but the upload of step" in message]
    assert len(said) == 1
    assert most == 1
    assert entries(place)[-1] == 6
    assert len(entries(place)) == 2
    assert not any(name.startswith("offsite-") for name in checkpoint_names(tmp_path / "run" / "state"))


@pytest.mark.long
def test_what_an_ended_process_left_is_sent_when_the_run_goes_on(tmp_path: Path) -> None:
    offsite = {"offsite": str(tmp_path / "place"), "offsite_every": 100}
    run(tmp_path / "run", tiny.Silent(stop_after=2), **offsite)
    assert not (tmp_path / "place" / "shared" / "files").exists()
    with closing(NvmeStore.open(tmp_path / "run" / "state")) as store:
        store.checkpoint("offsite-000001")
    observer = tiny.Silent(stop_after=1)
    run(tmp_path / "run", observer, resume=True, **offsite)
    assert entries(tmp_path / "place") == [2]
    assert not any(name.startswith("offsite-") for name in tiny.kept(tmp_path / "run"))


def test_another_run_at_the_place_is_found_before_the_first_step(tmp_path: Path) -> None:
    offsite = {"offsite": str(tmp_path / "place"), "offsite_every": 2}
    run(tmp_path / "run", tiny.Silent(stop_after=2), **offsite)
    before = {path: path.read_bytes() for path in (tmp_path / "place").rglob("*") if path.is_file()}
    with pytest.raises(UserError, match="holds run 'tiny'"):
        run(tmp_path / "other", tiny.Silent(), **offsite)
    assert not (tmp_path / "other").exists(), "nothing was prepared"
    assert before == {path: path.read_bytes() for path in (tmp_path / "place").rglob("*") if path.is_file()}


def test_the_plan_counts_what_an_upload_takes(tmp_path: Path) -> None:
    storage = tiny.storage(offsite=str(tmp_path / "place"))
    assert kept_generations(tiny.recipe(storage=storage)) == kept_generations(tiny.recipe()) + 1
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
