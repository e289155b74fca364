from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from samples import sampled
from seen import span, view_of, widths

from penstock.app.lanes import LANES
from penstock.app.ops import PARTS
from penstock.app.rows import ASCII, UNICODE, Glyphs, plain
from penstock.tui.data.parts import UPDATE, parts_of
from penstock.tui.data.spans import Busy, StepWindow
from penstock.tui.render.lanes import LaneScene, UnderWay, lanes_rows, layout


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
    scene = LaneScene(view=view, start_s=0, end_s=6, steps=view.steps(), predicted=predicted)
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
    scene = LaneScene(view=view, start_s=start, end_s=start + length, until_s=start + length / 2, steps=view.steps())
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
