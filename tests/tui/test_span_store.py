from __future__ import annotations

import itertools
import json
import random
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.app.lanes import LANES
from penstock.tui.data.spans import MAX_LANES, OTHER, SpanStore, StepWindow


def span(lane: str, start: float, end: float, **more: Any) -> dict[str, Any]:
    fields = {"lane": lane, "op": "o", "block": "b", "chunk": 0, "start_s": start, "end_s": end, "bytes": 1, "step": 1}
    return fields | more


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
    edges = np.sort(np.array(at)) / 8
    everything = [item for group in groups for item in group]
    ticks = np.arange(-16, 45 * 8) / 8 + 1 / 16  # middles of cells of 1/8 s: all ends lie on their borders
    for lane in (*LANES, "new"):
        mine = [item for item in everything if item["lane"] == lane]
        on = np.zeros(len(ticks), bool)
        for item in mine:
            on |= (ticks > item["start_s"]) & (ticks < item["end_s"])
        want = [on[(ticks > a) & (ticks < b)].mean() for a, b in itertools.pairwise(edges)]
        assert store.view.coverage(lane, edges) == pytest.approx(want, abs=1e-9)
        assert store.view.busy_s(lane, edges[0], edges[-1]) == pytest.approx(
            on[(ticks > edges[0]) & (ticks < edges[-1])].sum() / 8
        )
        moved = sum(item["bytes"] for item in mine if edges[0] < item["end_s"] <= edges[-1])
        assert store.view.bytes_by_lane(edges[0], edges[-1]).get(lane, 0) == moved
        for time in edges:
            held = {(item["start_s"], item["end_s"]) for item in mine if item["start_s"] <= time < item["end_s"]}
            rows = store.view.rows_at(lane, float(time))
            assert {(store.view.span(row).start_s, store.view.span(row).end_s) for row in rows} == held


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
        assert view.coverage("h2d", edges)[0] * (edges[1] - edges[0]) == pytest.approx(len(kept) / 2)


def test_what_is_no_span_is_counted_and_left_out() -> None:
    store = SpanStore()
    bad: list[Any] = [
        {},
        None,
        "text",
        7,
        [1],
        span("h2d", 2.0, 1.0),
        span("h2d", 0.0, float("nan")),
        span("h2d", 0.0, float("inf")),
        span("h2d", 0.0, 1.0, bytes=10**30),
        span("h2d", 0.0, 1.0, waited=5),
        span("h2d", 0.0, 1.0, block=3),
        span(3, 0.0, 1.0),  # type: ignore[arg-type]
        {"lane": "h2d", "op": "o", "start_s": "x", "end_s": 1},
    ]
    assert store.add(bad) == 0
    assert store.num_rejected == len(bad)
    assert store.view.num_spans == 0
    assert store.add([{"lane": "h2d", "op": "load", "start_s": 0, "end_s": 1, "colour": "red"}]) == 1
    assert store.view.span(0) == ("h2d", "load", "", -1, 0.0, 1.0, 0, 0, -1, None)


def test_foreign_names_are_bounded_and_printable() -> None:
    store = SpanStore()
    store.add([span("tab\there\u200b", 0.0, 1.0, op="線" * 200)])
    assert store.view.lanes == (*LANES, "tab?here?")
    assert store.view.span(0).op == "?" * 80
    store.add([span(f"lane {i}", 0.0, 1.0) for i in range(200)])
    assert len(store.view.lanes) == MAX_LANES
    assert store.view.lanes[-1] == OTHER
    assert store.view.coverage(OTHER, np.array([0.0, 2.0])) == [0.5]


def test_windows_of_steps() -> None:
    store = SpanStore()
    assert store.view.steps() == []
    clip = {"op": "clip", "block": "all"}
    store.add([span("compute", 0.5, 1.0), span("optimizer", 1.0, 2.0, **clip), span("compute", 2.0, 4.0, step=2)])
    assert store.view.steps() == [StepWindow(1, 0.5, 2.0)]
    store.add([span("optimizer", 4.0, 5.0, step=2, **clip), span("optimizer", 6.0, 7.0, step=3, **clip)])
    again = [span("compute", 9.0, 9.5, step=2), span("optimizer", 9.5, 10.0, step=2, **clip)]
    store.add(again)
    assert store.view.steps() == [
        StepWindow(1, 0.5, 2.0),
        StepWindow(2, 2.0, 5.0),
        StepWindow(3, 5.0, 7.0),
        StepWindow(2, 9.0, 10.0),
    ]


def test_a_step_whose_beginning_was_dropped_is_not_whole() -> None:
    store = SpanStore(capacity=3)
    for step in range(1, 6):
        store.add([span("h2d", step, step + 0.5, step=step), span("optimizer", step, step + 1, step=step, op="clip")])
    assert store.view.num_spans == 3
    assert store.view.steps() == [StepWindow(5, 5.0, 6.0)]


def test_a_reader_never_sees_half_an_update() -> None:
    """Every batch keeps each lane busy for as long; a reader beside the writer always finds them equal."""
    store = SpanStore(capacity=400)
    rng = random.Random(0)
    over = threading.Event()

    def write() -> None:
        for t in range(600):
            batch = [span(lane, t, t + 0.25, id=t) for lane in LANES]
            rng.shuffle(batch)
            store.add(batch)
        over.set()

    writer = threading.Thread(target=write)
    writer.start()
    looks = 0
    while not over.is_set() or looks == 0:
        view = store.view
        looks += 1
        counts = {int((view.lane == lane).sum()) for lane in range(len(LANES))}
        assert max(counts) - min(counts) <= 1  # 400 is no multiple of 6
        end = view.last_end_s
        busy = {round(view.busy_s(lane, view.complete_from_s, end), 6) for lane in LANES}
        assert len(busy) == 1
        for row in (0, view.num_spans - 1):
            if view.num_spans:
                assert view.span(row).end_s == view.span(row).id + 0.25
    writer.join()
    assert store.view.num_spans == 400


def test_lines_of_a_file_with_dependencies() -> None:
    store = SpanStore()
    store.add([json.loads(json.dumps(span("h2d", 0, 1, id=5, waited=[3, 4]))), span("h2d", 1, 2, id=6, waited=[])])
    assert [store.view.waited(row) for row in range(2)] == [(3, 4), ()]
    assert store.view.row_of_id(6) == 1
    assert store.view.row_of_id(7) is None
    assert store.view.row_of_id(-1) is None


def test_a_validation_and_samples_at_a_steps_beginning() -> None:
    store = SpanStore()
    clip = {"op": "clip", "block": "all"}
    store.add([span("compute", 0, 1), span("optimizer", 1, 2, **clip)])
    assert store.view.between_s(StepWindow(1, 0.0, 2.0)) == (0, "")
    store.add([span("compute", 2, 3, op="head_score"), span("optimizer", 3, 3.5, op="score")])
    store.add([span("optimizer", 5, 6, step=2, **clip)])
    first, second = store.view.steps()
    assert store.view.between_s(first) == (0, "")
    assert store.view.between_s(second) == (1.5, "validating")
    store.add([span("optimizer", 6.1, 6.2, op="take_logits"), span("optimizer", 6.3, 6.5, op="take_logits")])
    store.add([span("compute", 6.6, 7, op="layer_forward"), span("optimizer", 7, 8, step=3, **clip)])
    third = store.view.steps()[2]
    assert store.view.between_s(third) == (0.5, "writing samples")
    assert store.view.between_s(StepWindow(3, 2.0, 8.0)) == (4.5, "validating and writing samples")
