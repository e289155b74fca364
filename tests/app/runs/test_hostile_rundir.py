"""Run directories that somebody has prepared: links, pipes, foreign files; and what is told of a run that died."""

import errno
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
from bad_run_files import OBSTACLES
from cli_process import Cli, json_lines, wait_until
from test_run_log import metrics, samples, told, validation

from penstock.app.cli.main import main
from penstock.app.launch.launcher import _spawn
from penstock.app.runs import control, directory
from penstock.app.runs.checkpoints import CheckpointRequests, checkpoint_steps, committed_step, make_for_export
from penstock.app.runs.directory import RunDir, RunLock, is_live, read_info, state_of
from penstock.app.runs.log import RunLog, drop_steps
from penstock.engine.config import Recipe
from penstock.engine.events import Span
from penstock.storage.files.errors import UserError

LINES = ("metrics.jsonl", "validation.jsonl", "samples.jsonl", "spans.jsonl", "log.jsonl")
WRITTEN = (*LINES, "status.json.tmp")


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Path]:
    """Somebody's file, which nobody touches."""
    path = tmp_path / "target"
    path.write_text("not ours\n")
    yield path
    assert path.read_text() == "not ours\n"
    assert not path.with_name("none").exists()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    RunDir.create(Recipe(name="x"), path).__exit__()
    return path


@pytest.mark.parametrize("obstacle", OBSTACLES)
@pytest.mark.parametrize("name", WRITTEN)
def test_a_run_writes_to_files_of_its_own_only(run: Path, target: Path, name: str, obstacle: str) -> None:
    OBSTACLES[obstacle](run / name, target)
    with pytest.raises(UserError, match=rf"{name}: .*(it is|Is a directory)"):  # noqa: PT012
        log = RunLog(run, total_steps=9)
        try:
            for step in (1, 2):
                log.progress(told(Span("h2d", "x", "y", 0, 0.0, 1.0, 0, step)))
                log.message("a word")
                log.step(metrics(step))
                log.validation(validation(step, 1.0))
                log.samples(samples(step, "text"))
            log.drain()
            log.check()
        finally:
            log.close("failed")


@pytest.mark.parametrize("obstacle", OBSTACLES)
@pytest.mark.parametrize("name", ["run.lock", "recipe.json", "status.json", "metrics.jsonl", "control.json"])
def test_readers_neither_wait_nor_follow(run: Path, target: Path, name: str, obstacle: str) -> None:
    (run / name).unlink(missing_ok=True)
    OBSTACLES[obstacle](run / name, target)
    assert (is_live(run), read_info(run).state, control.wanted(run)) == (False, "unknown", "run")
    assert len(directory.list_runs(run.parent)) == (name != "recipe.json" or obstacle == "link")
    if name == "status.json":
        assert str(read_info(run).error).startswith("status.json cannot be read: it ")
    if name == "recipe.json":
        with pytest.raises(UserError, match=r"recipe\.json"):
            directory.read_recipe(run)
    if name == "run.lock":
        with pytest.raises(UserError, match=r"run\.lock: locking the run failed: "):
            RunLock(run)
    if name == "control.json":
        with pytest.raises(UserError, match=r"control\.json: .*not a regular file; move it away"):
            control.forget(run)
    assert os.path.lexists(run / name)


@pytest.mark.parametrize("name", directory.OWN_FOLDERS)
def test_a_run_with_links_for_folders_is_refused(run: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).symlink_to(tmp_path / "elsewhere")
    for begin in (lambda: RunDir.open(run), lambda: RunDir.create(Recipe(name="x"), run)):
        with pytest.raises(UserError, match=rf"run/{name}: is a link.*storage\.nvme"):
            begin()
    assert not is_live(run), "the lock is given back"


@pytest.mark.parametrize("obstacle", OBSTACLES)
@pytest.mark.parametrize("name", directory.OWN_FILES)
def test_a_run_with_another_thing_for_a_file_is_refused(run: Path, target: Path, name: str, obstacle: str) -> None:
    (run / name).unlink(missing_ok=True)
    OBSTACLES[obstacle](run / name, target)
    with pytest.raises(UserError, match=rf"run/{name}: "):
        RunDir.open(run)


