"""Log lines wrapped and filtered; the planned step beside the real one."""

from __future__ import annotations

import pytest
from rich.cells import cell_len

from penstock.app.rows import ASCII, UNICODE, plain
from penstock.tui.data.run_data import LogLine
from penstock.tui.render.log import log_rows, matches
from penstock.tui.render.plan_table import StepFigures, plan_rows

LINES = [
    LogLine(None, "info", "first", 1),
    LogLine(None, "warning", "the second line is longer than a row", 2),
    LogLine(None, "error", "Traceback\n  File x", 3),
]


def test_the_newest_lines_are_at_the_bottom_and_wrap() -> None:
    assert plain(log_rows(LINES, 24, 10)).splitlines() == [
        "first                   ",
        "warning: the second line",
        "is longer than a row    ",
        "error: Traceback        ",
        "  File x                ",
    ]
    assert plain(log_rows(LINES, 24, 2)).splitlines() == ["error: Traceback        ", "  File x                "]
    assert log_rows(LINES, 24, 0) == []


@pytest.mark.parametrize("width", [1, 2, 7, 40, 120])
def test_rows_are_as_wide_as_asked_whatever_is_logged(width: int) -> None:
    odd = ["漢字" * 200, "\x1b[31mred\x1b[0m\ttab\r", "", "\n\n", "x" * 100_000, "é́" * 50, "\u202e rtl \x00"]
    rows = log_rows([LogLine(1e9 * i, "info", text, None) for i, text in enumerate(odd)], width, 500)
    assert {cell_len(plain([row])) for row in rows} == {width}
    assert "\x1b" not in plain(rows)


def test_times_stand_before_the_first_row_only() -> None:
    rows = plain(log_rows([LogLine(0.0, "info", "word " * 20, 1)], 50, 9)).splitlines()
    assert rows[0][2] == rows[0][5] == ":"
    assert rows[1].startswith(" " * 9 + "word")
    log_rows([LogLine(1e300, "info", "then", 1)], 50, 9)


def test_filter() -> None:
    line = LINES[1]
    assert matches(line, "")
    assert matches(line, "SECOND warning")
    assert not matches(line, "second !warning")
    assert matches(line, "!error !")
    assert not matches(line, "third")


def test_plan_beside_real() -> None:
    planned = StepFigures(2.0, 500.0, 0.31, "compute", {"compute": 0.9, "h2d": 0.5})
    real = StepFigures(3.0, 333.3, None, "nvme_read", {"compute": 0.6, "h2d": 0.5})
    rows = plan_rows(planned, real, ("compute", "h2d"), 36, 20, ASCII)
    assert [line.rstrip() for line in plain(rows).splitlines()] == [
        "             planned      mean",
        "step          2.00 s   3.00 s  +50%",
        "tokens/s         500      333  -33%",
        "MFU            31.0%      n/a",
        "             planned last step",
        "bound by    compute  nvme_read",
        "compute          90%      60% #### |",
        "h2d              50%      50% ##|",
    ]


@pytest.mark.parametrize("width", [1, 10, 29, 33, 60])
def test_plan_rows_at_any_width(width: int) -> None:
    for figures in (StepFigures(), StepFigures(float("nan"), 0.0, 1.0, "x" * 50, {"compute": float("nan")})):
        for glyphs in (UNICODE, ASCII):
            rows = plan_rows(figures, figures, ("compute",), width, 9, glyphs)
            assert {len(plain([row])) for row in rows} == {width}
