"""What a run tells: the checklist of what is prepared before its first step; spans within a step, each once; pauses
that change nothing; a step whose loss leaps with the documents that it was trained on, wherever they come from."""

import json
import math
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
from corpora import loader_of, make_corpus

import penstock.engine.preparing
import penstock.engine.progress
import penstock.engine.runtime.executor
import penstock.engine.train
from penstock.engine import opening
from penstock.engine.config import DataConfig, Recipe
from penstock.engine.data.corpus.files import Origins, OriginsWriter
from penstock.engine.data.corpus.prepare import prepare_data
from penstock.engine.data.documents import MOST_DOCUMENTS, step_documents
from penstock.engine.events import LaneTotals, Preparing, Progress, StepMetrics, Want
from penstock.engine.plan.chunks import Chunk
from penstock.engine.preparing import REPORT_S, Checklist
from penstock.engine.progress import Live
from penstock.engine.runtime.failures import DivergedError
from penstock.engine.runtime.health import LossSpikes
from penstock.engine.schedule.action import WORKING
from penstock.engine.schedule.actions import CLIP, HEAD
from penstock.engine.schedule.ops import Op
from penstock.engine.self_check import check_model
from penstock.engine.session import Session
from penstock.engine.train import TrainResult, train_step
from penstock.storage.generations.checkpoints import list_checkpoints
from penstock.storage.tier.manifest import Manifest

SMALL: dict[str, Any] = {"global_batch_size": 1, "chunk_tokens": 48}
QUICK = tiny.training(**SMALL)


def run(folder: Path, observer: tiny.Silent, *, resume: bool = False) -> TrainResult:
    train, storage = tiny.training(steps=6, global_batch_size=1, chunk_tokens=24), tiny.storage(checkpoint_every=2)
    gpu, ram = tiny.TIERS[3]
    sections = {"train": train, "storage": storage, "budgets": tiny.BudgetConfig(gpu=gpu, ram=ram)}
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


