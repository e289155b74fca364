"""A run directory from somebody else, whose state holds links, pipes and folders of others: nothing follows them."""

from __future__ import annotations

import contextlib
import shutil
from contextlib import closing
from pathlib import Path

import pytest
from nvme_state import assert_holds, assert_whole, make
from obstacles import plant

from penstock.storage.checkpoints import delete_checkpoint
from penstock.storage.errors import UserError
from penstock.storage.nvme import NvmeStore

IN_MEMORY = True
PLACES = [
    "layers.0",
    "layers.0/master",
    "layers.0/master/0",
    "layers.0/master/0/c.0.0",
    "layers.0/master/1/c.1.0",
    "layers.0/weights/0/zarr.json",
    "checkpoints",
    "checkpoints/one",
    "checkpoints/one/layers.0/master",
    "scratch",
    "drive.json",
]


@pytest.fixture
def thesis(tmp_path: Path) -> Path:
    """A folder of the user's, which looks like part of a state."""
    folder = tmp_path / "thesis"
    for name in ("0", "1", "master/0", "one/layers.0/master/0", "spill"):
        (folder / name).mkdir(parents=True)
        (folder / name / "c.0.0").write_text("years of work")
        (folder / name / "drive.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Generation 2 of a state with a checkpoint; tests take a copy."""
    root = tmp_path_factory.mktemp("made") / "state"
    with closing(make(root, 1, 2)) as store:
        store.checkpoint("one")
    return root


@pytest.mark.parametrize("obstacle", ["link", "pipe"])
@pytest.mark.parametrize("place", PLACES)
def test_nothing_in_a_state_leads_elsewhere(
    tmp_path: Path, made: Path, thesis: Path, place: str, obstacle: str
) -> None:
    root = shutil.copytree(made, tmp_path / "state")
    path = root / place
    is_file = path.is_file()
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    plant(path, obstacle, thesis / "0/c.0.0" if is_file else thesis)
    before = {file: file.read_bytes() for file in thesis.rglob("*") if file.is_file()}
    with pytest.raises(UserError, match=rf"{path}|{root}"):
        NvmeStore.open(root)
    with contextlib.suppress(UserError):  # it may go where nothing of it leads elsewhere
        delete_checkpoint(root, "one")
    with contextlib.suppress(UserError), closing(NvmeStore.open(root, read_only=True)) as store:
        store.verify()
        assert_holds(store, 2)
    assert {file: file.read_bytes() for file in thesis.rglob("*") if file.is_file()} == before
    path.unlink()


def test_a_checkpoint_that_is_another_runs(tmp_path: Path) -> None:
    """A link in the place of a checkpoint's folder: deleting it would delete the other run's."""
    for name in ("mine", "other"):
        with closing(make(tmp_path / name, 1)) as store:
            store.checkpoint("one")
    shutil.rmtree(tmp_path / "mine/checkpoints/one")
    (tmp_path / "mine/checkpoints/one").symlink_to(tmp_path / "other/checkpoints/one")
    with pytest.raises(UserError, match="mine/checkpoints/one: is a link, which a state never contains"):
        delete_checkpoint(tmp_path / "mine", "one")
    assert_whole(tmp_path / "other/checkpoints/one", 1)
