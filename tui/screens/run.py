"""The run screen: a run as it trains, or as it was; nothing here touches the run but the actions that ask first."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from textual import events, work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Container, Vertical
from textual.notifications import SeverityLevel
from textual.widgets import Input

from penstock.app.runs.checkpoints import STEP_MARK, export_folder
from penstock.storage.files.errors import UserError
from penstock.tui.data.alerts import refusals, why_no_ops
from penstock.tui.data.blocks import BlockLocation
from penstock.tui.data.run_data import RunData
from penstock.tui.render.bars import plan_rows, tier_pane_rows
from penstock.tui.render.blockmap import block_map
from penstock.tui.render.chart import next_kind
from penstock.tui.render.pipeline import height_for
from penstock.tui.screens.base import PenstockScreen
from penstock.tui.screens.lane_keys import LaneKeys
from penstock.tui.widgets.kpi_bar import AlertBar, KpiBar, PipelineBar
from penstock.tui.widgets.lane_view import LaneView
from penstock.tui.widgets.lines import Drawn, Footer, LineWidget
from penstock.tui.widgets.loss_chart import LossChart
from penstock.tui.widgets.pages import LogPane, SamplesPane


class Size(NamedTuple):
    width: int
    height: int

    @property
    def wide(self) -> bool:
        """Panes stand in two columns."""
        return self.width >= 100

    @property
    def stacked(self) -> bool:
        """The side's panes stand below the main ones."""
        return not self.wide and self.height >= 44


class Pane(NamedTuple):
    """One pane; its key is in tui/actions.py, as `pane('NAME')`."""

    make: Callable[[RunScreen], LineWidget]
    height: Callable[[Size], int | str]
    """Cells, or a share as Textual writes it; 0 where it does not fit."""
    news: frozenset[str]
    """It is drawn again when RunData.poll has found any of these."""
    side: bool = False
    """Stands beside the main panes, not among them."""


