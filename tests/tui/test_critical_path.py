import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from seen import span, view_of, widths

from penstock.app.lanes import LANES
from penstock.app.rows import UNICODE, plain
from penstock.tui.data.critical import Blockers, analyse
from penstock.tui.data.spans import StepWindow
from penstock.tui.render.step_detail import idle_rows, path_stretches

SECOND = 1 / 64


def op(op_id: int, lane: str, start: float, end: float, waited: list[int] | None = None, **more: Any) -> dict[str, Any]:
    more = {"op": f"{lane}_op", "block": f"layers.{op_id}", "step": 2, "id": op_id, "waited": waited or []} | more
    return span(lane, start, end, **more)


def clip(op_id: int, start: float, end: float, waited: list[int]) -> dict[str, Any]:
    return op(op_id, "optimizer", start, end, waited, op="clip", block="all")


def before(end: float = 1.0) -> dict[str, Any]:
    """The op that ends the step before."""
    return op(0, "optimizer", 0.0, end, op="clip", step=1)


@st.composite
def simulated(draw: st.DrawFn) -> tuple[list[dict[str, Any]], StepWindow, bool]:
    """Spans of ops with random dependencies on in-order lanes; whether anything was ever late for another reason.

    The step before ends with op 0; the step's own `clip` waits for some of the others.
    """
    num_ops = draw(st.integers(1, 40))
    in_flight = {lane: draw(st.sampled_from([1, 1, 2, 3])) for lane in LANES}
    prompt = draw(st.booleans()) and all(limit == 1 for limit in in_flight.values())
    spans = [before(8 * SECOND)]
    ends = {0: 8}
    lane_ops: dict[str, list[tuple[int, int]]] = {lane: [] for lane in LANES}
    lane_ops["optimizer"] = [(0, 8)]
    for op_id in range(1, num_ops + 1):
        last = op_id == num_ops
        lane = "optimizer" if last else draw(st.sampled_from(LANES))
        deps = draw(st.lists(st.integers(0, op_id - 1), max_size=3, unique=True))
        if op_id == 1 or last or prompt:
            deps = [*deps, 0] if 0 not in deps else deps  # nothing of this step begins before the one before has ended
        earlier = lane_ops[lane]
        reached = max((start for start, _ in earlier), default=0)
        running = sorted((end for _, end in earlier if end > reached), reverse=True)
        if len(running) >= in_flight[lane]:
            reached = running[in_flight[lane] - 1]
        waited = [dep for dep in deps if ends[dep] > reached]
        start = max([reached, *(ends[dep] for dep in waited)])
        start += 0 if prompt else draw(st.sampled_from([0, 0, 0, 1, 3]))
        ends[op_id] = start + draw(st.integers(1, 9))
        earlier.append((start, ends[op_id]))
        more = {"op": "clip"} if last else {}
        spans.append(op(op_id, lane, start * SECOND, ends[op_id] * SECOND, waited, **more))
    spans.sort(key=lambda item: item["end_s"])
    return spans, StepWindow(2, 8 * SECOND, ends[num_ops] * SECOND), prompt


@given(case=simulated())
def test_the_path_fills_the_step_and_idle_times_are_all_that_is_not_busy(case: tuple[Any, StepWindow, bool]) -> None:
    spans, window, prompt = case
    view = view_of(*spans)
    found = analyse(view, window)
    length = window.end_s - window.start_s
    assert found.recorded
    assert (found.path[0].start_s, found.path[-1].end_s) == window[1:]
    assert all(a.end_s == b.start_s for a, b in itertools.pairwise(found.path))
    ran = [part for part in found.path if part.row is not None]
    ran_s = sum(part.end_s - part.start_s for part in ran)
    assert ran_s + found.gap_s == pytest.approx(length)
    assert sum(found.path_by_lane(view).values()) == pytest.approx(ran_s)
    assert all(view.start_s[part.row] <= part.start_s and part.end_s <= view.end_s[part.row] for part in ran)
    assert len(set(found.path_rows)) == len(found.path_rows)
    last = view.span(found.path_rows[-1])
    assert (last.op, last.step) == ("clip", 2)
    if prompt:  # every op ran as soon as it could: nothing is unexplained
        assert found.gap_s == 0
    for lane in LANES:
        assert found.idle_s(lane) + view.busy_s(lane, window.start_s, window.end_s) == pytest.approx(length)
        seconds = [total.seconds for total in found.idle_totals(view, lane)]
        assert sum(seconds) == pytest.approx(found.idle_s(lane))
        assert seconds == sorted(seconds, reverse=True)
        for part in found.idle[lane]:
            assert part.end_s > part.start_s
            assert view.busy_s(lane, part.start_s, part.end_s) == pytest.approx(0, abs=1e-12)
            if part.kind == "waiting":
                assert part.cause_row is not None
                assert part.next_row is not None
                assert part.end_s <= view.end_s[part.cause_row] <= view.start_s[part.next_row]
            assert not prompt or part.kind in ("waiting", "no more work")


