"""Runs from Python: callbacks, ways to stop, a run as an iterator, and what a run has told."""

import dataclasses
import json
import math
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from recipe_texts import tiny_recipe

import penstock
from penstock.app.runs.checkpoints import committed_step, make_checkpoint
from penstock.engine import validation
from penstock.storage.files.errors import UserError


def recipe(**changes: dict[str, Any]) -> penstock.Recipe:
    """Four steps on random tokens, the second and the fourth of them validated."""
    train = {"steps": 4, "validate_every": 2} | changes.pop("train", {})
    data = {"source": "random", "path": None, "validation_documents": 8, "tokenizer_vocab_size": 300}
    budgets = {"gpu": "64MiB", "ram": "64MiB"}
    return tiny_recipe(model={"vocab_size": 300}, data=data, train=train, budgets=budgets, **changes)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder, and Control-C as a program has it that was not started in a shell's background."""
    monkeypatch.chdir(tmp_path)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def state(run: Path) -> tuple[str, int | None]:
    """What a run is, and the step that it has committed."""
    return penstock.Run(run).state, committed_step(run)


def test_callbacks_are_told_what_the_run_writes(capsys: pytest.CaptureFixture[str]) -> None:
    told, lines = list[Any](), list[str]()
    hear: dict[str, Any] = {"on_step": told.append, "on_validation": told.append, "on_message": lines.append}
    run = penstock.train(recipe(), run_dir="run", **hear)
    kinds = [(type(one).__name__, one.step) for one in told]
    every = ("StepMetrics", "StepMetrics", "ValidationMetrics")
    assert kinds == [*zip(every, (1, 2, 2), strict=True), *zip(every, (3, 4, 4), strict=True)]
    found = penstock.Run("run")
    assert found.path == run
    assert [m for m in told if isinstance(m, penstock.StepMetrics)] == list(found.metrics())
    measured = [dataclasses.astuple(m) for m in told if isinstance(m, penstock.ValidationMetrics)]
    assert measured == [dataclasses.astuple(m) for m in found.validations()]
    assert (found.state, found.step, found.recipe.name) == ("finished", 4, "tiny")
    assert found.summary()["steps"] == 4
    assert lines[0] == "run directory run"
    assert any(line.startswith("trained to step 4") for line in lines)
    assert "\x1b" not in "".join(lines)
    assert capsys.readouterr().out == ""
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    with (run / "metrics.jsonl").open("a") as file:
        for change in ({"step": 5, "loss": None}, {"step": 6, "loss": "high"}, {"step": 7, "lr": 1.5}):
            file.write(json.dumps(last | change) + "\n")
        file.write("{}\n[torn")
    more = list(found.metrics())[4:]
    assert [m.step for m in more] == [5, 7], "lines that are none are left out"
    assert math.isnan(more[0].loss)
    with pytest.raises(penstock.UserError, match="no such run"):
        penstock.Run("nowhere")


def test_a_callback_stops_the_run_with_its_step_committed_or_before_its_first() -> None:
    def on_step(metrics: penstock.StepMetrics) -> None:
        if metrics.step == 2:
            raise penstock.StopTraining

    run, steps = penstock.train(recipe(), run_dir="run", on_step=on_step), list[int]()
    assert state(run) == ("stopped", 2)
    penstock.resume(run, on_step=lambda metrics: steps.append(metrics.step))
    assert steps == [3, 4]
    assert state(run) == ("finished", 4)

    def on_message(line: str) -> None:
        raise penstock.StopTraining

    assert state(penstock.train(recipe(), run_dir="early", on_message=on_message)) == ("stopped", None)


def test_what_a_callback_raises_comes_out_with_its_own_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def on_step(metrics: penstock.StepMetrics) -> None:
        if metrics.step == 3:
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine") as raised:
        penstock.train(recipe(storage={"checkpoint_every": 1}), run_dir="run", on_step=on_step)
    assert raised.traceback[-1].name == "on_step"
    assert "the generation of step 2 is intact" in raised.value.__notes__[0]
    assert state(Path("run")) == ("failed", 2)
    assert "in on_step" in json.loads(Path("run/log.jsonl").read_text().splitlines()[-1])["text"]
    penstock.resume("run")
    assert [m.step for m in penstock.Run("run").metrics()] == [1, 2, 3, 4]


def test_control_c_stops_at_a_step_with_that_step_committed(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)

    def on_step(metrics: penstock.StepMetrics) -> None:
        if metrics.step == 2:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        penstock.train(recipe(), run_dir="run", on_step=on_step)
    assert state(Path("run")) == ("stopped", 2)
    assert signal.getsignal(signal.SIGINT) is before
    assert "stopped after step 2; continue with" in capsys.readouterr().out


