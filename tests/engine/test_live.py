"""What a run tells: the checklist of what is prepared before its first step; spans within a step, each once; pauses
that change nothing."""

import json
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny

import penstock.engine.preparing
import penstock.engine.progress
import penstock.engine.runtime.executor
import penstock.engine.train
from penstock.engine import opening
from penstock.engine.events import LaneTotals, Preparing, Progress, StepMetrics, Want
from penstock.engine.model.check import check_model
from penstock.engine.preparing import TELL_S, Checklist
from penstock.engine.progress import Live
from penstock.engine.schedule.actions import CLIP, HEAD, LANES
from penstock.engine.schedule.ops import Op
from penstock.engine.train import TrainResult, train_step
from penstock.storage.checkpoints import list_checkpoints
from penstock.storage.manifest import Manifest


def run(folder: Path, observer: tiny.Silent, *, resume: bool = False) -> TrainResult:
    gpu, ram = tiny.TIERS[3]
    train = tiny.training(steps=6, global_batch_size=1, chunk_tokens=24)
    sections: dict[str, Any] = {"storage": tiny.storage(checkpoint_every=2), "train": train}
    sections["budgets"] = tiny.BudgetConfig(gpu=gpu, ram=ram)
    found: TrainResult = tiny.train_run(folder, observer, resume=resume, **sections)
    return found


class Pausing(tiny.Silent):
    """Pauses at some steps for a few looks, each time for a checkpoint, and may stop out of the last pause."""

    def __init__(self, at: tuple[int, ...], then: Want = "run") -> None:
        super().__init__()
        self.at, self._then = list(at), then
        self.pauses: list[tuple[bool, int]] = []
        self._looks = 0

    def wanted(self) -> Want:
        step = self.metrics[-1].step if self.metrics else 0
        if not self.at or step < self.at[0]:
            return "run"
        self._looks += 1
        if self._looks < 4:
            return "pause"
        self._looks = 0
        self.at.pop(0)
        return "run" if self.at else self._then

    def on_pause(self, paused: bool) -> None:
        self.pauses.append((paused, self.metrics[-1].step if self.metrics else 0))

    def checkpoint_requests(self) -> list[str]:
        return [f"looked-{self.metrics[-1].step}"] if self._looks == 2 else []


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock.engine.train, "POLL_S", 0.001)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[tiny.Silent, TrainResult, str]:
    folder, observer = tmp_path_factory.mktemp("straight"), tiny.Silent()
    return observer, run(folder, observer), tiny.digest_of(folder)


def test_a_pause_changes_no_bit(tmp_path: Path, told: tuple[tiny.Silent, TrainResult, str]) -> None:
    straight, _, expected = told
    pausing = Pausing(at=(1, 2, 5))
    result = run(tmp_path / "pausing", pausing)
    assert pausing.pauses == [(True, 1), (False, 1), (True, 2), (False, 2), (True, 5), (False, 5)]
    assert [(m.step, m.loss, m.grad_norm) for m in pausing.metrics] == [
        (m.step, m.loss, m.grad_norm) for m in straight.metrics
    ]
    assert tiny.digest_of(tmp_path / "pausing") == expected
    assert not result.stopped
    assert pausing.checkpoints == [(f"looked-{step}", step, None) for step in (1, 2, 5)]
    made = {info.name: info.meta["step"] for info in list_checkpoints(tmp_path / "pausing" / "state")}
    assert made == {"looked-1": 1, "looked-2": 2, "looked-5": 5, "good-000005": 5}


