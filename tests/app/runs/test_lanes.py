"""What is told of a run's spans: busy shares, against shares counted point by point; the trace; and the mean speed, as
every place shows it."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock.app.runs.trace_events
from penstock.app.runs.directory import read_info
from penstock.app.runs.lanes import LaneTimes, lanes_report, union
from penstock.app.runs.log import RunLog
from penstock.app.runs.speed import MeanSpeed, speed_text
from penstock.app.runs.trace import _Tracks, write_trace
from penstock.app.runs.trace_events import Arrows, Rates
from penstock.engine.events import Span, StepMetrics
from penstock.engine.schedule.action import WORKING
from penstock.storage.files.errors import UserError
from penstock.tui.data.catalog import about_lines, read_run_entry
from penstock.tui.data.compare import figure_rows
from penstock.tui.data.run_data import RunData
from penstock.tui.render.bars import real_step
from penstock.tui.widgets.kpi_bar import figures

KEPT = Path(__file__).parents[2] / "tui" / "snapshot_run"

intervals = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 8)).map(lambda p: (p[0], p[0] + p[1])), max_size=12)


def span(lane: str, start: float, end: float, *, op: str = "work", size: int = 0, step: int = 1) -> dict[str, Any]:
    times = {"start_s": start, "end_s": end}
    return {"lane": lane, "op": op, "block": "", "chunk": -1, "bytes": size, "step": step} | times


def clip(step: int, end: float) -> dict[str, Any]:
    return span("optimizer", end, end, op="clip", step=step)


@given(intervals)
def test_union_covers_the_same_points_once(pieces: list[tuple[float, float]]) -> None:
    start_s, end_s = union(*np.array(pieces, dtype=float).reshape(-1, 2).T)
    merged = list(zip(start_s, end_s, strict=True))
    covered = {point for start, end in pieces for point in range(int(start), int(end))}
    assert {point for start, end in merged for point in range(int(start), int(end))} == covered
    assert (end_s - start_s).sum() == len(covered)
    assert all(left[1] < right[0] for left, right in itertools.pairwise(merged))


@given(st.lists(st.tuples(st.sampled_from(WORKING), st.integers(0, 30), st.integers(1, 8)), max_size=20))
def test_shares_are_what_counting_seconds_gives(works: list[tuple[str, int, int]]) -> None:
    spans = [span(lane, start, start + size) for lane, start, size in works]
    shares = LaneTimes(map(Span.of, [*spans, clip(0, 10), clip(1, 30)])).shares(1, 1)
    busy: dict[str, set[int]] = {lane: set() for lane in WORKING}
    for lane, start, size in works:
        busy[lane] |= {second for second in range(start, start + size) if 10 <= second < 30}
    for lane in WORKING:
        assert shares.busy[lane] == pytest.approx(len(busy[lane]) / 20)
    moving = busy["nvme_read"] | busy["nvme_write"] | busy["h2d"] | busy["d2h"]
    assert shares.drive_busy == pytest.approx(len(busy["nvme_read"] | busy["nvme_write"]) / 20)
    assert shares.exposed_io == pytest.approx(len(moving - busy["compute"]) / 20)
    assert shares.idle == pytest.approx(1 - len(moving | busy["compute"]) / 20)


def test_a_report_counts_bytes_where_an_op_ends_and_refuses_steps_that_the_run_lacks(tmp_path: Path) -> None:
    spans = [span("h2d", 8, 11, size=3), span("h2d", 28, 31, size=5), clip(0, 10), clip(1, 30), clip(2, 50)]
    assert [LaneTimes(map(Span.of, spans)).shares(1, last).bytes["h2d"] for last in (1, 2)] == [3, 8]
    with pytest.raises(UserError, match="fewer than two steps"):
        lanes_report(tmp_path, None, as_json=False)
    read = span("nvme_read", 2.5, 3.0, size=10**9, step=2)
    computed = span("compute", 1.0, 2.5, step=2) | {"awaited": [[1, 0.25], [2, 0.5]]}
    earlier = span("ranks", 0.5, 1.0) | {"awaited": [[1, 0.5]]}
    added = span("optimizer", 2.5, 2.75, step=2) | {"awaited": [[2, 0.125]]}
    spans = [earlier, clip(1, 1.0), computed, added, read, clip(2, 3.0)]
    (tmp_path / "spans.jsonl").write_text("".join(json.dumps(item) + "\n" for item in spans))
    report = lanes_report(tmp_path, None, as_json=False)
    assert "steps 2 to 2: n/a a step, n/a tok/s; shares are of 2.00 s" in report
    assert "2.00 GB/s" in report
    assert "waited for GPU 1: 250 ms a step, all lanes together\nwaited for GPU 2: 625 ms" in report
    assert json.loads(lanes_report(tmp_path, "2:2", as_json=True))["exposed_io"] == pytest.approx(0.25)
    for steps, message in (("1:2", "has steps 2 to 2 in full"), ("2", "FIRST:LAST")):
        with pytest.raises(UserError, match=message):
            lanes_report(tmp_path, steps, as_json=False)


def write_spans(folder: Path, spans: list[Span], tail: str = "") -> list[str]:
    lines = [json.dumps(span._asdict()) + "\n" for span in spans]
    (folder / "spans.jsonl").write_text("".join(lines) + tail)
    return lines


def events_of(run: Path, out: Path, *more: Any) -> list[dict[str, Any]]:
    write_trace(run, out, *more)
    return list(json.loads(out.read_text())["traceEvents"])


def test_one_track_per_lane_and_bad_input(tmp_path: Path) -> None:
    spans = [
        Span("compute", "forward", "layers.0", 2, 0.5, 0.75, 0, 1),
        Span("nvme_read", "weights", "embed", -1, 0.0, 0.25, 4096, 1),
        Span("lane of tomorrow", "think", "head", -1, 1.0, 2.0, 0, 1),
    ]
    with pytest.raises(UserError, match="has no spans"):
        write_trace(tmp_path, tmp_path / "trace.json")
    write_spans(tmp_path, spans, '{"lane": "comp')
    with pytest.raises(UserError, match=r"none/trace\.json: cannot be written"):
        write_trace(tmp_path, tmp_path / "none" / "trace.json")
    assert [path.name for path in tmp_path.iterdir()] == ["spans.jsonl"]
    assert write_trace(tmp_path, tmp_path / "trace.json") == 3
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert sorted(names.values()) == sorted([*WORKING, "lane of tomorrow"])
    complete = [event for event in events if event["ph"] == "X"]
    assert [names[event["tid"]] for event in complete] == [span.lane for span in spans]
    first = {"name": "forward layers.0[2]", "cat": "compute", "ph": "X", "pid": 1, "ts": 500_000.0, "dur": 250_000.0}
    args = {"block": "layers.0", "chunk": 2, "step": 1, "bytes": 0}
    assert complete[0] == first | {"tid": complete[0]["tid"], "args": args}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["spans.jsonl", "trace.json"]


@given(st.lists(st.tuples(st.sampled_from(["nvme_read", "x"]), st.integers(0, 50), st.integers(0, 9)), max_size=30))
def test_tracks_hold_no_overlaps(pieces: list[tuple[str, int, int]]) -> None:
    tracks = _Tracks()
    placed: dict[int, list[Span]] = {}
    for lane, start, size in pieces:
        span = Span(lane, "op", "embed", -1, float(start), float(start + size), 0, 1)
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

    assert [starts(step) for step in (1, 2, 3)] == [[0.0, 1.0, 1.5], [2.0, 3.0, 1.5], [6.0, 7.0]]
    assert starts(3, 4) == [6.0, 7.0, 8.0, 9.0]
    sizes = [len(line) for line in lines]
    assert starts(2, extent=(sum(sizes[:1]), sum(sizes[:7]))) == [2.0, 3.0, 1.5]
    with pytest.raises(UserError, match="does not contain the end of step 5"):
        starts(5)


def test_a_real_runs_trace_is_whole(tmp_path: Path) -> None:
    """Arrows begin in one op and end where another begins, later; counters go forward; steps follow one another."""
    events = events_of(KEPT, tmp_path / "t.json")
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["ph"] for event in events} == {"X", "M", "s", "f", "C", "B", "E"}
    named = {event["tid"] for event in events if event["name"] == "thread_name"}
    assert {event["tid"] for event in events if event["ph"] in "XsfBE"} <= named
    starts, ends = ({event["id"]: event for event in events if event["ph"] == end} for end in "sf")
    assert starts.keys() == ends.keys()
    assert len(starts) == len([event for event in events if event["ph"] in "sf"]) / 2 > 100
    for arrow, start in starts.items():
        end = ends[arrow]
        assert (start["ts"] <= end["ts"], end["bp"]) == (True, "e")
        on = {event["tid"]: [one for one in slices if one["tid"] == event["tid"]] for event in (start, end)}
        assert any(one["ts"] <= start["ts"] <= round(one["ts"] + one["dur"], 1) for one in on[start["tid"]])
        assert any(one["ts"] == end["ts"] for one in on[end["tid"]])
    counters = {event["name"] for event in events if event["ph"] == "C"}
    for name in counters:
        found = [event for event in events if event["name"] == name]
        assert all(a["ts"] <= b["ts"] for a, b in itertools.pairwise(found)), name
        assert all(value >= 0 for event in found for value in event["args"].values()), name
    tiers = {name.partition(",")[0] for name in counters if name.endswith("held at most")}
    assert tiers == {"gpu", "ram", "nvme"}
    metrics = [json.loads(line) for line in (KEPT / "metrics.jsonl").read_text().splitlines()]
    losses = {f"step {line['step']}": line["loss"] for line in metrics}
    steps = [event for event in events if event["ph"] in "BE"]
    assert "".join(event["ph"] for event in steps) == "BEBEBE"
    assert [event["name"] for event in steps[::2]] == ["step 28", "step 29", "step 30"]  # those whose spans it has
    assert all(event["args"]["loss"] == losses[event["name"]] for event in steps[::2])
    assert all(before["ts"] == after["ts"] for before, after in zip(steps[1::2], steps[2::2], strict=False))
    assert all(a["ts"] <= b["ts"] for a, b in itertools.pairwise(steps))


def test_an_op_that_is_told_of_late_has_its_arrow_and_what_is_remembered_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lanes tell of their ops in turn: one that waited may come before the one it waited for."""
    spans = [
        Span("compute", "layer_forward", "layers.0", 0, 1.0, 2.0, 0, 1, 7, (5, 6)),
        Span("h2d", "load_weights", "layers.0", 0, 0.0, 1.0, 1000, 1, 5, ()),
        Span("compute", "layer_forward", "layers.1", 0, 2.0, 3.0, 0, 1, 8, (7, 9)),
    ]
    write_spans(tmp_path, spans)
    drawn = [(event["ph"], event["ts"]) for event in events_of(tmp_path, tmp_path / "t.json") if event["ph"] in "sf"]
    assert drawn == [("s", 999_999.9), ("f", 1e6), ("s", 1_999_999.9), ("f", 2e6)]
    monkeypatch.setattr(penstock.app.runs.trace_events, "_MOST_REMEMBERED", 50)
    arrows, count = Arrows(), 0
    for op in range(1000):
        waited = (*range(max(0, op - 10), op), op + 10_000)
        count += len(list(arrows.of(Span("h2d", "load_x", "layers.0", 0, float(op), op + 0.5, 1, 1, op, waited), 1)))
    assert len(arrows._done) == len(arrows._waiting) == 50
    assert count == 2 * (sum(range(10)) + 990 * 10)


