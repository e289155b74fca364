"""Compare: several runs' losses, or another metric, over steps, tokens or time; their key figures, and where their
recipes differ."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.widgets import Static

from penstock.app.console.rows import Glyphs, Row
from penstock.tui.data.alerts import NOTHING_MEASURED
from penstock.tui.data.compare import LETTERS, MOST_RUNS, config_rows, figure_rows, measured_names, read_new, state_text
from penstock.tui.data.metrics import X_COLUMNS
from penstock.tui.data.run_data import RunData
from penstock.tui.render.chart import Curve, XKind, chart, next_kind
from penstock.tui.render.table import table_rows
from penstock.tui.screens.base import PenstockScreen
from penstock.tui.theme import styled
from penstock.tui.widgets.lines import Drawn, Footer


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
    CompareScreen #figures, CompareScreen #config { height: 1; }
    CompareScreen.-narrow #tables { layout: vertical; height: 50%; }
    CompareScreen.-tiny #tables { display: none; }
    """

    axis: XKind = "step"
    log_y = False
    clip = True
    series: str | None = None
    """What is drawn of all that the runs measure; None: the loss."""

    def __init__(self, run_paths: list[Path]) -> None:
        super().__init__()
        self._runs = [RunData(path, figures_only=True) for path in run_paths[:MOST_RUNS]]
        self._left_out = len(run_paths) - len(self._runs)
        self._all_fields = False
        self.tables: dict[str, list[list[str]]] = {"figures": [], "config": []}

    def compose(self) -> ComposeResult:
        yield Static(id="legend", markup=False)
        with Vertical(id="body"):
            with Vertical(id="charts"):
                yield Drawn(partial(self._chart_rows, "ema"), id="loss", classes="pane")
                yield Drawn(partial(self._chart_rows, "tokens_per_s"), id="speed", classes="pane")
            with Horizontal(id="tables"):
                for name in self.tables:
                    with VerticalScroll(id=f"{name}-pane", classes="pane"):
                        yield Drawn(partial(self._table_rows, name), id=name)
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#speed").border_title = "tokens/s of each step"
        self.query_one("#figures-pane").border_title = "figures"
        self._draw_charts()
        self.query_one("#figures-pane").focus()
        self.start_feed(self._poll, self._take, every_s=0.5)
        if self._left_out:
            self.notify(
                f"only {MOST_RUNS} runs are compared; {self._left_out} marked ones are left out", severity="warning"
            )

    def _poll(self) -> bool:
        return any([read_new(run) for run in self._runs])

    def _take(self, _: bool) -> None:
        parts = [
            (f"{LETTERS[index]} {run.name} ({state_text(run)})   ", f"series.{index} bold")
            for index, run in enumerate(self._runs)
        ]
        self.query_one("#legend", Static).update(styled(parts, self.app.current_theme.dark))
        self._draw_charts()
        self._draw_tables()
        self.refresh_bindings()

    def _chart_rows(self, column: str, width: int, height: int, glyphs: Glyphs) -> list[Row]:
        """A curve per run, with its letter along it."""
        curves = [curve for index, run in enumerate(self._runs) for curve in self._curves(index, run, column)]
        log_y = self.log_y and column == "ema" and self.series is None
        return chart(width, height, curves, glyphs, x_kind=self.axis, log_y=log_y, clip=self.clip)

    def _curves(self, index: int, run: RunData, column: str) -> list[Curve]:
        rows = run.metrics.rows
        x, y = run.metrics.column(X_COLUMNS[self.axis], rows), run.metrics.column(column, rows)
        if column == "ema" and self.series is not None:
            _, y = run.metrics.measured(self.series, rows)
        token = f"series.{index}"
        # Letters tell the curves apart where colours do not: some along each, at other places than its neighbours'.
        at = np.unique(np.linspace(0, max(0, rows - 1), 6).astype(int) + index * rows // (6 * MOST_RUNS))
        at = at[at < rows]
        return [Curve(x, y, token), Curve(x[at], y[at], f"{token} bold", points=True, mark=LETTERS[index])]

    def _table_rows(self, name: str, width: int, height: int, glyphs: Glyphs) -> list[Row]:
        head = [("", "dim"), *((LETTERS[index], f"series.{index} bold") for index in range(len(self._runs)))]
        return table_rows(head, self.tables[name], width, glyphs.ellipsis, changed=name == "config")

    def _draw_tables(self) -> None:
        config = config_rows(self._runs, all_fields=self._all_fields)
        for name, body in (("figures", figure_rows(self._runs)), ("config", config)):
            if body != self.tables[name]:
                self.tables[name] = body
                table = self.query_one(f"#{name}", Drawn)
                table.styles.height = len(body) + 1
                table.redraw()
        what = "all fields" if self._all_fields else "fields that differ" if config else "no fields differ"
        self.query_one("#config-pane").border_title = f"recipe: {what}"

    def _draw_charts(self) -> None:
        over = {"step": "steps", "tokens": "trained tokens", "time": "training time"}[self.axis]
        log = ", logarithmic" if self.log_y and self.series is None else ""
        title = f"{self.series or 'loss'}, averaged, over {over}{log}"
        self.query_one("#loss").border_title = title.replace("[", "(").replace("]", ")")  # it reads markup
        for name in ("loss", "speed"):
            self.query_one(f"#{name}", Drawn).redraw()

    def action_axis(self) -> None:
        self.axis = next_kind(self.axis)
        self._draw_charts()

    def action_log_scale(self) -> None:
        self.log_y = not self.log_y
        self._draw_charts()

    def why_not(self, action: str) -> str:
        return "" if action != "series" or measured_names(self._runs) else NOTHING_MEASURED

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Textual's hook: another metric is offered where a run has one."""
        return not self.why_not(action)

    def action_series(self, by: int) -> None:
        series = [None, *measured_names(self._runs)]
        at = series.index(self.series) if self.series in series else 0
        self.series = series[(at + by) % len(series)]
        self._draw_charts()

    def action_outliers(self) -> None:
        self.clip = not self.clip
        self._draw_charts()

    def action_differences(self) -> None:
        self._all_fields = not self._all_fields
        self._draw_tables()
