"""Runs with trackers: whatever becomes of these, a run ends as it does without any."""

import dataclasses
import json
import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from cli_process import FAKE, PATIENCE_S, done, json_lines, refusal, started, steps, wait_until
from recipe_texts import recipe_text, tiny_recipe
from samples import cases
from tiny import digest_of
from tracker_servers import SERVERS, StandIn, WandbServer, environment, tensorboard, without_settings

import penstock
from penstock.app.cli.main import main
from penstock.app.trackers import attach

CLIENTS = {"trackio", "wandb", "mlflow"}
DATA = {"source": "random", "path": None, "tokenizer_vocab_size": 300}
SMALL = {"model": {"vocab_size": 300}, "data": DATA, "budgets": {"gpu": "64MiB", "ram": "64MiB"}}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_settings(monkeypatch)
    monkeypatch.chdir(tmp_path)


def warnings(run: Path, tracker: str) -> list[str]:
    """What a run's log says of a tracker."""
    told = [line["text"] for line in json_lines(run / "log.jsonl") if line["level"] == "warning"]
    return [text for text in told if text.startswith(f"tracker {tracker}: ")]


def of_place(record: Path) -> dict[str, Any]:
    """What a run keeps of a tracker with one place."""
    (place,) = json.loads(record.read_text()).values()
    return dict(place)


def test_no_trouble_of_a_tracker_reaches_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """One never answers, one answers 500, one is down, and one works."""
    recipe = tiny_recipe(train={"steps": 4}, **SMALL)
    plain = penstock.train(recipe, run_dir="plain")
    imported = CLIENTS & sys.modules.keys()
    monkeypatch.setattr(attach, "FINISH_S", 1.0)
    servers: dict[str, StandIn] = {}

    def on_step(metrics: penstock.StepMetrics) -> None:
        if metrics.step == 4:
            assert all(server.reached.wait(PATIENCE_S) for server in servers.values())

    with ExitStack() as stack:
        for name, mood in (("wandb", "hangs"), ("mlflow", "fails")):
            servers[name] = stack.enter_context(SERVERS[name](mood))
        urls = {name: server.url for name, server in servers.items()} | {"trackio": "http://127.0.0.1:1"}
        for name, url in urls.items():
            for key, value in environment(name, url).items():
                monkeypatch.setenv(key, value)
        followed = dataclasses.replace(recipe, trackers=["wandb", "mlflow", "trackio", "tensorboard"])
        run = penstock.train(followed, run_dir="run", on_step=on_step)
    assert CLIENTS & sys.modules.keys() == imported
    assert (penstock.Run(run).state, digest_of(run)) == ("finished", digest_of(plain))
    assert [m.loss for m in penstock.Run(run).metrics()] == [m.loss for m in penstock.Run(plain).metrics()]
    assert warnings(run, "tensorboard") == []
    for name in CLIENTS:
        *before, last = warnings(run, name)
        assert last.startswith(f"tracker {name}: steps 1 to 4 were not sent (")
        assert [text for text in before if "it will be tried again" not in text] == []
        assert len(before) <= 1, "a failure while the run runs is told once"
    assert [(event.step, event.value) for event in tensorboard(run).Scalars("train/loss")] == [
        (m.step, pytest.approx(m.loss)) for m in penstock.Run(run).metrics()
    ]


def test_samples_of_a_run_are_what_a_tracker_gets() -> None:
    """The real lines of a run's samples, not made up ones."""
    Path("corpus").mkdir()
    for name in "abcd":
        Path(f"corpus/{name}.txt").write_text("one day it rained and rained " * 100)
    parts: dict[str, dict[str, Any]] = {"samples": {"prompts": ["one day"], "every": 2, "tokens": 4}}
    parts |= {"data": {"validation_documents": 1}, "train": {"steps": 2, "validate_every": 2}}
    recipe = tiny_recipe(**parts, budgets=SMALL["budgets"])
    run = penstock.train(dataclasses.replace(recipe, trackers=["tensorboard"]), run_dir="run")
    (line,) = json_lines(run / "samples.jsonl")
    found = tensorboard(run)
    (event,) = found.Tensors("samples/text_summary")
    assert (event.step, event.wall_time) == (2, line["time"])
    text = event.tensor_proto.string_val[0].decode()
    assert text.startswith("**one day**\n\n")
    assert [event.step for event in found.Scalars("validation/perplexity")] == [2]


@pytest.mark.long
@pytest.mark.parametrize("number", cases([signal.SIGKILL, signal.SIGINT], signal.SIGKILL), ids=lambda one: one.name)
def test_a_run_that_was_ended_and_resumed_is_one_run_of_its_trackers(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for the engine trains; the trackers are sent every step once."""
    text = recipe_text(train={"steps": 60}, **SMALL)
    Path("recipe.py").write_text(text.replace("trackers=[]", "trackers=['tensorboard', 'wandb']"))
    run = tmp_path / "run"
    records = [run / "trackers" / f"{tracker}.json" for tracker in ("tensorboard", "wandb")]
    with WandbServer() as server:
        settings = environment("wandb", server.url)
        process = started(tmp_path, *FAKE, "train", "recipe.py", "--run-dir", "run", FAKE_STEP_S="0.1", **settings)
        wait_until(lambda: (run / "metrics.jsonl").exists() and len(steps(run)) > 4)
        wait_until(lambda: all(record.exists() and "metrics" in of_place(record)["sent"] for record in records))
        process.send_signal(number)
        done(process, -number if number == signal.SIGKILL else 0)
        done(started(tmp_path, *FAKE, "resume", "run", **settings))
        for key, value in settings.items():
            monkeypatch.setenv(key, value)
        assert main(["track", "run"]) == 0
        assert steps(run) == list(range(1, 61))
        ((name, rows),) = server.rows.items()
        sent = [row["train/global_step"] for row in rows if "train/loss" in row]
        assert sent == steps(run)
        assert server.exit_codes == {name: 0}
    assert [event.step for event in tensorboard(run).Scalars("train/loss")] == steps(run)
    assert [of_place(record)["ended"] for record in records] == ["finished", "finished"]


def test_a_run_does_not_begin_without_its_trackers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", os.getcwd())
    text = recipe_text(train={"steps": 1}, **SMALL).replace("trackers=[]", "trackers=['wandb']")
    Path("recipe.py").write_text(text)
    assert "wandb: you are not logged in; run `wandb" in refusal(capsys, "train", "recipe.py", "--run-dir", "run")
    monkeypatch.setattr("penstock.app.trackers.require.versions", lambda *packages: {packages[0]: "0.9.1"})
    assert "wandb 0.9.1 is too old" in refusal(capsys, "train", "recipe.py", "--run-dir", "run")
    assert "wandb" in refusal(capsys, "train", "recipe.py", "--set", 'trackers=["comet"]', "--run-dir", "run")
    assert [path.name for path in Path().iterdir()] == ["recipe.py"]
