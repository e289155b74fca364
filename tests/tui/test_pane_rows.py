"""The key figures, gauges, log lines and the plan, as rows of any width; and the panel that scrolls the plan."""

import itertools

from rich.cells import cell_len
from sample_forecast import fitting, refused
from seen import Themed, widths
from textual.app import ComposeResult

from penstock.app.rows import ASCII, UNICODE, Glyphs, plain
from penstock.tui.data.plan_client import PlanState
from penstock.tui.data.run_data import LogLine
from penstock.tui.data.tiers import Tier
from penstock.tui.render.bars import bar, tier_rows
from penstock.tui.render.kpi import Figure, kpi_row
from penstock.tui.render.log import log_rows, matches
from penstock.tui.render.plan import state_rows, summary_row
from penstock.tui.render.plan_table import StepFigures, plan_rows
from penstock.tui.widgets.plan_panel import PlanPanel

FIGURES = [
    Figure("1,240/8,000", label="step"),
    Figure("1.8342 (ema 1.851)", "1.8342", label="loss"),
    Figure("2,143 tok/s"),
    Figure("6h12m", label="ETA"),
    Figure("31.2%", label="MFU"),
]


def line(width: int) -> str:
    return plain([kpi_row(width, "qwen3-32b-20261122", "running", FIGURES, UNICODE)]).rstrip()


def test_a_wide_line_has_everything_and_what_goes_first() -> None:
    name, head = "qwen3-32b-20261122  ● running", "  step 1,240/8,000  loss 1.8342"
    assert line(120) == f"{name}{head} (ema 1.851)  2,143 tok/s  ETA 6h12m  MFU 31.2%"
    assert line(100) == f"{name}{head}  2,143 tok/s  ETA 6h12m  MFU 31.2%"
    assert line(80) == f"qwen3-32b-202…  ● running{head}  2,143 tok/s  ETA 6h12m"
    assert line(50) == f"{name}  step 1,240/8,000"
    assert [line(width) for width in (30, 20, 9, 5)] == [name, "qwen3-32…  ● running", "● running", "● run"]


def test_every_row_is_as_wide_as_asked() -> None:
    tiers = [Tier("gpu", 100.0, 50.0, 70.0), Tier("ram", None, None, None), Tier("nvme", 1e13, 2e13, 3e13)]
    for width, glyphs in itertools.product(range(0, 150, 7), (UNICODE, ASCII)):
        assert widths([kpi_row(width, "name", "crashed", FIGURES, glyphs)]) == {width}
        assert widths(tier_rows(tiers, width, 1, glyphs)) == widths(tier_rows(tiers, width, 2, glyphs)) == {width}


def test_bar_is_filled_to_what_is_held_and_marked_at_the_plan() -> None:
    assert plain([bar(10, 0.4, 0.8, UNICODE, "x")]) == "████░░░┃░░"
    assert plain([bar(10, 0.9, 0.5, ASCII, "x")]) == "####|####."
    assert plain([bar(4, None, None, UNICODE, "x")]) == "░░░░"
    assert plain([bar(4, 7.0, 7.0, UNICODE, "x")]) == "███┃"


def test_tier_says_held_of_budget() -> None:
    gib = 2.0**30
    rows = tier_rows([Tier("ram", 128 * gib, 100 * gib, 96 * gib)], 40, 2, UNICODE)
    assert plain(rows[:1]) == "ram  96.0 of 128 GiB  plan 100 GiB   75%"
    assert rows[0][-1] == ("  75%", "text")
    for held, share in ((97.0, ("  97%", "warn")), (101.0, (" 101%", "bad"))):
        assert tier_rows([Tier("ram", 100.0, 50.0, held)], 40, 2, UNICODE)[0][-1] == share
    assert "planned 50 of 100 B" in plain(tier_rows([Tier("ram", 100.0, 50.0, None)], 40, 2, UNICODE))


NAN = float("nan")
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