def test_a_run_directory_may_be_reached_through_links_and_a_lock_does_not_speak_to_the_shell(
    run: Path, tmp_path: Path
) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "by-link").symlink_to(run)
    with RunDir.open(tmp_path / "by-link") as opened:
        assert opened.path == run
        log = RunLog(opened.path, total_steps=3)
        log.step(metrics(1))
        log.close("stopped")
        (run / "run.lock").write_text("1; rm -r ~\x1b]0;title\x07")
        with pytest.raises(UserError, match="in use by another process; wait"):
            RunLock(run)
    assert read_info(tmp_path / "by-link").state == "stopped"


@pytest.mark.parametrize("name", ["status.json", "log.jsonl", "control.json", "spans.jsonl"])
def test_replacing_a_run_deletes_its_files_only(run: Path, target: Path, name: str) -> None:
    for obstacle in ("link", "folder"):
        OBSTACLES[obstacle](run / name, target)
        with pytest.raises(UserError, match=rf"{name}: is (a link|not a file), .*; move it away"):
            RunDir.create(Recipe(name="x"), run)
        assert not is_live(run)
        assert os.path.lexists(run / name)
        (run / name).rmdir() if obstacle == "folder" else (run / name).unlink()


def test_nothing_is_deleted_but_requests_and_answers(run: Path, target: Path) -> None:
    folder = run / "requests"
    folder.mkdir()
    for name in ("old.request", "old.answer", ".old.answer.12.tmp", "thesis.tex", ".hidden", "x.answer.bak"):
        (folder / name).write_text("")
    (folder / "b.request").symlink_to(target)
    (folder / "c.request").mkdir()
    os.mkfifo(folder / "d.request")
    requests = CheckpointRequests(run)
    (folder / "e.request").write_text("")
    assert requests.take() == ["e"]
    assert requests.take() == []
    kept = {"thesis.tex", ".hidden", "x.answer.bak", "b.request", "c.request", "d.request"}
    assert set(os.listdir(folder)) == kept
    assert requests.answer("e", 3, None) is None
    assert json.loads((folder / "e.answer").read_text()) == {"step": 3, "error": None}
    folder.rename(run / "elsewhere")
    folder.symlink_to(run / "elsewhere")  # a link to a folder loses nothing either
    (folder / "a.request").write_text("theirs")
    assert CheckpointRequests(run).take() == []
    assert (folder / "a.request").read_text() == "theirs"


def test_an_answer_that_cannot_be_written_does_not_end_the_run(run: Path) -> None:
    folder, requests = run / "requests", CheckpointRequests(run)
    folder.mkdir(exist_ok=True)
    for name in ("a", "b"):
        (folder / f"{name}.request").write_text("")
    assert requests.take() == ["a", "b"]
    (folder / "a.answer").mkdir()
    assert "a.answer: writing" in str(requests.answer("a", 1, None))
    (folder / "a.answer").rmdir()
    folder.rmdir()
    assert "requests: no longer exists" in str(requests.answer("b", 1, None))
    assert requests.take() == []


@pytest.mark.parametrize("found", ["", "[]", '{"step": "x", "error": null}', '{"step": 1, "error": 7}', *OBSTACLES])
def test_an_answer_that_is_damaged_or_no_file_is_one_message(run: Path, target: Path, found: str) -> None:
    """A thread answers in the place of a locked run."""
    folder = run / "requests"
    folder.mkdir()

    def reply() -> None:
        wait_until(lambda: any(folder.glob("*.request")))
        [request] = folder.glob("*.request")
        request.unlink()
        answer = request.with_suffix(".answer")
        if found in OBSTACLES:
            OBSTACLES[found](answer, target)
            return
        answer.with_suffix(".new").write_text(found)
        answer.with_suffix(".new").replace(answer)

    thread = threading.Thread(target=reply)
    thread.start()
    wrong = ".*not a regular file" if found in OBSTACLES else "cannot be read"
    with RunDir.open(run), pytest.raises(UserError, match=f"answer: {wrong}"):
        make_for_export(run)
    thread.join()


def test_a_process_that_hangs_is_not_waited_for(run: Path) -> None:
    (run / "status.json").write_text(json.dumps({"state": "running", "heartbeat": time.time() - 100}))
    with RunDir.open(run), pytest.raises(UserError, match=r"has not responded for 1\d\d s"):
        make_for_export(run)
    assert os.listdir(run / "requests") == []


