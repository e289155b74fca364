"""What is kept of a run's spans, and where steps are found in a file of them."""

import itertools
import json
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from samples import sampled
from seen import span, view_of

import penstock.tui.data.steps as steps_module
from penstock.app.runs.lanes import LANES
from penstock.tui.data.spans import MAX_LANES, OTHER, SpanStore, StepWindow
from penstock.tui.data.steps import StepIndex


def clip(start: float, end: float, step: int = 1) -> dict[str, Any]:
    return span("optimizer", start, end, step=step, op="clip", block="all")


@st.composite
def batches(draw: st.DrawFn) -> list[list[dict[str, Any]]]:
    """Spans of few lanes, overlapping, shuffled, in batches of any size."""
    pieces = draw(
        st.lists(st.tuples(st.sampled_from(["h2d", "compute", "new"]), st.integers(0, 60), st.integers(0, 12)))
    )
    spans = [span(lane, start / 2, (start + length) / 2, bytes=length) for lane, start, length in pieces]
    cuts = sorted(draw(st.lists(st.integers(0, len(spans)), max_size=5)))
    return [spans[a:b] for a, b in zip([0, *cuts], [*cuts, len(spans)], strict=True)]


@given(batches(), st.lists(st.integers(-10, 300), min_size=2, max_size=9, unique=True))
def test_coverage_is_the_share_that_brute_force_finds(groups: list[list[dict[str, Any]]], at: list[int]) -> None:
    store = SpanStore(capacity=1000)
    for group in groups:
        assert store.add(group) == len(group)
    view, edges = store.view, np.sort(np.array(at)) / 8
    begin, end = edges[0], edges[-1]
    ticks = np.arange(-16, 45 * 8) / 8 + 1 / 16  # middles of cells of 1/8 s: all ends lie on their borders
    for lane in (*LANES, "new"):
        mine = [item for group in groups for item in group if item["lane"] == lane]
        on = np.zeros(len(ticks), bool)
        for item in mine:
            on |= (ticks > item["start_s"]) & (ticks < item["end_s"])
        want = [on[(ticks > a) & (ticks < b)].mean() for a, b in itertools.pairwise(edges)]
        assert view.busy_of(lane).coverage(edges) == pytest.approx(want, abs=1e-9)
        assert view.busy_s(lane, begin, end) == pytest.approx(on[(ticks > begin) & (ticks < end)].sum() / 8)
        moved = sum(item["bytes"] for item in mine if begin < item["end_s"] <= end)
        assert view.bytes_by_lane(begin, end).get(lane, 0) == moved
        for time in edges:
            held = {(item["start_s"], item["end_s"]) for item in mine if item["start_s"] <= time < item["end_s"]}
            found = [view.span(row) for row in view.rows_at(lane, float(time))]
            assert {(item.start_s, item.end_s) for item in found} == held


@settings(max_examples=30)
@given(st.integers(1, 12), st.lists(st.integers(0, 30), max_size=12))
def test_only_the_last_spans_are_kept_and_coverage_of_them_stays_exact(capacity: int, sizes: list[int]) -> None:
    store = SpanStore(capacity=capacity)
    everything: list[dict[str, Any]] = []
    for size in sizes:
        fresh = [span("h2d", t, t + 0.5, id=t) for t in range(len(everything), len(everything) + size)]
        everything += fresh
        store.add(fresh)
    view = store.view
    kept = everything[-capacity:]
    assert [view.span(row).id for row in range(view.num_spans)] == [item["id"] for item in kept]
    assert view.complete_from_s == max((item["end_s"] for item in everything[:-capacity]), default=0.0)
    if kept:
        edges = np.array([kept[0]["start_s"], kept[-1]["end_s"]])
        assert view.busy_of("h2d").coverage(edges)[0] * (edges[1] - edges[0]) == pytest.approx(len(kept) / 2)


def test_what_is_no_span_is_counted_and_left_out_and_what_is_one_has_its_dependencies() -> None:
    store = SpanStore()
    bad: list[Any] = [{}, None, "text", 7, [1], {"lane": "h2d", "op": "o", "start_s": "x", "end_s": 1}]
    bad += [span("h2d", 2.0, 1.0), span("h2d", 0.0, float("nan")), span("h2d", 0.0, float("inf"))]
    bad += [span("h2d", 0.0, 1.0, **{key: value}) for key, value in (("bytes", 10**30), ("waited", 5), ("block", 3))]
    bad += [span(3, 0.0, 1.0)]  # type: ignore[arg-type]
    assert (store.add(bad), store.num_rejected, store.view.num_spans) == (0, len(bad), 0)
    assert store.add([{"lane": "h2d", "op": "load", "start_s": 0, "end_s": 1, "colour": "red"}]) == 1
    assert store.view.span(0) == ("h2d", "load", "", -1, 0.0, 1.0, 0, 0, -1, (), ())
    # Foreign names are bounded and printable.
    store.add([span("tab\there\u200b", 0.0, 1.0, op="線" * 200)])
    assert (store.view.lanes, store.view.span(1).op) == ((*LANES, "tab?here?"), "?" * 80)
    store.add([span(f"lane {i}", 0.0, 1.0) for i in range(200)])
    assert (len(store.view.lanes), store.view.lanes[-1]) == (MAX_LANES, OTHER)
    assert store.view.busy_of(OTHER).coverage(np.array([0.0, 2.0])) == [0.5]
    view = view_of(json.loads(json.dumps(span("h2d", 0, 1, id=5, waited=[3, 4]))), span("h2d", 1, 2, id=6, waited=[]))
    assert [view.waited(row) for row in range(2)] == [(3, 4), ()]
    assert [view.row_of_id(number) for number in (6, 7, -1)] == [1, None, None]


