"""Copies, moves and old backups of a run directory whose state lies on drives outside of it."""

import errno
import json
import os
import re
import shlex
import shutil
import subprocess
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from nvme_state import advance, assert_holds, assert_whole, committed_files, make, write_all
from samples import samples
from system_calls import before_calls

from penstock.storage.files.errors import UserError
from penstock.storage.generations.checkpoints import checkpoint_folder, delete_checkpoint, list_checkpoints
from penstock.storage.generations.copying import copy_state
from penstock.storage.generations.store import NvmeStore

IN_MEMORY = True
Tree = dict[str, tuple[int, int, int, bytes | None]]


def tree(*folders: Path, times: bool = False) -> Tree:
    """Every path below `folders` with its inode, mode, time of change (folders' only with `times`) and content."""
    found: Tree = {}
    for folder in folders:
        for path in (folder, *folder.rglob("*")):
            status = path.stat()
            content = path.read_bytes() if path.is_file() else None
            changed = 0 if content is None and not times else status.st_mtime_ns
            found[str(path)] = (status.st_ino, status.st_mode, changed, content)
    return found


def modes(found: Tree) -> dict[str, object]:
    """Without inodes and times."""
    return {path: (mode, content) for path, (_, mode, _, content) in found.items()}


@pytest.fixture
def drives(tmp_path: Path) -> list[Path]:
    return [tmp_path / "a", tmp_path / "b"]


@pytest.fixture
def run(tmp_path: Path, drives: list[Path]) -> Path:
    """Generation 2 of a run whose state is on the drives."""
    make(tmp_path / "run", 1, 2, drives=drives).close()
    return tmp_path / "run"


def test_a_copy_is_refused_and_the_original_untouched(tmp_path: Path, run: Path, drives: list[Path]) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    before = tree(run, copy, *drives)
    for given in (None, [tmp_path / "c"], drives):
        with pytest.raises(UserError, match=rf"{copy}: is a copy of {run}.*--copy-state.*storage\.nvme.*Nothing was"):
            NvmeStore.open(copy, drives=given)
        assert tree(run, copy, *drives) == before
        assert not (tmp_path / "c").exists()
    for drive in drives:  # each has a copy of the newest manifest
        shutil.copy(drive / "manifest.backup.json", run / "manifest.json")
        assert_whole(run, 2, generation=2)
    mounted = [drive.rename(tmp_path / f"mounted-{drive.name}") for drive in drives]
    with pytest.raises(UserError, match="is a copy of"):
        NvmeStore.open(copy, drives=mounted)
    assert_whole(run, 2, drives=mounted)


@pytest.mark.parametrize("place", ["run", "copy", "older copy", "checkpoint"])
def test_opening_for_reading_changes_nothing(tmp_path: Path, run: Path, drives: list[Path], place: str) -> None:
    older = shutil.copytree(run, tmp_path / "older")
    with closing(NvmeStore.open(run)) as store:
        store.checkpoint("two")
        advance(store, 3)
        store.checkpoint("three")
    (drives[0] / "scratch").mkdir()
    (drives[1] / "checkpoints/torn").mkdir()
    copy = shutil.copytree(run, tmp_path / "copy")
    root = {"run": run, "copy": copy, "older copy": older, "checkpoint": checkpoint_folder(run, "two")}[place]
    folders = (run, copy, older, *drives)
    before = tree(*folders, times=True)
    if place == "older copy":
        with pytest.raises(UserError, match=r"holds generation 2 \(step 2\), but the drive .* generation 3 \(step 3\)"):
            NvmeStore.open(root, read_only=True)
    else:
        with closing(NvmeStore.open(root, read_only=place != "checkpoint")) as store:  # which is only read in any case
            assert_holds(store, 2 if place == "checkpoint" else 3)
            store.verify()
            forbidden = ((write_all, store, 4), (store.commit, {}), (store.checkpoint, "x"), (store.restore, "two"))
            for act, *arguments in forbidden:
                with pytest.raises(AssertionError, match="opened for reading"):
                    act(*arguments)
    assert tree(*folders, times=True) == before