def test_manifests_behind_links_are_not_read(run: Path, tmp_path: Path) -> None:
    kept = tmp_path / "elsewhere" / "checkpoints" / "a"
    kept.mkdir(parents=True)
    for folder in (kept, tmp_path / "elsewhere"):
        (folder / "manifest.json").write_text('{"meta": {"step": 3}}')
    (run / "state").symlink_to(tmp_path / "elsewhere")
    assert (checkpoint_steps(run), committed_step(run)) == ([], None)
    (run / "state").unlink()
    (run / "state").mkdir()
    checkpoints = run / "state" / "checkpoints"
    checkpoints.symlink_to(kept.parent)
    assert checkpoint_steps(run) == []
    checkpoints.unlink()
    (checkpoints / "b\x1b[31m").mkdir(parents=True)
    (checkpoints / "b\x1b[31m" / "manifest.json").write_text('{"meta": {"step": 5}}')
    assert checkpoint_steps(run) == [("b\ufffd[31m", 5)]


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_a_started_run_writes_its_output_to_no_other_file(run: Path, target: Path, obstacle: str) -> None:
    OBSTACLES[obstacle](run / "output.log", target)
    with pytest.raises(UserError, match=r"output\.log|cannot be started"):
        _spawn(["resume", str(run)], run, run.parent)


def test_the_logs_thread_does_not_die_unnoticed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RunLog(run, total_steps=9)
    monkeypatch.setattr(log, "_look_at_drives", Mock(side_effect=KeyError("a bug")))
    log.watch_drives([run])
    log._thread.join(10)
    with pytest.raises(KeyError, match="a bug") as caught:
        log.step(metrics(1))
    assert "_write_all" in [entry.name for entry in caught.traceback]
    log.close("failed")
    assert directory.read_status(run)["state"] == "failed"


def failing_replace(code: int) -> Any:
    """No file can be replaced, with that error."""
    return patch.object(os, "replace", side_effect=OSError(code, os.strerror(code)))


def test_the_advice_is_that_of_what_went_wrong(run: Path) -> None:
    cases = ((errno.ENOSPC, "free some space"), (errno.EDQUOT, "quota"), (errno.EIO, "check the disk"))
    for code, advice in (*cases, (errno.EROFS, "read-o")):
        log = RunLog(run, total_steps=9)
        with failing_replace(code):
            log.set_state("running")
        with pytest.raises(UserError, match=advice):
            log.step(metrics(1))
        log.close("failed")


BAD = (b"[]", b'{"a":1}', b"garbage \xff", b'{"step": null}', b'{"step": 1e3}', b'{"step": "2"}', b"[" * 100_000)


def test_steps_done_again_are_dropped_past_bad_lines_which_stay(run: Path) -> None:
    file = run / "metrics.jsonl"
    lines = [b'{"step": 1}', *BAD, b'{"step": 2, "loss": 1.25e-7}', b"x" * (3 << 20), b'{"step": 3}', b'{"step": 4}']
    file.write_bytes(b"\n".join(lines) + b"\n" + b'{"step": 5')
    warning = drop_steps(file, 3)
    assert file.read_bytes() == b"\n".join([b'{"step": 1}', *BAD, b'{"step": 2, "loss": 1.25e-7}', b""])
    assert warning == f"{file}: {len(BAD) + 1} damaged lines are skipped; the first is line 2"
    before = file.stat().st_ino
    drop_steps(file, 3)
    assert file.stat().st_ino == before, "nothing to drop, nothing written"


def test_a_resumed_run_goes_on_behind_bad_lines(run: Path) -> None:
    for name in ("metrics.jsonl", "validation.jsonl", "spans.jsonl"):
        (run / name).write_bytes(b"\n".join([b'{"step": 1, "loss": 2.0}', *BAD, b""]))
    absurd = Span("h2d", "x", "y", 0, 1e300, 1e300, 0, 1, 2**62)._asdict()
    (run / "spans.jsonl").open("a").write(json.dumps(absurd) + "\n")
    log = RunLog(run, total_steps=9, step=1)
    log.progress(told(Span("h2d", "x", "y", 0, 0.5, 1.0, 0, 2, 0)))
    log.step(metrics(2))
    log.drain()
    log.check()
    log.close("stopped")
    span = json.loads((run / "spans.jsonl").read_bytes().splitlines()[-1])
    assert (span["start_s"], span["id"]) == (0.5, 0)
    assert read_info(run).loss == 1.0
    assert [(line["level"], line["text"].partition(": ")[2]) for line in json_lines(run / "log.jsonl")] == [
        ("warning", f"{len(BAD)} damaged lines are skipped; the first is line 2")
    ] * 2


