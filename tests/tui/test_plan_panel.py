"""The plan's page as text: every figure is right or n/a, no row is too wide; and the widget that scrolls it."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from textual.app import App, ComposeResult

from tui.data.plan_client import PlanState
from tui.glyphs import ASCII, UNICODE, Glyphs
from tui.render import Row, plain
from tui.render.plan import fixes, plan_rows, summary_row
from tui.theme import THEMES
from tui.widgets.plan_panel import PlanPanel, PlanSummary

sys.path.insert(0, str(Path(__file__).parents[1] / "app"))
from sample_forecast import fitting, refused


def page(forecast: dict[str, Any] | None, width: int = 76, glyphs: Glyphs = UNICODE, **state: Any) -> str:
    rows = plan_rows(width, glyphs, forecast=forecast, **state)
    assert all(sum(cell_len(text) for text, _ in row) == width for row in rows)
    return plain(rows)


def flat(text: str) -> str:
    return " ".join(text.split())


def tokens(rows: list[Row]) -> set[str]:
    return {token for row in rows for text, token in row if text.strip()}


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
@pytest.mark.parametrize("width", [1, 7, 20, 50, 59, 60, 76, 110, 200])
@pytest.mark.parametrize("forecast", [fitting(), refused(), None])
def test_rows_have_exactly_the_width(forecast: dict[str, Any] | None, width: int, glyphs: Glyphs) -> None:
    text = page(forecast, width, glyphs, phase="advising")
    if glyphs is ASCII:
        assert text.isascii()
    page(forecast, width, glyphs, error="no room " * 30, trouble="it ended", stale=True)


def test_every_figure_is_there() -> None:
    text = flat(page(fitting()))
    for part in (
        "✓ fits on gh200-480",
        "NVIDIA GH200 480GB; data sheets of NVIDIA GH200",
        "mistral 123 B, 88 layers; 262,144 tokens a step, context 32,768",
        "11m11s 390 15d13h 30.1%",
        "a step tokens/s 2,000 steps MFU",
        "gpu 80% 72.0 of 90.0 GiB",
        "█ kept activations 30.0 GiB ▓ K/V window 12.0 GiB ▒ weight slots 11.0 GiB ░ 3 more 19.0 GiB",
        "ram 91% 400.0 of 440.0 GiB",
        "nvme 46% 3.12 of 6.84 TiB",
        "bound by nvme_read",
        "91% 10m12s 1.66 TiB",
        "78% 524 s -",
        "twice as many sequences in a step → 492 tokens/s (+26%)",
        "train.global_batch_size=16",
        "b applies it",
        "compute-bound from 306,500 tokens a step",
        "32 chunks of 8,192 tokens; keys and values whole; saved for backward: everything 2%, attention 98%",
        "1562.50 TiB written, endurance used 11.4% of 13671.88 TiB",
        "/mnt/b: 1464.84 TiB written, endurance used n/a",
        "chunk tokens: 8,192",
    ):
        assert part in text, part


def test_a_bar_is_as_long_as_its_share() -> None:
    line = next(line for line in page(fitting()).splitlines() if line.startswith("gpu"))
    bar = line[line.index("█") :]
    assert len(bar) == 43
    assert [round(bar.count(shade) * 90 / 43) for shade in "█▓▒░"] == [29, 13, 10, 19]
    lane = next(line for line in page(fitting()).splitlines() if line.startswith("compute "))
    assert lane.count("█") == round(0.78 * 41)
    assert "h2d        ▌" in page(fitting())


def test_blocks_are_drawn_in_their_order() -> None:
    rows = [line for line in page(fitting(), 110).splitlines() if line.startswith(("weights ", "state ", "gradient "))]
    assert rows[0].split()[1] == "█" + "▒" * 40 + "░" * 48 + "█"
    assert rows[1].split()[1] == "▒" + "░" * 88 + "▒"
    assert "weights   g" + "r" * 40 in page(fitting(), 110, ASCII)


def test_what_is_not_known_reads_na() -> None:
    forecast = fitting() | {"mfu": None, "compute_bound_tokens": None, "best_change": None}
    forecast["machine"] = {"name": "generic", "source": "assumed", "gpu": None}
    forecast["tiers"]["nvme"] |= {"budget_bytes": None, "peak_bytes": None}
    forecast["lanes"]["h2d"] = {}
    forecast["run"] = {}
    text = flat(page(forecast))
    for part in (
        "fits on this machine",
        "no GPU: the gpu tier is ordinary memory",
        "n/a n/a a step tokens/s 2,000 steps MFU",
        "compute-bound from n/a tokens",
        "no single change was found that helps",
        "nvme n/a n/a of n/a",
    ):
        assert part in text, part


def test_a_refusal_numbers_its_fixes() -> None:
    forecast = refused()
    forecast["refusal"]["changes"].append({"set": [], "text": "a machine with 33.0 GiB of GPU memory"})
    text = page(forecast)
    assert "✗ does not fit on rtx3090-64" in text
    assert "the gpu tier is too small by 11.0 GiB" in text
    assert "gpu   150%  33.0 of 22.0 GiB" in text
    assert "1 shorter chunks, streamed window" in text
    assert '  storage.nvme=["/mnt/a", "/mnt/b"]' in text
    assert "- a machine with 33.0 GiB" in text
    assert [change["text"] for change in fixes(forecast)][2] == "two drives"
    assert len(fixes(forecast)) == 3
    assert fixes(fitting()) == fixes(None) == []


def test_states() -> None:
    assert "loading the planner…" in page(None, phase="starting", machine="gh200-480")
    assert "for gh200-480" in page(None, phase="starting", machine="gh200-480")
    assert "planning…" in page(fitting(), phase="planning", stale=True)
    rows = plan_rows(76, UNICODE, forecast=fitting(), phase="planning", stale=True)
    assert tokens(rows) == {"dim", "accent"}
    assert "older" in page(fitting(), stale=True)
    early = fitting()
    del early["best_change"]
    assert "trying…" in page(early, phase="advising")
    empty = refused()
    empty["refusal"]["changes"] = []
    assert "trying changes one by one…" in page(empty, phase="advising")
    assert "no single change was found to fit" in page(empty)
    text = page(fitting(), error="data.path: /x does not exist", stale=True)
    assert text.startswith("✗ no plan")
    assert "  data.path: /x does not exist" in text
    assert "f5 tries again" in page(None, trouble="the planner ended again: no room", phase="idle")
    assert "shape from the recipe" in page(fitting() | {"note": "shape from the recipe: /m is not there"})


@pytest.mark.parametrize("width", [1, 10, 78, 200])
def test_one_row_for_narrow_terminals(width: int) -> None:
    for forecast, state in (
        (fitting(), {}),
        (refused(), {"phase": "planning"}),
        (None, {"phase": "starting"}),
        (fitting(), {"error": "no\nroom", "stale": True}),
    ):
        row = summary_row(width, UNICODE, forecast=forecast, **state)  # type: ignore[arg-type]
        assert sum(cell_len(text) for text, _ in row) == width
    if width == 78:
        text = plain([summary_row(width, UNICODE, forecast=fitting())])
        assert flat(text) == "✓ fits gh200-480 11m11s a step 390 tok/s nvme_read-bound 15d13h"
        assert "✗ no plan no room" in plain([summary_row(width, UNICODE, forecast=None, error="no\nroom")])
        assert "1 shorter chunks" in plain([summary_row(width, UNICODE, forecast=refused())])


def test_a_forecast_is_left_as_it_is() -> None:
    forecast = fitting()
    before = copy.deepcopy(forecast)
    page(forecast, stale=True)
    assert forecast == before


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
