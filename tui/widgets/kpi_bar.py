"""The lines at the top of a run: key figures, alerts, and the pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.app.console.rows import Row, exactly
from penstock.app.runs.measured import REWARD
from penstock.app.runs.speed import speed_text
from penstock.storage.files.units import count_text, duration_text
from penstock.tui.data.alerts import Alert, alerts
from penstock.tui.data.flow import Flow, Marks, Route, flow
from penstock.tui.data.run_data import Prepared, RunData
from penstock.tui.render.kpi import Figure, kpi_row
from penstock.tui.render.pipeline import pipeline_rows
from penstock.tui.render.ticks import fit
from penstock.tui.widgets.lines import RunPane


def figures(data: RunData, *, frozen: bool = False) -> list[Figure]:
    """The run's key figures by falling weight; what is not known is left out or n/a."""
    metrics, total = data.metrics, data.total_steps
    result = [Figure("display frozen", token="warn reverse")] if frozen else []
    if data.is_live and (item := next((item for item in data.preparing if not item.done), None)) is not None:
        result.append(_preparing(item))
    result.append(Figure(f"{data.step:,}/{total:,}" if total else f"{data.step:,}", label="step"))
    if data.behind and data.share_read < 0.95:
        result.append(Figure(f"reading {data.share_read:.0%}", token="accent"))
    loss, ema = metrics.last("loss"), metrics.last("ema")
    if metrics.rows:
        short = "n/a" if loss is None else f"{loss:.4f}"
        long = short if ema is None else f"{short} (ema {ema:.3f})"
        result.append(Figure(long, short, token="bold" if loss is not None else "bad", label="loss"))
        mean, last_step = metrics.last("mean_tokens_per_s"), metrics.last("tokens_per_s")
        short = speed_text(mean, None if mean is not None else last_step)
        result.append(Figure(speed_text(mean, last_step), short, token="text"))
    if data.is_live and not data.metrics.rows:
        return result  # before the first step there is nothing to say of speed
    if data.is_live:
        result.append(Figure(duration_text(data.eta_s()), label="ETA"))
    mfu = data.mfu
    result.append(Figure("n/a" if mfu is None else f"{mfu:.1%}", label="MFU", token="text" if mfu else "dim"))
    steps, values = metrics.validated.get(REWARD, metrics.validation)
    if len(steps):
        result.append(
            Figure(f"{values[-1]:.4f} @{int(steps[-1]):,}", f"{values[-1]:.4f}", token="validation", label="val")
        )
    if metrics.rows:
        result.append(Figure(count_text(float(metrics.column("total_tokens")[-1])), label="tokens"))
        result.append(Figure(duration_text(float(metrics.column("total_s")[-1])), label="trained"))
    return result


def _preparing(item: Prepared) -> Figure:
    seconds = "" if item.seconds is None else f" {item.seconds:.0f} s"
    share = "" if item.fraction is None else f" {item.fraction:.0%}"
    return Figure(f"{item.name}{seconds}{share}", f"{item.name}{seconds}", token="accent")


class KpiBar(RunPane):
    """State, step, loss, speed, time to the end."""

    DEFAULT_CSS = "KpiBar { height: 1; padding: 0 1; background: $panel; }"
    frozen = False

    def rows(self, width: int, height: int) -> list[Row]:
        result = figures(self._data, frozen=self.frozen)
        return [kpi_row(width, self._data.name, self._data.state, result, self.glyphs)]


class AlertBar(RunPane):
    """One alert a row, the gravest first; there only while there is one."""

    DEFAULT_CSS = "AlertBar { height: 1; padding: 0 1; display: none; }"
    MOST = 3
    most = MOST
    alerts: Sequence[Alert] = ()

    def update(self) -> None:
        result = alerts(self._data)
        if result == self.alerts:
            return
        self.alerts = result
        self.display = bool(result)
        if result:
            self.styles.height = min(len(result), self.most)
        self.redraw()

    def rows(self, width: int, height: int) -> list[Row]:
        """As many alerts as there is room for; the last row says how many more there are."""
        rows: list[Row] = []
        for number, alert in enumerate(self.alerts[:height]):
            rest = len(self.alerts) - height if number == height - 1 else 0
            more = f"  and {rest} more" if rest > 0 else ""
            mark = self.glyphs.cross if alert.token == "bad" else "!"
            text = fit(alert.text, max(0, width - 2 - len(more)), self.glyphs.ellipsis)
            rows.append(exactly([(mark + " ", f"{alert.token} bold"), (text, alert.token), (more, "dim")], width))
        return rows


class PipelineBar(RunPane):
    """Drawn again only where something else is to be seen."""

    DEFAULT_CSS = "PipelineBar { height: 3; padding: 0 1; }"

    def __init__(self, data: RunData) -> None:
        super().__init__(data, id="pipeline")
        self._marks = Marks()
        self._shown: tuple[Flow, dict[Route, int]] | None = None

    def update(self) -> None:
        now = flow(self._data)
        self._marks.move(self._data.spans.view, now, behind=self._data.behind)
        shown = now, self._marks.offsets
        if shown != self._shown:
            self._shown = shown
            self.redraw()

    def rows(self, width: int, height: int) -> list[Row]:
        now, offsets = self._shown or (flow(self._data), self._marks.offsets)
        return pipeline_rows(width, height, now, offsets, self.glyphs)
