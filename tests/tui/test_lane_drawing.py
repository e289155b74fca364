"""The lanes of a step drawn at any size and window; its critical path, and what its idle times waited for."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import sampled
from seen import span, view_of, widths

from penstock.app.console.rows import ASCII, UNICODE, Glyphs, plain
from penstock.app.runs.lanes import LANES
from penstock.app.runs.ops import PARTS
from penstock.tui.data.critical import Blockers, analyse
from penstock.tui.data.parts import UPDATE, parts_of
from penstock.tui.data.run_data import UnderWay
from penstock.tui.data.spans import Busy, StepWindow
from penstock.tui.render.lanes import LaneScene, lanes_rows, layout
from penstock.tui.render.step_detail import idle_rows, path_stretches


def test_a_cell_shows_how_much_of_it_was_busy_as_far_as_is_known() -> None:
    """The cells are 1 s wide: a lane that is busy for an eighth of each must not look busy throughout."""
    quarter = [span("h2d", cell, cell + 0.25) for cell in range(20)]
    half = [span("nvme_read", cell + 0.25, cell + 0.75) for cell in range(20)]
    full = [span("compute", cell, cell + 1) for cell in range(20)]
    scene = LaneScene(view=view_of(*quarter, *half, *full), start_s=0, end_s=20, title="lanes")
    assert plain(lanes_rows(32, 8, scene, UNICODE)).startswith("lanes  bound by compute 100%")
    place = layout(32, 8, scene)
    assert (place.label_cells, place.num_cells) == (0, 27)
    scene = replace(scene, end_s=27.0)
    shown = [f"{cell * 20}{' ' * 7}  {share}%" for cell, share in (("▄", 37), ("▂", 19), ("█", 74))]
    lines = plain(lanes_rows(32, 8, scene, UNICODE)).splitlines()
    assert (lines[1:4], lines[4].strip()) == (shown, "0%")
    lines = plain(lanes_rows(32, 8, scene, ASCII)).splitlines()
    assert lines[1] == "=" * 20 + " " * 7 + "  37%"
    assert all(line.isascii() for line in lines)
    # Live: behind `until_s` nothing has arrived; an op under way is busy up to there.
    under_way = [UnderWay("compute", "head", "head", 3, 1.0), UnderWay("d2h", "x", "y", -1, None)]
    view = view_of(span("compute", 0, 1), span("h2d", 0, 1))
    scene = LaneScene(view=view, start_s=0, end_s=10, until_s=2.0, under_way=under_way)
    lines = {line[:11].strip(): line[11:] for line in plain(lanes_rows(66, 9, scene, UNICODE)).splitlines()}
    assert [lines[lane][-4:] for lane in ("compute", "h2d", "d2h")] == ["100%", " 50%", "  0%"]
    assert lines["compute"][12:50].strip() == ""
    wide = plain(lanes_rows(150, 9, replace(scene, now=scene.under_way), UNICODE))
    assert "→ head head[3]" in wide
    assert "→ x y" in wide


def test_ops_carry_their_names_where_there_is_room() -> None:
    ops = [span("compute", i, i + 1, op="layer_forward", block=f"layers.{i}", chunk=i) for i in range(4)]
    scene = LaneScene(view=view_of(*ops), start_s=0, end_s=4)
    rows = lanes_rows(116, 9, scene, UNICODE)
    [line] = [line for line in plain(rows).splitlines() if line.startswith("compute")]
    assert all(f"▏layer_forward …{i}[{i}]" in line for i in range(4))
    assert {token for row in rows for text, token in row if "layer" in text} == {"box.compute"}
    narrow = plain(lanes_rows(64, 9, scene, UNICODE))
    assert "▏layer_forwar" not in narrow.replace("▏layer_forward", "")
    # Overlapping ones lie in tracks where there is room, and have no names elsewhere.
    reads = [span("nvme_read", i, i + 3, op="read_state", block=f"layers.{i}") for i in (0, 1)]
    scene = LaneScene(view=view_of(*reads), start_s=0, end_s=4)
    assert "read_state" not in plain(lanes_rows(100, 9, scene, UNICODE))
    tall = [line for line in plain(lanes_rows(100, 22, scene, UNICODE)).splitlines() if "read_state" in line]
    assert len(tall) == 2
    assert "L0" in tall[0] or "layers.0" in tall[0]
    assert tall[1].index("read_state") > tall[0].index("read_state") + 15


def test_parts_of_a_step_stand_above_the_lanes_and_in_them() -> None:
    """The update lies beside forward; weights belong to the part that computes with them, by the run's own order."""
    view = view_of(
        span("optimizer", 0, 2, op="update", id=0, step=1),
        span("h2d", 0, 1, op="load_weights", bytes=9, id=1, step=2),
        span("compute", 1, 4, op="layer_forward", id=2, step=2),
        span("h2d", 2, 3, op="load_weights", bytes=9, id=3, step=2),
        span("compute", 4, 8, op="layer_backward", id=4, step=2),
        span("d2h", 5, 6, op="store_x", bytes=9, id=5, step=2),
        span("optimizer", 8, 8.1, op="clip", id=6, step=2),
    )
    scene = LaneScene(view=view, start_s=0, end_s=8)
    rows = lanes_rows(11 + 80 + 5, 9, scene, UNICODE)
    assert plain(rows[1:2])[11:91] == "▏update   ▏F+U      ▏forward            ▏backward".ljust(80)
    assert [token for _, token in rows[1][1:4]] == ["box.part.update", "box.part.forward", "box.part.backward"]
    assert parts_of(view, view.rows_between(0, 8)).tolist() == [UPDATE, 0, 0, 1, 1, 1]
    written = view_of(span("h2d", 0, 1, op="load_weights", bytes=9), span("compute", 1, 2, op="layer_generate"))
    assert parts_of(written, written.rows_between(0, 2)).tolist() == [PARTS.index("samples")] * 2
    assert plain(lanes_rows(7 + 24 + 5, 9, scene, ASCII)[1:2])[7:31] == "|U |F |F    |backward   "
    many = [span("compute", i / 8, (i + 1) / 8, op=f"layer_{'forward' if i < 80 else 'backward'}") for i in range(160)]
    many += [span("d2h", i / 8, (i + 0.5) / 8, op="store_gradient", bytes=9) for i in range(100, 160)]
    scene = LaneScene(view=view_of(*many), start_s=0, end_s=20, history={"d2h": [1.0, 4.0, 2.0, float("nan")]})
    place = layout(80, 9, scene)
    lines = {line[:11].strip(): line[11:] for line in plain(lanes_rows(80, 9, scene, UNICODE)).splitlines()}
    middle = place.num_cells // 2
    assert (lines["compute"][0], lines["compute"][middle]) == ("F", "B")
    assert lines["d2h"].strip("▄▃ ")[0] == "B"
    assert lines["d2h"].endswith("▃▇▄ ")
    assert lines["s"].endswith("per step")