def test_a_second_control_c_does_not_wait_and_leaves_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.app.launch.signals._SAME_REQUEST_S", -1.0)

    def on_step(metrics: penstock.StepMetrics) -> None:
        if metrics.step == 3:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        penstock.train(recipe(storage={"checkpoint_every": 1}), run_dir="run", on_step=on_step)
    assert state(Path("run")) == ("stopped", 2)


@pytest.mark.long
def test_outside_the_main_thread_no_handler_is_installed() -> None:
    before, seen = signal.getsignal(signal.SIGINT), list[Any]()

    def train() -> None:
        penstock.train(recipe(), run_dir="run", on_step=lambda metrics: seen.append(signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert seen == [before] * 4
    assert state(Path("run")) == ("finished", 4)


def test_a_run_is_an_iterator_over_its_steps_and_whoever_leaves_the_loop_stops_it_at_that_step() -> None:
    measured: list[int] = []
    steps = penstock.steps(recipe(), run_dir="run", on_validation=lambda metrics: measured.append(metrics.step))
    assert ([m.step for m in steps], measured) == ([1, 2, 3, 4], [2, 4])
    assert state(Path("run")) == ("finished", 4)
    for metrics in penstock.steps(recipe(), run_dir="left"):
        if metrics.step == 2:
            break
    assert state(Path("left")) == ("stopped", 2)
    with pytest.raises(ZeroDivisionError):
        print([metrics.step / 0 for metrics in penstock.steps(recipe(), run_dir="failed")])
    assert state(Path("failed")) == ("stopped", 1)
    with pytest.raises(penstock.UserError, match=r"train\.lr"):
        next(penstock.steps(recipe(), overrides=["train.lr=-1"]))


@pytest.mark.long
def test_a_run_that_ended_early_says_so_and_has_nothing_to_resume(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, losses = validation.validate, {1: 2.0, 2: 3.0, 3: 3.0, 4: 1.5}
    monkeypatch.setattr(validation, "validate", lambda s: dataclasses.replace(real(s), loss=losses[s.step]))
    train = {"validate_every": 1, "early_stopping_patience": 2}
    run = penstock.train(recipe(train=train, storage={"keep_best": True}, after={"export": True}), run_dir="run")
    said = capsys.readouterr().out
    assert "ended early after step 3: no gain in 2 validations; best 2 at step 1" in said
    assert state(run) == ("finished", 3)
    summary, best = penstock.Run(run).summary(), {"best": 2.0, "best_step": 1}
    assert (summary["ended_early"], summary["validation_loss"]) == ({"validations": 2} | best, {"last": 3.0} | best)
    assert (run / "export" / "config.json").exists()
    with pytest.raises(penstock.UserError, match=r"to continue it, raise train\.early_stopping"):
        penstock.resume(run)
    penstock.export(run, "best", checkpoint="best")
    for name in ("best", "best-{step}"):
        with pytest.raises(penstock.UserError, match=r"best-N and best for storage\.keep_best; choose another"):
            make_checkpoint(run, name)
    penstock.resume(run, overrides=["train.early_stopping_patience=3"])
    assert state(run) == ("finished", 4)
    assert penstock.Run(run).summary()["ended_early"] is None
    assert [m.step for m in penstock.Run(run).validations()] == [1, 2, 3, 4]


@pytest.mark.parametrize(("section", "field", "value", "said"), [
    (penstock.TrainConfig, "steps", "5", "train.steps: '5' must be a whole number"),
    (penstock.TrainConfig, "chunk_tokens", "4k", "train.chunk_tokens: '4k' must be a whole number"),
    (penstock.TrainConfig, "lr", "1e-4", "train.lr: '1e-4' must be a number"),
    (penstock.TrainConfig, "freeze", "*norm*", r"train.freeze: '\*norm\*' must be a list"),
    (penstock.TrainConfig, "freeze", None, "train.freeze: None must be a list"),
    (penstock.TrainConfig, "lr_groups", ["a"], r"train.lr_groups: \['a'\] must be a dict"),
    (penstock.DataConfig, "sequence_length", "4k", "data.sequence_length: '4k' must be a whole number"),
    (penstock.AdapterConfig, "alpha", "4", "adapter.alpha: '4' must be a number"),
    (penstock.ModelConfig, "overrides", [1], r"model.overrides: \[1\] must be a dict"),
])  # fmt: skip
def test_a_value_of_another_kind_is_said_by_its_field(section: Any, field: str, value: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        section(**{field: value})
