"""The plan beside the form: a page that scrolls, and one row of it for narrow terminals."""

from __future__ import annotations

from penstock.app.console.rows import Row
from penstock.tui.data.plan_client import PlanState
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
