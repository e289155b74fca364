"""Charts as text: sizes, gaps, spikes, clipping, axes, marks; ticks and figures."""

import itertools

import numpy as np
import pytest
from seen import widths

from penstock.app.rows import ASCII, UNICODE, Glyphs, Row, plain
from penstock.tui.render.chart import Curve, chart, decimate, sparkline
from penstock.tui.render.ticks import linear_ticks, log_ticks, tick_texts, time_ticks


def curve(values: list[float], token: str = "raw", *, points: bool = False) -> Curve:
    return Curve(np.arange(1, len(values) + 1, dtype=float), np.array(values, dtype=float), token, points)


def tokens_of(rows: list[Row], token: str) -> str:
    return "".join(text for row in rows for text, name in row if name == token)


NAN = float("nan")
SHAPES = [[], [1.0], [1.0, 1.0], [NAN] * 3, [1.0, NAN, 2.0], [0.0, -1.0, 5.0], [float("inf"), 1.0, 2.0]]
SHAPES += [[1e-12, 2e-12], [1e12, 3e12, 2e12]]


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
def test_every_row_is_as_wide_as_asked(glyphs: Glyphs) -> None:
    sizes = [(1, 1), (2, 6), (5, 2), (13, 6), (24, 6), (25, 7), (80, 12), (200, 3)]
    for values, log_y, (width, height) in itertools.product(SHAPES, (False, True), sizes):
        curves = [curve(values), curve(values, "v", points=True)]
        rows = chart(width, height, curves, glyphs, log_y=log_y, marks=[1, 2.5])
        assert (len(rows), widths(rows)) == (height, {width})
        assert glyphs is UNICODE or plain(rows).isascii()
    assert chart(0, 5, [], UNICODE) == []


def test_a_falling_line() -> None:
    rows = chart(26, 8, [curve([4, 3, 2, 1], "ema")], ASCII)
    assert [text.rstrip() for text in plain(rows).splitlines()] == [
        "4 +'-.",
        "  |   '--.",
        "  |       ''-..",
        "2 +            '-..",
        "  |                '--.",
        "  |                    '-.",
        "  +-------+---------------",
        "          2           step",
    ]
    gap = chart(30, 3, [curve([1.0] * 10 + [NAN] * 10 + [1.0] * 10, "ema")], UNICODE)
    assert plain(gap[1:2]) == "1 ┤⠒⠒⠒⠒⠒⠒⠒⠒⠂         ⠐⠒⠒⠒⠒⠒⠒⠒⠒"


def test_outliers_survive_and_touch_the_edge_or_set_the_axis() -> None:
    values = [2.0 + (i % 5) * 0.1 for i in range(400)]
    values[200] = 1000.0
    clipped, whole = (plain(chart(80, 12, [curve(values)], UNICODE, clip=clip)) for clip in (True, False))
    assert "2.2" in clipped
    assert "1000" not in clipped
    assert "1000" in whole or "800" in whole
    spike = np.ones(200_000)
    spike[123_456] = 5.0
    least, greatest = decimate(np.arange(200_000.0), spike, 0, 199_999, 160)
    assert (least.min(), greatest.max()) == (1.0, 5.0)
    assert int(greatest.argmax()) == 123_456 * 160 // 199_999


def test_what_curves_points_marks_and_cursor_are_drawn_as() -> None:
    rows = chart(60, 10, [curve([1, 2, 3, 4]), curve([1, 2, 3, 4], "ema")], UNICODE)
    assert tokens_of(rows, "ema")
    assert not tokens_of(rows, "raw"), "later curves lie over earlier ones"
    cloud = Curve(np.arange(1.0, 4.0), np.array([1.0, 3.0, 1.0]), "raw", joined=False)
    assert sum(cell not in " \n" for cell in tokens_of(chart(30, 4, [cloud], UNICODE), "raw")) == 3
    rows = chart(60, 10, [curve([3, 2, 1], "validation", points=True)], UNICODE, marks=[2.0, 99.0], cursor=2.0)
    assert tokens_of(rows, "validation") == UNICODE.diamond * 3
    assert tokens_of(rows, "checkpoint") == UNICODE.up
    assert UNICODE.vline in plain([row[2:] for row in rows[:8]])


def test_axis_names_what_x_counts() -> None:
    curves = [curve([float(i) for i in range(100)])]
    assert plain(chart(60, 10, curves, UNICODE)).endswith("step")
    assert "1m" in plain(chart(60, 10, curves, UNICODE, x_kind="time"))
    assert plain(chart(60, 10, curves, UNICODE, x_kind="tokens")).endswith("tokens")


def test_sparkline() -> None:
    assert sparkline(np.arange(8.0), 8, UNICODE) == "▁▂▃▄▅▆▇█"
    assert sparkline(np.array([1.0, np.nan, 3.0]), 5, UNICODE) == "▁ █  "
    assert sparkline(np.array([]), 4, UNICODE) == "    "
    assert len(sparkline(np.random.default_rng(0).normal(size=999), 33, ASCII)) == 33
    assert sparkline(np.array([2.0]), 3, UNICODE) == "▁  "


def test_ticks() -> None:
    assert linear_ticks(0.93, 4.1, 5) == [1, 2, 3, 4]
    assert linear_ticks(1, 1, 5) == []
    assert log_ticks(0.5, 600, 6) == [1, 3, 10, 30, 100, 300]
    assert log_ticks(2, 3, 3) == [2.0, 2.5, 3.0]
    assert time_ticks(0, 130, 4) == [0, 60, 120]
    assert tick_texts([1.0, 1.5, 2.0]) == ["1.0", "1.5", "2.0"]
    assert tick_texts([1e-5, 2e-5]) == ["1e-5", "2e-5"]


def test_places_too_close_to_be_told_apart_are_drawn() -> None:
    for low, high in ((1e29, 1e29), (1e29, 1.0000000000000002e29), (-1e29, -1e29), (0.0, 0.0)):
        places = Curve(np.array([low, high]), np.array([1.0, 2.0]), "raw")
        rows = chart(40, 10, [places], UNICODE, x_range=(low, high), marks=[low, high], cursor=low)
        assert (len(rows), widths(rows)) == (10, {40})
