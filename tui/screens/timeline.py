"""Timeline: any step of a run in full, with its critical path, idle lanes explained, and export to Perfetto."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import numpy as np
from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.notifications import SeverityLevel

from penstock.app.console.rows import Glyphs, Row
from penstock.app.runs.directory import spans_name
from penstock.app.runs.files import read_object
from penstock.app.runs.ops import STEP_END
from penstock.app.runs.rank_spans import gpus_of
from penstock.app.runs.trace import write_trace
from penstock.storage.files.errors import UserError
from penstock.storage.files.units import seconds_text
from penstock.storage.files.untrusted import printable
from penstock.tui.data.catalog import MOST_PLAN_BYTES
from penstock.tui.data.critical import Blockers
from penstock.tui.data.fields import number
from penstock.tui.data.run_data import read_predicted
from penstock.tui.data.spans import Ints, SpanStore
from penstock.tui.data.steps import StepIndex, StepSpans
from penstock.tui.render.step_detail import idle_rows, inspector_rows, matching_rows, op_rows
from penstock.tui.screens.base import PenstockScreen
from penstock.tui.screens.lane_keys import LaneKeys
from penstock.tui.widgets.lane_view import LaneView
from penstock.tui.widgets.lines import Drawn, Footer, LineWidget

_LOOK_S = 0.5


_asking = work(group="question", exclusive=True)


class TimelineScreen(LaneKeys, PenstockScreen):
    """A step of a run; `step` None: its last one."""

    SCOPE = "timeline"
    DEFAULT_CSS = """
    TimelineScreen #lanes { height: 3fr; }
    TimelineScreen #idle { height: 9; }
    TimelineScreen.-tall #idle { height: 13; }
    TimelineScreen.-very-tall #idle { height: 15; }
    TimelineScreen #below { height: 2fr; }
    TimelineScreen #ops { width: 3fr; }
    TimelineScreen #inspector { width: 2fr; }
    TimelineScreen.-short #below, TimelineScreen.-tiny #below { display: none; }
    TimelineScreen.-tiny #idle { display: none; }
    TimelineScreen.-narrow #inspector { display: none; }
    TimelineScreen.-tall.-predicted #below, TimelineScreen.-short.-predicted #idle { display: none; }
    """

    def __init__(self, run_path: Path, step: int | None = None) -> None:
        super().__init__()
        self.run_path = run_path
        self.step: StepSpans | None = None
        self.said = "looking for steps"
        self.lane_view = LaneView(live=False, id="lanes", classes="pane")
        self.found: Ints | None = None
        self._search = ""
        self._wanted = step
        self._gpu = 0
        """Whose ops are shown, in a run on several GPUs."""
        self._index = StepIndex(self._spans_path)
        self._bounds: tuple[int, int] | None = None
        self._loading: int | None = None

    @property
    def _spans_path(self) -> Path:
        return self.run_path / spans_name(self._gpu)

    def compose(self) -> ComposeResult:
        with Vertical():
            yield self.lane_view
            yield Drawn(self._idle_rows, id="idle", classes="pane")
            with Horizontal(id="below"):
                yield Drawn(self._op_rows, id="ops", classes="pane")
                yield Drawn(self._inspector_rows, id="inspector", classes="pane")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#idle").border_title = "waits"
        self.query_one("#idle").border_subtitle = "up, down: select a lane"
        self.query_one("#inspector").border_title = "op"
        self._draw_titles()
        self.lane_view.focus()
        self.start_feed(self._look, self._take_bounds, every_s=_LOOK_S)

    def _look(self) -> tuple[tuple[int, int] | None] | None:
        bounds = self._index.bounds()
        return (bounds,) if bounds != self._bounds or (bounds is None and self.step is None) else None

    def _take_bounds(self, result: tuple[tuple[int, int] | None]) -> None:
        self._bounds = result[0]
        if self._bounds is None:
            self.said = self._why_nothing()
            self._redraw()
        elif self.step is None and self._loading is None:
            self._load(self._bounds[1] if self._wanted is None else self._wanted)
        self._draw_titles()

    def _why_nothing(self) -> str:
        if not self.run_path.is_dir():
            return f"{printable(self.run_path.name)}: the run directory is gone"
        if not os.path.lexists(self._spans_path):
            return "no ops yet: the first step's ops appear here once it is done"
        if (wrong := self._index.problem) is not None:
            return wrong
        return "no step has finished yet"

    def _load(self, step: int) -> None:
        self._loading = step
        self.said = f"reading step {step}"
        self._draw_titles()
        self._read(step)

    @work(group="step", exclusive=True, exit_on_error=False)
    async def _read(self, step: int) -> None:
        self.unless_closing(self._take_step, step, *await asyncio.to_thread(self._find, step))

    def _find(self, step: int) -> tuple[StepSpans | None, SpanStore, str]:
        predicted = self.lane_view.predicted or read_predicted(self.run_path)
        result = StepIndex(self._spans_path).find(step)
        if result is not None:
            _ = result.analysis  # here, which takes a while, and not where it is drawn
        return result, predicted, predicted_note(self.run_path, predicted)

    def _take_step(self, step: int, loaded: StepSpans | None, predicted: SpanStore, note: str) -> None:
        self._loading = None
        self.lane_view.predicted, self.lane_view.predicted_note = predicted, note
        if loaded is None:
            self.said = f"step {step} was not recorded by this run"
            self.notify(self.said, severity="warning")
        else:
            self.step = loaded
            self.found, self._search = None, ""
            self.lane_view.show_step(loaded.view, loaded.window, loaded.analysis)
            if loaded.num_damaged:
                self.notify(f"{loaded.num_damaged} damaged lines were skipped", severity="warning")
            if not loaded.whole:
                self.notify("the step has more ops than are kept; its beginning is missing", severity="warning")
        self._redraw()

    def _redraw(self) -> None:
        self._draw_titles()
        for pane in self.query(LineWidget):
            pane.redraw()

    def _draw_titles(self) -> None:
        last = f" of {self._bounds[1]}" if self._bounds else ""
        shown = f"step {self.step.window.step}{last}" if self.step else self.said
        if self._loading is not None and self.step is not None:
            shown += f"  {self.said}"
        gpu = f"GPU {self._gpu}  " if self._gpu or gpus_of(self.run_path) > 1 else ""
        self.lane_view.border_title = Text(f"{printable(self.run_path.name)}  {gpu}{shown}")
        ops = self.query("#ops")
        if ops:
            listed = f"{len(self.listed_rows()):,}" if self.step else ""
            ops.first().border_title = Text(
                f"found: {self._search} ({listed})"
                if self.found is not None
                else f"ops of {self.lane_view.lane or 'all lanes'} ({listed})"
            )

    def _idle_rows(self, width: int, height: int, glyphs: Glyphs) -> list[Row]:
        if self.step is None:
            return [[(self.said, "dim")]]
        lane = self.lane_view.lane or "compute"
        return idle_rows(self.step.view, self.step.analysis, width, height, lane, glyphs)

    def _op_rows(self, width: int, height: int, glyphs: Glyphs) -> list[Row]:
        if self.step is None:
            return []
        view, window = self.step.view, self.step.window
        path, row = set(self.step.analysis.path_rows), self.lane_view.row_of_selected()
        return op_rows(view, self.listed_rows(), row, path, window.start_s, width, height, glyphs)

    def _inspector_rows(self, width: int, height: int, glyphs: Glyphs) -> list[Row]:
        if self.step is None:
            return []
        return inspector_rows(self.step.view, self.lane_view.row_of_selected(), self.step.analysis, width)

    def listed_rows(self) -> Ints:
        """Rows of the list: those found, those of the selected lane, or all of the step."""
        if self.step is None:
            return np.zeros(0, np.int64)
        if self.found is not None:
            return self.found
        view, rows, lane = self.step.view, self.step.rows, self.lane_view.lane
        return rows[view.lane[rows] == view.lanes.index(lane)] if lane in view.lanes else rows

    def on_lane_view_selected(self) -> None:
        self._redraw()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Textual's hook: another GPU is offered where the run has one."""
        return not self.why_not(action)

    def why_not(self, action: str) -> str:
        return "this run is on one GPU" if action == "gpu" and gpus_of(self.run_path) == 1 else ""

    def action_gpu(self) -> None:
        shown = self.step.window.step if self.step else self._wanted
        self._gpu = (self._gpu + 1) % gpus_of(self.run_path)
        self._index, self._bounds, self.step = StepIndex(self._spans_path), None, None
        self._wanted, self._loading = shown, None

    def action_go(self, by: int) -> None:
        shown = self._loading if self._loading is not None else self.step.window.step if self.step else None
        if shown is None or self._bounds is None:
            return
        step = shown + by
        if self._bounds[0] <= step <= self._bounds[1]:
            self._load(step)
        else:
            self.notify(f"the run has steps {self._bounds[0]} to {self._bounds[1]}")

    @_asking
    async def action_choose_step(self) -> None:
        if self._bounds is None:
            return
        first, last = self._bounds
        answer = await self.penstock.ask_text("Go to step", f"A step from {first} to {last}, or `last`", str(last))
        if answer is None:
            return
        if answer.lower() == "last":
            answer = str(self._bounds[1])
        if not answer.isdecimal() or not first <= int(answer) <= self._bounds[1]:
            self.notify(f"{answer}: the run has steps {first} to {self._bounds[1]}", severity="error")
            return
        self._load(int(answer))

    @_asking
    async def action_search(self) -> None:
        if self.step is None:
            return
        text = await self.penstock.ask_text(
            "Find ops", "Words of an op, block, lane or chunk; leave it empty to end the search", self._search
        )
        if text is None or self.step is None:
            self.found, self._search = None, ""
            self._redraw()
            return
        view = self.step.view
        self.found = matching_rows(view, self.step.rows, text)
        self._search = text
        if len(self.found):
            self.lane_view.select(view.span(int(self.found[0])))
        else:
            self.notify(f"no op of this step matches {text}")
        self._redraw()

    def action_span(self, by: int) -> None:
        if self.step is None:
            return
        if self.found is None or not len(self.found):
            self.lane_view.action_move(by)
        else:
            self._select_among(self.found, by)
        self._redraw()

    def _select_among(self, rows: Ints, by: int) -> None:
        """The row behind or before the selected one, by place in the list, else by time."""
        assert self.step is not None
        view = self.step.view
        row = self.lane_view.row_of_selected()
        positions = np.flatnonzero(rows == row) if row is not None else np.zeros(0, np.int64)
        if len(positions):
            position = int(positions[0]) + by
        elif row is not None:
            position = int(np.searchsorted(view.start_s[rows], view.start_s[row])) - (by < 0)
        else:
            position = 0 if by > 0 else len(rows) - 1
        self.lane_view.select(view.span(int(rows[min(max(position, 0), len(rows) - 1)])))

    def action_blocker(self) -> None:
        row = self.lane_view.row_of_selected()
        if self.step is None or row is None:
            self.notify("select an op first:  .  and  ,")
            return
        blocker = Blockers(self.step.view).blocker(row)
        if blocker is None:
            self.notify("no op is known that this one waited for")
            return
        self.lane_view.select(self.step.view.span(blocker))
        self._redraw()

    def action_next_critical(self) -> None:
        rows = np.array(self.step.analysis.path_rows if self.step else [], dtype=np.int64)
        if len(rows):
            self._select_among(rows, 1)
            self._redraw()

    def action_predicted(self) -> None:
        predicted = self.lane_view.predicted
        if predicted is None or not predicted.view.num_spans:
            self.notify("this run has no predicted.jsonl to compare with", severity="warning")
            return
        self.lane_view.toggle_predicted()
        self.set_class(self.lane_view.show_predicted, "-predicted")

    def action_export(self) -> None:
        if self.step is not None:
            self._export(self.step)

    def action_export_run(self) -> None:
        self._export(None)

    @_asking
    async def _export(self, step: StepSpans | None) -> None:
        what = f"step-{step.window.step}" if step else "run"
        value = str(self.penstock.root / f"{self.run_path.name}-{what}.trace.json")
        answer = await self.penstock.ask_text("Export", f"Write {what.replace('-', ' ')} for ui.perfetto.dev to", value)
        if answer is None:
            return
        out = self.penstock.target(answer)
        if out is None:
            return
        if os.path.lexists(out) and not await self.penstock.ask("Replace", f"{out} exists", yes="Replace"):
            return
        self.app.run_worker(self._write(step, out), group="export", exit_on_error=False)  # may outlast this screen

    async def _write(self, step: StepSpans | None, out: Path) -> None:
        steps = (step.window.step, step.window.step) if step else None
        extent = (step.first_byte, step.end_byte) if step else None
        warnings: list[str] = []
        severity: SeverityLevel = "information"
        try:
            gpu, report = self._gpu, warnings.append
            count = await asyncio.to_thread(write_trace, self.run_path, out, steps, extent, report, gpu)
            text = f"{count:,} ops written to {out}; open it at https://ui.perfetto.dev"
        except (UserError, OSError) as error:
            text, severity = str(error), "error"
        for warning in warnings:
            self.app.notify(warning, severity="warning")
        self.app.notify(text, severity=severity)


def predicted_note(run_path: Path, predicted: SpanStore) -> str:
    """Says so where the forecast's ops are of some of the layers only, as they are of deep models."""
    step_s = number(read_object(run_path / "plan.json", MOST_PLAN_BYTES), "step_s")
    view = predicted.view
    ends = view.end_s[view.op == view.ops.index(STEP_END)] if STEP_END in view.ops else []
    if step_s is None or not len(ends) or ends[-1] >= 0.9 * step_s:
        return ""
    return f"forecast of some layers only: {seconds_text(float(ends[-1]))} of {seconds_text(step_s)}"
