import json
import os
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_process import json_lines, wait_until

import penstock.app.runs.log
from penstock.app.runs.files import JsonLines
from penstock.app.runs.log import RunLog, continue_spans
from penstock.engine import events
from penstock.engine.events import Preparing, Progress, Sample, SampleMetrics, Span, StepMetrics, ValidationMetrics

FIELDS: dict[str, Any] = {
    "grad_norm": 0.5, "lr": 1e-3, "tokens": 7, "step_s": 0.25, "tokens_per_s": 28.0, "warmup": False, "time": 1234.5,
    "model_flops": 10**15, "nvme_read_bytes": {"/mnt/a/run": 4096}, "nvme_written_bytes": {"/mnt/a/run": 8192},
    "tier_bytes": {"gpu": 1, "ram": 2, "nvme": 3}, "measured": {"rewards/margins": 0.25, "kl": 0.5},
}  # fmt: skip
"""Of a step, as the log has them too."""

MEAN = {"mean_tokens_per_s": 28.0, "mean_step_s": 0.25, "mean_model_tflops_per_s": 4000.0}
"""Of the run, if all its steps are like that."""


def metrics(step: int, loss: float = 1.0) -> StepMetrics:
    return StepMetrics(step=step, loss=loss, **FIELDS)


def span(step: int, start_s: float, end_s: float, id: int = -1, waited: tuple[int, ...] = ()) -> Span:
    return Span("compute", "forward", "layers.0", 2, start_s, end_s, 0, step, id, waited)


def told(*spans: Span) -> Progress:
    return Progress(list(spans), 0.0, [])


def steps_of(file: Path, *names: str) -> list[tuple[Any, ...]]:
    """The step and these fields of each line."""
    return [tuple(line[name] for name in ("step", *names)) for line in json_lines(file)]


def status(path: Path) -> dict[str, object]:
    return dict(json.loads((path / "status.json").read_text()))


def test_log_writes_exactly_the_documented_fields(tmp_path: Path) -> None:
    log = RunLog(tmp_path, total_steps=3)
    assert status(tmp_path)["state"] == "preparing"
    log.set_state("running")
    log.progress(told(span(1, 0.0, 0.5, 7, (3, 5))._replace(awaited=((2, 0.125),))))
    log.step(metrics(1))
    log.step(metrics(2, loss=float("nan")))
    log.message("a word", "warning")
    log.progress(Progress([span(2, 0.5, 0.75)], 0.8, [events.UnderWay("h2d", "load", "head", -1, 2, 0.7)]))
    log.set_state("running")
    now = {"h2d": [{"op": "load", "block": "head", "chunk": -1, "step": 2, "start_s": 0.7}]}
    assert {"clock_s": 0.8, "now": now}.items() <= status(tmp_path).items()
    log.close("finished")
    log.close("failed")
    lines = [{"step": step, "loss": loss} | FIELDS | MEAN for step, loss in ((1, 1.0), (2, None))]
    assert json_lines(tmp_path / "metrics.jsonl") == lines
    first, second = json_lines(tmp_path / "spans.jsonl")
    assert first == span(1, 0.0, 0.5)._asdict() | {"id": 7, "waited": [3, 5], "awaited": [[2, 0.125]]}
    assert second | {"awaited": ()} == span(2, 0.5, 0.75)._asdict() | {"waited": []}
    assert Span.of(first) == span(1, 0.0, 0.5, 7, (3, 5))._replace(awaited=((2, 0.125),))
    (message,) = json_lines(tmp_path / "log.jsonl")
    assert abs(message.pop("time") - time.time()) < 5  # type: ignore[operator]
    assert message == {"level": "warning", "text": "a word", "step": 2}
    found = status(tmp_path)
    for name in ("heartbeat", "started"):
        assert abs(found.pop(name) - time.time()) < 5  # type: ignore[operator]
    process = {"pid": os.getpid(), "host": socket.gethostname()}
    assert found == {"state": "finished", "step": 2, "total_steps": 3, "clock_s": 0.8} | process


def test_the_whole_checklist_is_told_to_whoever_comes_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 10.0
    monkeypatch.setattr(penstock.app.runs.log, "HEARTBEAT_S", 1000.0)
    times = {"perf_counter": lambda: now, "monotonic": time.monotonic, "time": time.time}
    monkeypatch.setattr(penstock.app.runs.log, "time", SimpleNamespace(**times))
    log = RunLog(tmp_path, total_steps=3)
    assert "preparing" not in status(tmp_path)
    log.prepare(Preparing("data", "begun", 0.0))
    data = {"name": "data", "state": "running", "seconds": 0.0, "detail": None, "fraction": None}
    assert status(tmp_path)["preparing"] == [data]
    log.prepare(Preparing("data", "progress", 1.5, "half of it", 0.5))
    now += 0.25  # it has gone on since
    log.set_state("preparing")
    assert status(tmp_path)["preparing"] == [data | {"seconds": 1.75, "detail": "half of it", "fraction": 0.5}]
    log.prepare(Preparing("data", "done", 2.0))
    log.prepare(Preparing("self-check", "begun", 0.0))
    now += 3.0
    log.close("failed", "it broke off")
    assert status(tmp_path)["preparing"] == [
        {"name": "data", "state": "done", "seconds": 2.0},
        {"name": "self-check", "state": "running", "seconds": 3.0, "detail": None, "fraction": None},
    ]


