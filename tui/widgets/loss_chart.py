"""The loss pane: raw, averaged and validation loss, or another of what the objective measures in its place;
checkpoints, and below it the newest of what is measured, gradient norm and learning rate."""

from __future__ import annotations

from typing import Any

import numpy as np
from textual import events
from textual.binding import Binding

from penstock.app.console.rows import Row, beside, exactly
from penstock.app.runs.recall_view import map_rows, map_width
from penstock.storage.files.units import count_text, figure
from penstock.tui.data.metrics import X_COLUMNS
from penstock.tui.render.chart import Curve, XKind, chart, sparkline
from penstock.tui.render.kpi import checklist_rows
from penstock.tui.render.measured import measured_rows
from penstock.tui.widgets.lines import RunPane

_SIGNAL_LABEL = 22
_LEAST_CHART = 38
_LABEL_CELLS = 4


def learning_rate(value: float | None) -> str:
    """As people write it: 0.001, 3e-5."""
    return "n/a" if value is None else f"{value:.3g}".replace("e-0", "e-")


class LossChart(RunPane, can_focus=True):
    """Zoom, pan and a cursor that goes from step to step; without a zoom it follows the run."""

    BINDINGS = [Binding("left", "move(-1)", show=False), Binding("right", "move(1)", show=False)]

    log_y = False
    clip = True
    x_kind: XKind = "step"
    window: tuple[float, float] | None = None
    """Shares of the x axis that are shown; None: all."""
    cursor: int | None = None
    _series: str | None = None

    @property
    def series(self) -> str | None:
        """What is drawn of all that the objective measures; None: the loss."""
        return self._series if self._series in self._data.metrics.measured_names else None

    @property
    def title(self) -> str:
        """What is drawn, as a border takes it, which reads markup."""
        return (self.series or "loss").replace("[", "(").replace("]", ")")

    def next_series(self, by: int) -> None:
        """Draw the next one, or the loss behind the last."""
        series = [None, *self._data.metrics.measured_names]
        self._series = series[(series.index(self.series) + by) % len(series)]
        self.redraw()

    def rows(self, width: int, height: int) -> list[Row]:
        """The chart; signals where there is room for them, and at its right what the model finds in haystacks.

        Before the first step the checklist of what it takes.
        """
        if self._waits:
            return checklist_rows(self._data.preparing, width, height, self.glyphs, live=self._data.is_live)
        left = self._chart_cells(width)
        rows = self._charts(left, height)
        return rows if left == width else beside(rows, self._maps(height))

    def _chart_cells(self, width: int) -> int:
        """Cells of `width` that are the chart's; the map has the rest, where there is one and room for it."""
        maps = self._data.metrics.recall
        rest = map_width(maps[-1]) + 2 if maps else 0
        return width - rest if width - rest >= _LEAST_CHART else width

    def _maps(self, height: int) -> list[Row]:
        """What was found in haystacks: the last map, and below it the first, or its title, where there is room.

        Where there is little room the longest haystacks stay.
        """
        first, last = self._data.metrics.recall[0], self._data.metrics.recall[-1]
        rows = map_rows(last, self.glyphs)
        if height < len(rows):
            return [rows[0], *rows[len(rows) - height + 1 :]]
        if first == last:
            return rows
        before = map_rows(first, self.glyphs)
        return [*rows, [], *before] if height > len(rows) + len(before) else [*rows, before[0]]

    def _charts(self, width: int, height: int) -> list[Row]:
        tall = height >= 24
        measured = self._measured_rows(width, 4 if tall else 2 if height >= 11 else 1 if height >= 4 else 0)
        height -= len(measured)
        num_signals = 2 if height >= 11 else 1 if height >= 8 else 0
        chart_height = height - (height // 3 if tall else num_signals)
        rows = self._chart(width, chart_height) + measured
        if tall:
            return rows + self._second_chart(width, height - chart_height)
        return rows + self._signals(width, num_signals)

    def _measured_rows(self, width: int, most: int) -> list[Row]:
        return measured_rows(self._data.metrics.newest, self.series, width, most, self.glyphs)

    @property
    def _waits(self) -> bool:
        return not self._data.metrics.rows and bool(self._data.preparing)

    def _chart(self, width: int, height: int) -> list[Row]:
        metrics = self._data.metrics
        num_rows = metrics.rows
        x = metrics.column(X_COLUMNS[self.x_kind], num_rows)
        if (series := self.series) is None:
            raw, averaged = metrics.column("loss", num_rows), metrics.column("ema", num_rows)
            steps, validated = metrics.validation
        else:
            raw, averaged = metrics.measured(series, num_rows)
            steps, validated = metrics.validated.get(series, (np.empty(0), np.empty(0)))
        curves = [
            Curve(x, raw, "raw", joined=False),
            Curve(x, averaged, "ema"),
            Curve(metrics.at_steps(steps, X_COLUMNS[self.x_kind]), validated, "validation", points=True),
        ]
        cursor = None if self._row is None else float(x[self._row])
        marks = metrics.at_steps(self._data.checkpoints, X_COLUMNS[self.x_kind]).tolist()
        return self._drawn(width, height, curves, log_y=self.log_y and series is None, marks=marks, cursor=cursor)

    def _drawn(self, width: int, height: int, curves: list[Curve], **more: Any) -> list[Row]:
        return chart(
            width,
            height,
            curves,
            self.glyphs,
            x_kind=self.x_kind,
            x_range=self._range(),
            clip=self.clip,
            label_cells=_LABEL_CELLS,
            **more,
        )

    def _bounds(self) -> tuple[float, float] | None:
        metrics = self._data.metrics
        x = metrics.column(X_COLUMNS[self.x_kind])
        return (float(x[0]), float(x[-1])) if metrics.rows > 1 and x[0] < x[-1] else None

    @property
    def _row(self) -> int | None:
        return None if self.cursor is None or self.cursor >= self._data.metrics.rows else self.cursor

    def _range(self) -> tuple[float, float] | None:
        bounds = self._bounds()
        if self.window is None or bounds is None:
            return None
        low, span = bounds[0], bounds[1] - bounds[0]
        return low + self.window[0] * span, low + self.window[1] * span

    def _signals(self, width: int, most: int) -> list[Row]:
        metrics = self._data.metrics
        rows: list[Row] = []
        for name, label in (("grad_norm", "grad norm"), ("lr", "lr"))[:most]:
            score = metrics.z_score(name) if name == "grad_norm" else None
            last = metrics.last(name)
            value = figure(last) if name == "grad_norm" or last is None else learning_rate(last)
            spike = score is not None and score > 5
            cells = max(0, width - _SIGNAL_LABEL)
            row: Row = [(label.ljust(11), "dim"), (value.ljust(_SIGNAL_LABEL - 11), "bad" if spike else "text")]
            row.append((sparkline(metrics.column(name), cells, self.glyphs), "raw"))
            rows.append(exactly(row, width))
        return rows

    def _second_chart(self, width: int, height: int) -> list[Row]:
        metrics = self._data.metrics
        num_rows = metrics.rows
        x = metrics.column(X_COLUMNS[self.x_kind], num_rows)
        title = f"gradient norm {figure(metrics.last('grad_norm'))}"
        lr = f"   learning rate {learning_rate(metrics.last('lr'))} "
        cells = width - len(title) - len(lr)
        head: Row = [(title, "title"), (lr, "dim")]
        head.append((sparkline(metrics.column("lr"), min(40, max(0, cells)), self.glyphs), "raw"))
        curve = Curve(x, metrics.column("grad_norm", num_rows), "lane.d2h")
        return [exactly(head, width), *self._drawn(width, height - 1, [curve], log_y=self.log_y)]

    def headline(self) -> str:
        """The step under the cursor in figures, else how the loss is drawn."""
        metrics, row = self._data.metrics, self._row
        if self._waits:
            return "before the first step"
        if row is not None:
            at = {name: float(metrics.column(name)[row]) for name in ("step", "loss", "ema", "total_tokens", "step_s")}
            if self.series is not None:
                at["loss"], at["ema"] = (float(column[row]) for column in metrics.measured(self.series))
            return (
                f"step {at['step']:,.0f}  {self.series or 'loss'} {figure(at['loss'], 5)}  ema {figure(at['ema'], 5)}  "
                f"{count_text(at['total_tokens'])} tokens  {figure(at['step_s'])} s"
            )
        parts = [f"over {self.x_kind}s" if self.x_kind == "step" else f"over {self.x_kind}"]
        if (series := self.series) in metrics.validated:
            steps, values = metrics.validated[series]
            parts[:0] = [f"validation {figure(values[-1])} @{steps[-1]:,.0f}"] if len(steps) else []
        parts[:0] = [f"last {figure(metrics.newest[series])}"] if series in metrics.newest else []
        parts += ["log"] * (self.log_y and self.series is None)
        parts += ["outliers clipped"] * self.clip + ["zoomed"] * (self.window is not None)
        return ", ".join(parts)

    def cursor_step(self) -> int | None:
        return None if self._row is None else int(self._data.metrics.column("step")[self._row])

    nothing = "no step has finished yet"

    @property
    def is_empty(self) -> bool:
        return not self._data.metrics.rows

    @property
    def viewport(self) -> tuple[object, ...]:
        """What is looked at: another one where a key has done something."""
        return self.window, self.cursor

    def zoom(self, factor: float) -> None:
        """Show `factor` times as much, around the cursor, or its end."""
        low, high = self.window or (0.0, 1.0)
        length = (high - low) * factor
        if length >= 1:
            self.window = None
        elif length > 1e-5:
            centre = self._cursor_share()
            centre = high if centre is None or not low <= centre <= high else centre
            self._set_window(centre - (centre - low) * factor, length)
        self.redraw()

    def _cursor_share(self) -> float | None:
        bounds = self._bounds()
        if self._row is None or bounds is None:
            return None
        x = float(self._data.metrics.column(X_COLUMNS[self.x_kind])[self._row])
        return (x - bounds[0]) / (bounds[1] - bounds[0])

    def _set_window(self, start: float, length: float) -> None:
        start = min(max(0.0, start), 1.0 - length)
        self.window = (start, start + length)

    def pan(self, share: float) -> None:
        if self.window is not None:
            low, high = self.window
            self._set_window(low + share * (high - low), high - low)
            self.redraw()

    def fit(self) -> None:
        self.window = self.cursor = None
        self.redraw()

    def action_move(self, by: int) -> None:
        rows = self._data.metrics.rows
        if rows:
            # At least a dot of the chart at a time.
            low, high = self.window or (0.0, 1.0)
            by *= max(1, round(rows * (high - low) / max(1, self._chart_cells(self.size.width) * 2)))
            self.cursor = rows - 1 if self.cursor is None else min(rows - 1, max(0, self.cursor + by))
            self.redraw()

    def on_click(self, event: events.Click) -> None:
        """The cursor goes to the step under the mouse."""
        offset = event.get_content_offset(self)
        low, high = self._range() or self._bounds() or (0.0, 0.0)
        cells = self._chart_cells(self.size.width)
        if offset is None or high <= low or cells < 30:
            return
        gutter = _LABEL_CELLS + 2
        share = (offset.x - gutter) / max(1, cells - gutter)
        x = self._data.metrics.column(X_COLUMNS[self.x_kind])
        self.cursor = int(np.searchsorted(x, low + share * (high - low)).clip(0, len(x) - 1))
        self.redraw()

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self.zoom(0.8)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self.zoom(1.25)
