"""What is known of a plan, in each state of its planning, and the widget that scrolls it."""

from __future__ import annotations

from typing import Any

import pytest
from rich.cells import cell_len
from sample_forecast import fitting, refused
from textual.app import App, ComposeResult

from penstock.app.rows import ASCII, UNICODE, Glyphs, plain
from penstock.tui.data.plan_client import PlanState
from penstock.tui.render.plan import state_rows, summary_row
from penstock.tui.theme import THEMES
from penstock.tui.widgets.plan_panel import PlanPanel, PlanSummary


def page(state: PlanState, machine: str = "", width: int = 76, glyphs: Glyphs = UNICODE) -> str:
    rows = state_rows(state, machine, width, glyphs)
    assert all(sum(cell_len(text) for text, _ in row) == width for row in rows)
    return plain(rows)


def one_row(state: PlanState, width: int = 78) -> str:
    row = summary_row(state, "", width, UNICODE)
    assert sum(cell_len(text) for text, _ in row) == width
    return " ".join(plain([row]).split())


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
@pytest.mark.parametrize("width", [1, 7, 20, 76, 200])
@pytest.mark.parametrize("forecast", [fitting(), refused(), None])
def test_rows_have_exactly_the_width(forecast: dict[str, Any] | None, width: int, glyphs: Glyphs) -> None:
    for state in (
        PlanState("advising", forecast),
        PlanState("done", forecast, stale=True, error="no\nroom " * 30, trouble="it ended"),
        PlanState("planning", forecast, stale=True),
    ):
        page(state, "gh200-480", width, glyphs)
        one_row(state, width)


def test_states() -> None:
    assert "loading the planner…" in page(PlanState("starting"), "gh200-480")
    assert "for gh200-480" in page(PlanState("starting"), "gh200-480")
    assert "planning…" in page(PlanState("planning", fitting(), stale=True))
    rows = state_rows(PlanState("planning", fitting(), stale=True), "", 76, UNICODE)
    assert {token for row in rows for text, token in row if text.strip()} == {"dim", "accent"}
    assert "outdated" in page(PlanState("done", fitting(), stale=True))
    text = page(PlanState("done", fitting(), stale=True, error="data.path: /x does not exist"))
    assert text.startswith("✗ no plan")
    assert "  data.path: /x does not exist" in text
    assert "f5 tries again" in page(PlanState("idle", trouble="the planner stopped again: no room"))


def test_one_row_for_narrow_terminals() -> None:
    assert (
        one_row(PlanState("done", fitting()))
        == "✓ fits gh200-480 planned 11m11s a step 390 tok/s nvme_read-bound 15d13h"
    )
    assert "✗ no plan no room" in one_row(PlanState("done", error="no\nroom"))
    assert "1 shorter chunks" in one_row(PlanState("done", refused()))


class PanelApp(App[None]):
    """The panel alone."""

    glyphs = UNICODE

    def compose(self) -> ComposeResult:
        yield PlanPanel()
        yield PlanSummary(id="summary")

    def on_mount(self) -> None:
        for theme in THEMES:
            self.register_theme(theme)
        self.theme = "penstock-dark"
        self.query_one(PlanPanel).focus()


def shown(widget: PlanPanel) -> list[str]:
    return [widget.render_line(y).text for y in range(widget.size.height)]


async def test_the_page_scrolls() -> None:
    app = PanelApp()
    async with app.run_test(size=(60, 20)) as pilot:
        panel = app.query_one(PlanPanel)
        panel.show(PlanState("done", fitting()), "gh200-480")
        app.query_one(PlanSummary).show(PlanState("done", fitting()), "gh200-480")
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
        panel.show(PlanState("planning", fitting(), stale=True), "gh200-480")
