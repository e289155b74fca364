"""A clone of the disk that a run directory lies on: every inode and the file system's UUID are those of the original.

The disks are images, mounted; the state lies on drives outside of them.
"""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from disk_images import Disks, mounted_disks
from nvme_state import advance, assert_holds, assert_whole, make

from penstock.storage.files.errors import UserError
from penstock.storage.generations.checkpoints import delete_checkpoint, list_checkpoints
from penstock.storage.generations.copying import copy_state
from penstock.storage.generations.store import NvmeStore
from penstock.storage.generations.tidy import remove_store
from penstock.storage.tier.filesystem import filesystem_id

IN_MEMORY = True


@pytest.fixture
def disks(tmp_path: Path) -> Iterator[Disks]:
    with mounted_disks(tmp_path) as found:
        yield found


@pytest.fixture
def drives(tmp_path: Path) -> list[Path]:
    return [tmp_path / "a", tmp_path / "b"]


@pytest.fixture
def run(tmp_path: Path, disks: Disks, drives: list[Path]) -> Path:
    """Generation 3 and checkpoint "two" of a run on disk `disk`."""
    root = tmp_path / "disk/runs/run/state"
    with closing(make(root, 1, 2, drives=drives)) as store:
        store.checkpoint("two")
        advance(store, 3)
    return root


def contents(*folders: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file()}


def assert_kept_out(copy: Path, original: Path, drives: list[Path], said: str) -> None:
    """Nothing that is done to the copy touches the original's drives, and the copy can have its own state."""
    before = contents(*drives)
    for given in (None, drives):
        with pytest.raises(UserError, match=said + r".*--copy-state.*Nothing was changed"):
            NvmeStore.open(copy, drives=given)
    with closing(NvmeStore.open(copy, read_only=True)) as store:
        assert_holds(store, 3)
    spare = shutil.copytree(copy.parent, copy.parent.with_name("spare")) / copy.name
    delete_checkpoint(spare, "two")
    remove_store(spare, drives)
    assert contents(*drives) == before
    own = copy.parent / "own"
    assert copy_state(copy, [own]) > 0
    with closing(NvmeStore.open(copy, drives=[own])) as store:
        advance(store, 14, 15)
        store.restore("two")
        assert_holds(store, 2)
    delete_checkpoint(copy, "two")
    remove_store(copy, drives)
    assert contents(*drives) == before
    with closing(NvmeStore.open(original)) as store:
        assert_holds(store, 3)
        store.verify()
        store.restore("two")
        advance(store, 4)
    assert_whole(original, 4)
    delete_checkpoint(original, "two")
    assert not list(drives[0].glob("checkpoints/*"))


@pytest.mark.parametrize("first", ["copy", "original"])
def test_a_clone_of_the_disk_is_kept_out(
    tmp_path: Path, disks: Disks, run: Path, drives: list[Path], first: str
) -> None:
    disks.clone("original", "cloned")
    copy = disks.mount("cloned", "clone") / "runs/run/state"
    assert (copy.stat().st_ino, filesystem_id(copy)) == (run.stat().st_ino, filesystem_id(run))
    if first == "original":
        assert_whole(run, 3)
    assert_kept_out(copy, run, drives, f"{copy}: is a copy of {run}, which still exists and owns")


def test_a_clone_in_the_original_s_place(disks: Disks, run: Path, drives: list[Path]) -> None:
    """As after the home has moved to a new disk and the old one is mounted elsewhere: the place counts."""
    disks.clone("original", "cloned")
    disks.unmount(run.parents[2])
    old = disks.mount("original", "old") / "runs/run/state"
    assert disks.mount("cloned", "disk") == run.parents[2]
    assert_kept_out(old, run, drives, f"{old}: is a copy of {run}, which still exists and owns")


def test_only_one_of_original_and_clone_is_mounted(tmp_path: Path, disks: Disks, run: Path, drives: list[Path]) -> None:
    """The one that trains on is the run: nobody can tell whether it was the first. The other is told so."""
    disks.clone("original", "cloned")
    disks.unmount(run.parents[2])
    copy = disks.mount("cloned", "clone") / "runs/run/state"
    with closing(NvmeStore.open(copy)) as store:
        assert any(f"{copy}: was moved here from {run}; its state on" in said for said in store.warnings)
        advance(store, 4)
    disks.mount("original", "disk")
    before = contents(*drives)
    with pytest.raises(UserError, match=f"{run}: is a copy of {copy}, which still exists and owns"):
        NvmeStore.open(run)
    delete_checkpoint(run, "two")
    disks.unmount(copy.parents[2])
    with pytest.raises(UserError, match=r"holds generation 3 \(step 3\), but the drive .* generation 4 \(step 4\)"):
        NvmeStore.open(run)
    assert contents(*drives) == before
    disks.mount("cloned", "clone")
    assert_whole(copy, 4)


@pytest.mark.parametrize("to", ["runs/renamed", "elsewhere/run"])
def test_a_clone_whose_original_was_renamed(disks: Disks, run: Path, drives: list[Path], to: str) -> None:
    """Before the drives know its new place."""
    disks.clone("original", "cloned")
    renamed = run.parents[2] / to / "state"
    renamed.parent.parent.mkdir(exist_ok=True)
    run.parent.rename(renamed.parent)
    copy = disks.mount("cloned", "clone") / "runs/run/state"
    said = f"{copy}: is a copy of {renamed}" if to == "runs/renamed" else f"{copy}: lies on a copy of the file system"
    assert_kept_out(copy, renamed, drives, said)


