"""Each tracker's own client sends what a run directory holds, once, whatever became of the sender before."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_process import PATIENCE_S, REPOSITORY, refusal
from samples import cases
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tracked import end, made_up_run, write_steps
from tracker_servers import SERVERS, Asked, MlflowServer, StandIn, TrackioServer, WandbServer, environment

from penstock.app.cli import main
from penstock.app.trackers import attach
from penstock.app.trackers.attach import Trackers, end_sender, start_sender, words

STEPS = list(range(1, 26))
"""Of every wait, and of every sender: one that hangs is killed and so fails its test. Senders give way to all else: on
a busy machine one takes half a minute to begin."""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of 20 steps; five more come later."""
    for name in [*os.environ]:
        if name.startswith(("WANDB_", "MLFLOW_", "TRACKIO_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return made_up_run(tmp_path / "run")


@pytest.fixture(autouse=True)
def _no_sender_hangs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    started: list[tuple[subprocess.Popen[bytes], threading.Timer]] = []

    def start(run: Path, name: str, *, once: bool = False) -> subprocess.Popen[bytes]:
        process = start_sender(run, name, once=once)
        timer = threading.Timer(PATIENCE_S, end_sender, [process])
        timer.start()
        started.append((process, timer))
        return process

    monkeypatch.setattr(attach, "start_sender", start)
    monkeypatch.setattr("penstock.app.trackers.track.start_sender", start)
    yield
    for process, timer in started:
        timer.cancel()
        if process.poll() is None:
            end_sender(process)
            process.wait(PATIENCE_S)


@pytest.fixture
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    name, mood = request.param
    with SERVERS[name](mood) as server:
        for key, value in environment(name, server.url).items():
            monkeypatch.setenv(key, value)
        yield server


def track(run: Path, name: str, lost: bool = True) -> None:
    """Send 20 steps, lose the last word of what was sent if so, and send 25."""
    record = run / "trackers" / f"{name}.json"
    assert main(["track", str(run), "--to", name]) == 0
    known = json.loads(record.read_text())
    (place,) = known["places"].values()
    place["sent"]["metrics"] = [18, place["sent"]["metrics"][1] - 2]
    if lost:
        record.write_text(json.dumps(known))
    write_steps(run, range(21, 26))
    end(run, "finished")
    assert main(["track", str(run), "--to", name]) == 0


def losses(found: list[tuple[int, float]]) -> None:
    assert found == [(step, pytest.approx(8.0 / step)) for step in STEPS]


def begun(server: StandIn) -> list[Asked]:
    """What W&B was told of a run as a whole."""
    return [asked for asked in server.asked if asked.path == "/graphql" and "UpsertBucket" in str(asked.body)]


@pytest.mark.parametrize("server", [("wandb", "works")], indirect=True)
def test_wandb_has_all_of_it(run: Path, server: WandbServer) -> None:
    track(run, "wandb")
    ((name, rows),) = server.rows.items()
    losses([(row["train/global_step"], row["train/loss"]) for row in rows if "train/loss" in row])
    assert [row["train/global_step"] for row in rows if "validation/perplexity" in row] == [10, 20]
    pages = {asked.body for asked in server.asked if "/upload/media/html/" in asked.path}
    assert [row["train/global_step"] for row in rows if "samples" in row] == [10, 20]
    assert len(pages) == 2
    assert any("<b>One *day*</b> after 20 steps\nit rained ..." in page for page in pages)
    assert (server.exit_codes, server.summary[name]["summary/tiers.gpu.peak_bytes"]) == ({name: 0}, 7)
    assert server.config[name]["train"]["value"]["steps"] == 100
    assert {one.body["variables"].get("host") for one in begun(server)} == {None}
    assert str(REPOSITORY) not in "".join(map(str, server.asked))


@pytest.mark.long
def test_wandb_offline_is_what_wandb_sync_sends(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    track(run, "wandb", lost=False)
    folders = sorted(map(str, (run / "trackers" / "wandb").glob("offline-run-*")))
    assert len(folders) == 2
    with WandbServer() as server:
        command = [sys.executable, "-m", "wandb", "sync", *folders]
        environ = os.environ | environment("wandb", server.url) | {"WANDB_MODE": "online"}
        silent: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True}
        subprocess.run(command, env=environ, timeout=PATIENCE_S, check=True, **silent)
    (rows,) = server.rows.values()
    losses([(row["train/global_step"], row["train/loss"]) for row in rows if "train/loss" in row])


@pytest.mark.long
@pytest.mark.parametrize("server", [("mlflow", "works")], indirect=True)
def test_mlflow_has_all_of_it(run: Path, server: MlflowServer) -> None:
    from mlflow import MlflowClient

    track(run, "mlflow")
    client = MlflowClient(server.url)
    losses([(metric.step, metric.value) for metric in client.get_metric_history("run0", "train/loss")])
    times = [metric.timestamp for metric in client.get_metric_history("run0", "validation/accuracy")]
    assert times == [1_800_000_010_100, 1_800_000_020_100]
    assert (server.runs["run0"]["status"], server.runs["run0"]["params"]["train.steps"]) == ("FINISHED", "100")
    assert server.texts["step-20.md"].startswith("**One \\*day\\***")
    assert json.loads(server.texts["summary.json"])["last_loss"] == 0.4


def test_trackio_has_all_of_it(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    track(run, "trackio")
    code = (
        "import json, trackio; from trackio.sqlite_storage import SQLiteStorage as storage; "
        "(run,) = trackio.Api().runs('penstock'); "
        "print(json.dumps([run.config, storage.get_logs('penstock', run.name, run_id=run.id)]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    config, rows = json.loads(done.stdout)
    losses([(row["step"], row["train/loss"]) for row in rows if "train/loss" in row])
    assert [row["step"] for row in rows if "validation/loss" in row] == [10, 20]
    assert [row["samples"]["_value"][0]["text"] for row in rows if "samples" in row][-1] == " after 20 steps\nit rained"
    assert config["train"]["steps"] == 100


@pytest.mark.long
@pytest.mark.parametrize("server", [("trackio", "works")], indirect=True)
def test_a_server_of_trackio_has_all_of_it(
    run: Path, server: TrackioServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    track(run, "trackio", lost=False)
    losses([(log["step"], log["metrics"]["train/loss"]) for log in server.logs if "train/loss" in log["metrics"]])
    assert len({log["run"] for log in server.logs}) == 1


def test_one_sender_at_a_time_and_what_a_tracker_has_all_of_is_not_sent_again(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that follows the run, and whose run's process goes without a word."""
    follower = attach.start_sender(run, "tensorboard")
    assert "at" in next(iter(words(follower)))
    error = refusal(capsys, "track", str(run), "--to", "tensorboard")
    assert "tensorboard: another process is sending this run to it" in error
    assert follower.stdin is not None
    follower.stdin.close()
    assert follower.wait(PATIENCE_S) == 0
    record = json.loads((run / "trackers" / "tensorboard.json").read_text())
    assert record["places"]["tensorboard"]["ended"] == "crashed"
    assert main(["track", str(run), "--to", "tensorboard"]) == 0
    files = {file: file.stat().st_mtime_ns for file in (run / "tensorboard").iterdir()}
    assert main(["track", str(run), "--to", "tensorboard"]) == 0
    assert {file: file.stat().st_mtime_ns for file in (run / "tensorboard").iterdir()} == files
    assert capsys.readouterr().out.endswith("tensorboard: has all of run\n")


TROUBLE = {
    ("wandb", "refuses"): "it refuses this login; log in with `wandb login`",
    ("wandb", "hangs"): "it did not accept everything within 2 s",
    ("mlflow", "refuses"): "RestException",
    ("mlflow", "fails"): "too many 500 error responses",
    ("mlflow", "hangs"): "it did not accept everything within 2 s",
    ("trackio", "refuses"): "it refuses the write token; set TRACKIO_WRITE_TOKEN",
    ("trackio", "fails"): "its server answers 500",
    ("trackio", "hangs"): "it did not accept everything within 2 s",
}


@pytest.mark.parametrize("server", cases(TROUBLE, ("wandb", "refuses")), indirect=True, ids="-".join)
def test_trouble_is_told_in_a_line_and_what_is_missing_is_sent_later(
    run: Path, server: StandIn, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, mood = request.node.callspec.params["server"]
    if mood == "hangs":
        monkeypatch.setattr(attach, "FINISH_S", 2.0)
    told: list[tuple[str, str]] = []
    trackers = Trackers(run, [name], lambda text, level: told.append((level, text)))
    trackers.begin()
    assert server.reached.wait(PATIENCE_S)
    trackers.finish("finished")
    levels, texts = zip(*told, strict=True)
    assert set(levels) == {"warning"}
    assert len(texts) <= 2
    assert TROUBLE[name, mood] in texts[-1]
    assert texts[-1].startswith(f"tracker {name}: steps 1 to 20 were not sent (")
    assert texts[-1].endswith(f"); nothing is lost, send it with: penstock track {run}")
    if (name, mood) == ("mlflow", "fails"):
        server.mood = "works"
        assert main(["track", str(run), "--to", name]) == 0
        assert isinstance(server, MlflowServer)
        assert len([one for one in server.runs["run0"]["metrics"] if one["key"] == "train/loss"]) == 20


def test_a_killed_sender_is_started_again_and_told_of_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two are killed as soon as the tracker's run is open, which may be amid or after what they send: each finds steps
    that are new, as one without any would not open it."""
    monkeypatch.setattr(attach, "_PAUSE_S", 0.01)
    begun: list[subprocess.Popen[bytes]] = []
    more = {2: range(21, 23), 3: range(23, 26)}
    third = threading.Event()

    def words_and_kill(process: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
        begun.append(process)
        if len(begun) in more:
            write_steps(run, more[len(begun)])
        for word in words(process):
            if len(begun) < 3:
                end_sender(process)
            else:
                third.set()
            yield word

    monkeypatch.setattr(attach, "words", words_and_kill)
    told: list[tuple[str, str]] = []
    trackers = Trackers(run, ["tensorboard"], lambda text, level: told.append((level, text)))
    trackers.begin()
    assert third.wait(PATIENCE_S)
    trackers.finish("finished")
    assert [text for level, text in told if level == "warning"] == [
        "tracker tensorboard: its process was ended by signal 9; it will be tried again, and the run continues without "
        "it (run/trackers/tensorboard.log has its own messages)"
    ]
    record = json.loads((run / "trackers" / "tensorboard.json").read_text())["places"]["tensorboard"]
    assert (record["sent"]["metrics"][0], record["ended"]) == (25, "finished")
    found = EventAccumulator(str(run / "tensorboard"))
    found.Reload()
    assert [event.step for event in found.Scalars("train/loss")] == STEPS