@pytest.mark.long
def test_bad_lines_neither_end_nor_blind_a_run(cli: Cli) -> None:
    cli.run("train", "tiny.py", "--run-dir", "run", "--set", "train.steps=9", code=2, FAKE_FAIL_AT="3:user")
    run = cli.folder / "run"
    for name in LINES:
        with (run / name).open("ab") as file:
            file.write(b"\n".join(BAD) + b"\n" + b"x" * (3 << 20) + b"\n")
    resumed = cli.run("resume", "run")
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["tokens"]) == (9, 900)
    assert f"metrics.jsonl: {len(BAD) + 1} damaged lines are skipped; the first is line 3" in resumed.stdout
    for command, code in (("lanes", 2), ("trace", 0)):  # one whole step is too few for lanes
        done = cli.run(command, "run", code=code)
        assert "Traceback" not in done.stderr
        assert f"spans.jsonl: {len(BAD) + 1} damaged lines are skipped" in done.stdout + done.stderr


def crashed(run: Path, **status: object) -> str:
    """What is told of a run whose process died."""
    word = {"state": "running", "host": socket.gethostname(), "heartbeat": time.time(), "started": 100.0}
    (run / "status.json").write_text(json.dumps(word | status))
    info = read_info(run)
    assert info.state == "crashed"
    assert info.error is not None
    return info.error


def test_what_can_be_told_of_a_process_that_is_gone(run: Path) -> None:
    assert "killed, or out of memory" in crashed(run)
    assert "restarted" in crashed(run, heartbeat=1000.0)
    full: Any = os.statvfs_result((4096, 4096, 10**6, 0, 0, 0, 0, 0, 0, 255))
    with patch.object(os, "statvfs", lambda path: full):
        assert "the disk is full, so the reason could not be recorded. Free space" in crashed(run)
    errors = [{"time": at, "level": "error", "text": f"at {at}\nTraceback"} for at in (50.0, 150.0)]
    (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in errors[:1]))
    assert "killed" in crashed(run), "that was the process before"
    (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in errors))
    assert crashed(run) == "its last message was: at 150.0\nTraceback"
    assert crashed(run, error="its own word") == "its own word"


def test_a_run_that_could_not_write_its_failure_is_told_by_the_command_line(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = RunLog(run, total_steps=9)
    log.set_state("running")
    with failing_replace(errno.ENOSPC):
        log.close("failed", "the disk is full")
    assert directory.read_status(run)["state"] == "running"
    monkeypatch.chdir(run.parent)
    Path("runs").mkdir()
    run.rename("runs/one")
    assert main(["runs"]) == 0
    output = capsys.readouterr().out
    assert "crashed" in output
    assert "one: its process is gone without a message" in output


def test_a_clock_that_was_set_back_does_not_hide_a_hanging_process(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a lock that may not be looked at, which leaves it to the heartbeat."""
    now = time.time()

    def state(ahead_s: float) -> str:
        return state_of(run, {"state": "running", "heartbeat": now + ahead_s}, now)

    with RunDir.open(run):
        assert [state(ahead) for ahead in (-1.0, 1.0, 3600.0)] == ["running", "running", "stale"]
    refused = PermissionError(errno.EACCES, "Permission denied", str(run))
    monkeypatch.setattr(directory, "open_regular", Mock(side_effect=refused))
    assert [state(ahead) for ahead in (0.0, -60.0)] == ["running", "stale"]


def test_a_run_directory_whose_name_is_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / os.fsdecode(b"r\xff\x1b]0;t\x07")
    with RunDir.create(Recipe(name="x"), run):
        log = RunLog(run, total_steps=3)
        log.message(f"run directory {run}")
        log.step(metrics(1))
        log.close("failed", f"{run}: failed")
    info = read_info(run)
    assert (info.name, info.state, info.step) == ("r\ufffd\ufffd]0;t\ufffd", "failed", 1)
    assert str(info.error).endswith("r\ufffd\ufffd]0;t\ufffd: failed")
    assert main(["pause", str(run)]) == 2
    told = capsys.readouterr().err
    assert "is not UTF-8 text" in told
    assert "\x1b" not in told
