"""Pages that scroll: the plan beside the form, and the samples of a run."""

from __future__ import annotations

from penstock.app.console.rows import Row, exactly
from penstock.tui.data.fields import get
from penstock.tui.data.plan_client import PlanState
from penstock.tui.data.run_data import RunData
from penstock.tui.data.sample_log import Samples
from penstock.tui.render.log import sample_rows
from penstock.tui.render.plan import state_rows, summary_row
from penstock.tui.widgets.lines import LineWidget, ScrolledLines


class _Planned(LineWidget):
    """Draws what is known of a plan."""

    state = PlanState()
    _machine = ""

    def show(self, state: PlanState, machine: str) -> None:
        """Draw another state; `machine` is what is planned for."""
        if (state, machine) != (self.state, self._machine):
            self.state, self._machine = state, machine
            self.redraw()


class PlanSummary(_Planned):
    """The plan in one row."""

    def rows(self, width: int, height: int) -> list[Row]:
        return [summary_row(self.state, self._machine, width, self.glyphs)]


class PlanPanel(ScrolledLines, _Planned):
    """The whole plan."""

    def show(self, state: PlanState, machine: str) -> None:
        if state.forecast is not None and self.state.forecast is None:
            self.top = 0
        super().show(state, machine)

    def page(self, width: int) -> list[Row]:
        return state_rows(self.state, self._machine, width, self.glyphs)


class SamplesPane(ScrolledLines):
    """Follows the newest samples until one goes to older ones."""

    _held: int | None = None
    """Step of the samples that are shown; None: the newest."""
    _prompt = 0

    def __init__(self, data: RunData) -> None:
        super().__init__()
        self._data = data

    @property
    def nothing(self) -> str:
        if get(self._data.recipe, "samples", "every") is None:
            return "this run generates no samples; set samples.every"
        return "no samples yet"

    def _at(self) -> int:
        found = self._data.samples
        steps = [one.step for one in found]
        return steps.index(self._held) if self._held in steps else len(found) - 1

    def go(self, by: int) -> bool:
        """To samples of so many steps later, or earlier; whether there are any. At the newest it follows again."""
        found, at = self._data.samples, self._at() + by
        if not 0 <= at < len(found):
            return False
        self._held = None if at == len(found) - 1 else found[at].step
        self.top = 0
        self.redraw()
        return True

    def next_prompt(self, by: int) -> bool:
        """To another prompt's sample; whether there is one."""
        found = self._data.samples
        if not found or len(found[self._at()].samples) == 1:
            return False
        self._prompt = (self._prompt + by) % len(found[self._at()].samples)
        self.top = 0
        self.redraw()
        return True

    def page(self, width: int) -> list[Row]:
        found: list[Samples] = self._data.samples
        if not found:
            return [exactly([(self.nothing, "dim")], width)]
        at = self._at()
        newer = len(found) - 1 - at
        note = f"{newer:,} newer: ]" if newer else f"{at:,} older: [" if at else ""
        shown = found[at]
        return sample_rows(shown, min(self._prompt, len(shown.samples) - 1), note, width, self.glyphs)
