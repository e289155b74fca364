import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock.app.trace_events
from penstock.app.trace import _Tracks, write_trace
from penstock.app.trace_events import Arrows, Rates
from penstock.engine.events import Span
from penstock.engine.schedule.actions import LANES
from penstock.storage.errors import UserError

SPANS = [
    Span("compute", "forward", "layers.0", 2, 0.5, 0.75, 0, 1),
    Span("nvme_read", "weights", "embed", -1, 0.0, 0.25, 4096, 1),
    Span("lane of tomorrow", "think", "head", -1, 1.0, 2.0, 0, 1),
]
REAL = Path(__file__).parents[1] / "tui" / "snapshot_run"


def write_spans(folder: Path, spans: list[Span] = SPANS, tail: str = "") -> list[str]:
    lines = [json.dumps(span._asdict()) + "\n" for span in spans]
    (folder / "spans.jsonl").write_text("".join(lines) + tail)
    return lines


def events_of(run: Path, out: Path, *more: Any) -> list[dict[str, Any]]:
    write_trace(run, out, *more)
    return list(json.loads(out.read_text())["traceEvents"])


def test_one_track_per_lane_and_bad_input(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no spans"):
        write_trace(tmp_path, tmp_path / "trace.json")
    write_spans(tmp_path, tail='{"lane": "comp')
    with pytest.raises(UserError, match=r"none/trace\.json: cannot be written"):
        write_trace(tmp_path, tmp_path / "none" / "trace.json")
    assert [path.name for path in tmp_path.iterdir()] == ["spans.jsonl"]
    assert write_trace(tmp_path, tmp_path / "trace.json") == 3
    trace = json.loads((tmp_path / "trace.json").read_text())
    events = trace["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert sorted(names.values()) == sorted([*LANES, "lane of tomorrow"])
    complete = [event for event in events if event["ph"] == "X"]
    assert [names[event["tid"]] for event in complete] == [span.lane for span in SPANS]
    first = {"name": "forward layers.0[2]", "cat": "compute", "ph": "X", "pid": 1, "ts": 500_000.0, "dur": 250_000.0}
    args = {"block": "layers.0", "chunk": 2, "step": 1, "bytes": 0}
    assert complete[0] == first | {"tid": complete[0]["tid"], "args": args}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["spans.jsonl", "trace.json"]


@given(st.lists(st.tuples(st.sampled_from(["nvme_read", "x"]), st.integers(0, 50), st.integers(0, 9)), max_size=30))
def test_tracks_hold_no_overlaps(pieces: list[tuple[str, int, int]]) -> None:
    tracks = _Tracks()
    placed: dict[int, list[Span]] = {}
    for lane, start, length in pieces:
        span = Span(lane, "op", "embed", -1, float(start), float(start + length), 0, 1)
        placed.setdefault(tracks.track(span), []).append(span)
    names = {event["tid"]: event["args"]["name"] for event in tracks.names("run") if event["name"] == "thread_name"}
    assert set(placed) <= set(names)
    for track, spans in placed.items():
        assert all(names[track].split(" ")[0] == span.lane for span in spans)
        spans.sort(key=lambda span: (span.start_s, span.end_s))
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(spans))


def test_single_steps(tmp_path: Path) -> None:
    """Steps 1 to 4 of 2 s each, 3 done twice; a long op of step 1 reaches into step 2."""
    spans = []
    for step, start in ((1, 0.0), (2, 2.0), (3, 4.0), (3, 6.0), (4, 8.0)):
        spans.append(Span("compute", "forward", "layers.0", 0, start, start + 1, 0, step))
        spans.append(Span("optimizer", "clip", "all", -1, start + 1, start + 2, 0, step))
    spans.insert(4, Span("nvme_write", "commit", "all", -1, 1.5, 3.5, 0, 1))
    lines = write_spans(tmp_path, spans)

    def starts(*steps: int, extent: tuple[int, int] | None = None) -> list[float]:
        events = events_of(tmp_path, tmp_path / "t.json", (steps[0], steps[-1]), extent)
        slices = [event for event in events if event["ph"] == "B"]
        assert [event["name"] for event in slices] == [f"step {step}" for step in range(steps[0], steps[-1] + 1)]
        return [event["ts"] / 1e6 for event in events if event["ph"] == "X"]

    assert starts(1) == [0.0, 1.0, 1.5]
    assert starts(2) == [2.0, 3.0, 1.5]
    assert starts(3) == [6.0, 7.0]
    assert starts(3, 4) == [6.0, 7.0, 8.0, 9.0]
    sizes = [len(line) for line in lines]
    assert starts(2, extent=(sum(sizes[:1]), sum(sizes[:7]))) == [2.0, 3.0, 1.5]
    with pytest.raises(UserError, match="does not contain the end of step 5"):
        starts(5)


def test_a_real_runs_trace_is_whole(tmp_path: Path) -> None:
    """Arrows begin in one op and end where another begins, later; counters go forward; steps follow one another."""
    events = events_of(REAL, tmp_path / "t.json")
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["ph"] for event in events} == {"X", "M", "s", "f", "C", "B", "E"}
    named = {event["tid"] for event in events if event["name"] == "thread_name"}
    assert {event["tid"] for event in events if event["ph"] in "XsfBE"} <= named
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == len([event for event in events if event["ph"] in "sf"]) / 2 > 100
    for arrow, start in starts.items():
        end = ends[arrow]
        assert start["ts"] <= end["ts"]
        assert end["bp"] == "e"
        on = {event["tid"]: [one for one in slices if one["tid"] == event["tid"]] for event in (start, end)}
        assert any(one["ts"] <= start["ts"] <= round(one["ts"] + one["dur"], 1) for one in on[start["tid"]])
        assert any(one["ts"] == end["ts"] for one in on[end["tid"]])
    counters: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "C":
            counters.setdefault(event["name"], []).append(event)
    for name, found in counters.items():
        assert all(a["ts"] <= b["ts"] for a, b in itertools.pairwise(found)), name
        assert all(value >= 0 for event in found for value in event["args"].values()), name
    tiers = {name.partition(",")[0] for name in counters if name.endswith("held at most")}
    assert tiers == {"gpu", "ram", "nvme"}
    metrics = [json.loads(line) for line in (REAL / "metrics.jsonl").read_text().splitlines()]
    losses = {f"step {line['step']}": line["loss"] for line in metrics}
    steps = [event for event in events if event["ph"] in "BE"]
    assert "".join(event["ph"] for event in steps) == "BEBEBE"
    assert [event["name"] for event in steps[::2]] == ["step 28", "step 29", "step 30"]  # those whose spans it has
    assert all(event["args"]["loss"] == losses[event["name"]] for event in steps[::2])
    assert all(before["ts"] == after["ts"] for before, after in zip(steps[1::2], steps[2::2], strict=False))
    assert all(a["ts"] <= b["ts"] for a, b in itertools.pairwise(steps))


