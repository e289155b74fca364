"""Pages that scroll: the plan beside the form, the samples of a run, its log."""

from __future__ import annotations

from textual import events
from textual.binding import Binding

from penstock.app.console.rows import Row, exactly
from penstock.tui.data.fields import get
from penstock.tui.data.metrics import Samples
from penstock.tui.data.plan_client import PlanState
from penstock.tui.render.log import log_rows, matches, sample_rows
from penstock.tui.render.plan import state_rows
from penstock.tui.widgets.lines import RunPane, ScrolledLines


class PlanPanel(ScrolledLines):
    state = PlanState()
    machine = ""

    def show(self, state: PlanState, machine: str) -> bool:
        """Draw another state; `machine` is what is planned for. Whether it is another."""
        if (state, machine) == (self.state, self.machine):
            return False
        if state.forecast is not None and self.state.forecast is None:
            self.top = 0
        self.state, self.machine = state, machine
        self.redraw()
        return True

    def page(self, width: int) -> list[Row]:
        return state_rows(self.state, self.machine, width, self.glyphs)


class SamplesPane(RunPane, ScrolledLines):
    """Follows the newest samples until one goes to older ones."""

    _held: int | None = None
    """Step of the samples that are shown; None: the newest."""
    _prompt = 0

    @property
    def nothing(self) -> str:
        if get(self._data.recipe, "samples", "every") is None:
            return "this run generates no samples; set samples.every"
        return "no samples yet"

    def _at(self) -> int:
        result = self._data.samples
        steps = [one.step for one in result]
        return steps.index(self._held) if self._held in steps else len(result) - 1

    def go(self, by: int) -> bool:
        """To samples of so many steps later, or earlier; whether there are any. At the newest it follows again."""
        result, at = self._data.samples, self._at() + by
        if not 0 <= at < len(result):
            return False
        self._held = None if at == len(result) - 1 else result[at].step
        self.top = 0
        self.redraw()
        return True

    def next_prompt(self, by: int) -> bool:
        result = self._data.samples
        if not result or len(result[self._at()].samples) == 1:
            return False
        self._prompt = (self._prompt + by) % len(result[self._at()].samples)
        self.top = 0
        self.redraw()
        return True

    def page(self, width: int) -> list[Row]:
        result: list[Samples] = self._data.samples
        if not result:
            return [exactly([(self.nothing, "dim")], width)]
        at = self._at()
        newer = len(result) - 1 - at
        note = f"{newer:,} newer: ]" if newer else f"{at:,} older: [" if at else ""
        shown = result[at]
        return sample_rows(shown, min(self._prompt, len(shown.samples) - 1), note, width, self.glyphs)


class LogPane(RunPane, can_focus=True):
    """Messages of log.jsonl; of a run without one, nothing."""

    _LINES = {"up": 1, "down": -1, "pageup": 10, "pagedown": -10, "home": 1_000_000, "end": -1_000_000}
    BINDINGS = [Binding(key, f"scroll_by({lines})", show=False) for key, lines in _LINES.items()]

    words = ""
    """What lines must have to be shown; see tui.render.log.matches."""
    _held: int | None = None
    """Lines ever logged up to the one at the bottom; None: the newest."""

    @property
    def follows(self) -> bool:
        return self._held is None

    def filter(self, words: str) -> None:
        self.words = words
        self._held = None
        self.redraw()

    def action_scroll_by(self, lines: int) -> None:
        """Towards older lines, or newer ones where negative; at the newest it follows again."""
        total, kept = self._data.num_log, len(self._data.log)
        held = (total if self._held is None else self._held) - lines
        self._held = None if held >= total else max(total - kept + 1, held, 1)
        self.redraw()

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self.action_scroll_by(3)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self.action_scroll_by(-3)

    def headline(self) -> str:
        parts = [f"filter {self.words}"] if self.words else []
        parts += [] if self.follows else ["scrolled back, end follows"]
        return "  ".join(parts)

    def rows(self, width: int, height: int) -> list[Row]:
        """The last messages that match, at the top while they are few."""
        lines = self._data.log_lines()
        if self._held is not None:
            newer = self._data.num_log - self._held
            lines = lines[: len(lines) - newer]
        if self.words:
            lines = [line for line in lines if matches(line, self.words)]
        rows = log_rows(lines, width, height)
        if not rows:
            text = "no line matches" if self.words else "the run has logged nothing yet"
            rows = [exactly([(text, "dim")], width)]
        return rows
