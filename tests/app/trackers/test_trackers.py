"""What is handed to trackers and kept of it; and that each tracker's own client sends what a run directory holds, once,
whatever became of the sender before."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tracker_servers
from cli_process import PATIENCE_S, REPOSITORY, refusal
from samples import cases
from tracker_servers import SERVERS, MlflowServer, StandIn, TrackioServer, WandbServer, environment, tensorboard

from penstock.app.cli.main import main
from penstock.app.runs.directory import RunDir
from penstock.app.trackers import attach
from penstock.app.trackers.attach import Trackers, end_sender, listen, start_sender
from penstock.app.trackers.base import Line
from penstock.app.trackers.record import Entry, Feed, Mark, directory_id, read_entries, write_entries
from penstock.app.trackers.require import require_trackers
from penstock.app.trackers.sender import Sender
from penstock.engine.config import Recipe
from penstock.storage.files.errors import UserError

STEPS = list(range(1, 26))
"""Of every wait, and of every sender: one that hangs is killed and so fails its test. Senders give way to all else: on
a busy machine one takes half a minute to begin."""
BEGAN = 1.8e9
"""Unix seconds of step 0."""


def made_up_run(path: Path, steps: Iterable[int] = range(1, 21)) -> Path:
    """A finished run of these steps, with a validation and samples every tenth, with all that is sent to trackers."""
    RunDir.create(Recipe(name="tiny"), path).__exit__()
    write_steps(path, steps)
    end(path, "finished")
    return path


def append(path: Path, line: dict[str, Any]) -> None:
    with open(path, "a") as file:
        file.write(json.dumps(line) + "\n")


def write_steps(path: Path, steps: Iterable[int], began: float = BEGAN) -> None:
    """Append lines as a run does, the metrics of a step before its validation and samples."""
    for step in steps:
        at = began + step
        append(path / "metrics.jsonl", {
            "step": step, "loss": 8.0 / step, "grad_norm": None if step == 3 else 1.5, "lr": 1e-3, "tokens": 100,
            "tokens_per_s": 50.0, "step_s": 2.0, "time": at, "tier_bytes": {"gpu": 1000 + step, "ram": 2000},
            "nvme_read_bytes": {"/a": 5, "/b": 6},
            "measured": {"rewards/margins": step / 8, "rewards/<lambda>/mean": None if step == 3 else 2.5, "loss": 9.0},
        })  # fmt: skip
        if step % 10 == 0:
            append(path / "validation.jsonl", {"step": step, "loss": 2.0, "accuracy": 0.5, "time": at + 0.1,
                                               "measured": {"rewards/margins": step / 4}})  # fmt: skip
            sample = {"prompt": "One *day*", "text": f" after {step} steps\nit rained", "tokens": 5, "ended": False}
            append(path / "samples.jsonl", {"step": step, "samples": [sample], "seconds": 1, "time": at + 0.2})


def drop_steps(path: Path, first: int) -> None:
    """Drop the lines of a resumed run's steps that are done again."""
    for name in ("metrics", "validation", "samples"):
        file = path / f"{name}.jsonl"
        kept = [line for line in file.read_text().splitlines(keepends=True) if json.loads(line)["step"] < first]
        file.unlink()
        file.write_text("".join(kept))