def rates(spans: list[Span]) -> list[tuple[float, float]]:
    """(seconds, GB/s) of one lane."""
    counted = Rates()
    events = [event for span in spans for event in counted.of(span)] + list(counted.rest())
    assert all(event["name"] == "h2d GB/s" for event in events)
    return [(event["ts"] / 1e6, event["args"]["GB/s"]) for event in events]


def copy(start_s: float, end_s: float, size: float) -> Span:
    return Span("h2d", "load_x", "layers.0", 0, start_s, end_s, int(size), 1)


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 900), st.integers(1, 10**9)), max_size=60))
def test_rates_go_forward_and_give_all_bytes_back(pieces: list[tuple[int, int, int]]) -> None:
    spans = [copy(start / 100, (start + 1 + long) / 100, size) for start, long, size in pieces]
    spans.sort(key=lambda span: span.end_s)
    found = rates(spans)
    assert all(a[0] <= b[0] for a, b in itertools.pairwise(found))
    assert rates([copy(1.0, 1.5, 1e9), copy(3.0, 4.0, 3e9)]) == [(1.0, 2.0), (1.5, 0.0), (3.0, 3.0), (4.0, 0.0)]
    assert rates([copy(1.0, 1.0, 1e9)]) == [], "no time, no rate"
    moved = sum(rate * 1e9 * (after - at) for (at, rate), (after, _) in itertools.pairwise(found))
    assert moved == pytest.approx(sum(span.bytes for span in spans), rel=1e-3)