def test_a_step_by_hand() -> None:
    """Weights arrive, two chunks are computed, the gradient leaves, and clip ends it."""
    view = view_of(
        before(),
        op(1, "nvme_read", 1.0, 2.0),
        op(2, "h2d", 2.25, 3.0, [1]),
        op(3, "compute", 3.0, 5.0, [2]),
        op(5, "d2h", 5.0, 5.5, [3]),
        op(4, "compute", 5.0, 7.0),
        op(6, "d2h", 7.0, 8.0, [4]),
        clip(7, 8.5, 9.0, [5, 6]),
    )

    def id_of(row: int | None) -> int | None:
        return None if row is None else view.span(row).id

    found = analyse(view, StepWindow(2, 1.0, 9.0))
    assert [id_of(part.row) for part in found.path] == [1, None, 2, 3, 4, 6, None, 7]
    assert found.gap_s == pytest.approx(0.75)
    assert found.path_by_lane(view) == {"compute": 4.0, "nvme_read": 1.0, "d2h": 1.0, "h2d": 0.75, "optimizer": 0.5}
    totals = [(total.kind, total.op, total.blocks, total.seconds) for total in found.idle_totals(view, "compute")]
    assert totals == [("waiting", "h2d_op", ("layers.2",), 2.0), ("no more work", "", ("",), 2.0)]
    causes = [(part.kind, id_of(part.cause_row)) for part in found.idle["d2h"]]
    assert causes == [("waiting", 3), ("waiting", 4), ("no more work", None)]
    optimizer = [(part.kind, part.end_s - part.start_s) for part in found.idle["optimizer"]]
    assert optimizer == [("waiting", 7.0), ("starting", 0.5)]
    # Two reads at once on a lane in order: the second could begin only when the first had what it waited for.
    reads = [op(2, "nvme_read", 4.0, 6.0, [1]), op(3, "nvme_read", 4.0, 7.0)]
    view = view_of(before(), op(1, "compute", 1.0, 4.0), *reads, clip(4, 7.0, 8.0, [3]))
    assert Blockers(view).blocker(view.row_of_id(3)) == view.row_of_id(1)  # type: ignore[arg-type]
    found = analyse(view, StepWindow(2, 1.0, 8.0))
    assert [view.span(row).id for row in found.path_rows] == [1, 3, 4]
    assert found.gap_s == 0


def test_waits_are_told_as_one_would_say_them() -> None:
    """Compute's first, whatever is selected; another lane's where it is; of the rest how long."""
    block = {"block": "layers.3"}
    view = view_of(
        before(),
        op(1, "nvme_read", 1.0, 2.0, op="read_weights", chunk=1, **block),
        op(2, "h2d", 2.25, 3.0, [1], op="load_weights", **block),
        op(3, "compute", 3.0, 5.0, [2], op="layer_forward", chunk=0, **block),
        op(4, "compute", 5.5, 7.0, op="layer_forward", chunk=1, **block),
        clip(7, 7.0, 8.0, [4]),
    )
    found = analyse(view, StepWindow(2, 1.0, 8.0))
    assert [(lane, ops) for lane, ops, _ in path_stretches(view, found)] == [
        ("nvme_read", "read_weights layers.3[1]"),
        ("h2d", "load_weights layers.3"),
        ("compute", "layer_forward layers.3[0] to layers.3[1]"),
        ("optimizer", "clip all"),
    ]
    shown = plain(idle_rows(view, found, 80, 9, "compute", UNICODE)).splitlines()
    assert [line.rstrip() for line in shown[1:6]] == [
        "compute     idle 3.50 s, 50% of the step",
        "              2.00 s  waited for load_weights layers.3",
        "              1.00 s  queue was empty",
        "              500 ms  not scheduled yet",
        "idle  nvme_read 86%  h2d 89%  d2h 100%  optimizer 86%  nvme_write 100%",
    ]
    shown = plain(idle_rows(view, found, 80, 10, "h2d", UNICODE)).splitlines()
    assert shown[1].startswith("compute     idle")
    assert any(line.startswith("h2d         idle 6.25 s") for line in shown)
    assert any("ready, about to start" in line for line in shown)
    for width, height in itertools.product((20, 80, 140), range(1, 16)):
        rows = idle_rows(view, found, width, height, "d2h", UNICODE)
        assert len(rows) <= height
        assert widths(rows) == {width}


def test_without_recorded_dependencies_nothing_is_claimed_and_none_that_contradict_time_hang() -> None:
    old = [span("h2d", i, i + 1.0, step=2) for i in (1, 2)]
    found = analyse(view_of(*old), StepWindow(2, 0.0, 3.0))
    assert (found.recorded, found.path, found.idle) == (False, [], {})
    for spans in ([op(1, "h2d", 0.0, 1.0), op(2, "h2d", 1.0, 2.0) | {"waited": None}], []):
        assert not analyse(view_of(*spans), StepWindow(2, 0.0, 3.0)).recorded
    # Ids that contradict time do not hang.
    view = view_of(op(1, "h2d", 0.0, 2.0, [2, 1, 77]), op(2, "compute", 0.0, 2.0, [1]), clip(3, 1.0, 2.0, [2, 1]))
    found = analyse(view, StepWindow(2, 0.0, 2.0))
    assert sum(part.end_s - part.start_s for part in found.path) == pytest.approx(2.0)