def test_a_pause_changes_no_bit_and_is_no_step_time(
    tmp_path: Path, told: tuple[tiny.Silent, TrainResult, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand seconds pass in each look of a paused run: no step is longer for it, and no window of spans."""
    (straight, _, expected), pausing, slept_s = told, Pausing(at=(1, 2, 5)), 0.0

    def perf_counter() -> float:
        return time.perf_counter() + slept_s

    def sleep(seconds: float) -> None:
        nonlocal slept_s
        slept_s += 1000.0

    clocks = {"perf_counter": perf_counter, "monotonic": time.monotonic, "time": time.time}
    monkeypatch.setattr(penstock.engine.train, "time", SimpleNamespace(sleep=sleep, **clocks))
    monkeypatch.setattr(penstock.engine.runtime.executor, "time", SimpleNamespace(**clocks))
    result = run(tmp_path, pausing)
    assert slept_s == 6000.0
    assert max(m.step_s for m in pausing.metrics) < 1000.0
    assert max(span.end_s for span in pausing.spans) < 1000.0
    assert [m.warmup for m in pausing.metrics] == [m.warmup for m in straight.metrics] == [True] * 2 + [False] * 4
    assert pausing.pauses == [(True, 1), (False, 1), (True, 2), (False, 2), (True, 5), (False, 5)]
    for name in ("step", "loss", "grad_norm"):
        assert [getattr(m, name) for m in pausing.metrics] == [getattr(m, name) for m in straight.metrics]
    assert tiny.digest_of(tmp_path) == expected
    assert not result.stopped
    assert pausing.checkpoints == [(f"looked-{step}", step, None) for step in (1, 2, 5)]
    made = {name: content.meta["step"] for name, content in list_checkpoints(tmp_path / "state").items()}
    assert made == {"looked-1": 1, "looked-2": 2, "looked-5": 5, "good-000005": 5}


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
    totals = {lane: LaneTotals() for lane in WORKING}
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
    monkeypatch.setattr(penstock.engine.progress, "REPORT_S", 0.01)
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
    monkeypatch.setattr(penstock.engine.progress, "REPORT_S", 0.001)

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
    data = [Preparing("data", "begun", 0.0), Preparing("data", "done", 1.5)]
    assert listening.prepared == [*data, Preparing("plan", "begun", 0.0), Preparing("plan", "done", 0.25)]
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
            clock.now += REPORT_S / 8
            checklist.progress(gigabyte / 350, f"{gigabyte} GB")
    told = [item for item in listening.prepared if item.state == "progress"]
    assert [item.seconds for item in told] == [REPORT_S * count for count in range(1, 350 // 8 + 1)]
    assert [item.fraction for item in told] == [int(str(item.detail).split()[0]) / 350 for item in told]
    # From another thread; a fraction beyond its ends is cut, and late words say nothing.
    listening.prepared.clear()
    with checklist.step("data"):
        for fraction in (-0.1, 1.2, None):
            clock.now += 1.0
            with ThreadPoolExecutor() as thread:
                thread.submit(checklist.progress, fraction, "some")
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
    """Remembers steps among the items."""

    def on_step(self, metrics: StepMetrics) -> None:
        super().on_step(metrics)
        self.prepared.append(Preparing(f"step {metrics.step}", "done", 0.0))


def test_a_run_tells_what_it_prepares_and_its_first_step_alone(tmp_path: Path) -> None:
    first, second = Preparer(stop_after=2), Preparer()
    options = {"train": QUICK, "budgets": tiny.BudgetConfig(gpu="64MiB", ram="64MiB")}
    tiny.train_run(tmp_path, first, **options)
    tiny.train_run(tmp_path, second, resume=True, **options)
    opening = ("tokenizing the data", "taking the model apart", "opening lanes and drives", "searching a plan")
    ready = ("preparing the layers", "allocating memory", "filling the tiers", "first step")
    for run, state, steps in (
        (first, "writing the first generation", ("step 1", "step 2")),
        (second, "opening the last generation", ("step 3", "step 4")),
    ):
        told = [(item.name, item.state) for item in run.prepared if item.state != "progress"]
        items = [*opening, "self-check", state, *ready]
        begun_and_done = [(name, state) for name in items for state in ("begun", "done")]
        assert told == [*begun_and_done, *((name, "done") for name in steps)]


def test_what_takes_long_says_what_it_is_at_and_how_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock.engine.preparing, "REPORT_S", 0.0)
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
    checked = ["transformers' own gradients, float32", "streamed gradients, float32"]
    assert details["self-check"] == ["making a small copy of the model", *checked]
    for name in ("writing the first generation", "filling the tiers", "timing the ops"):
        shares = [item.fraction for item in at[name]]
        assert shares == sorted(share for share in shares if share is not None), name
    assert [item.fraction for item in at["filling the tiers"]][-1] == 1.0
    assert details["writing the first generation"][-2:] == ["head", "making it durable"]


def spikes_of(losses: list[float]) -> list[int]:
    """Which of the losses are spikes; the watch is recorded and taken up again after each."""
    watch, found = LossSpikes(), []
    for step, loss in enumerate(losses):
        watch = LossSpikes(json.loads(json.dumps(watch.to_json())))
        if watch.take(loss):
            found.append(step)
    return found


def test_what_a_spike_is() -> None:
    noise = np.random.default_rng(1).normal(0, 0.05, 400)
    falling = 2.0 + 6.0 * np.exp(-np.arange(400) / 40) + noise
    assert spikes_of(falling.tolist()) == []
    leaping = falling.copy()
    leaping[[100, 300]] += 1.5
    leaping[200:] += 0.1
    assert spikes_of(leaping.tolist()) == [100, 300]
    assert spikes_of([2.0] * 30 + [2.1, 2.3]) == [31], "losses that hardly vary"
    assert spikes_of([9.0, 2.0] * 5) == [], "the mean is not known yet"
    assert spikes_of([2.0, math.nan]) == [1]
    assert spikes_of([2.0] * 30 + [4.0] * 60) == [30], "of losses that stay high the first"
    # A record of something else begins anew.
    values: list[Any] = [[1.0, math.nan, 1.0, 3, False], ["a", 1.0, 1.0, 3, False], [1.0, 1.0, 1.0, -1, True]]
    for record in (None, 3, [1.0], *values):
        assert LossSpikes(record).to_json() == LossSpikes().to_json()


def test_origins_are_what_was_written() -> None:
    places = ["a.jsonl:12", "a.jsonl:13", f"a.jsonl:{10**13}", "b.parquet:row 7", "c.txt", "d:row x", "odd:row:5", ""]
    places += ["a.jsonl:0", ":3"]
    writer = OriginsWriter()
    for place in places:
        writer.add(place)
    packed, names = writer.finish()
    origins = Origins(np.frombuffer(packed[-8 * len(places) :], dtype="<i8"), names)
    assert [origins.where(number) for number in range(len(places))] == places


@pytest.mark.parametrize("packing", ["wrap", "best_fit", "none"])
def test_a_step_names_its_documents(tmp_path: Path, packing: str) -> None:
    """Of all sources of a mixture, rows of a file and texts in a folder; in whichever way rows are filled."""
    rows, texts = tmp_path / "rows.jsonl", tmp_path / "texts"
    rows.write_text("".join(json.dumps({"text": f"row number {n} " * n}) + "\n" for n in range(1, 9)))
    texts.mkdir()
    for name in ("one", "two"):
        (texts / f"{name}.txt").write_text(f"the text called {name} " * 20)
    sources = [{"source": "jsonl", "path": str(rows)}, {"source": "text", "path": str(texts)}]
    sizes = {"tokenizer_vocab_size": 300, "sequence_length": 64}
    config = DataConfig(source="mixture", mixture=sources, packing=packing, **sizes)
    tokenizer, made = prepare_data(Recipe(name="x", data=config), tmp_path / "data")
    batches = loader_of(made, 64, 2, 2, packing=packing).next_step()
    places = [(n, n // 4, n % 4, 32 * (n % 4)) for n in range(8)]
    cut = {n: Chunk(index=n, micro_batch=m, local=i, ordinal=i, start=at, end=at + 32) for n, m, i, at in places}
    documents, count = step_documents(made, tokenizer, batches, cut, dict.fromkeys(cut, 1.0) | {4: 1000.0})
    assert count == sum(len(batch.lengths) for batch in batches) == len(documents)
    ids = [token for batch in batches for token in batch.ids.tolist()]
    for told in documents:
        start = int(made.starts[told.document]) + told.first_token
        tokens = made.tokens[start : start + told.tokens].tolist()
        assert any(ids[at : at + told.tokens] == tokens for at in range(len(ids)))
        text = tokenizer.decode(made.tokens[made.starts[told.document] : made.starts[told.document + 1]].tolist())
        if "rows.jsonl" in told.where:
            assert f"row number {told.where.rpartition(':')[2]} " in text
        else:
            assert f"called {Path(told.where).stem}" in text
        assert tokenizer.decode(tokens).strip().startswith(told.excerpt.removesuffix("...")[:10])
    losses = [told.loss for told in documents if told.loss is not None]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > 10
    worst = [source for at, source in zip(batches[1].documents, batches[1].sources, strict=False) if at < 32]
    assert int(made.starts[documents[0].document]) + documents[0].first_token in worst


def test_no_more_are_told_than_anybody_reads(tmp_path: Path) -> None:
    made = make_corpus(tmp_path, [[1, 2, 3]] * 200)
    documents, count = step_documents(made, None, loader_of(made, 300).next_step(), {}, {})
    assert (len(documents), count) == (MOST_DOCUMENTS, 100)
    assert all(told.loss is None and told.excerpt == "" for told in documents)


def test_a_run_tells_the_step_that_leapt_resumed_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of step 24 is told ten times as high."""
    real = Session.observe

    def observe(self: Session, step: int, loss: float) -> None:
        self._data.loss = loss * 10 if step == 24 else loss
        real(self, step, self._data.loss)

    monkeypatch.setattr(Session, "observe", observe)
    run: dict[str, Any] = {"train": tiny.training(steps=26, lr=1e-4, **SMALL), "storage": tiny.storage()}
    straight, first, second = tiny.Silent(), tiny.Silent(stop_after=23), tiny.Silent()
    tiny.train_run(tmp_path / "straight", straight, **run)
    tiny.train_run(tmp_path / "parts", first, **run)
    tiny.train_run(tmp_path / "parts", second, resume=True, **run)
    assert first.spikes == []
    for told in (straight.spikes, second.spikes):
        assert [spike.step for spike in told] == [24]
        assert told[0].loss > 9 * told[0].expected
        assert told[0].num_documents == len(told[0].documents) > 0
        assert told[0].documents[0].where.startswith("random document ")
        assert told[0].words().startswith("step 24: the loss jumped to ")
    assert second.spikes[0].documents == straight.spikes[0].documents
    assert second.spikes[0].expected == straight.spikes[0].expected


def test_what_is_not_finite_names_its_documents(tmp_path: Path) -> None:
    observer, train = tiny.Silent(), tiny.training(steps=6, lr=1e18, lr_schedule="constant", **SMALL)
    with pytest.raises(DivergedError, match=r"step \d: the .* is not finite"):
        tiny.train_run(tmp_path, observer, train=train)
    assert [spike.step for spike in observer.spikes] == [len(observer.metrics) + 1]
    spike = observer.spikes[0]
    assert math.isnan(spike.loss)
    assert spike.documents
    assert "a value is not finite; trained on random document" in spike.words()