def step(number: int, step_s: float, *, warmup: bool, tokens: int = 100) -> StepMetrics:
    of_step: dict[str, Any] = {"loss": 1.0, "grad_norm": 1.0, "lr": 1.0, "tokens": tokens, "step_s": step_s}
    return StepMetrics(step=number, tokens_per_s=tokens / step_s, warmup=warmup, model_flops=10**12, **of_step)


def test_the_mean_of_a_resumed_run_leaves_out_every_process_warm_up(tmp_path: Path) -> None:
    first = RunLog(tmp_path, total_steps=8)
    assert first.step(step(1, 90.0, warmup=True)).tokens_per_s is None
    first.step(step(2, 30.0, warmup=True))
    assert first.step(step(3, 2.0, warmup=False)).tokens_per_s == 50.0
    first.step(step(4, 7.0, warmup=False))  # of a generation that is never committed
    first.close("crashed")  # type: ignore[arg-type]
    second = RunLog(tmp_path, total_steps=8, step=3)
    for number, step_s in ((4, 80.0), (5, 40.0)):
        second.step(step(number, step_s, warmup=True))
    mean = second.step(step(6, 3.0, warmup=False, tokens=400))
    second.close("stopped")
    assert (mean.steps, mean.tokens_per_s, mean.step_s, mean.tflops_per_s) == (2, 100.0, 2.5, 0.4)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["mean_tokens_per_s"] for line in lines] == [None, None, 50.0, 50.0, 50.0, 100.0]
    assert MeanSpeed.of(lines) == mean
    assert read_info(tmp_path).mean_tokens_per_s == 100.0