def test_an_op_that_is_told_of_late_has_its_arrow(tmp_path: Path) -> None:
    """Lanes tell of their ops in turn: one that waited may come before the one it waited for."""
    spans = [
        Span("compute", "layer_forward", "layers.0", 0, 1.0, 2.0, 0, 1, 7, (5, 6)),
        Span("h2d", "load_weights", "layers.0", 0, 0.0, 1.0, 1000, 1, 5, ()),
        Span("compute", "layer_forward", "layers.1", 0, 2.0, 3.0, 0, 1, 8, (7, 9)),
    ]
    write_spans(tmp_path, spans)
    events = events_of(tmp_path, tmp_path / "t.json")
    arrows = [(event["ph"], event["ts"]) for event in events if event["ph"] in "sf"]
    assert arrows == [("s", 999_999.9), ("f", 1e6), ("s", 1_999_999.9), ("f", 2e6)]


def rates(spans: list[Span]) -> list[tuple[float, float]]:
    """(seconds, GB/s) of one lane."""
    counted = Rates()
    events = [event for span in spans for event in counted.of(span)] + list(counted.rest())
    assert all(event["name"] == "h2d GB/s" for event in events)
    return [(event["ts"] / 1e6, event["args"]["GB/s"]) for event in events]


def copy(start_s: float, end_s: float, size: float) -> Span:
    return Span("h2d", "load_x", "layers.0", 0, start_s, end_s, int(size), 1)


def test_rates_are_bytes_by_the_time_that_they_took() -> None:
    assert rates([]) == []
    assert rates([copy(1.0, 1.5, 1e9)]) == [(1.0, 2.0), (1.5, 0.0)]
    assert rates([copy(1.0, 1.5, 1e9), copy(3.0, 4.0, 3e9)]) == [(1.0, 2.0), (1.5, 0.0), (3.0, 3.0), (4.0, 0.0)]
    assert rates([copy(0.0, 1.0, 1e9), copy(0.0, 1.0, 1e9)]) == [(0.0, 2.0), (1.0, 0.0)]  # at once
    assert rates([copy(1.0, 1.0, 1e9)]) == []  # no time, no rate


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 900), st.integers(1, 10**9)), max_size=60))
def test_rates_go_forward_and_give_all_bytes_back(pieces: list[tuple[int, int, int]]) -> None:
    spans = [copy(start / 100, (start + 1 + long) / 100, size) for start, long, size in pieces]
    spans.sort(key=lambda span: span.end_s)
    found = rates(spans)
    assert all(a[0] <= b[0] for a, b in itertools.pairwise(found))
    moved = sum(rate * 1e9 * (after - at) for (at, rate), (after, _) in itertools.pairwise(found))
    assert moved == pytest.approx(sum(span.bytes for span in spans), rel=1e-3)


def test_a_trace_grows_with_its_spans_and_what_is_remembered_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock.app.trace_events, "_MOST_REMEMBERED", 50)
    arrows = Arrows()
    count = 0
    for op in range(1000):
        waited = (*range(max(0, op - 10), op), op + 10_000)
        span = Span("h2d", "load_x", "layers.0", 0, float(op), op + 0.5, 1, 1, op, waited)
        count += len(list(arrows.of(span, 1)))
    assert len(arrows._done) == len(arrows._waiting) == 50
    assert count == 2 * (sum(range(10)) + 990 * 10)