def test_a_move_is_recognised_and_said(tmp_path: Path, run: Path, drives: list[Path]) -> None:
    with closing(NvmeStore.open(run)) as store:
        store.checkpoint("two")
    moved = run.rename(tmp_path / "moved")
    for said in (True, False):
        with closing(NvmeStore.open(moved)) as store:
            assert any(f"{moved}: was moved here from {run}" in text for text in store.warnings) == said
            assert_holds(store, 2 if said else 3)
            advance(store, 3)
    delete_checkpoint(moved, "two")
    assert not list(drives[0].glob("checkpoints/*"))
    assert_whole(moved, 3)
    moved.rename(run)
    assert_whole(run, 3)
    run.rename(moved)  # a new run in its place is no aborted start
    before = tree(*drives)
    with pytest.raises(UserError, match="holds the state of another run"):
        make(run, drives=drives)
    assert tree(*drives) == before
    make(run, 1, 2, drives=[tmp_path / "c"]).close()
    assert_whole(moved, 3)
    assert_whole(run, 2)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_copy_is_not_taken_for_a_renamed_original(tmp_path: Path, drives: list[Path], swapped: bool) -> None:
    run, renamed = (tmp_path / "runs" / name / "state" for name in ("run", "renamed"))
    make(run, 1, 2, drives=drives).close()
    copy = shutil.copytree(run.parent, tmp_path / "runs/copy") / "state"
    run.parent.rename(renamed.parent)
    if swapped:
        copy.parent.rename(run.parent)
        copy = run
    before = tree(copy, renamed, *drives)
    with pytest.raises(UserError, match=rf"{copy}: is a copy of {renamed}"):
        NvmeStore.open(copy)
    assert tree(copy, renamed, *drives) == before
    assert_whole(renamed, 2)


def test_an_inode_alone_is_no_proof(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, run: Path, drives: list[Path]
) -> None:
    """What a clone of the disk sees (test_clones mounts some): the owner's inode is its own, on another file system."""
    copy = shutil.copytree(run, tmp_path_factory.mktemp("other") / "copy")
    if copy.stat().st_dev == run.stat().st_dev:
        pytest.skip("there is one file system here")
    for drive in drives:
        content = json.loads((drive / "drive.json").read_text())
        assert content["inode"] == run.stat().st_ino
        (drive / "drive.json").write_text(json.dumps(content | {"inode": copy.stat().st_ino, "filesystem": ""}))
    with pytest.raises(UserError, match=rf"{copy}: is a copy of {run}.*--copy-state"):
        NvmeStore.open(copy)
    assert_whole(run, 2)


NEWER = r"newer generation: (cp .*)\. Nothing"


def mend(pattern: str, message: str) -> None:
    """Type the command that a message names."""
    (command,) = re.findall(pattern, message, re.DOTALL)
    assert shlex.split(command)[0] in ("cp", "mkdir")
    subprocess.run(["sh", "-c", command], check=True, cwd="/")


def put_back(run: Path, backup: Path) -> None:
    shutil.rmtree(run)
    shutil.copytree(backup, run)


@pytest.mark.parametrize("name", ["it's a b", '$(touch pwned)"', "new\nline ümlaut 🚰", "-rf", "x" * 200])
def test_an_older_run_directory_put_back(tmp_path: Path, name: str) -> None:
    """What the messages say mends it, whatever the names."""
    run, drives = tmp_path / name / "state", [tmp_path / "drives" / name, tmp_path / "b"]
    make(run, 1, 2, drives=drives).close()
    backup = shutil.copytree(run, tmp_path / "backup")
    put_back(run, backup)
    assert_whole(run, 2)
    with closing(NvmeStore.open(run)) as store:
        advance(store, 3, 4)
        store.checkpoint("four")
        advance(store, 5)
    put_back(run, backup)
    before = tree(run, *drives)
    for read_only in (True, False):
        with pytest.raises(UserError, match=r"holds generation 2 \(step 2\), but the drive .*5 \(step 5\)") as caught:
            NvmeStore.open(run, read_only=read_only)
    assert tree(run, *drives) == before
    mend(NEWER, str(caught.value))
    with closing(NvmeStore.open(run)) as store:
        assert_holds(store, 5)
        said = [text for text in store.warnings if "a checkpoint that" in text]
    assert len(said) == len(drives)
    mend(r"To list it: (mkdir .*); to drop", said[0])
    with closing(NvmeStore.open(run)) as store:
        assert list(list_checkpoints(run)) == ["four"]
        assert not [text for text in store.warnings if "a checkpoint that" in text]
        store.restore("four")
        assert_holds(store, 4)