def test_every_place_tells_the_same_mean_and_names_it(tmp_path: Path) -> None:
    assert speed_text(1282.4, 1234.0) == "1,282 tok/s mean, 1,234 last step"
    assert speed_text(12.3, 0.45) == "12 tok/s mean, 0.45 last step"
    assert speed_text(None, 1234.0) == "1,234 tok/s last step"
    assert speed_text(1282.4, None) == "1,282 tok/s mean"
    assert speed_text(None, None) == "n/a tok/s"
    path = Path(shutil.copytree(KEPT, tmp_path / "run"))
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    mean, last = MeanSpeed.of(lines), lines[-1]["tokens_per_s"]
    assert mean.steps == len(lines) - 2
    assert mean.tokens_per_s is not None
    said, planned = f"{mean.tokens_per_s:,.0f}", json.loads((path / "plan.json").read_text())["tokens_per_s"]
    assert len({said, f"{last:,.0f}", f"{planned:,.0f}"}) == 3, "they are told apart"
    data = RunData(path)
    while data.behind:
        data.poll()
    header = next(figure for figure in figures(data) if "tok/s" in figure.text)
    assert (header.text, header.short) == (f"{said} tok/s mean, {last:,.0f} last step", f"{said} tok/s mean")
    assert real_step(data).tokens_per_s == pytest.approx(mean.tokens_per_s)
    entry = read_run_entry(path)
    assert entry is not None
    assert entry.info.mean_tokens_per_s == pytest.approx(mean.tokens_per_s)
    assert f"{said} tok/s" in "\n".join(about_lines(path))
    shown = dict(figure_rows([data]))
    found = [shown[f"tokens/s, {which}"] for which in ("mean", "last step", "planned")]
    assert found == [said, f"{last:,.0f}", f"{planned:,.0f}"]
    of_two = MeanSpeed.of(lines[-2:]).tokens_per_s  # the spans kept are of these steps
    assert f"steps 29 to 30: 115 ms a step, {of_two:,.0f} tok/s mean; " in lanes_report(path, None, as_json=False)
