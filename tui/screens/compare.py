"""Compare: several runs' losses over steps, tokens or time, their key figures, and where their recipes differ."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.widgets import Static

from penstock.app.console.rows import Row
from penstock.storage.files.untrusted import printable
from penstock.tui.data.compare import LETTERS, MOST_RUNS, ComparedRun, config_rows, figure_rows
from penstock.tui.data.metrics import X_COLUMNS
from penstock.tui.render.chart import Curve, XKind, chart, next_kind
from penstock.tui.render.table import table_rows
from penstock.tui.screens.base import PenstockScreen
from penstock.tui.theme import styled
from penstock.tui.widgets.lines import Footer, LineWidget


class CompareChart(LineWidget):
    """A curve per run, with its letter along it."""

    axis: XKind = "step"
    log_y = False
    clip = True

    def __init__(self, runs: list[ComparedRun], column: str, *, id: str) -> None:
        super().__init__(id=id, classes="pane")
        self.runs, self.column = runs, column

    def rows(self, width: int, height: int) -> list[Row]:
        curves = [curve for index, run in enumerate(self.runs) for curve in self._curves(index, run)]
        return chart(
            width,
            height,
            curves,
            self.glyphs,
            x_kind=self.axis,
            log_y=self.log_y and self.column == "ema",
            clip=self.clip,
        )

    def _curves(self, index: int, run: ComparedRun) -> list[Curve]:
        rows = run.metrics.rows
        x, y = run.metrics.column(X_COLUMNS[self.axis], rows), run.metrics.column(self.column, rows)
        token = f"series.{index}"
        # Letters tell the curves apart where colours do not: some along each, at other places than its neighbours'.
        places = np.unique(np.linspace(0, max(0, rows - 1), 6).astype(int) + index * rows // (6 * MOST_RUNS))
        places = places[places < rows]
        return [Curve(x, y, token), Curve(x[places], y[places], f"{token} bold", points=True, mark=LETTERS[index])]


class TableView(LineWidget):
    """A table as tall as its rows."""

    DEFAULT_CSS = "TableView { height: auto; }"

    head: Sequence[tuple[str, str]] = ()
    body: Sequence[list[str]] = ()
    changed = False

    def show(self, head: list[tuple[str, str]], body: list[list[str]], *, changed: bool = False) -> None:
        if (head, body) != (self.head, self.body):
            self.head, self.body, self.changed = head, body, changed
            self.styles.height = len(body) + 1
            self.redraw()

    def rows(self, width: int, height: int) -> list[Row]:
        if not self.head:
            return []
        return table_rows(self.head, self.body, width, self.glyphs.ellipsis, changed=self.changed)


class CompareScreen(PenstockScreen):
    """Up to six runs; those that live go on."""

    SCOPE = "compare"
    DEFAULT_CSS = """
    CompareScreen #legend { height: auto; max-height: 3; padding: 0 1; }
    CompareScreen #charts { height: 1fr; }
    CompareScreen #loss { height: 3fr; }
    CompareScreen #speed { height: 2fr; }
    CompareScreen.-short #speed, CompareScreen.-tiny #speed { display: none; }
    CompareScreen #tables { height: 40%; }
    CompareScreen.-very-wide #body { layout: horizontal; }
    CompareScreen.-very-wide #charts { width: 3fr; height: 1fr; }
    CompareScreen.-very-wide #tables { width: 2fr; height: 1fr; layout: vertical; }
    CompareScreen #figures-pane, CompareScreen #config-pane { width: 1fr; height: 1fr; }
    CompareScreen.-narrow #tables { layout: vertical; height: 50%; }
    CompareScreen.-tiny #tables { display: none; }
    """

    def __init__(self, run_paths: list[Path]) -> None:
        super().__init__()
        self._runs = [ComparedRun(path) for path in run_paths[:MOST_RUNS]]
        self._left_out = len(run_paths) - len(self._runs)
        self._all_fields = False

    def compose(self) -> ComposeResult:
        yield Static(id="legend", markup=False)
        with Vertical(id="body"):
            with Vertical(id="charts"):
                yield CompareChart(self._runs, "ema", id="loss")
                yield CompareChart(self._runs, "tokens_per_s", id="speed")
            with Horizontal(id="tables"):
                with VerticalScroll(id="figures-pane", classes="pane"):
                    yield TableView(id="figures")
                with VerticalScroll(id="config-pane", classes="pane"):
                    yield TableView(id="config")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#speed").border_title = "tokens/s of each step"
        self.query_one("#figures-pane").border_title = "figures"
        self._draw_titles()
        self.query_one("#figures-pane").focus()
        self.start_feed(self._poll, self._take, every_s=0.5)
        if self._left_out:
            self.notify(
                f"only {MOST_RUNS} runs are compared; {self._left_out} marked ones are left out",
                severity="warning",
            )

    def _poll(self) -> bool:
        return any([run.poll() for run in self._runs])

    def _take(self, _: bool) -> None:
        parts = [
            (f"{LETTERS[index]} {printable(run.path.name)} ({run.state})   ", f"series.{index} bold")
            for index, run in enumerate(self._runs)
        ]
        self.query_one("#legend", Static).update(styled(parts, self.app.current_theme.dark))
        for name in ("loss", "speed"):
            self._chart(name).redraw()
        self._draw_tables()

    def _chart(self, id: str) -> CompareChart:
        return cast(CompareChart, self.query_one(f"#{id}"))

    def _draw_tables(self) -> None:
        letters = [(LETTERS[index], f"series.{index} bold") for index in range(len(self._runs))]
        self.query_one("#figures", TableView).show([("", "dim"), *letters], figure_rows(self._runs))
        body = config_rows(self._runs, all_fields=self._all_fields)
        self.query_one("#config", TableView).show([("", "dim"), *letters], body, changed=True)
        what = "all fields" if self._all_fields else "fields that differ" if body else "no fields differ"
        self.query_one("#config-pane").border_title = f"recipe: {what}"

    def _draw_titles(self) -> None:
        loss = self._chart("loss")
        over = {"step": "steps", "tokens": "trained tokens", "time": "training time"}[loss.axis]
        loss.border_title = f"loss, averaged, over {over}{', logarithmic' if loss.log_y else ''}"

    def action_axis(self) -> None:
        axis = next_kind(self._chart("loss").axis)
        for name in ("loss", "speed"):
            self._chart(name).axis = axis
            self._chart(name).redraw()
        self._draw_titles()

    def action_log_scale(self) -> None:
        loss = self._chart("loss")
        loss.log_y = not loss.log_y
        loss.redraw()
        self._draw_titles()

    def action_outliers(self) -> None:
        for name in ("loss", "speed"):
            self._chart(name).clip = not self._chart(name).clip
            self._chart(name).redraw()

    def action_differences(self) -> None:
        self._all_fields = not self._all_fields
        self._draw_tables()
