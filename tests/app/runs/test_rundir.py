"""Run directories: made, locked, listed and found; and their backups by hard links (cp -al, rsync --link-dest), which
stay as they were and are runs of their own."""

import errno
import json
import os
import shutil
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from cli_process import Cli
from test_run_log import metrics, samples, span, told, validation

from penstock.app.runs import directory
from penstock.app.runs.checkpoints import make_checkpoint, scrub_run
from penstock.app.runs.directory import RunDir, RunLock, find_run, is_live, list_runs, read_info, read_recipe, state_of
from penstock.app.runs.log import RunLog
from penstock.engine.config import Recipe
from penstock.engine.hf.constants import write_constants
from penstock.storage.files.errors import UserError
from penstock.storage.generations.store import NvmeStore
from penstock.storage.tier.manifest import ArraySpec

SPEC = ArraySpec("embed", "master", 1000, "float32", 2048)
GROWING = ("log.jsonl", "metrics.jsonl", "samples.jsonl", "spans.jsonl", "validation.jsonl")


def create(path: Path, name: str = "x") -> Path:
    RunDir.create(Recipe(name=name), path).__exit__()
    return path


def test_a_new_run_is_named_by_recipe_and_time_and_found_by_path_or_name(tmp_path: Path) -> None:
    recipe, runs = Recipe(name="x"), tmp_path / "runs"
    with RunDir.create(recipe, root=runs) as first, RunDir.create(recipe, root=runs) as second:
        assert first.path != second.path
        assert first.path.name.startswith("x-20")
        assert read_recipe(first.path) == recipe
    run = create(tmp_path / "quickstart-1")
    assert find_run("quickstart-1", tmp_path) == find_run(str(run), Path("nowhere")) == run
    for name, said in (("quikstart", "did you mean 'quickstart-1'"), ("zzz", "no such run")):
        with pytest.raises(UserError, match=said):
            find_run(name, tmp_path if name == "quikstart" else tmp_path / "none")


def test_a_directory_with_a_run_or_that_is_not_empty_or_cannot_be_made_is_refused(tmp_path: Path) -> None:
    path = create(create(tmp_path / "run"), "y")
    assert read_recipe(path).name == "y", "a run without a step is replaced"
    (path / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match=r"already contains a run.*penstock resume"):
        create(path)
    assert read_recipe(path).name == "y"
    (tmp_path / "file").write_text("")
    for path, said in (("file", "file"), ("file/run", "file"), (".", "not empty.*file.*--run-dir")):
        with pytest.raises(UserError, match=said):
            create(tmp_path / path)
    begun = tmp_path / "begun"
    begun.mkdir()
    for name in directory.LEFT_BY_LAUNCHER:
        (begun / name).write_text("")
    create(begun)
    for name in ("spans.jsonl", "log.jsonl", "status.json", "control.json"):
        (begun / name).write_text("")
    create(begun)
    assert {path.name for path in begun.iterdir()} == directory.LEFT_BY_LAUNCHER, "one that is replaced leaves nothing"


def test_a_run_in_use_names_the_process_and_a_killed_one_is_crashed(cli: Cli, tmp_path: Path) -> None:
    path, process = cli.begin(FAKE_STEP_S="60")
    try:
        assert is_live(path)
        (tmp_path / "link").symlink_to(tmp_path)
        for attempt, at in ((RunDir.open, path), (RunDir.open, tmp_path / "link" / "out"), (create, path)):
            with pytest.raises(UserError, match=f"in use by process {process.pid};.*kill {process.pid}"):
                attempt(at)
    finally:
        process.kill()
        process.communicate()
    assert not is_live(path)
    assert read_info(path).state == "crashed"
    with RunDir.open(path):
        assert is_live(path)