def test_tall_lanes_rise_over_their_rows_and_the_forecast_stands_beneath_each_step() -> None:
    scene = LaneScene(view=view_of(*[span("h2d", cell, cell + 0.5) for cell in range(60)]), start_s=0, end_s=60)
    place = layout(70, 21, scene)
    assert set(place.bar_rows) == {3}
    top, middle, bottom = plain(lanes_rows(70, 21, scene, UNICODE)).splitlines()[4:7]
    assert top[11:].strip() == "50%"
    assert set(middle[12:60]) <= set("▄▃▅")
    assert set(bottom[12:60]) == {"█"}
    assert [y for y in range(21) if place.lane_at(y) == "h2d"] == [4, 5, 6]
    view = view_of(
        span("compute", 0, 2), span("optimizer", 2, 3, op="clip"), span("compute", 3, 5, step=2),
        span("optimizer", 5, 6, op="clip", step=2),
    )  # fmt: skip
    predicted = view_of(span("compute", 0, 1.5), span("h2d", 2, 99))
    scene = LaneScene(view=view, start_s=0, end_s=6, steps=view.steps, predicted=predicted)
    rows = plain(lanes_rows(64, 16, scene, UNICODE)).splitlines()
    compute = next(i for i, row in enumerate(rows) if row.startswith("compute"))
    beneath = next(row for row in rows[compute:] if row.startswith(" predicted"))
    assert beneath[11:59].rstrip() == "█" * 12 + " " * 12 + "█" * 12
    assert beneath.endswith(" 50%")
    beside = plain(lanes_rows(64, 9, scene, UNICODE)).splitlines()
    assert beside[3].endswith(" 67%  50%p")


