"""Busy shares from spans, against shares counted point by point."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.app.lanes import lane_shares, lanes_report, length, union
from penstock.engine.schedule.actions import LANES
from penstock.storage.errors import UserError

intervals = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 8)).map(lambda p: (p[0], p[0] + p[1])), max_size=12)


def span(lane: str, start: float, end: float, *, op: str = "work", size: int = 0, step: int = 1) -> dict[str, Any]:
    return {"lane": lane, "op": op, "start_s": start, "end_s": end, "bytes": size, "step": step}


def clip(step: int, end: float) -> dict[str, Any]:
    return span("optimizer", end, end, op="clip", step=step)


@given(intervals)
def test_union_covers_the_same_points_once(pieces: list[tuple[float, float]]) -> None:
    merged = union(pieces)
    covered = {point for start, end in pieces for point in range(int(start), int(end))}
    assert {point for start, end in merged for point in range(int(start), int(end))} == covered
    assert length(merged) == len(covered)
    assert all(left[1] < right[0] for left, right in itertools.pairwise(merged))


@given(st.lists(st.tuples(st.sampled_from(LANES), st.integers(0, 30), st.integers(1, 8)), max_size=20))
def test_shares_are_what_counting_seconds_gives(works: list[tuple[str, int, int]]) -> None:
    spans = [span(lane, start, start + size) for lane, start, size in works]
    shares = lane_shares([*spans, clip(0, 10), clip(1, 30)], 1, 1)
    busy: dict[str, set[int]] = {lane: set() for lane in LANES}
    for lane, start, size in works:
        busy[lane] |= {second for second in range(start, start + size) if 10 <= second < 30}
    for lane in LANES:
        assert shares.busy[lane] == pytest.approx(len(busy[lane]) / 20)
    moving = busy["nvme_read"] | busy["nvme_write"] | busy["h2d"] | busy["d2h"]
    assert shares.drive_busy == pytest.approx(len(busy["nvme_read"] | busy["nvme_write"]) / 20)
    assert shares.exposed_io == pytest.approx(len(moving - busy["compute"]) / 20)
    assert shares.idle == pytest.approx(1 - len(moving | busy["compute"]) / 20)


def test_bytes_count_where_an_op_ends() -> None:
    spans = [span("h2d", 8, 11, size=3), span("h2d", 28, 31, size=5), clip(0, 10), clip(1, 30), clip(2, 50)]
    assert lane_shares(spans, 1, 1).bytes["h2d"] == 3
    assert lane_shares(spans, 1, 2).bytes["h2d"] == 8


def test_report_reads_a_run_and_refuses_steps_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="fewer than two steps"):
        lanes_report(tmp_path, None, as_json=False)
    read = span("nvme_read", 2.5, 3.0, size=10**9, step=2)
    spans = [clip(1, 1.0), span("compute", 1.0, 2.5, step=2), read, clip(2, 3.0)]
    (tmp_path / "spans.jsonl").write_text("".join(json.dumps(item) + "\n" for item in spans))
    report = lanes_report(tmp_path, None, as_json=False)
    assert "steps 2 to 2: n/a a step, n/a tok/s; shares are of 2.00 s" in report
    assert "2.00 GB/s" in report
    assert json.loads(lanes_report(tmp_path, "2:2", as_json=True))["exposed_io"] == pytest.approx(0.25)
    with pytest.raises(UserError, match="has steps 2 to 2 in full"):
        lanes_report(tmp_path, "1:2", as_json=False)
    with pytest.raises(UserError, match="FIRST:LAST"):
        lanes_report(tmp_path, "2", as_json=False)