def test_an_older_run_directory_put_back_after_a_drive_was_given_up(tmp_path: Path, run: Path, drives: Any) -> None:
    backup = shutil.copytree(run, tmp_path / "backup")
    with closing(NvmeStore.open(run, drives=[tmp_path / "new", drives[1]])) as store:
        advance(store, 3)
    assert not (drives[0] / "drive.json").exists()
    put_back(run, backup)
    with pytest.raises(UserError, match=r"holds generation 2 \(step 2\), but the drive .*3 \(step 3\)") as caught:
        NvmeStore.open(run, drives=drives)
    mend(NEWER, str(caught.value))
    assert_whole(run, 3, drives=drives)


def test_two_copies_of_an_owner_that_has_gone_leave_its_state_alone(tmp_path: Path, drives: list[Path]) -> None:
    """The original moved, and came back from a backup; a copy lies where the drives saw it last."""
    run, moved = (tmp_path / "runs" / name / "state" for name in ("run", "moved"))
    make(run, 1, 2, drives=drives).close()
    for name in ("copy", "backup"):
        shutil.copytree(run.parent, tmp_path / name)
    run.parent.rename(moved.parent)
    shutil.rmtree(moved.parent)
    (tmp_path / "backup").rename(moved.parent)
    (tmp_path / "copy").rename(run.parent)
    before = tree(run, moved, *drives)
    one_of_two = "is one of two run directories that list the state on"
    for folder, said in ((run, one_of_two), (moved, f"is a copy of {run}, which")):
        with pytest.raises(UserError, match=f"^{folder}: {said}.*--copy-state.*Nothing was changed"):
            NvmeStore.open(folder, drives=[tmp_path / "new"])
        assert tree(run, moved, *drives) == before
    copy_state(run, [tmp_path / "c"])
    assert_whole(run, 2, drives=[tmp_path / "c"])
    assert_whole(moved, 2)  # nobody else names it now
    assert_whole(run, 2)


def test_a_name_that_an_unlisted_checkpoint_has_is_not_given_again(run: Path, drives: list[Path]) -> None:
    with closing(NvmeStore.open(run)) as store:
        store.checkpoint("two")
        shutil.rmtree(run / "checkpoints")
        kept = [drive / "checkpoints" for drive in drives]
        before = tree(*kept)
        with pytest.raises(UserError, match="holds a checkpoint that this run does not list"):
            store.checkpoint("two")
        assert tree(*kept) == before
        store.checkpoint("again")
        assert_holds(store, 2)


@pytest.fixture
def copy(tmp_path: Path, run: Path) -> Path:
    """Of the run, which has made a checkpoint and a step before."""
    with closing(NvmeStore.open(run)) as store:
        store.checkpoint("two")
        advance(store, 3)
    return shutil.copytree(run, tmp_path / "copy")


def test_a_copy_goes_on_with_copies_of_the_drives(tmp_path: Path, run: Path, drives: list[Path]) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    own = [shutil.copytree(drive, tmp_path / f"copy-{drive.name}") for drive in drives]
    with closing(NvmeStore.open(copy, drives=own)) as store:
        assert_holds(store, 2)
        advance(store, 13, 14)
    assert_whole(run, 2)
    with closing(NvmeStore.open(run)) as store:
        advance(store, 3, 4, 5)
    assert_whole(copy, 14)
    assert_whole(run, 5)


