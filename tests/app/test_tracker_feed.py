"""What is handed to trackers, and what is kept of it, without any of them."""

import os
import shutil
from pathlib import Path

import pytest
from cli_process import refusal
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tracked import drop_steps, made_up_run, write_steps

from penstock.app.trackers.base import Line
from penstock.app.trackers.feed import Feed, Mark
from penstock.app.trackers.record import Record
from penstock.app.trackers.require import require_trackers
from penstock.app.trackers.sender import Sender
from penstock.storage.errors import UserError


def all_of(feed: Feed) -> list[Line]:
    lines = feed.read()
    while feed.behind:
        lines += feed.read()
    return lines


def places(lines: list[Line]) -> list[tuple[int, str]]:
    return [(line.step, line.stream) for line in lines]


def test_lines_come_once_in_the_order_of_steps(tmp_path: Path) -> None:
    run = made_up_run(tmp_path / "run", range(1, 12))
    feed = Feed(run, {})
    lines = all_of(feed)
    assert places(lines)[8:] == [(9, "metrics"), (10, "metrics"), (10, "validation"), (10, "samples"), (11, "metrics")]
    assert lines[0].values["train/loss"] == 8.0
    assert lines[0].values["drives/read_bytes"] == 11
    assert lines[0].values["memory/gpu_bytes"] == 1001
    assert "train/grad_norm" not in lines[2].values, "null in metrics.jsonl: not finite"
    assert lines[10].values["validation/perplexity"] == pytest.approx(7.389056)
    write_steps(run, [12])
    assert places(feed.read()) == [(12, "metrics")]
    assert places(Feed(run, feed.marks).read()) == []
    assert feed.redone is None


def test_steps_that_were_done_again_are_known_by_their_time(tmp_path: Path) -> None:
    run = made_up_run(tmp_path / "run", range(1, 21))
    feed = Feed(run, {})
    all_of(feed)
    drop_steps(run, 15)
    assert (feed.read(), feed.redone) == ([], None)
    write_steps(run, range(15, 23), began=1.9e9)
    for reader in (feed, Feed(run, feed.marks)):
        lines = reader.read()
        assert (places(lines)[0], reader.redone) == ((21, "metrics"), 15)
        reader.rewind(15)
        assert [step for step, stream in places(all_of(reader)) if stream == "metrics"] == list(range(15, 23))
        assert reader.redone is None


def test_a_copy_of_a_run_or_another_place_is_another_run_and_a_damaged_record_is_none(tmp_path: Path) -> None:
    run = made_up_run(tmp_path / "run")
    (run / "trackers").mkdir()
    Record(run, "wandb", "here").save(known={"id": "x"}, marks={"metrics": Mark(5, 1.0)})

    def kept(path: Path, place: str) -> tuple[object, object]:
        return Record(path, "wandb", place).known, Record(path, "wandb", place).marks

    shutil.copytree(run, tmp_path / "copy")
    assert kept(run, "here") == ({"id": "x"}, {"metrics": Mark(5, 1.0)})
    assert kept(run, "there") == kept(tmp_path / "copy", "here") == ({}, {})
    assert Record(tmp_path / "copy", "wandb", "here", local=True).known == {"id": "x"}
    os.rename(run, tmp_path / "moved")
    assert Record(tmp_path / "moved", "wandb", "here").known == {"id": "x"}
    for content in ("", "[]", '{"places": 3}', '{"places": {"tensorboard": {"sent": 4, "known": []}}}'):
        (tmp_path / "moved" / "trackers" / "tensorboard.json").write_text(content)
        damaged = Record(tmp_path / "moved", "tensorboard", "tensorboard", local=True)
        assert (damaged.known, damaged.marks, damaged.ended) == ({}, {}, None)


def test_a_tensorboard_has_every_step_once_and_as_it_was_done_last(tmp_path: Path) -> None:
    """A sender is killed before it keeps what it has sent, and steps are done again, twice."""
    run = made_up_run(tmp_path / "run", range(1, 21))
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
    found = EventAccumulator(str(run / "tensorboard"))
    found.Reload()
    losses = [(event.step, event.wall_time, event.value) for event in found.Scalars("train/loss")]
    began = {step: 1.8e9 if step < 18 else 1.9e9 for step in range(1, 24)}
    assert losses == [(step, began[step] + step, pytest.approx(8.0 / step)) for step in range(1, 24)]
    assert [event.step for event in found.Scalars("validation/perplexity")] == [10, 20]
    text = found.Tensors("samples/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert text == "**One \\*day\\***\n\n after 20 steps\nit rained ...\n"


def test_what_cannot_be_sent_to_is_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "NETRC", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TRACKIO_SERVER_URL", "http://127.0.0.1:1")
    monkeypatch.delenv("TRACKIO_WRITE_TOKEN", raising=False)
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
    run = made_up_run(tmp_path / "run")
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