@pytest.mark.parametrize("is_renamed", [False, True])
def test_a_clone_with_its_own_state_goes_on(disks: Disks, tmp_path: Path, is_renamed: bool) -> None:
    """The state lies in the run directory, of which there are two that know nothing of each other."""
    run = tmp_path / "disk/runs/run/state"
    with closing(make(run, 1, 2)) as store:
        store.checkpoint("two")
    disks.clone("original", "cloned")
    copy = disks.mount("cloned", "clone") / "runs/run/state"
    if is_renamed:
        run = run.parent.rename(run.parent.with_name("renamed")) / "state"
    assert_apart(run, copy, None)


@pytest.mark.parametrize("place", ["same disk", "second disk"])
def test_a_clone_goes_on_with_a_clone_of_the_drives(disks: Disks, tmp_path: Path, place: str) -> None:
    run = tmp_path / "disk/runs/run/state"
    top, disk = tmp_path / "disk", "original"
    if place == "second disk":
        disks.make("second")
        top, disk = disks.mount("second", "fast"), "second"
    with closing(make(run, 1, 2, drives=[top / "run"])) as store:
        store.checkpoint("two")
    for image in dict.fromkeys(["original", disk]):
        disks.clone(image, f"{image} cloned")
    copy = disks.mount("original cloned", "clone") / "runs/run/state"
    cloned = tmp_path / "clone" if disk == "original" else disks.mount("second cloned", "fast clone")
    with pytest.raises(UserError, match=f"{copy}: is a copy of {run}, .* drives that hold a copy"):
        NvmeStore.open(copy)
    assert_apart(run, copy, [cloned / "run"])


def assert_apart(run: Path, copy: Path, drives: list[Path] | None) -> None:
    """Both go on, and neither sees the other."""
    with closing(NvmeStore.open(copy, drives=drives)) as store:
        advance(store, 13)
    delete_checkpoint(copy, "two")
    assert_whole(run, 2)
    with closing(NvmeStore.open(run)) as store:
        advance(store, 3)
        store.restore("two")
        assert_holds(store, 2)
        advance(store, 4)
    assert_whole(copy, 13)
    assert_whole(run, 4)


def test_a_disk_that_is_mounted_elsewhere(disks: Disks, run: Path, drives: list[Path]) -> None:
    disks.unmount(run.parents[2])
    moved = disks.mount("original", "elsewhere") / "runs/run/state"
    with closing(NvmeStore.open(moved)) as store:
        assert any(f"{moved}: was moved here from {run}" in said for said in store.warnings)
        store.restore("two")
        advance(store, 4)
    delete_checkpoint(moved, "two")
    assert not list(drives[0].glob("checkpoints/*"))
    assert_whole(moved, 4)


def cp(source: Path, to: Path) -> None:
    subprocess.run(["cp", "-a", source, to], check=True)


def rsync(source: Path, to: Path) -> None:
    if shutil.which("rsync") is None:
        pytest.skip("no rsync here")
    subprocess.run(["rsync", "-aHAX", f"{source}/", f"{to}/"], check=True)


def tar(source: Path, to: Path) -> None:
    to.mkdir()
    subprocess.run(f"tar -C '{source}' -c . | tar -C '{to}' -x", shell=True, check=True)


@pytest.mark.parametrize("way", [cp, rsync, tar])
@pytest.mark.parametrize("place", ["beside", "new disk"])
def test_a_copy_is_kept_out(
    disks: Disks, run: Path, drives: list[Path], way: Callable[[Path, Path], None], place: str
) -> None:
    """On a new disk the copy may have the original's inode by chance."""
    top = run.parents[1]
    if place == "new disk":
        disks.make("second")
        top = disks.mount("second", "new") / "runs"
        top.mkdir()
    way(run.parent, top / "copy")
    copy = top / "copy/state"
    assert_kept_out(copy, run, drives, f"{copy}: is a copy of {run}, which still exists and owns")


def test_a_home_that_moved_to_a_new_disk(disks: Disks, run: Path, drives: list[Path]) -> None:
    """Its files have other inodes there, and the old disk is still mounted."""
    disks.make("second")
    new = disks.mount("second", "new")
    cp(run.parents[1], new)
    disks.unmount(new, run.parents[2])
    disks.mount("second", "disk")
    old = disks.mount("original", "old") / "runs/run/state"
    assert_kept_out(old, run, drives, f"{old}: is a copy of {run}, which still exists and owns")


@pytest.mark.parametrize("place", ["over it", "beside it"])
def test_a_backup_that_is_older_than_the_drives(disks: Disks, run: Path, drives: list[Path], place: str) -> None:
    """It lists a checkpoint of whose name there is another one meanwhile."""
    backup = run.parents[1] / "backup"
    cp(run.parent, backup)
    with closing(NvmeStore.open(run)) as store:
        delete_checkpoint(run, "two")
        advance(store, 4)
        store.checkpoint("two")
        advance(store, 5)
    newest = (run / "manifest.json").read_bytes()
    if place == "over it":
        shutil.rmtree(run.parent)
        backup.rename(run.parent)
        backup = run.parent
    root, before = backup / "state", contents(*drives)
    said = "holds generation 3" if place == "over it" else f"{root}: is a copy of {run}"
    with pytest.raises(UserError, match=said + ".*Nothing was changed"):
        NvmeStore.open(root)
    delete_checkpoint(root, "two")
    assert contents(*drives) == before
    assert list_checkpoints(root) == {}
    if place == "over it":
        (run / "manifest.json").write_bytes(newest)  # what the message says
        (run / "checkpoints/two").mkdir()
        shutil.copy(drives[0] / "checkpoints/two/manifest.backup.json", run / "checkpoints/two/manifest.json")
    with closing(NvmeStore.open(run)) as store:
        assert_holds(store, 5)
        store.restore("two")
        assert_holds(store, 4)