def end(path: Path, state: str) -> None:
    (path / "status.json").write_text(json.dumps({"state": state, "step": 20, "heartbeat": time.time()}))
    (path / "summary.json").write_text(json.dumps({"steps": 20, "last_loss": 0.4, "tiers": {"gpu": {"peak_bytes": 7}}}))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of 20 steps; five more come later."""
    tracker_servers.without_settings(monkeypatch)
    monkeypatch.chdir(tmp_path)
    return made_up_run(tmp_path / "run")


def all_of(feed: Feed) -> list[Line]:
    lines = feed.read()
    while feed.behind:
        lines += feed.read()
    return lines


def places(lines: list[Line]) -> list[tuple[int, str]]:
    return [(line.step, line.stream) for line in lines]


def test_a_sample_with_a_reward_shows_it(tmp_path: Path) -> None:
    sample = {"prompt": "2 + 2 =", "text": " 4", "tokens": 2, "ended": True, "reward": 1.0}
    append(tmp_path / "samples.jsonl", {"step": 3, "samples": [sample], "seconds": 1, "time": 5.0})
    assert [line.samples for line in all_of(Feed(tmp_path, {}))] == [[("2 + 2 =", " 4  [reward 1]")]]


def test_lines_come_once_in_the_order_of_steps(tmp_path: Path) -> None:
    run = made_up_run(tmp_path / "run", range(1, 12))
    feed = Feed(run, {})
    lines = all_of(feed)
    assert places(lines)[8:] == [(9, "metrics"), (10, "metrics"), (10, "validation"), (10, "samples"), (11, "metrics")]
    first = {"train/loss": 8.0, "drives/read_bytes": 11, "memory/gpu_bytes": 1001}
    assert first.items() <= lines[0].values.items()
    assert {"train/grad_norm", "train/rewards/<lambda>/mean"}.isdisjoint(lines[2].values), "null: not finite"
    assert (lines[0].values["train/rewards/margins"], lines[10].values["eval/rewards/margins"]) == (0.125, 2.5)
    assert lines[10].values["validation/perplexity"] == pytest.approx(7.389056)
    write_steps(run, [12])
    assert places(feed.read()) == [(12, "metrics")]
    assert places(Feed(run, feed.marks).read()) == []


def test_steps_that_were_done_again_are_known_by_their_time(run: Path) -> None:
    feeds = [Feed(run, {}, again=again) for again in (False, True)]
    for feed in feeds:
        all_of(feed)
    drop_steps(run, 15)
    assert [feed.read() for feed in feeds] == [[], []]
    write_steps(run, range(15, 23), began=1.9e9)
    for feed in (*feeds, *(Feed(run, feed.marks, again=feed._again) for feed in feeds)):
        metrics = [step for step, stream in places(all_of(feed)) if stream == "metrics"]
        assert metrics == list(range(15, 23) if feed._again else range(21, 23))
        assert feed.repeated != feed._again


def test_a_copy_of_a_run_or_another_place_is_another_run_and_a_damaged_record_is_none(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / "trackers").mkdir()

    def knows(path: Path, name: str) -> bool:
        return Sender(path, name, lambda word: None, {})._entry is not None

    for name in ("wandb", "tensorboard"):
        entry = Entry(run=directory_id(run), id="x", known={}, sent={"metrics": Mark(5, 1.0)})
        write_entries(run, name, {name: entry})
        assert read_entries(run, name) == {name: entry}
    shutil.copytree(run, tmp_path / "copy")
    assert (knows(run, "wandb"), knows(tmp_path / "copy", "wandb")) == (True, False)
    assert knows(tmp_path / "copy", "tensorboard")
    monkeypatch.setenv("WANDB_PROJECT", "other")
    assert not knows(run, "wandb")
    monkeypatch.delenv("WANDB_PROJECT")
    os.rename(run, tmp_path / "moved")
    assert knows(tmp_path / "moved", "wandb")
    for content in ("", "[]", '{"places": 3}', '{"tensorboard": {"sent": 4, "known": []}}'):
        (tmp_path / "moved" / "trackers" / "tensorboard.json").write_text(content)
        assert not knows(tmp_path / "moved", "tensorboard")


def test_a_tensorboard_has_every_step_once_and_as_it_was_done_last(run: Path) -> None:
    """A sender is killed before it keeps what it has sent, and steps are done again, twice."""
    (run / "trackers").mkdir()

    def send() -> None:
        sender = Sender(run, "tensorboard", lambda word: None, {"python": "3"})
        while sender.send():
            pass

    send()
    kept = (run / "trackers" / "tensorboard.json").read_bytes()
    write_steps(run, range(21, 26))
    send()
    (run / "trackers" / "tensorboard.json").write_bytes(kept)
    send()
    drop_steps(run, 18)
    write_steps(run, range(18, 24), began=1.9e9)
    send()
    found = tensorboard(run)
    losses = [(event.step, event.wall_time, event.value) for event in found.Scalars("train/loss")]
    began = {step: BEGAN if step < 18 else 1.9e9 for step in range(1, 24)}
    assert losses == [(step, began[step] + step, pytest.approx(8.0 / step)) for step in range(1, 24)]
    assert [event.step for event in found.Scalars("validation/perplexity")] == [10, 20]
    assert [event.value for event in found.Scalars("train/rewards/margins")] == [step / 8 for step in range(1, 24)]
    assert [event.value for event in found.Scalars("eval/rewards/margins")] == [2.5, 5.0]
    text = found.Tensors("samples/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert text == "**One \\*day\\***\n\n after 20 steps\nit rained ...\n"


def test_what_cannot_be_sent_to_is_refused_before_the_first_step(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NETRC", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TRACKIO_SERVER_URL", "http://127.0.0.1:1")
    with pytest.raises(UserError) as error:
        require_trackers(["tensorboard", "wandb", "trackio"])
    assert str(error.value) == (
        "trackers: wandb: you are not logged in; run `wandb login`, or set WANDB_API_KEY, or WANDB_MODE=offline; "
        "trackio: TRACKIO_SERVER_URL needs a write token; set TRACKIO_WRITE_TOKEN, or leave it out of trackers"
    )
    (tmp_path / ".netrc").write_text(f"machine api.wandb.ai login user password {'0' * 40}\n")
    (tmp_path / ".netrc").chmod(0o600)
    require_trackers(["wandb"])
    (tmp_path / ".netrc").unlink()
    (tmp_path / ".config" / "wandb").mkdir(parents=True)
    (tmp_path / ".config" / "wandb" / "settings").write_text("[default]\nmode = offline\n")
    require_trackers(["wandb"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"mlflow is not installed; `pip install mlflow-skinny`, or leave it out"):
        require_trackers(["mlflow"])
    for tracker, reason in (
        ("tensorboard", "tensorboard is not installed; `pip install tensorboard`"),
        ("comet", "comet: is not a tracker; choose from trackio, wandb"),
    ):
        assert reason in refusal(capsys, "track", str(run), "--to", tracker)
    assert "its recipe names no trackers; choose one with --to" in refusal(capsys, "track", str(run))
    assert not (run / "trackers").exists()


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
    (place,) = known.values()
    place["sent"]["metrics"] = [18, place["sent"]["metrics"][1] - 2]
    if lost:
        record.write_text(json.dumps(known))
    write_steps(run, range(21, 26))
    end(run, "finished")
    assert main(["track", str(run), "--to", name]) == 0


def losses(found: list[tuple[int, float]]) -> None:
    assert found == [(step, pytest.approx(8.0 / step)) for step in STEPS]


@pytest.mark.parametrize("server", [("wandb", "works")], indirect=True)
def test_wandb_has_all_of_it(run: Path, server: WandbServer) -> None:
    track(run, "wandb")
    ((name, rows),) = server.rows.items()
    losses([(row["train/global_step"], row["train/loss"]) for row in rows if "train/loss" in row])
    assert [row["train/global_step"] for row in rows if "validation/perplexity" in row] == [10, 20]
    margins = [row["train/rewards/margins"] for row in rows if "train/rewards/margins" in row]
    assert margins == [step / 8 for step in STEPS]
    assert [row["eval/rewards/margins"] for row in rows if "eval/rewards/margins" in row] == [2.5, 5.0]
    pages = {asked.body for asked in server.requests if "/upload/media/html/" in asked.path}
    assert [row["train/global_step"] for row in rows if "samples" in row] == [10, 20]
    assert len(pages) == 2
    assert any("<b>One *day*</b> after 20 steps\nit rained ..." in page for page in pages)
    assert (server.exit_codes, server.summary[name]["summary/tiers.gpu.peak_bytes"]) == ({name: 0}, 7)
    assert server.config[name]["train"]["value"]["steps"] == 100
    begun = [asked for asked in server.requests if asked.path == "/graphql" and "UpsertBucket" in str(asked.body)]
    assert {asked.body["variables"].get("host") for asked in begun} == {None}
    assert str(REPOSITORY) not in "".join(map(str, server.requests))


@pytest.mark.long
def test_wandb_offline_is_what_wandb_sync_sends(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    track(run, "wandb", lost=False)
    folders = sorted(map(str, (run / "trackers" / "wandb").glob("offline-run-*")))
    assert len(folders) == 2
    with WandbServer() as server:
        command = [sys.executable, "-m", "wandb", "sync", *folders]
        environ = os.environ | environment("wandb", server.url) | {"WANDB_MODE": "online"}
        subprocess.run(command, env=environ, timeout=PATIENCE_S, check=True, stdin=subprocess.DEVNULL)
    (rows,) = server.rows.values()
    losses([(row["train/global_step"], row["train/loss"]) for row in rows if "train/loss" in row])


@pytest.mark.long
@pytest.mark.parametrize("server", [("mlflow", "works")], indirect=True)
def test_mlflow_has_all_of_it(run: Path, server: MlflowServer) -> None:
    from mlflow import MlflowClient

    track(run, "mlflow")
    client = MlflowClient(server.url)
    losses([(metric.step, metric.value) for metric in client.get_metric_history("run0", "train/loss")])
    rewards = client.get_metric_history("run0", "train/rewards/_lambda_/mean")
    assert [metric.step for metric in rewards] == [step for step in STEPS if step != 3]
    assert [metric.value for metric in client.get_metric_history("run0", "eval/rewards/margins")] == [2.5, 5.0]
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
    assert [row["train/rewards/margins"] for row in rows if "train/rewards/margins" in row] == [s / 8 for s in STEPS]
    assert [row["eval/rewards/margins"] for row in rows if "eval/rewards/margins" in row] == [2.5, 5.0]
    assert [row["samples"]["_value"][0]["text"] for row in rows if "samples" in row][
        -1
    ] == " after 20 steps\nit rained ..."
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
    assert follower.stdout is not None
    assert "at" in json.loads(follower.stdout.readline())
    error = refusal(capsys, "track", str(run), "--to", "tensorboard")
    assert "tensorboard: another process is sending this run to it" in error
    assert follower.stdin is not None
    follower.stdin.close()
    assert follower.wait(PATIENCE_S) == 0
    record = json.loads((run / "trackers" / "tensorboard.json").read_text())
    assert record["tensorboard"]["ended"] == "crashed"
    assert main(["track", str(run), "--to", "tensorboard"]) == 0
    before = [(file, file.stat().st_mtime_ns) for file in (run / "tensorboard").iterdir()]
    assert main(["track", str(run), "--to", "tensorboard"]) == 0
    assert [(file, file.stat().st_mtime_ns) for file in (run / "tensorboard").iterdir()] == before
    assert capsys.readouterr().out.endswith("tensorboard: has all of run\n")


HANGS = "it did not accept everything within 2 s"
TROUBLE = {
    ("wandb", "refuses"): "it refuses this login; log in with `wandb login`", ("wandb", "hangs"): HANGS,
    ("mlflow", "refuses"): "RestException", ("mlflow", "fails"): "too many 500 error responses",
    ("mlflow", "hangs"): HANGS, ("trackio", "fails"): "its server answers 500", ("trackio", "hangs"): HANGS,
    ("trackio", "refuses"): "it refuses the write token; set TRACKIO_WRITE_TOKEN",
}  # fmt: skip


@pytest.mark.parametrize("server", cases(TROUBLE, ("wandb", "refuses")), indirect=True, ids="-".join)
def test_trouble_is_told_in_a_line_and_what_is_missing_is_sent_later(
    run: Path, server: StandIn, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, mood = request.node.callspec.params["server"]
    monkeypatch.setattr(attach, "FINISH_S", 2.0 if mood == "hangs" else PATIENCE_S)
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

    def listen_and_kill(process: subprocess.Popen[bytes], tell: attach.Tell) -> str | None:
        begun.append(process)
        if len(begun) in more:
            write_steps(run, more[len(begun)])

        def heard(text: str, level: Any) -> None:
            if len(begun) < 3:
                end_sender(process)
            else:
                third.set()
            tell(text, level)

        return listen(process, heard)

    monkeypatch.setattr(attach, "listen", listen_and_kill)
    told: list[tuple[str, str]] = []
    trackers = Trackers(run, ["tensorboard"], lambda text, level: told.append((level, text)))
    trackers.begin()
    assert third.wait(PATIENCE_S)
    trackers.finish("finished")
    assert [text for level, text in told if level == "warning"] == [
        "tracker tensorboard: its process was ended by signal 9; it will be tried again, and the run continues without "
        "it (run/trackers/tensorboard.log has its own messages)"
    ]
    record = json.loads((run / "trackers" / "tensorboard.json").read_text())["tensorboard"]
    assert (record["sent"]["metrics"][0], record["ended"]) == (25, "finished")
    assert [event.step for event in tensorboard(run).Scalars("train/loss")] == STEPS
