"""The plan beside the form: a page that scrolls, and one row of it for narrow terminals."""

from __future__ import annotations

from textual import events

from penstock.app.rows import Row
from penstock.tui.data.plan_client import PlanState
from penstock.tui.render.plan import state_rows, summary_row
from penstock.tui.widgets.lines import LineWidget, row_bindings


class _Planned(LineWidget):
    """Draws what is known of a plan."""

    state = PlanState()
    """What is shown."""
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


class PlanPanel(_Planned, can_focus=True):
    """The whole plan."""

    BINDINGS = [*row_bindings("scroll")]
    _top = 0
    _num_rows = 0

    def show(self, state: PlanState, machine: str) -> None:
        if state.forecast is not None and self.state.forecast is None:
            self._top = 0
        super().show(state, machine)

    def rows(self, width: int, height: int) -> list[Row]:
        """The part of the page that is scrolled to."""
        found = state_rows(self.state, self._machine, width, self.glyphs)
        self._num_rows = len(found)
        self._top = max(0, min(self._top, len(found) - height))
        below = len(found) - self._top - height
        subtitle = f"{below} more {self.glyphs.down}" if below > 0 else ""
        if subtitle != (self.border_subtitle or ""):
            self.border_subtitle = subtitle
        return found[self._top : self._top + height]

    def action_scroll(self, by: int) -> None:
        self._top = max(0, min(self._top + by, self._num_rows - self.size.height))
        self.redraw()

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        self.action_scroll(2)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self.action_scroll(-2)
