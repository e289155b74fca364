import json
import threading
import time
from pathlib import Path

import pytest
from cli_process import Cli
from test_run_log import metrics

from penstock.app import rundir
from penstock.app.run_log import RunLog
from penstock.app.rundir import RunDir, RunLock, find_run, is_live, list_runs, read_info, read_recipe, state_of
from penstock.engine.config import Recipe
from penstock.storage.errors import UserError


def test_a_new_run_is_named_by_recipe_and_time(tmp_path: Path) -> None:
    recipe = Recipe(name="x")
    runs = tmp_path / "runs"
    with RunDir.create(recipe, root=runs) as first, RunDir.create(recipe, root=runs) as second:
        assert first.path != second.path
        assert first.path.name.startswith("x-20")
        assert read_recipe(first.path) == recipe


def test_a_directory_with_a_run_or_that_is_not_empty_or_cannot_be_made_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    RunDir.create(Recipe(name="x"), path).__exit__()
    RunDir.create(Recipe(name="y"), path).__exit__()
    assert read_recipe(path).name == "y", "a run without a step is replaced"
    (path / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match=r"already contains a run.*penstock resume"):
        RunDir.create(Recipe(name="z"), path)
    assert read_recipe(path).name == "y"
    (tmp_path / "file").write_text("")
    for path, said in (("file", "file"), ("file/run", "file"), (".", "not empty.*file.*--run-dir")):
        with pytest.raises(UserError, match=said):
            RunDir.create(Recipe(name="x"), tmp_path / path)


def test_a_run_in_use_names_the_process_and_a_killed_one_is_crashed(cli: Cli, tmp_path: Path) -> None:
    path, process = cli.begin(FAKE_STEP_S="60")
    try:
        assert is_live(path)
        (tmp_path / "link").symlink_to(tmp_path)
        opens = (lambda: RunDir.open(path), lambda: RunDir.open(tmp_path / "link" / "out"))
        for attempt in (*opens, lambda: RunDir.create(Recipe(name="x"), path)):
            with pytest.raises(UserError, match=f"in use by process {process.pid};.*kill {process.pid}"):
                attempt()
    finally:
        process.kill()
        process.communicate()
    assert not is_live(path)
    assert read_info(path).state == "crashed"
    with RunDir.open(path):
        assert is_live(path)


def test_readers_that_test_the_lock_never_keep_a_run_from_starting(tmp_path: Path) -> None:
    RunDir.create(Recipe(name="x"), tmp_path / "run").__exit__()
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            is_live(tmp_path / "run")

    readers = [threading.Thread(target=look) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for _ in range(20):
            RunDir.open(tmp_path / "run").__exit__()
    finally:
        done.set()
        for reader in readers:
            reader.join()


def test_runs_are_listed_whatever_their_state(tmp_path: Path) -> None:
    assert list_runs(tmp_path / "none") == []
    for name in ("a", "b", "c"):
        RunDir.create(Recipe(name="x"), tmp_path / name).__exit__()
    (tmp_path / "not-a-run").mkdir()
    (tmp_path / "b" / "status.json").write_text("[1]")
    log = RunLog(tmp_path / "c", total_steps=4)
    log.step(metrics(1, loss=3.5))
    log.close("stopped")
    found = list_runs(tmp_path)
    assert [info.name for info in found] == ["a", "b", "c"]
    assert [info.state for info in found] == ["unknown", "unknown", "stopped"]
    assert found[2][3:6] == (1, 4, 3.5)
    assert found[2].mean_tokens_per_s == 28.0
    assert found[2].heartbeat == pytest.approx(time.time(), abs=5)
    assert (found[2].metrics or {})["lr"] == 1e-3


def test_a_foreign_status_breaks_nothing(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('[1]\n{"loss": "NaN", "mean_tokens_per_s": true}\n"x"\n')
    wrong = {"state": "stopped", "step": "x", "total_steps": None, "heartbeat": "y", "error": 3}
    for status in (wrong, {"state": ["running"], "step": True}, {"state": "running", "host": 7}):
        (tmp_path / "status.json").write_text(json.dumps(status))
        info = read_info(tmp_path)
        assert (info.step, info.total_steps, info.loss, info.mean_tokens_per_s) == (0, 0, None, None)
        assert info.heartbeat is None


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
        *((1.0, None, True, "paused"), (rundir.STALE_S + 1, None, True, "stale"), (1.0, None, False, "crashed")),
        *((1.0, "elsewhere", False, "paused"), (rundir.STALE_S + 1, "elsewhere", False, "stale")),
    ):
        status = {"state": "paused", "heartbeat": now - age} | ({} if host is None else {"host": host})
        held = RunLock(tmp_path) if lock else None
        assert state_of(tmp_path, status, now) == state
        if held is not None:
            held.release()
    assert state_of(tmp_path, {"state": "finished"}, now) == "finished"


def test_what_a_launcher_left_is_no_run_yet_and_a_replaced_one_leaves_nothing(tmp_path: Path) -> None:
    for name in rundir.LEFT_BY_LAUNCHER:
        (tmp_path / name).write_text("")
    RunDir.create(Recipe(name="x"), tmp_path).__exit__()
    for name in ("spans.jsonl", "log.jsonl", "status.json", "control.json"):
        (tmp_path / name).write_text("")
    RunDir.create(Recipe(name="x"), tmp_path).__exit__()
    assert {path.name for path in tmp_path.iterdir()} == rundir.LEFT_BY_LAUNCHER


def test_find_run_by_path_or_name(tmp_path: Path) -> None:
    RunDir.create(Recipe(name="x"), tmp_path / "quickstart-1").__exit__()
    assert find_run("quickstart-1", tmp_path) == tmp_path / "quickstart-1"
    assert find_run(str(tmp_path / "quickstart-1"), Path("nowhere")) == tmp_path / "quickstart-1"
    with pytest.raises(UserError, match="did you mean 'quickstart-1'"):
        find_run("quikstart", tmp_path)
    with pytest.raises(UserError, match="no such run"):
        find_run("zzz", tmp_path / "none")
