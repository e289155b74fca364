"""The checklist of what is prepared before the first step."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny

import penstock.engine.preparing
from penstock.engine import opening
from penstock.engine.events import Preparing, StepMetrics
from penstock.engine.model.check import check_model
from penstock.engine.preparing import TELL_S, Checklist


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What engine.preparing takes for the time, in `now`."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(penstock.engine.preparing, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def test_items_are_told_as_they_begin_and_end_and_do_not_nest(clock: SimpleNamespace) -> None:
    listening = tiny.Silent()
    checklist = Checklist(listening)
    with checklist.step("data"):
        clock.now += 1.5
    with checklist.step("on a GPU only", when=False), checklist.step("plan"):
        clock.now += 0.25
    assert listening.prepared == [
        Preparing("data", "begun", 0.0),
        Preparing("data", "done", 1.5),
        Preparing("plan", "begun", 0.0),
        Preparing("plan", "done", 0.25),
    ]
    refused = pytest.raises(AssertionError, match="inner begins within outer")
    with refused, checklist.step("outer"), checklist.step("inner"):
        pass


def test_progress_is_told_every_so_often(clock: SimpleNamespace) -> None:
    listening = tiny.Silent()
    checklist = Checklist(listening)
    with checklist.step("pinning 350 GB"):
        for gigabyte in range(350):
            clock.now += TELL_S / 8
            checklist.progress(gigabyte / 350, f"{gigabyte} GB")
    told = [item for item in listening.prepared if item.state == "progress"]
    assert [item.seconds for item in told] == [TELL_S * count for count in range(1, 350 // 8 + 1)]
    assert [item.fraction for item in told] == [int(str(item.detail).split()[0]) / 350 for item in told]


def test_progress_comes_from_another_thread_and_late_words_say_nothing(clock: SimpleNamespace) -> None:
    """A fraction beyond its ends is cut."""
    listening = tiny.Silent()
    checklist = Checklist(listening)
    with checklist.step("data"):
        for fraction in (-0.1, 1.2, None):
            clock.now += 1.0
            thread = threading.Thread(target=checklist.progress, args=(fraction, "some"))
            thread.start()
            thread.join()
    clock.now += 1.0
    checklist.progress(1.0, "too late")
    told = [(item.state, item.detail, item.fraction) for item in listening.prepared[1:-1]]
    assert told == [("progress", "some", 0.0), ("progress", "some", 1.0), ("progress", "some", None)]


def test_an_error_passes_through_and_leaves_its_item_undone() -> None:
    listening = tiny.Silent()
    checklist = Checklist(listening)
    with pytest.raises(KeyboardInterrupt), checklist.step("data"):
        raise KeyboardInterrupt
    with checklist.step("again"):
        pass
    told = [(item.name, item.state) for item in listening.prepared]
    assert told == [("data", "begun"), ("again", "begun"), ("again", "done")]


class Onlooker(tiny.Silent):
    """Looks at what this process has reserved as each item begins: the bytes of RAM in its record."""

    def __init__(self, place: Path) -> None:
        super().__init__(stop_after=1)
        self.place, self.reserved = place, dict[str, int]()

    def on_prepare(self, item: Preparing) -> None:
        super().on_prepare(item)
        for record in self.place.glob("run-*"):
            self.reserved.setdefault(item.name, json.loads(record.read_bytes())["ram_bytes"])


def test_a_run_with_the_least_budgets_reserves_no_more_while_it_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may plan with the rest meanwhile: opening compiles and measures, which takes minutes."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    found = []
    for budget in ("least", "64MiB"):
        budgets, run = tiny.BudgetConfig(gpu=budget, ram=budget), Onlooker(tmp_path / "penstock")
        tiny.train_run(tmp_path / budget, run, train=QUICK, budgets=budgets)
        found.append(run.reserved)
    least, given = found
    planned = ("opening lanes and drives", "searching a plan", "self-check")
    assert [given[item] for item in planned] == [128 * 2**20] * 3
    assert all(0 < least[item] < 32 * 2**20 for item in planned)
    assert 0 < least["first step"] <= least["searching a plan"]


class Preparer(tiny.Silent):
    """Remembers items and steps in the order in which they were told."""

    def __init__(self, stop_after: int | None = None) -> None:
        super().__init__(stop_after)
        self.told: list[str] = []

    def on_prepare(self, item: Preparing) -> None:
        if item.state != "progress":
            self.told.append(f"{item.name}: {item.state}")

    def on_step(self, metrics: StepMetrics) -> None:
        super().on_step(metrics)
        self.told.append(f"step {metrics.step}")


QUICK = tiny.training(global_batch_size=1, chunk_tokens=48)


def both(*names: str) -> list[str]:
    return [f"{name}: {state}" for name in names for state in ("begun", "done")]


def test_a_run_tells_what_it_prepares_and_its_first_step_alone(tmp_path: Path) -> None:
    first, second = Preparer(stop_after=2), Preparer()
    options = {"train": QUICK, "budgets": tiny.BudgetConfig(gpu="64MiB", ram="64MiB")}
    tiny.train_run(tmp_path, first, **options)
    opening = ("tokenizing the data", "taking the model apart", "opening lanes and drives", "searching a plan")
    ready = ("preparing the layers", "allocating memory", "filling the tiers", "first step")
    new = both(*opening, "self-check", "writing the first generation", *ready)
    assert first.told == [*new, "step 1", "step 2"]
    tiny.train_run(tmp_path, second, resume=True, **options)
    resumed = both(*opening, "self-check", "opening the last generation", *ready)
    assert second.told == [*resumed, "step 3", "step 4"]


def test_what_takes_long_says_what_it_is_at_and_how_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock.engine.preparing, "TELL_S", 0.0)
    monkeypatch.setattr(opening, "check_model", check_model)  # which no other test has asked before
    run = tiny.Silent()
    tiny.train_run(
        tmp_path,
        run,
        train=tiny.training(calibrate=True, steps=1),
        budgets=tiny.BudgetConfig(gpu="64MiB", ram="64MiB"),
    )
    rates = [text for text in run.messages if text.startswith("no profile of this machine: ")]
    assert len(rates) == 1
    assert re.search(r": reads at [\d.e+]+ GB/s, writes at [\d.e+]+ GB/s, as timed briefly", rates[0])
    assert "measuring the drives" in {item.name for item in run.prepared}
    told = [item for item in run.prepared if item.state == "progress"]
    at = {name: [item for item in told if item.name == name] for name in dict.fromkeys(item.name for item in told)}
    details = {name: [item.detail for item in items] for name, items in at.items()}
    assert details["self-check"] == [
        "making a small copy of the model",
        "transformers' own gradients, float32",
        "streamed gradients, float32",
    ]
    for name in ("writing the first generation", "filling the tiers", "timing the ops"):
        shares = [item.fraction for item in at[name]]
        assert shares == sorted(share for share in shares if share is not None), name
    assert [item.fraction for item in at["filling the tiers"]][-1] == 1.0
    assert details["writing the first generation"][-2:] == ["head", "making it durable"]