def test_a_pause_is_no_step_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand seconds pass in each look of a paused run: no step is longer for it, and no window of spans."""
    slept_s = 0.0

    def perf_counter() -> float:
        return time.perf_counter() + slept_s

    def sleep(seconds: float) -> None:
        nonlocal slept_s
        slept_s += 1000.0

    clocks = {"perf_counter": perf_counter, "monotonic": time.monotonic, "time": time.time}
    monkeypatch.setattr(penstock.engine.train, "time", SimpleNamespace(sleep=sleep, **clocks))
    monkeypatch.setattr(penstock.engine.runtime.executor, "time", SimpleNamespace(**clocks))
    observer = Pausing(at=(2, 4))
    run(tmp_path, observer)
    assert slept_s == 4000.0
    assert max(m.step_s for m in observer.metrics) < 1000.0
    assert max(span.end_s for span in observer.spans) < 1000.0
    assert [m.warmup for m in observer.metrics] == [True, True, False, False, False, False]


def test_a_paused_run_has_committed_its_step_and_stops_when_asked(tmp_path: Path) -> None:
    """And a run that is stopped before its first step does none."""
    result = run(tmp_path, tiny.Silent(stop_after=0))
    assert (result.stopped, result.steps, result.steps_done) == (True, 0, 0)
    observer = Pausing(at=(1,), then="stop")
    result = run(tmp_path, observer, resume=True)
    assert (result.stopped, result.steps) == (True, 1)
    assert observer.pauses == [(True, 1)]
    assert Manifest.read(tmp_path / "state").meta["step"] == 1


def test_every_span_is_told_once_with_what_it_waited_for(told: tuple[tiny.Silent, TrainResult, str]) -> None:
    observer, result, _ = told
    assert sorted(span.id for span in observer.spans) == list(range(len(observer.spans)))
    assert all(dep < span.id for span in observer.spans for dep in span.waited)
    ends = {span.id: span.end_s for span in observer.spans}
    for span in observer.spans:
        assert all(ends[dep] <= span.start_s for dep in span.waited), "it started before what it waited for had ended"
    assert any(span.waited for span in observer.spans)
    totals = {lane: LaneTotals() for lane in LANES}
    for span in observer.spans:
        totals[span.lane].add(span)  # type: ignore[index]
    assert result.lanes == {lane: {"busy_s": t.busy_s, "bytes": t.bytes} for lane, t in totals.items()}
    # Metrics tell the time and what the tiers hold.
    times = [m.time for m in observer.metrics]
    assert times == sorted(times)
    assert time.time() - 3600 < times[0] <= times[-1] <= time.time()
    for tier in ("gpu", "ram", "nvme"):
        peaks = [m.tier_bytes[tier] for m in observer.metrics]
        assert peaks == sorted(peaks)
        assert 0 < peaks[-1] <= result.tiers[tier]["peak_bytes"]
    assert observer.metrics[-1].tier_bytes["ram"] == result.tiers["ram"]["peak_bytes"]


class Waiting(tiny.Silent):
    """Says when the head has been told to be under way, and spans before it."""

    def __init__(self) -> None:
        super().__init__()
        self.told = threading.Event()
        self.progress: list[Progress] = []

    def on_progress(self, progress: Progress) -> None:
        super().on_progress(progress)
        self.progress.append(progress)
        if self.spans and any(op.op == "head" for op in progress.under_way):
            self.told.set()


def test_spans_are_told_within_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock.engine.progress, "TELL_S", 0.01)
    observer = Waiting()

    def wait(op: Op) -> None:
        assert op.action is not HEAD or observer.told.wait(300), "nothing was told within the step"

    with tiny.session(tmp_path) as session, Live(session, observer):
        tiny.before_ops(session, wait)
        train_step(session)
    seen = next(p for p in observer.progress if p.under_way and p.spans)
    assert all(span.end_s <= seen.clock_s for span in seen.spans)
    now = next(op for p in observer.progress for op in p.under_way if op.op == "head")
    assert now.lane == "compute"
    assert now.start_s is not None


def test_what_ended_before_a_failure_is_told(tmp_path: Path) -> None:
    observer = tiny.Silent()

    def fail(op: Op) -> None:
        if op.action is CLIP:
            raise RuntimeError("broken")

    with tiny.session(tmp_path) as session:
        tiny.before_ops(session, fail)
        with pytest.raises(RuntimeError, match="broken"), Live(session, observer):
            train_step(session)
    assert {span.op for span in observer.spans} >= {"layer_forward", "layer_backward"}


def test_a_failure_to_tell_reaches_the_training_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock.engine.progress, "TELL_S", 0.001)

    class Broken(tiny.Silent):
        def on_progress(self, progress: Progress) -> None:
            raise OSError("no room")

        def on_step(self, metrics: StepMetrics) -> None:
            raise AssertionError("came after a failure")

    with pytest.raises(OSError, match="no room"):
        run(tmp_path, Broken())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What engine.preparing takes for the time, in `now`."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(penstock.engine.preparing, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def test_items_are_told_as_they_begin_and_end_and_do_not_nest(clock: SimpleNamespace) -> None:
    """An error passes through and leaves its item undone."""
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
    with pytest.raises(KeyboardInterrupt), checklist.step("stopped"):
        raise KeyboardInterrupt
    with checklist.step("again"):
        pass
    told = [(item.name, item.state) for item in listening.prepared[4:]]
    assert told == [("stopped", "begun"), ("again", "begun"), ("again", "done")]
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
    # From another thread; a fraction beyond its ends is cut, and late words say nothing.
    listening.prepared.clear()
    with checklist.step("data"):
        for fraction in (-0.1, 1.2, None):
            clock.now += 1.0
            thread = threading.Thread(target=checklist.progress, args=(fraction, "some"))
            thread.start()
            thread.join()
    clock.now += 1.0
    checklist.progress(1.0, "too late")
    details = [(item.state, item.detail, item.fraction) for item in listening.prepared[1:-1]]
    assert details == [("progress", "some", 0.0), ("progress", "some", 1.0), ("progress", "some", None)]


class Onlooker(tiny.Silent):
    """Looks at what this process has reserved as each item begins: the bytes of RAM in its record."""

    def __init__(self, place: Path) -> None:
        super().__init__(stop_after=1)
        self.place, self.reserved = place, dict[str, int]()

    def on_prepare(self, item: Preparing) -> None:
        super().on_prepare(item)
        for record in self.place.glob("run-*"):
            self.reserved.setdefault(item.name, json.loads(record.read_bytes())["ram_bytes"])


def test_a_run_with_the_least_budgets_reserves_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    budgets = tiny.BudgetConfig(gpu="64MiB", ram="64MiB")
    tiny.train_run(tmp_path, run, train=tiny.training(calibrate=True, steps=1), budgets=budgets)
    (rates,) = (text for text in run.messages if text.startswith("no profile of this machine: "))
    assert re.search(r": reads at [\d.e+]+ GB/s, writes at [\d.e+]+ GB/s, as timed briefly", rates)
    assert "measuring the drives" in {item.name for item in run.prepared}
    told = [item for item in run.prepared if item.state == "progress"]
    at = {name: [item for item in told if item.name == name] for name in dict.fromkeys(item.name for item in told)}
    details = {name: [item.detail for item in items] for name, items in at.items()}
    checked = [
        "making a small copy of the model",
        "transformers' own gradients, float32",
        "streamed gradients, float32",
    ]
    assert details["self-check"] == checked
    for name in ("writing the first generation", "filling the tiers", "timing the ops"):
        shares = [item.fraction for item in at[name]]
        assert shares == sorted(share for share in shares if share is not None), name
    assert [item.fraction for item in at["filling the tiers"]][-1] == 1.0
    assert details["writing the first generation"][-2:] == ["head", "making it durable"]
