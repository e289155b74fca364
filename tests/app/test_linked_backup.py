"""A backup of a run directory by hard links (cp -al, rsync --link-dest) stays as it was, and is a run of its own."""

import errno
import os
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from test_run_log import metrics, samples, span, told, validation

from penstock.app.checkpoints import make_checkpoint, scrub_run
from penstock.app.run_log import RunLog
from penstock.app.rundir import RunDir, RunLock, is_live
from penstock.engine.config import Recipe
from penstock.engine.hf.constants import write_constants
from penstock.storage.errors import UserError
from penstock.storage.manifest import ArraySpec
from penstock.storage.nvme import NvmeStore

SPEC = ArraySpec("embed", "master", 1000, "float32", 2048)
GROWING = ("log.jsonl", "metrics.jsonl", "samples.jsonl", "spans.jsonl", "validation.jsonl")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of one generation, without data."""
    run = tmp_path / "run"
    RunDir.create(Recipe(name="x"), run).__exit__()
    with closing(NvmeStore.create(run / "state", [SPEC], budget_bytes=None)) as store:
        store.write(SPEC.buffer, SPEC.kind, 0, torch.arange(1000.0)).result()
        store.commit({"step": 1, "constants": write_constants(run / "state/constants.safetensors", {})})
    return run


def linked(run: Path) -> tuple[Path, dict[str, bytes]]:
    """A backup of `run`, and what it holds."""
    backup = run.with_name("backup")
    shutil.copytree(run, backup, copy_function=os.link)
    return backup, files(backup)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write(log: RunLog, step: int) -> None:
    log.step(metrics(step))
    log.validation(validation(step, 1.0))
    log.samples(samples(step, "text"))
    log.progress(told(span(step, 1.0, 2.0, step)))
    log.message(f"step {step}")


@pytest.mark.parametrize("end", ["", '{"torn'], ids=["whole lines", "a torn last line"])
def test_a_resumed_run_leaves_its_backup_as_it_was(run: Path, end: str) -> None:
    log = RunLog(run, total_steps=3)
    write(log, 1)
    log.close("stopped")
    for name in (*GROWING, "status.json.tmp"):
        with (run / name).open("a") as file:
            file.write(end)
    backup, before = linked(run)
    with RunDir.open(run):
        log = RunLog(run, total_steps=3)
        write(log, 2)
        log.close("stopped")
    make_checkpoint(run, "kept")
    scrub_run(run)
    assert files(backup) == before
    for name in GROWING:
        assert (run / name).read_bytes().startswith(before[name].removesuffix(end.encode())), "nothing is lost"
        assert (run / name).stat().st_nlink == 1


def test_a_backup_taken_of_a_live_run_grows_no_more(run: Path) -> None:
    with RunDir.open(run):
        log = RunLog(run, total_steps=3)
        write(log, 1)
        while not all((run / name).exists() and (run / name).stat().st_size for name in GROWING):
            assert log._thread.is_alive()
        backup, before = linked(run)
        write(log, 2)
        log.close("stopped")
    after = files(backup)
    assert {name for name in before if after[name] != before[name]} == set()
    assert all(b"2" in (run / name).read_bytes() for name in GROWING)


def test_a_backup_of_a_live_run_is_not_live_and_both_can_be_worked_on(run: Path) -> None:
    with RunDir.open(run):
        backup, before = linked(run)
        assert is_live(run)
        assert not is_live(backup)
        with RunDir.open(backup):
            assert is_live(run)
            assert is_live(backup)
            for path in (run, backup):
                with pytest.raises(UserError, match=rf"{path}: in use by process {os.getpid()}"):
                    RunLock(path)
        assert is_live(run)
        assert not is_live(backup)
        assert (run / "run.lock").read_bytes() == before["run.lock"]
    assert not is_live(run)


def read_only() -> Any:
    """A file system on which nothing can be opened to be written."""
    real = os.open

    def refused(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real(path, flags, *args, **kwargs)

    return patch.object(os, "open", refused)


def test_a_run_that_cannot_be_written_can_be_scrubbed(run: Path) -> None:
    """A read-only disk, or another user's run; nobody can begin to train it meanwhile, if anybody can at all."""
    for lock in (True, False):
        if not lock:
            (run / "run.lock").unlink()
        before = files(run)
        with read_only():
            assert "no damage" in scrub_run(run)
            with pytest.raises(UserError, match=r"run\.lock.*Read-only file system.*mounted read-only"):
                RunDir.open(run)
        assert files(run) == before
    with RunDir.open(run), read_only(), pytest.raises(UserError, match="in use by process"):
        scrub_run(run)