def test_windows_of_steps_and_what_a_step_did_between_them() -> None:
    store = SpanStore()
    assert store.view.steps == []
    store.add([span("compute", 0.5, 1.0), clip(1.0, 2.0), span("compute", 2.0, 4.0, step=2)])
    windows = [StepWindow(1, 0.5, 2.0)]
    assert store.view.steps == windows
    store.add([clip(4.0, 5.0, 2), clip(6.0, 7.0, 3), span("compute", 9.0, 9.5, step=2), clip(9.5, 10.0, 2)])
    windows += [StepWindow(2, 2.0, 5.0), StepWindow(3, 5.0, 7.0), StepWindow(2, 9.0, 10.0)]
    assert store.view.steps == windows
    store = SpanStore(capacity=3)
    for step in range(1, 6):
        store.add([span("h2d", step, step + 0.5, step=step), clip(step, step + 1, step)])
    assert store.view.num_spans == 3
    assert store.view.steps == [StepWindow(5, 5.0, 6.0)], "a step whose beginning was dropped is not whole"
    store = SpanStore()
    store.add([span("compute", 0, 1), clip(1, 2)])
    assert store.view.between_s(StepWindow(1, 0.0, 2.0)) == (0, "")
    store.add([span("compute", 2, 3, op="head_evaluate"), span("optimizer", 3, 3.5, op="evaluate"), clip(5, 6, 2)])
    store.add([span("optimizer", 6.1, 6.2, op="choose"), span("optimizer", 6.3, 6.5, op="choose")])
    store.add([span("compute", 6.6, 7, op="layer_forward"), clip(7, 8, 3)])
    between = [store.view.between_s(window) for window in store.view.steps]
    assert between == [(0, ""), (1.5, "validating"), (0.5, "writing samples")]
    assert store.view.between_s(StepWindow(3, 2.0, 8.0)) == (4.5, "validating and writing samples")


def test_a_reader_never_sees_half_an_update() -> None:
    """Every batch keeps each lane busy for as long; a reader beside the writer always finds them equal."""
    store = SpanStore(capacity=400)
    rng = random.Random(0)

    def write() -> None:
        for t in range(600):
            batch = [span(lane, t, t + 0.25, id=t) for lane in LANES]
            rng.shuffle(batch)
            store.add(batch)

    writer = threading.Thread(target=write)
    writer.start()
    is_over = False
    while not is_over:
        is_over = not writer.is_alive()
        view = store.view
        counts = {int((view.lane == lane).sum()) for lane in range(len(LANES))}
        assert max(counts) - min(counts) <= 1  # 400 is no multiple of 6
        assert len({round(view.busy_s(lane, view.complete_from_s, view.last_end_s), 6) for lane in LANES}) == 1
        for row in (0, view.num_spans - 1) if view.num_spans else ():
            assert view.span(row).end_s == view.span(row).id + 0.25
    assert store.view.num_spans == 400


def line(lane: str, op: str, start: float, end: float, step: int, op_id: int) -> str:
    return json.dumps(span(lane, start, end, op=op, step=step, id=op_id, waited=[]), separators=(",", ":")) + "\n"