def test_the_drives_temperature_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock.app.runs.log, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(penstock.app.runs.log, "disk_temperature", lambda disks: 41.5)
    log, folders = RunLog(tmp_path, total_steps=3), [tmp_path / "state", Path("/nowhere/at/all")]
    log.watch_drives(folders)
    wait_until(lambda: "drives" in status(tmp_path))
    assert status(tmp_path)["drives"] == {str(folder): {"temperature_c": 41.5} for folder in folders}
    log.close("finished")
    assert "drives" not in status(tmp_path), "nobody looks at them any more"


def test_heartbeat_goes_on_without_steps_and_under_load_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert penstock.app.runs.log.HEARTBEAT_S <= 5
    monkeypatch.setattr(penstock.app.runs.log, "HEARTBEAT_S", 0.05)

    def heartbeat() -> Any:
        return status(tmp_path)["heartbeat"]

    log = RunLog(tmp_path, total_steps=3)
    first = heartbeat()
    wait_until(lambda: heartbeat() > first)
    step, before = 0, heartbeat()

    def goes_on() -> bool:
        nonlocal step
        step += 1
        log.progress(told(*[span(step, 0.0, 1.0)] * 500))
        log.step(metrics(step))
        return heartbeat() > before

    wait_until(goes_on)
    for _ in range(40):  # much is left to be written at the end
        goes_on()
    log.close("finished")
    assert len(json_lines(tmp_path / "metrics.jsonl")) == step
    assert sum(1 for _ in JsonLines(tmp_path / "spans.jsonl")) == 500 * step


def test_a_stalled_disk_drops_spans_never_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock.app.runs.log, "MAX_PENDING_SPANS", 3)
    log = RunLog(tmp_path, total_steps=9)
    for step, count in ((1, 4), (2, 2)):
        log.progress(told(*[span(step, 0.0, 1.0)] * count))
        log.step(metrics(step))
    log.close("finished")
    assert log.dropped_spans == 4
    assert (steps_of(tmp_path / "metrics.jsonl"), steps_of(tmp_path / "spans.jsonl")) == ([(1,), (2,)], [(2,), (2,)])