def test_borders_and_cursor_are_marked_and_the_critical_path_is_outlined_and_no_bar_taller() -> None:
    view = view_of(span("compute", 0, 4), span("optimizer", 4, 5, op="clip"), span("h2d", 5, 8, step=2))
    critical = {lane: Busy(np.zeros(0), np.zeros(0), np.zeros(0)) for lane in LANES}
    critical["compute"] = critical["compute"].merge(np.array([0.0]), np.array([4.0]))
    scene = LaneScene(
        view=view, start_s=0, end_s=8, steps=[StepWindow(1, 0, 5)], critical=critical, cursor_s=1.0, lane="h2d", row=0
    )
    rows = lanes_rows(64, 10, scene, UNICODE)
    lines = plain(rows).splitlines()
    assert "│step 2" in lines[8]
    assert "▲" in lines[8]
    assert "┊" in lines[1]
    assert ("h2d        ", "lane.h2d reverse") in rows[2]
    assert any(token == "selected" for _, token in rows[3])
    assert "line" not in str(rows)  # what is selected shows that alone
    view = view_of(*[span("compute", cell, cell + 1) for cell in range(24)], *[span("h2d", c, c + 0.5) for c in (1, 2)])
    whole = dict(zip(view.lanes, view.busy, strict=True))
    for height, lines in ((9, "▁"), (22, "▔▁")):
        scene = LaneScene(view=view, start_s=0, end_s=48)
        bare, outlined = (lanes_rows(64, height, s, UNICODE) for s in (scene, replace(scene, critical=whole)))
        drawn = "".join(text for row in outlined for text, token in row if token == "line.compute")
        assert drawn == "".join(line * 24 for line in lines)
        assert not any(" line" in token or "line." in token for row in bare for _, token in row)
        found = [line.translate({ord("▁"): "█", ord("▔"): "█"}) for line in plain(outlined).splitlines()]
        assert [line for line in found if "compute" in line] == [
            line for line in plain(bare).splitlines() if "compute" in line
        ]
        if height == 9:  # a bar that does not fill its cell is underlined, and stays
            assert "".join(text for row in outlined for text, token in row if token == "lane.h2d line") == "▄▄"


@sampled(30, 120)
@given(
    st.sampled_from([UNICODE, ASCII]),
    st.booleans(),
    st.integers(1, 220),
    st.integers(1, 40),
    st.floats(0, 50),
    st.floats(1e-6, 100),
    st.lists(st.tuples(st.sampled_from([*LANES, "alien"]), st.floats(0, 60), st.floats(0, 20)), max_size=30),
)
def test_any_size_and_window_fits(
    glyphs: Glyphs, predicted: bool, width: int, height: int, start: float, length: float, pieces: list[Any]
) -> None:
    spans = [span(lane, begin, begin + took, op="clip", step=i, id=i) for i, (lane, begin, took) in enumerate(pieces)]
    view, under_way = view_of(*spans), [UnderWay("h2d", "op", "block", 1, start)]
    scene = LaneScene(view=view, start_s=start, end_s=start + length, until_s=start + length / 2, steps=view.steps)
    if predicted:
        scene = replace(scene, predicted=view, critical=dict(zip(view.lanes, view.busy, strict=True)))
    scene = replace(scene, under_way=under_way, now=under_way, cursor_s=start, row=0 if spans else None)
    scene = replace(scene, title="lanes", status="live", info=[("x" * 300, "text")])
    rows = lanes_rows(width, height, scene, glyphs)
    assert 1 <= len(rows) <= height
    assert widths(rows) == {width}
    assert glyphs is UNICODE or plain(rows).isascii()


def test_compact_forms_keep_the_busiest_lanes() -> None:
    busy = {"nvme_read": 1, "h2d": 6, "compute": 9, "d2h": 4, "optimizer": 3, "nvme_write": 2}
    scene = LaneScene(view=view_of(*[span(lane, 0, end) for lane, end in busy.items()]), start_s=0, end_s=10, title="t")
    for height in (1, 2, 3, 5, 7, 8, 9, 11):
        place = layout(80, height, scene)
        assert place.title_row == (height >= 3)
        num_shown = min(6, height - place.title_row - place.axis_row - place.info_row)
        busiest = sorted(busy, key=lambda lane: -busy[lane])[:num_shown]
        assert list(place.lanes) == [lane for lane in LANES if lane in busiest]
        assert len(lanes_rows(80, height, scene, UNICODE)) <= height


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
                assert part.end_s <= view.end_s[part.cause_row]
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


def test_dependencies_that_contradict_time_do_not_hang() -> None:
    view = view_of(op(1, "h2d", 0.0, 2.0, [2, 1, 77]), op(2, "compute", 0.0, 2.0, [1]), clip(3, 1.0, 2.0, [2, 1]))
    found = analyse(view, StepWindow(2, 0.0, 2.0))
    assert sum(part.end_s - part.start_s for part in found.path) == pytest.approx(2.0)