class Writer:
    """Writes what a run of some steps writes: updates of a step run under the next one."""

    def __init__(self, steps: int = 0, num_ops: int = 0) -> None:
        self.lines: list[str] = []
        self.time = 0.0
        self.ends: dict[int, float] = {}
        self.starts: dict[int, float] = {}
        self.random = random.Random(0)
        for step in range(1, steps + 1):
            self.step(step, num_ops)

    def op(self, lane: str, op: str, step: int) -> None:
        start, self.time = self.time, round(self.time + 0.25, 6)
        self.lines.append(line(lane, op, start, self.time, step, len(self.lines)))

    def step(self, step: int, num_ops: int, *, end: bool = True) -> None:
        started = self.time
        for i in range(num_ops):
            self.op("compute", "layer_forward", step)
            if i < num_ops // 2 and step > 1:
                self.op("optimizer", "update", step - 1)
        if end:
            self.op("optimizer", "clip", step)
            self.starts[step], self.ends[step] = started, self.time

    def write(self, path: Path) -> Path:
        path.write_text("".join(self.lines))
        return path


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file is to these what a file of many GB is to the real ones."""
    monkeypatch.setattr(steps_module, "_BLOCK_BYTES", 2048)
    monkeypatch.setattr(steps_module, "_AROUND_BYTES", 1024)


@sampled(15, 60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.data())
@pytest.mark.usefixtures("small_blocks")
def test_every_step_is_found_where_it_was_done_last(tmp_path: Path, data: st.DataObject) -> None:
    writer = Writer()
    size = data.draw(st.integers(2, 14), label="ops of a step")
    step = 0
    for _ in range(data.draw(st.integers(1, 4), label="processes")):
        for _ in range(data.draw(st.integers(1, 25), label="steps")):
            step += 1
            writer.step(step, size + writer.random.randrange(2))
        if data.draw(st.booleans(), label="killed within a step"):
            writer.step(step + 1, size // 2, end=False)
        last = step
        step -= data.draw(st.integers(0, step), label="steps lost")
    index = StepIndex(writer.write(tmp_path / "spans.jsonl"))
    assert index.bounds()[1] == last
    for wanted, end_s in writer.ends.items():
        found = index.find(wanted)
        if wanted > last:  # undone by a crash
            assert found is None
            continue
        assert found is not None, f"step {wanted}"
        assert (found.window.step, found.window.end_s, found.whole) == (wanted, end_s, True)
        if wanted > 1:
            assert found.window.start_s == pytest.approx(writer.starts[wanted]) or wanted - 1 in writer.ends
    assert index.find(max(writer.ends) + 1) is index.find(0) is None


def test_all_that_ran_in_the_step_is_there_and_only_a_part_of_a_large_file_is_read(tmp_path: Path) -> None:
    writer = Writer(39, 30)
    # A long write that began in step 20 and was reported steps later, and one of step 19 that reaches into it.
    start, end = writer.starts[20], writer.ends[20]
    at = next(i for i, text in enumerate(writer.lines) if json.loads(text)["end_s"] > end + 3)
    writer.lines.insert(at, line("nvme_write", "commit", start + 1, end + 3, 20, 99_999))
    index = StepIndex(writer.write(tmp_path / "spans.jsonl"))
    found = index.find(20)
    assert found.window[1:] == (start, end)
    want = {s["id"] for s in map(json.loads, writer.lines) if s["end_s"] > start and s["start_s"] < end}
    assert {99_999} < want <= set(found.view.id.tolist())
    assert index.bounds() == (1, 39)
    path = Writer(400, 60).write(tmp_path / "spans.jsonl")
    assert path.stat().st_size > 5 * steps_module._AROUND_BYTES
    found = StepIndex(path).find(200)
    assert found.end_byte - found.first_byte < 3 * steps_module._AROUND_BYTES + 100_000


@pytest.mark.usefixtures("small_blocks")
def test_torn_and_damaged_lines(tmp_path: Path) -> None:
    writer = Writer(29, 12)
    at = next(i for i, text in enumerate(writer.lines) if json.loads(text)["end_s"] == writer.ends[15]) - 3
    writer.lines[at:at] = ["oops\n", "[1, 2]\n", '{"op":"clip"}\n', "\x00" * 5000 + "\n", '"clip"\n']
    writer.lines.append('{"lane":"compute","op":"clip","st')
    index = StepIndex(writer.write(tmp_path / "spans.jsonl"))
    found = index.find(15)
    assert (found.window, found.num_damaged) == ((15, writer.starts[15], writer.ends[15]), 5)
    assert index.bounds() == (1, 29)


def test_files_without_steps_with_more_spans_than_are_kept_and_that_grow_and_begin_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for content in (b"", b"\n", b"junk", b"junk\n" * 3000, b"\xff" * 100_000, b'{"op":"clip"}\n' * 99):
        (tmp_path / "spans.jsonl").write_bytes(content)
        for path in (tmp_path / "spans.jsonl", tmp_path, tmp_path / "none"):
            assert StepIndex(path).bounds() is StepIndex(path).find(1) is None
    monkeypatch.setattr(steps_module, "MAX_SPANS", 20)
    found = StepIndex(Writer(2, 30).write(tmp_path / "spans.jsonl")).find(2)
    assert (found.whole, found.view.num_spans) == (False, 20)
    writer = Writer(1, 5)
    path = writer.write(tmp_path / "spans.jsonl")
    index = StepIndex(path)
    assert (index.bounds(), index.bounds(), index.find(2)) == ((1, 1), (1, 1), None)
    writer.step(2, 5)
    writer.write(path)
    assert (index.bounds(), index.find(2).window) == ((1, 2), (2, writer.starts[2], writer.ends[2]))
    Writer(1, 5).write(path)
    assert index.bounds() == (1, 1)
    path.unlink()
    assert index.bounds() is None
