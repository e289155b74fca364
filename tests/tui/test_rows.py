"""Charts, key figures, gauges, log lines, the plan and what a run prepares, as rows of any width; and their widgets."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.cells import cell_len
from sample_forecast import fitting, refused
from seen import Themed, drawn, opened, running, until, widths

from penstock.app.console.rows import ASCII, UNICODE, Glyphs, Row, plain
from penstock.app.runs.directory import RunLock
from penstock.tui.data.flow import Tier
from penstock.tui.data.plan_client import PlanState
from penstock.tui.data.run_data import LogLine, Prepared, RunData
from penstock.tui.render.bars import StepFigures, figure_rows, tier_rows
from penstock.tui.render.chart import Curve, chart, decimate, sparkline
from penstock.tui.render.kpi import Figure, checklist_rows, kpi_row
from penstock.tui.render.log import log_rows, matches
from penstock.tui.render.measured import measured_rows
from penstock.tui.render.one_row import bar
from penstock.tui.render.plan import state_rows, summary_row
from penstock.tui.render.ticks import linear_ticks, log_ticks, tick_texts, time_ticks
from penstock.tui.screens.run import RunScreen
from penstock.tui.widgets.kpi_bar import KpiBar
from penstock.tui.widgets.pages import PlanPanel


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


def test_a_falling_line_and_outliers_that_touch_the_edge_or_set_the_axis() -> None:
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


def test_what_curves_points_marks_cursor_and_axis_are_drawn_as() -> None:
    rows = chart(60, 10, [curve([1, 2, 3, 4]), curve([1, 2, 3, 4], "ema")], UNICODE)
    assert tokens_of(rows, "ema")
    assert not tokens_of(rows, "raw"), "later curves lie over earlier ones"
    cloud = Curve(np.arange(1.0, 4.0), np.array([1.0, 3.0, 1.0]), "raw", joined=False)
    assert sum(cell not in " \n" for cell in tokens_of(chart(30, 4, [cloud], UNICODE), "raw")) == 3
    rows = chart(60, 10, [curve([3, 2, 1], "validation", points=True)], UNICODE, marks=[2.0, 99.0], cursor=2.0)
    assert tokens_of(rows, "validation") == UNICODE.diamond * 3
    assert tokens_of(rows, "checkpoint") == UNICODE.up
    assert UNICODE.vline in plain([row[2:] for row in rows[:8]])
    curves = [curve([float(i) for i in range(100)])]
    assert plain(chart(60, 10, curves, UNICODE)).endswith("step")
    assert "1m" in plain(chart(60, 10, curves, UNICODE, x_kind="time"))
    assert plain(chart(60, 10, curves, UNICODE, x_kind="tokens")).endswith("tokens")


def test_sparkline_ticks_and_places_too_close_to_be_told_apart() -> None:
    assert sparkline(np.arange(8.0), 8, UNICODE) == "▁▂▃▄▅▆▇█"
    assert sparkline(np.array([1.0, np.nan, 3.0]), 5, UNICODE) == "▁ █  "
    assert sparkline(np.array([]), 4, UNICODE) == "    "
    assert len(sparkline(np.random.default_rng(0).normal(size=999), 33, ASCII)) == 33
    assert sparkline(np.array([2.0]), 3, UNICODE) == "▁  "
    assert linear_ticks(0.93, 4.1, 5) == [1, 2, 3, 4]
    assert linear_ticks(1, 1, 5) == []
    assert log_ticks(0.5, 600, 6) == [1, 3, 10, 30, 100, 300]
    assert log_ticks(2, 3, 3) == [2.0, 2.5, 3.0]
    assert time_ticks(0, 130, 4) == [0, 60, 120]
    assert tick_texts([1.0, 1.5, 2.0]) == ["1.0", "1.5", "2.0"]
    assert tick_texts([1e-5, 2e-5]) == ["1e-5", "2e-5"]
    for low, high in ((1e29, 1e29), (1e29, 1.0000000000000002e29), (-1e29, -1e29), (0.0, 0.0)):
        places = Curve(np.array([low, high]), np.array([1.0, 2.0]), "raw")
        rows = chart(40, 10, [places], UNICODE, x_range=(low, high), marks=[low, high], cursor=low)
        assert (len(rows), widths(rows)) == (10, {40})


FIGURES = [
    Figure("1,240/8,000", label="step"),
    Figure("1.8342 (ema 1.851)", "1.8342", label="loss"),
    Figure("2,143 tok/s"),
    Figure("6h12m", label="ETA"),
    Figure("31.2%", label="MFU"),
]


def line(width: int) -> str:
    return plain([kpi_row(width, "qwen3-32b-20261122", "running", FIGURES, UNICODE)]).rstrip()


def test_the_key_figures_at_any_width_and_tiers_with_bars_marked_at_the_plan() -> None:
    assert plain([bar(10, 0.4, 0.8, UNICODE, "x")]) == "████░░░┃░░"
    assert plain([bar(10, 0.9, 0.5, ASCII, "x")]) == "####|####."
    assert plain([bar(4, None, None, UNICODE, "x")]) == "░░░░"
    assert plain([bar(4, 7.0, 7.0, UNICODE, "x")]) == "███┃"
    gib = 2.0**30
    rows = tier_rows([Tier("ram", 128 * gib, 100 * gib, 96 * gib)], 40, 2, UNICODE)
    assert plain(rows[:1]) == "ram  96.0 of 128 GiB  plan 100 GiB   75%"
    assert rows[0][-1] == ("  75%", "text")
    for held, share in ((97.0, ("  97%", "warn")), (101.0, (" 101%", "bad"))):
        assert tier_rows([Tier("ram", 100.0, 50.0, held)], 40, 2, UNICODE)[0][-1] == share
    assert "planned 50 of 100 B" in plain(tier_rows([Tier("ram", 100.0, 50.0, None)], 40, 2, UNICODE))
    name, head = "qwen3-32b-20261122  ● running", "  step 1,240/8,000  loss 1.8342"
    assert line(120) == f"{name}{head} (ema 1.851)  2,143 tok/s  ETA 6h12m  MFU 31.2%"
    assert line(100) == f"{name}{head}  2,143 tok/s  ETA 6h12m  MFU 31.2%"
    assert line(80) == f"qwen3-32b-202…  ● running{head}  2,143 tok/s  ETA 6h12m"
    assert line(50) == f"{name}  step 1,240/8,000"
    assert [line(width) for width in (30, 20, 9, 5)] == [name, "qwen3-32…  ● running", "● running", "● run"]


NAN = float("nan")
LINES = [
    LogLine(None, "info", "first"),
    LogLine(None, "warning", "the second line is longer than a row"),
    LogLine(None, "error", "Traceback\n  File x"),
]


def test_the_newest_lines_are_at_the_bottom_and_wrap_and_are_filtered() -> None:
    newest = ["error: Traceback        ", "  File x                "]
    older = ["first                   ", "warning: the second line", "is longer than a row    "]
    assert plain(log_rows(LINES, 24, 10)).splitlines() == older + newest
    assert plain(log_rows(LINES, 24, 2)).splitlines() == newest
    assert log_rows(LINES, 24, 0) == []
    rows = plain(log_rows([LogLine(0.0, "info", "word " * 20)], 50, 9)).splitlines()
    assert rows[0][2] == rows[0][5] == ":", "the time stands before the first row only"
    assert rows[1].startswith(" " * 9 + "word")
    log_rows([LogLine(1e300, "info", "then")], 50, 9)
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


async def test_the_page_scrolls() -> None:
    app, panel = Themed(), PlanPanel()

    def shown() -> list[str]:
        return [panel.render_line(y).text for y in range(panel.size.height)]

    async with app.run_test(size=(60, 20)) as pilot:
        await app.mount(panel)
        panel.focus()
        panel.show(PlanState("done", fitting()), "gh200-480")
        await pilot.pause()
        assert "fits on gh200-480" in shown()[0]
        await pilot.press("down", "down")
        assert "fits on" not in "".join(shown())
        await pilot.press("end")
        assert "kv window" in "".join(shown())
        await pilot.press("pageup", "up", "j", "k", "home")
        assert "fits on gh200-480" in shown()[0]
        for size in ((20, 5), (80, 24), (200, 60)):
            await pilot.resize_terminal(*size)
            await pilot.press("pagedown", "end")
            assert all(len(line) == panel.size.width for line in shown())


ITEMS = [
    Prepared("tokenizing the data", True, 33.2),
    Prepared("self-check", True, 3.1),
    Prepared("pinning 350 GB", False, 41.0, "88 of 350 GB", 0.25),
]


def lines(width: int, height: int, **more: Any) -> list[str]:
    options = {"live": True} | more
    return plain(checklist_rows(options.pop("items", ITEMS), width, height, ASCII, **options)).splitlines()


def test_what_is_done_and_what_is_being_done_and_what_narrow_rows_leave_out() -> None:
    assert [line.rstrip() for line in lines(84, 10)] == [
        "v tokenizing the data                33.2 s",
        "v self-check                          3.1 s",
        "> pinning 350 GB                     41.0 s  ####............   25%  88 of 350 GB",
        "  so far                             77.3 s",
    ]
    dead = lines(84, 10, live=False)  # broken off, where nobody works on it
    assert dead[2].startswith("x pinning 350 GB")
    assert dead[3].split() == ["in", "all", "77.3", "s"]
    assert [line.split()[1] for line in lines(60, 3)] == ["tokenizing", "self-check", "pinning"]
    assert [line.split()[1] for line in lines(60, 2)] == ["self-check", "pinning"]
    assert lines(60, 0) == lines(60, 5, items=[]) == []
    full = "> pinning 350 GB                     41.0 s  ####............   25%  88 of 350 GB"
    short = "> pinning 350 GB                     41.0 s   25%  88 of 350 GB"
    shown = {90: full, 78: full[:77] + "~", 66: short, 64: short, 50: short[:49], 48: short[:43]}
    assert {width: lines(width, 3)[2].rstrip() for width in shown} == shown
    assert (lines(24, 3)[0], lines(14, 3)[0]) == ("v tokenizing t~   33.2 s", "v tokenizing ~")


def test_names_are_whole_where_there_is_room_else_what_has_none_is_counted() -> None:
    newest = {"logps/chosen": -105.3, "rewards/chosen": 0.58, "rewards/margins": 0.856, "kl": NAN}

    def lines(width: int, most: int) -> list[str]:
        return plain(measured_rows(newest, "kl", width, most, ASCII)).rstrip().splitlines()

    assert lines(90, 1) == ["rewards/margins 0.856  rewards/chosen 0.580   kl n/a   logps/chosen -105"]
    assert lines(70, 1) == ["rewards/margins 0.856  chosen 0.580   kl n/a   logps/chosen -105".ljust(70).rstrip()]
    assert lines(50, 1) == ["rewards/margins 0.856  chosen 0.580   kl n/a  +1"]
    assert [line.rstrip() for line in lines(50, 2)] == [
        "rewards/margins 0.856  rewards/chosen 0.580", "kl n/a   logps/chosen -105",
    ]  # fmt: skip
    assert lines(12, 1) == ["rewards/mar~"]
    assert lines(90, 0) == []
    assert measured_rows({}, None, 90, 3, ASCII) == []


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
def test_rows_are_as_wide_as_asked_whatever_they_show(glyphs: Glyphs) -> None:
    odd = ["漢字" * 200, "\x1b[31mred\x1b[0m\ttab\r", "", "\n\n", "x" * 100_000, "é́" * 50, "\u202e rtl \x00"]
    logged = [LogLine(1e9 * i, "info", text) for i, text in enumerate(odd)]
    items = [*ITEMS, Prepared("x" * 500, False, 1e300, "y" * 500, 1.0), Prepared("", False, None)]
    tiers = [Tier("gpu", 100.0, 50.0, 70.0), Tier("ram", None, None, None), Tier("nvme", 1e13, 2e13, 3e13)]
    for width in (1, 2, 7, 10, 12, 20, 29, 33, 40, 60, 76, 120, 200):
        rows = log_rows(logged, width, 500)
        assert {cell_len(plain([row])) for row in rows} == {width}
        assert "\x1b" not in plain(rows)
        for each in (StepFigures(), StepFigures(NAN, 0.0, 1.0, "x" * 50, {"compute": NAN})):
            assert widths(figure_rows(each, each, width, 9, glyphs)) == {width}
        assert widths(checklist_rows(items, width, 20, glyphs, live=True)) == {width}
        for forecast in (fitting(), refused(), None):
            wrong = PlanState("done", forecast, stale=True, error="no\nroom " * 30, trouble="it ended")
            for state in (PlanState("advising", forecast), wrong, PlanState("planning", forecast, stale=True)):
                page(state, "gh200-480", width, glyphs)
                one_row(state, width)
        for most in range(4):
            rows = measured_rows(
                {f"{name}/{n}": NAN for name in odd if name.isprintable() for n in "ab"}, None, width, most, glyphs
            )
            assert len(rows) <= most
            assert widths(rows) == ({width} if most else set())
    for width in range(0, 150, 7):
        assert widths([kpi_row(width, "name", "crashed", FIGURES, glyphs)]) == {width}
        assert widths(tier_rows(tiers, width, 1, glyphs)) == widths(tier_rows(tiers, width, 2, glyphs)) == {width}


def test_a_status_that_holds_anything_else_has_no_items(tmp_path: Path) -> None:
    data = RunData(tmp_path)
    for items in (None, 7, {}, "done", [None, 3, "x"], [[{}]]):
        data.status = {"preparing": items}
        assert data.preparing == []
    data.status = {"preparing": [{"name": "two\nlines", "seconds": "x", "detail": 3, "fraction": 12.0}, {"name": 5}]}
    assert data.preparing == [Prepared("two lines", False, None, "", 1.0), Prepared("?", False, None)]


def tell(run: Path, items: list[Prepared], **more: Any) -> None:
    """Write the status that a process at these items would."""
    listed = [item._asdict() | {"state": "done" if item.done else "running"} for item in items]
    status = {"state": "preparing", "step": 0, "total_steps": 12, "heartbeat": 1_900_000_000.0, "preparing": listed}
    (run / "status.json.tmp").write_text(json.dumps(status | more))
    (run / "status.json.tmp").replace(run / "status.json")


async def test_the_screen_shows_it_until_the_first_step_and_marks_where_a_run_died(root: Path) -> None:
    run, first = root / "runs" / "begun", root / "runs" / "first"
    run.mkdir()
    shutil.copy(first / "recipe.json", run)
    lock = RunLock(run)
    tell(run, ITEMS[:1])
    try:
        async with running(root, (80, 24), run=run, clock=lambda: 1_900_000_001.0, glyphs=ASCII) as (_, pilot):
            screen = await opened(pilot, RunScreen)
            kpi = screen.query_one(KpiBar)
            await until(pilot, lambda: screen.data.state == "preparing" and "tokenizing" in drawn(screen.loss))
            tell(run, ITEMS)
            await until(pilot, lambda: "pinning 350" in drawn(screen.loss))
            assert "41.0 s" in drawn(screen.loss)
            assert drawn(screen.loss).isascii()
            assert screen.loss.headline() == "before the first step"
            assert "preparing  pinning 350 GB 41 s 25%  step 0/12" in plain(kpi.rows(120, 1))
            assert "n/a" not in plain(kpi.rows(120, 1))
            tell(run, ITEMS, state="failed", error="no room")
            await until(pilot, lambda: f"{ASCII.cross} pinning 350 GB" in drawn(screen.loss))
            assert screen.data.state == "failed"
            (run / "metrics.jsonl").write_text((first / "metrics.jsonl").read_text().splitlines(keepends=True)[0])
            tell(run, [item._replace(done=True) for item in ITEMS], step=1)
            await until(pilot, lambda: "tokenizing" not in drawn(screen.loss))
            await until(pilot, lambda: "pinning" not in plain(kpi.rows(120, 1)))
    finally:
        lock.release()