def test_a_resumed_run_replaces_steps_done_again_and_goes_on_in_time(tmp_path: Path) -> None:
    log = RunLog(tmp_path, total_steps=9)
    for step in (1, 2, 3):
        log.progress(told(span(step, float(step), step + 1.0, 10 - step, (3,))))
        log.step(metrics(step, loss=10.0))
    log.message("before")
    log.close("failed")
    for name in ("metrics.jsonl", "spans.jsonl", "log.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{"step": 4, "lo')
    log = RunLog(tmp_path, total_steps=9, step=3)
    for step in (3, 4):
        log.progress(Progress([span(step, step - 3.0, step - 2.0, step, (0,))], 7.0, []))
        log.step(metrics(step, loss=20.0))
    log.message("on")
    log.close("finished")
    assert status(tmp_path)["clock_s"] == 11.0
    assert [line["text"] for line in json_lines(tmp_path / "log.jsonl")] == ["before", "on"]
    assert steps_of(tmp_path / "metrics.jsonl", "loss") == [(1, 10.0), (2, 10.0), (3, 20.0), (4, 20.0)]
    assert steps_of(tmp_path / "spans.jsonl", "start_s", "end_s", "id", "waited") == [
        *((1, 1.0, 2.0, 9, [3]), (2, 2.0, 3.0, 8, [3]), (3, 3.0, 4.0, 7, [3])),
        *((3, 4.0, 5.0, 13, [10]), (4, 5.0, 6.0, 14, [10])),
    ]


def validation(step: int, loss: float) -> ValidationMetrics:
    return ValidationMetrics(step=step, loss=loss, tokens=11, seconds=0.5, time=1234.5)


def samples(step: int, text: str) -> SampleMetrics:
    made = [Sample(prompt="a", text=text, tokens=3, ended=False)]
    return SampleMetrics(step=step, samples=made, seconds=0.5, time=1234.5)


@pytest.mark.parametrize(("resumed_at", "again"), [(2, "both"), (2, "samples"), (2, ""), (1, "")])
def test_validations_and_samples_have_files_of_their_own_that_a_resumed_run_replaces(
    tmp_path: Path, resumed_at: int, again: str
) -> None:
    """It begins with those of its step where they are due, the samples behind the validation."""
    log = RunLog(tmp_path, total_steps=9)
    for step in (1, 2, 3, 4):
        log.step(metrics(step, loss=10.0))
        if step % 2 == 0:
            log.validation(validation(step, 10.0 if step < 4 else float("nan")))
            log.samples(samples(step, "first"))
    log.close("failed")
    rest = {"tokens": 11, "seconds": 0.5, "time": 1234.5, "accuracy": None, "recall": None, "measured": {}}
    lines = [{"step": 2, "loss": 10.0} | rest, {"step": 4, "loss": None} | rest]
    assert json_lines(tmp_path / "validation.jsonl") == lines
    with (tmp_path / "validation.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    log = RunLog(tmp_path, total_steps=9, step=resumed_at)
    if again == "both":
        log.validation(validation(resumed_at, 20.0))
    if again:
        log.samples(samples(resumed_at, "again"))
    for step in range(resumed_at + 1, 5):
        log.step(metrics(step, loss=20.0))
        if step % 2 == 0:
            log.validation(validation(step, 20.0))
            log.samples(samples(step, "again"))
    log.close("finished")
    measured = 20.0 if again == "both" or resumed_at == 1 else 10.0
    assert steps_of(tmp_path / "validation.jsonl", "loss") == [(2, measured), (4, 20.0)]
    told = [(line["step"], line["samples"][0]["text"]) for line in json_lines(tmp_path / "samples.jsonl")]
    assert told == [(2, "again" if again or resumed_at == 1 else "first"), (4, "again")]
    losses = [(step, 10.0 if step <= resumed_at else 20.0) for step in (1, 2, 3, 4)]
    assert steps_of(tmp_path / "metrics.jsonl", "loss") == losses


@pytest.mark.parametrize("first", ["step", "spike"])
def test_spikes_have_a_file_of_their_own_that_a_resumed_run_replaces(tmp_path: Path, first: str) -> None:
    """What is not finite ends a step without a line of its own: then the spike is what a process tells first."""

    document = {"document": 3, "where": "a.jsonl:4", "first_token": 0, "tokens": 9, "loss": None, "excerpt": ""}
    rest: dict[str, Any] = {"expected": 1.0, "num_documents": 2, "time": 12.5}

    def spike(step: int, loss: float) -> events.Spike:
        return events.Spike(step=step, loss=loss, documents=[events.StepDocument(**document)], **rest)

    log = RunLog(tmp_path, 9)
    for step in (1, 2, 3):
        log.step(metrics(step))
        log.spike(spike(step, 4.0))
    log.close("failed")
    log = RunLog(tmp_path, 9, 2)
    if first == "step":
        log.step(metrics(3))
    log.spike(spike(3, float("nan")))
    log.close("failed")
    assert steps_of(tmp_path / "spikes.jsonl", "loss") == [(1, 4.0), (2, 4.0), (3, None)]
    assert json_lines(tmp_path / "spikes.jsonl")[2] == {"step": 3, "loss": None, "documents": [document]} | rest
    assert [line["step"] for line in json_lines(tmp_path / "metrics.jsonl")] == [1, 2, 3][: 2 + (first == "step")]


def test_a_line_of_samples_is_never_too_long_to_be_read(tmp_path: Path) -> None:
    log = RunLog(tmp_path, total_steps=9)
    long = [Sample(prompt="\n" * 10**6, text="Ж" * 10**6, tokens=10**6, ended=False) for _ in range(5)]
    log.samples(SampleMetrics(step=1, samples=long, seconds=0.5, time=1234.5))
    log.close("finished")
    (line,) = JsonLines(tmp_path / "samples.jsonl")
    assert [sample["text"][:3] for sample in line["samples"]] == ["ЖЖЖ"] * 5
    assert line["samples"][0]["text"].endswith("...")


@pytest.mark.parametrize("torn_bytes", [0, 1, 65535, 65536, 65537, 200_000])
def test_a_torn_last_line_of_any_length_is_cut_off(tmp_path: Path, torn_bytes: int) -> None:
    for whole in ("", '{"lane": "h2d", "op": "load", "step": 1, "start_s": 2.0, "end_s": 2.5}\n'):
        (tmp_path / "spans.jsonl").write_text(whole + "x" * torn_bytes)
        assert continue_spans(tmp_path) == (2.5 if whole else 0.0, 0)
        assert (tmp_path / "spans.jsonl").read_text() == whole