def _tiers_height(size: Size) -> int:
    return min(10, max(6, size.height // 3)) if size.wide or size.stacked else 0


def _blocks_height(size: Size) -> int | str:
    return ("1fr" if size.height >= 20 else 0) if size.wide else 9 if size.stacked else 0


PANES = {
    "loss": Pane(lambda screen: LossChart(screen.data), lambda size: "1fr", frozenset({"metrics", "checkpoints"})),
    "lanes": Pane(
        lambda screen: LaneView(screen.data.spans),
        lambda size: 0 if size.height < 14 else 11 if size.height < 34 else 12 if size.height < 44 else 19,
        frozenset(),
    ),
    "tiers": Pane(
        lambda screen: Drawn(partial(tier_pane_rows, screen.data)),
        _tiers_height,
        frozenset({"metrics", "plan", "spans", "tick"}),
        side=True,
    ),
    "blocks": Pane(
        lambda screen: Drawn(lambda *more: block_map(screen.blocks, *more)),
        _blocks_height,
        frozenset({"blocks"}),
        side=True,
    ),
    "log": Pane(
        lambda screen: LogPane(screen.data),
        lambda size: 0 if size.height < 28 else 5 if size.height < 34 else 7 if size.height < 48 else 12,
        frozenset({"log"}),
    ),
    "plan": Pane(
        lambda screen: Drawn(partial(plan_rows, screen.data)),
        lambda size: 13 if size.wide and size.height >= 34 else 0,
        frozenset({"metrics", "plan"}),
        side=True,
    ),
    "samples": Pane(
        lambda screen: SamplesPane(screen.data),
        lambda size: 0 if size.height < 40 else 7 if size.height < 48 else 10,
        frozenset({"samples", "plan"}),
    ),
}
"""In the order of their keys, 1 to 7, and of their places in their column. Lanes have a rule of their own. Samples,
which not every run has, take their height from the other panes."""

_TICK_S = 0.5
"""What only time changes (time to the end, drive rates, silence) is drawn so often."""


class FilterInput(Input):
    """The words that log lines must have; escape shows all lines again."""

    BINDINGS = [Binding("escape", "drop", show=False)]

    def action_drop(self) -> None:
        self.value = ""
        self.screen.query_one(LogPane).focus()
        self.display = False


_asking = work(group="actions", exit_on_error=False)


class RunScreen(LaneKeys, PenstockScreen):
    SCOPE = "run"
    data: RunData
    DEFAULT_CSS = """
    RunScreen #body { height: 1fr; }
    RunScreen #main { width: 1fr; height: 1fr; }
    RunScreen #side { height: 1fr; }
    RunScreen Footer { scrollbar-size-horizontal: 0; }
    RunScreen #filter { height: 1; border: none; padding: 0 1; background: $panel; display: none; }
    """

    def __init__(self, run_path: Path) -> None:
        super().__init__()
        self.data = RunData(run_path)
        self.frozen = False
        self.maximised: str | None = None
        self.blocks: list[BlockLocation] = []
        self._had_samples = False
        self._ticked_at = 0.0
        self._draws_blocks = True
        self._refused: set[str] = set()
        """The actions that were not offered when one last looked."""
        self._unshown: set[str] = set()
        """What the feed found that has not been shown yet."""

    def compose(self) -> ComposeResult:
        yield KpiBar(self.data, id="kpi")
        yield AlertBar(self.data, id="alerts")
        yield PipelineBar(self.data)
        with Container(id="body"):
            with Vertical(id="main"):
                yield from self._made(side=False)
                yield FilterInput(placeholder="words to show, !words to hide", id="filter", compact=True)
            with Vertical(id="side"):
                yield from self._made(side=True)
        yield Footer(compact=True)

    def _made(self, *, side: bool) -> Iterator[LineWidget]:
        for name, pane in PANES.items():
            if pane.side == side:
                widget = pane.make(self)
                widget.id = name
                widget.can_focus = True
                widget.add_class("pane")
                yield widget

    def on_mount(self) -> None:
        self.data.clock = self.penstock.clock
        for number, name in enumerate(PANES, start=1):
            self.pane(name).border_title = f"{number} {name}"
        self.loss = self.query_one(LossChart)
        self.lanes = self.lane_view = self.query_one(LaneView)
        self.log_pane = self.query_one(LogPane)
        self._arrange()
        self.redraw_all()
        self.loss.focus()
        self.start_feed(self._poll, self._show)

    def pane(self, name: str) -> LineWidget:
        return self.query_one(f"#{name}", LineWidget)

    def on_resize(self, event: events.Resize) -> None:
        self._arrange()

    def _arrange(self) -> None:
        size = Size(*self.app.size)
        samples = int(PANES["samples"].height(size)) if self.data.samples else 0
        rest = size._replace(height=size.height - (0 if self.maximised else samples))
        heights = {name: samples if name == "samples" else pane.height(rest) for name, pane in PANES.items()}
        if self.maximised is not None:
            heights = dict.fromkeys(PANES, 0) | {self.maximised: "1fr"}
        for name, height in heights.items():
            self.pane(name).display = height != 0
            self.pane(name).styles.height = height
        had_space, self._draws_blocks = self._draws_blocks, heights["blocks"] != 0
        if self._draws_blocks and not had_space:
            self._unshown.add("plan")  # what was known while it did not fit
        pipeline, side, main = (self.query_one(f"#{name}") for name in ("pipeline", "side", "main"))
        rows = height_for(*size)
        pipeline.display = rows > 0 and self.maximised is None
        pipeline.styles.height = rows or 1
        side.display, main.display = (
            any(heights[name] for name, pane in PANES.items() if pane.side == is_side) for is_side in (True, False)
        )
        alone = not main.display or not size.wide
        self.query_one("#body").styles.layout = "horizontal" if size.wide else "vertical"
        side.styles.width = "1fr" if alone else max(38, min(60, size.width // 3))
        side.styles.height = "auto" if size.stacked and main.display else "1fr"
        self.query_one("#alerts", AlertBar).most = 1 if size.height < 30 else AlertBar.MOST
        self.query_one(Footer).display = size.height >= 8

    def _poll(self) -> set[str]:
        """What is new, or was not shown when it was, in the feed's thread."""
        was_behind = self.data.behind
        self._unshown |= self.data.poll()
        if was_behind and not self.data.behind:
            self._unshown.add("status")  # which says how much has been read
        now = time.monotonic()
        if now - self._ticked_at >= _TICK_S and (self.data.is_live or self.data.behind):
            self._ticked_at = now
            self._unshown.add("tick")
        if self.frozen:
            return set()
        wanted = self._unshown & {"spans", "plan", "status"} and self._draws_blocks
        if wanted and (blocks := self.data.blocks()) != self.blocks:
            self.blocks = blocks
            self._unshown.add("blocks")
        return self._unshown | ({"now"} if self.data.now else set())

    def _show(self, changed: set[str]) -> None:
        if self.frozen or not self.is_mounted:
            return
        self._unshown -= changed
        if not self.data.metrics.rows and "status" in changed:
            changed = changed | {"metrics"}  # before the first step the loss pane shows what is prepared
        if changed & {"status", "metrics", "tick", "plan"}:
            self.query_one("#kpi", KpiBar).redraw()
            self.query_one("#alerts", AlertBar).update()
        if changed & {"status", "metrics", "plan", "spans", "tick"}:
            self.query_one("#pipeline", PipelineBar).update()
        if bool(self.data.samples) != self._had_samples:
            self._had_samples = not self._had_samples
            self._arrange()
        for name, pane in PANES.items():
            if changed & pane.news and self.pane(name).display:
                self.pane(name).redraw()
        self._show_lanes(changed)
        self._name_loss()
        if changed & {"status", "checkpoints", "metrics"}:
            refused = {action for action, why in refusals(self.data).items() if why}
            if refused != self._refused:
                self._refused = refused
                self.refresh_bindings()

    def _show_lanes(self, changed: set[str]) -> None:
        lanes, data = self.lanes, self.data
        lanes.store = data.spans
        if data.predicted is not None:
            lanes.predicted = data.predicted
        running = data.state == "running"
        lanes.nothing = why_no_ops(data.state, live=data.is_live, behind=data.behind)
        if lanes.display and (running or changed & {"spans", "status", "predicted"}):
            lanes.update_live(data.clock_s, data.now, running)

    def redraw_all(self) -> None:
        for widget in self.query(LineWidget):
            widget.redraw()

    def why_not(self, action: str) -> str:
        return refusals(self.data).get(action, "")

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Textual's hook: what is not offered is not in footer, help and palette."""
        return not self.why_not(action)

    def action_pane(self, name: str) -> None:
        """Focus a pane; again: alone, or back."""
        pane = self.pane(name)
        if self.maximised == name:
            self.maximised = None
        elif pane.has_focus or not pane.display:
            self.maximised = name
        self._arrange()
        if name == "blocks":
            self.blocks = self.data.blocks()
        if not pane.display:  # restored where it does not fit
            self.loss.focus()
        else:
            pane.focus()
        self.redraw_all()

    def zoomed(self) -> LossChart | LaneView:
        """The lanes, unless the loss has the focus."""
        return self.loss if self.loss.has_focus else self.lanes

    def act(self, view: LaneView | LossChart, why_not: str, move: Callable[[], None]) -> None:
        before = view.viewport
        move()
        if view.viewport == before:
            self.say(view.nothing if view.is_empty else why_not)

    def action_freeze(self) -> None:
        self.frozen = not self.frozen
        self.lanes.freeze(self.frozen)
        kpi = self.query_one("#kpi", KpiBar)
        kpi.frozen = self.frozen
        kpi.redraw()
        if not self.frozen:
            self.redraw_all()

    def action_log_scale(self) -> None:
        if self.loss.series is not None:
            self.say("only the loss has a logarithmic axis")
            return
        self.loss.log_y = not self.loss.log_y
        self.loss.redraw()

    def action_series(self, by: int) -> None:
        self.loss.next_series(by)
        self._name_loss()

    def _name_loss(self) -> None:
        self.loss.border_title = f"1 {self.loss.title}"

    def action_outliers(self) -> None:
        self.loss.clip = not self.loss.clip
        self.loss.redraw()

    def action_axis(self) -> None:
        self.loss.x_kind = next_kind(self.loss.x_kind)
        self.loss.redraw()

    def action_predicted(self) -> None:
        if not (self.data.path / "predicted.jsonl").is_file():
            self.say("this run has no planned step to show: its predicted.jsonl is missing")
            return
        if self.lanes.is_empty:
            self.say(self.lanes.nothing)
            return
        self.data.want_predicted = True
        self.lanes.toggle_predicted()

    @property
    def subject(self) -> tuple[Path, ...]:
        return (self.data.path,)

    def action_timeline(self) -> None:
        self.penstock.open("timeline", self.data.path, self.loss.cursor_step())

    def action_samples(self, by: int) -> None:
        self._samples(lambda pane: pane.go(by), f"these are the {'oldest' if by < 0 else 'newest'} samples")

    def action_prompt(self, by: int) -> None:
        self._samples(lambda pane: pane.next_prompt(by), "there is only one prompt")

    def _samples(self, move: Callable[[SamplesPane], bool], why_not: str) -> None:
        """Move in the samples, which come up where they are not seen."""
        pane = self.query_one(SamplesPane)
        if not pane.display and self.data.samples:
            self.action_pane("samples")
        elif not move(pane):
            self.say(why_not if self.data.samples else pane.nothing)

    def action_filter_log(self) -> None:
        if not self.log_pane.display:
            self.action_pane("log")
        field = self.query_one("#filter", FilterInput)
        field.display = True
        field.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        self.log_pane.filter(event.value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.input.display = False
        self.log_pane.focus()

    @_asking
    async def action_save_checkpoint(self) -> None:
        live = self.data.is_live
        text = "Saves the state at the end of this step" if live else "Saves the committed state"
        text += f" under a name. {STEP_MARK} in the name becomes its step."
        name = await self.penstock.ask_text("Save a checkpoint", text, f"at-step-{STEP_MARK}")
        if name is not None:
            self.notify("the run saves it at the end of its step" if live else "saving", title=f"Checkpoint {name}")
            await self._command(["checkpoint", "--", str(self.data.path), name])

    @_asking
    async def action_pause(self) -> None:
        text = "The run finishes its step, commits it and waits. Everyone who watches it sees it paused."
        if await self.penstock.ask("Pause the run?", text, "Pause"):
            await self._command(["pause", str(self.data.path)])

    @_asking
    async def action_stop(self) -> None:
        text = "The run finishes its step, commits it and ends. It can be resumed from there."
        if await self.penstock.ask("Stop the run?", text, "Stop"):
            await self._command(["stop", str(self.data.path)])

    @_asking
    async def action_export(self) -> None:
        text = "A new or empty folder for the Hugging Face model:"
        out = await self.penstock.ask_text("Export", text, str(export_folder(self.data.path, self.data.step)))
        if out is not None and (path := self.penstock.target(out)) is not None:
            self.notify(f"writing {path}", title="Export")
            await self._command(["export", "--", str(self.data.path), str(path)])

    @_asking
    async def action_resume(self) -> None:
        if self.data.state == "paused":
            if await self.penstock.ask("Resume the run?", "The paused run continues.", "Resume"):
                await self._command(["resume", str(self.data.path)])
            return
        committed = self.data.committed_step
        begin = "from the beginning" if committed is None else f"after step {committed:,}"
        text = f"A new process continues training {begin}. It keeps running when this terminal closes."
        if await self.penstock.ask("Resume the run?", text, "Resume"):
            await self._in_thread(_resume, self.data.path)

    async def _command(self, args: list[str]) -> None:
        await self._in_thread(_command, args, self.penstock.root)

    async def _in_thread(self, function: Callable[..., str], *arguments: Any) -> None:
        """Call what returns what it has to say, or raises."""
        severity: SeverityLevel = "information"
        try:
            text = await asyncio.to_thread(function, *arguments)
        except (UserError, OSError, ValueError) as error:  # ValueError: a NUL in a name
            text, severity = str(error), "error"
        if text:
            self.notify(text, severity=severity, timeout=20 if severity == "error" else 6)


def _command(args: list[str], root: Path) -> str:
    """Run a command of the command line; the end of what it said. Raises UserError where it failed."""
    from penstock.app.launch.launcher import command

    result = command(args, root)
    said = "\n".join([line for line in result.output.strip().splitlines() if line.strip()][-4:])
    if result.code != 0:
        raise UserError(said)
    return said


def _resume(path: Path) -> str:
    from penstock.app.launch.launcher import resume

    resume(path)
    return "the run continues in a process of its own"