def test_rows_are_as_wide_as_asked_whatever_is_logged() -> None:
    odd = ["漢字" * 200, "\x1b[31mred\x1b[0m\ttab\r", "", "\n\n", "x" * 100_000, "é́" * 50, "\u202e rtl \x00"]
    lines = [LogLine(1e9 * i, "info", text, None) for i, text in enumerate(odd)]
    figures = [StepFigures(), StepFigures(NAN, 0.0, 1.0, "x" * 50, {"compute": NAN})]
    for width in (1, 2, 7, 10, 29, 33, 40, 60, 120):
        rows = log_rows(lines, width, 500)
        assert {cell_len(plain([row])) for row in rows} == {width}
        assert "\x1b" not in plain(rows)
        for each, glyphs in itertools.product(figures, (UNICODE, ASCII)):
            assert widths(plan_rows(each, each, ("compute",), width, 9, glyphs)) == {width}


def test_times_stand_before_the_first_row_only() -> None:
    rows = plain(log_rows([LogLine(0.0, "info", "word " * 20, 1)], 50, 9)).splitlines()
    assert rows[0][2] == rows[0][5] == ":"
    assert rows[1].startswith(" " * 9 + "word")
    log_rows([LogLine(1e300, "info", "then", 1)], 50, 9)


def test_filter() -> None:
    found = {"": True, "SECOND warning": True, "second !warning": False, "!error !": True, "third": False}
    assert {words: matches(LINES[1], words) for words in found} == found


def page(state: PlanState, machine: str = "", width: int = 76, glyphs: Glyphs = UNICODE) -> str:
    rows = state_rows(state, machine, width, glyphs)
    assert widths(rows) == {width}
    return plain(rows)


def one_row(state: PlanState, width: int = 78) -> str:
    row = summary_row(state, "", width, UNICODE)
    assert widths([row]) == {width}
    return " ".join(plain([row]).split())


def test_rows_have_exactly_the_width() -> None:
    for forecast, width in itertools.product((fitting(), refused(), None), (1, 7, 20, 76, 200)):
        for state in (
            PlanState("advising", forecast),
            PlanState("done", forecast, stale=True, error="no\nroom " * 30, trouble="it ended"),
            PlanState("planning", forecast, stale=True),
        ):
            page(state, "gh200-480", width, UNICODE)
            page(state, "gh200-480", width, ASCII)
            one_row(state, width)


def test_states() -> None:
    planning = PlanState("planning", fitting(), stale=True)
    for words, state in {
        "loading the planner…": PlanState("starting"),
        "for gh200-480": PlanState("starting"),
        "planning…": planning,
        "outdated": PlanState("done", fitting(), stale=True),
        "f5 tries again": PlanState("idle", trouble="the planner stopped again: no room"),
    }.items():
        assert words in page(state, "gh200-480")
    rows = state_rows(planning, "", 76, UNICODE)
    assert {token for row in rows for text, token in row if text.strip()} == {"dim", "accent"}
    text = page(PlanState("done", fitting(), stale=True, error="data.path: /x does not exist"))
    assert text.startswith("✗ no plan")
    assert "  data.path: /x does not exist" in text
    fits = "✓ fits gh200-480 planned 11m11s a step 390 tok/s nvme_read-bound 15d13h"
    assert one_row(PlanState("done", fitting())) == fits
    assert "✗ no plan no room" in one_row(PlanState("done", error="no\nroom"))
    assert "1 shorter chunks" in one_row(PlanState("done", refused()))


class PanelApp(Themed):
    """The panel alone."""

    def compose(self) -> ComposeResult:
        yield PlanPanel()


def shown(widget: PlanPanel) -> list[str]:
    return [widget.render_line(y).text for y in range(widget.size.height)]


async def test_the_page_scrolls() -> None:
    app = PanelApp()
    async with app.run_test(size=(60, 20)) as pilot:
        panel = app.query_one(PlanPanel)
        panel.focus()
        panel.show(PlanState("done", fitting()), "gh200-480")
        await pilot.pause()
        assert "fits on gh200-480" in shown(panel)[0]
        await pilot.press("down", "down")
        assert "fits on" not in "".join(shown(panel))
        await pilot.press("end")
        assert "kv window" in "".join(shown(panel))
        await pilot.press("pageup", "up", "j", "k", "home")
        assert "fits on gh200-480" in shown(panel)[0]
        for size in ((20, 5), (80, 24), (200, 60)):
            await pilot.resize_terminal(*size)
            await pilot.press("pagedown", "end")
            assert all(len(line) == panel.size.width for line in shown(panel))