def test_readers_that_test_the_lock_never_keep_a_run_from_starting(tmp_path: Path) -> None:
    run, done = create(tmp_path / "run"), threading.Event()

    def look() -> None:
        while not done.is_set():
            is_live(run)

    readers = [threading.Thread(target=look) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for _ in range(20):
            RunDir.open(run).__exit__()
    finally:
        done.set()
        for reader in readers:
            reader.join()


def test_runs_are_listed_whatever_their_state(tmp_path: Path) -> None:
    assert list_runs(tmp_path / "none") == []
    for name in ("a", "b", "c"):
        create(tmp_path / name)
    (tmp_path / "not-a-run").mkdir()
    (tmp_path / "b" / "status.json").write_text("[1]")
    log = RunLog(tmp_path / "c", total_steps=4)
    log.step(metrics(1, loss=3.5))
    log.close("stopped")
    found = list_runs(tmp_path)
    assert [(info.name, info.state) for info in found] == [("a", "unknown"), ("b", "unknown"), ("c", "stopped")]
    assert (*found[2][3:6], found[2].mean_tokens_per_s) == (1, 4, 3.5, 28.0)
    assert found[2].heartbeat == pytest.approx(time.time(), abs=5)
    assert (found[2].metrics or {})["lr"] == 1e-3


def test_a_foreign_status_breaks_nothing(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('[1]\n{"loss": "NaN", "mean_tokens_per_s": true}\n"x"\n')
    wrong = {"state": "stopped", "step": "x", "total_steps": None, "heartbeat": "y", "error": 3}
    for status in (wrong, {"state": ["running"], "step": True}, {"state": "running", "host": 7}):
        (tmp_path / "status.json").write_text(json.dumps(status))
        info = read_info(tmp_path)
        assert (info.step, info.total_steps) == (0, 0)
        assert info.loss is info.mean_tokens_per_s is info.heartbeat is None


NO_STATUS = {
    b"": "is damaged", b'{"a"': "is damaged", b"[1]": "is damaged: expected a JSON object, not a list",
    b"[" * 100_000: "is ", b"\xff\xfe": "is ", b'{"a": ' * 50_000: "is ",
    b'{"a": "' + b"x" * (2 << 20) + b'"}': "is larger than anything a run writes",
}  # fmt: skip


@pytest.mark.parametrize(("content", "wrong"), NO_STATUS.items(), ids=range(len(NO_STATUS)))
def test_what_is_no_small_json_object_is_no_status(tmp_path: Path, content: bytes, wrong: str) -> None:
    for name in ("status.json", "metrics.jsonl"):
        (tmp_path / name).write_bytes(content + b"\n")
    info = read_info(tmp_path)
    assert info[:6] == (tmp_path.name, tmp_path, "unknown", 0, 0, None)
    assert str(info.error).startswith(f"status.json {wrong}")
    (tmp_path / "recipe.json").write_bytes(content)
    assert tmp_path in [info.path for info in list_runs(tmp_path.parent)]
    with pytest.raises(UserError, match=r"recipe\.json"):
        read_recipe(tmp_path)


def test_a_silent_run_is_stale_and_another_hosts_is_judged_by_its_heartbeat(tmp_path: Path) -> None:
    now = 1000.0
    for age, host, lock, state in (
        *((1.0, None, True, "paused"), (directory.STALE_S + 1, None, True, "stale"), (1.0, None, False, "crashed")),
        *((1.0, "elsewhere", False, "paused"), (directory.STALE_S + 1, "elsewhere", False, "stale")),
    ):
        status = {"state": "paused", "heartbeat": now - age} | ({} if host is None else {"host": host})
        held = RunLock(tmp_path) if lock else None
        assert state_of(tmp_path, status, now) == state
        if held is not None:
            held.release()
    assert state_of(tmp_path, {"state": "finished"}, now) == "finished"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of one generation, without data."""
    run = create(tmp_path / "run")
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
    assert files(backup) == before
    assert all(b"2" in (run / name).read_bytes() for name in GROWING)


def test_a_backup_of_a_live_run_is_not_live_and_both_can_be_worked_on(run: Path) -> None:
    with RunDir.open(run):
        backup, before = linked(run)
        assert is_live(run)
        assert not is_live(backup)
        with RunDir.open(backup):
            for path in (run, backup):
                assert is_live(path)
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
    for _ in ("with a lock", "without"):
        before = files(run)
        with read_only():
            assert "no damage" in scrub_run(run)
            with pytest.raises(UserError, match=r"run\.lock.*Read-only file system.*mounted read-only"):
                RunDir.open(run)
        assert files(run) == before
        (run / "run.lock").unlink(missing_ok=True)
    with RunDir.open(run), read_only(), pytest.raises(UserError, match="in use by process"):
        scrub_run(run)
