"""Commands on a run whose disk was cloned: original and clone are mounted, and name one folder on a drive."""

import os
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from cli_process import refusal
from disk_images import mounted_disks
from nvme_state import advance, assert_holds, assert_whole, make

from penstock.app.cli.main import main
from penstock.app.recipes.recipe import to_json
from penstock.app.runs.checkpoints import copy_state_of, make_checkpoint
from penstock.app.runs.directory import RunDir
from penstock.engine.config import DataConfig, ModelConfig, Recipe, StorageConfig
from penstock.storage.generations.checkpoints import checkpoint_names
from penstock.storage.generations.store import NvmeStore


@pytest.fixture
def place(tmp_path: Path) -> Iterator[tuple[Path, Path, Path]]:
    """The run, its clone, and the drive that both name; the run has made checkpoint "two" of generation 2."""
    with mounted_disks(tmp_path) as disks:
        run, drive = tmp_path / "disk/runs/run", tmp_path / "nvme/run"
        data = DataConfig(source="random", sequence_length=8)
        recipe = Recipe(name="x", model=ModelConfig(vocab_size=300), data=data)
        recipe.storage = StorageConfig(nvme=[str(drive.parent)])
        run.mkdir(parents=True)
        (run / "recipe.json").write_text(to_json(recipe))
        (run / "metrics.jsonl").touch()
        with closing(make(run / "state", 1, 2, drives=[drive])) as store:
            store.checkpoint("two")
            advance(store, 3)
        disks.clone("original", "cloned")
        yield run, disks.mount("cloned", "clone") / "runs/run", drive


def test_commands_on_a_clone(place: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    run, clone, drive = place
    before = contents(drive)
    said = f"{clone}/state: is a copy of {run}/state, which still exists and owns the state on {drive}"
    assert said in refusal(capsys, "resume", str(clone))
    assert said in refusal(capsys, "checkpoint", str(clone), "three")
    assert "holds the state of the run that this one was copied from" in refusal(
        capsys, "resume", str(clone), "--copy-state"
    )
    assert main(["checkpoint", str(clone), "two", "--delete"]) == 0
    assert checkpoint_names(clone / "state") == []
    with RunDir.open(clone) as opened:
        opened.discard()
    assert not (clone / "state").exists()
    assert contents(drive) == before
    make_checkpoint(run, "three")
    assert checkpoint_names(run / "state") == ["three", "two"]
    with closing(NvmeStore.open(run / "state")) as store:
        store.restore("two")
        assert_holds(store, 2)
        advance(store, 4)
    assert_whole(run / "state", 4)


def test_a_renamed_clone_takes_a_state_of_its_own(place: tuple[Path, Path, Path]) -> None:
    """It has the inode of the original, as a renamed original would."""
    run, clone, drive = place
    renamed = clone.rename(clone.with_name("second"))
    with RunDir.open(renamed) as opened:
        assert "bytes of state copied to" in copy_state_of(opened)
        assert "already has its own copy" in copy_state_of(opened)
    own = drive.with_name("second")
    before = contents(drive)
    with closing(NvmeStore.open(renamed / "state", drives=[own])) as store:
        advance(store, 14)
    assert main(["checkpoint", str(renamed), "two", "--delete"]) == 0
    assert contents(drive) == before
    assert_whole(run / "state", 3)
    shutil.rmtree(own)
    assert_whole(run / "state", 3)


def contents(folder: Path) -> dict[str, bytes]:
    return {os.fspath(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