@pytest.mark.parametrize("target", ["new drives", "root", "another device"])
def test_copy_state(tmp_path: Path, run: Path, copy: Path, drives: list[Path], target: str) -> None:
    shared = Path("/dev/shm") / f"penstock-{os.getpid()}-{tmp_path.name}"
    own = {"new drives": [tmp_path / "c"], "root": [copy], "another device": [shared, tmp_path / "d"]}[target]
    before = tree(run, *drives)
    other = shutil.copytree(copy, tmp_path / "other")
    delete_checkpoint(other, "two")  # the original's stays
    assert not list_checkpoints(other)
    assert tree(run, *drives) == before
    try:
        assert copy_state(copy, own) == 2 * (3 * 20480 + 3 * 12288 + 12288)
        assert copy_state(copy, own) == 0
        with closing(NvmeStore.open(copy, drives=own)) as store:
            assert_holds(store, 3)
            store.verify()
            advance(store, 14, 15, 16)
            store.restore("two")
            assert_holds(store, 2)
            advance(store, 17)
        assert modes(tree(run, *drives)) == modes(before)
        with closing(NvmeStore.open(run)) as store:
            assert_holds(store, 3)
            advance(store, 4, 5, 6)
        assert_whole(copy, 17)
        delete_checkpoint(copy, "two")
        with closing(NvmeStore.open(run)) as store:
            store.restore("two")
            assert_holds(store, 2)
        shutil.rmtree(run)
        assert_whole(copy, 17)
        with closing(NvmeStore.open(copy)) as store:
            for path in committed_files(store):
                assert any(path.is_relative_to(folder) for folder in own)
    finally:
        shutil.rmtree(shared, ignore_errors=True)


def test_copy_state_refuses(tmp_path: Path, run: Path, drives: list[Path]) -> None:
    with closing(NvmeStore.open(run)) as store:
        store.checkpoint("two")
    copy = shutil.copytree(run, tmp_path / "copy")
    with pytest.raises(UserError, match=r"--copy-state: .*/a holds the state of the run that this one was copied from"):
        copy_state(copy, drives)
    with closing(NvmeStore.open(run)), pytest.raises(UserError, match="in use by another process"):
        copy_state(copy, [tmp_path / "c"])  # a lock belongs to an open file: this is as from another process
    with closing(NvmeStore.open(run)) as store:
        advance(store, 3)
    with pytest.raises(UserError, match=r"holds generation 2 \(step 2\), but the drive .* 3 \(step 3\)"):
        copy_state(copy, [tmp_path / "c"])
    assert not (tmp_path / "c").exists()
    assert_whole(run, 3)


def break_off(patch: pytest.MonkeyPatch, number: int, *, links: bool) -> None:
    """The call after `number` that changes the disk ends everything."""

    def act(count: int, name: str, args: Any) -> None:
        if count == number:
            raise KeyboardInterrupt
        if name == "link" and not links:
            raise OSError(errno.EXDEV, "no links")

    before_calls(patch, ("link", "replace", "mkdir", "unlink", "fsync", "pwritev"), act)


@pytest.mark.sampled
@pytest.mark.parametrize("links", [True, pytest.param(False, marks=pytest.mark.long)])
def test_copy_state_broken_off_at_any_moment(
    tmp_path: Path, run: Path, drives: list[Path], monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    with closing(NvmeStore.open(run)) as store:
        store.checkpoint("two")
    before, number, done = tree(run, *drives), 0, False
    while not done:
        copy, own = tmp_path / f"copy{number}", [tmp_path / f"c{number}", tmp_path / f"d{number}"]
        shutil.copytree(run, copy)
        with monkeypatch.context() as patch:
            break_off(patch, number, links=links)
            with suppress(KeyboardInterrupt):
                copy_state(copy, own)
                done = True
        copy_state(copy, own)
        with closing(NvmeStore.open(copy, drives=own)) as store:
            assert_holds(store, 2)
            store.restore("two")
            assert_holds(store, 2)
        for folder in (copy, *own):
            shutil.rmtree(folder)
        number += 1 if number < 8 else samples(11, 5)
    assert number > 30
    assert modes(tree(run, *drives)) == modes(before)


def test_copy_state_makes_nothing_where_a_drive_was(tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy, drive, away = shutil.copytree(run, tmp_path / "copy"), tmp_path / "c", tmp_path / "away"

    def go(count: int, name: str, args: Any) -> None:
        if drive in Path(args[0]).parents and drive.exists():
            drive.rename(away)

    with monkeypatch.context() as patch:
        before_calls(patch, ["mkdir"], go)
        with pytest.raises(UserError, match="is the drive still mounted"):
            copy_state(copy, [drive])
    assert away.exists()
    assert not drive.exists()
