"""The plan beside the form: a page that scrolls, and one row of it for narrow terminals."""

from __future__ import annotations

from textual import events
from textual.binding import Binding

from tui.data.plan_client import PlanState
from tui.render import Row
from tui.render.plan import plan_rows, summary_row
from tui.widgets.lines import LineWidget


class PlanPanel(LineWidget, can_focus=True):
    """The whole plan."""

    BINDINGS = [
        Binding("down,j", "scroll(1)", show=False),
        Binding("up,k", "scroll(-1)", show=False),
        Binding("pagedown", "scroll(10)", show=False),
        Binding("pageup", "scroll(-10)", show=False),
        Binding("home", "scroll(-10000)", show=False),
        Binding("end", "scroll(10000)", show=False),
    ]

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._state = PlanState()
        self._machine = ""
        self._top = 0
        self._num_rows = 0

    @property
    def state(self) -> PlanState:
        """What is shown."""
        return self._state

    def show(self, state: PlanState, machine: str) -> None:
        """Draw another state; `machine` is what is planned for."""
        if (state, machine) == (self._state, self._machine):
            return
        if state.forecast is not None and self._state.forecast is None:
            self._top = 0
        self._state, self._machine = state, machine
        self.redraw()

    def rows(self, width: int, height: int) -> list[Row]:
        """The part of the page that is scrolled to."""
        state = self._state
        found = plan_rows(
            width,
            self.glyphs,
            forecast=state.forecast,
            phase=state.phase,
            stale=state.stale,
            error=state.error,
            trouble=state.trouble,
            machine=self._machine,
        )
        self._num_rows = len(found)
        self._top = max(0, min(self._top, len(found) - height))
        below = len(found) - self._top - height
        subtitle = f"{below} more {self.glyphs.down}" if below > 0 else ""
        if subtitle != (self.border_subtitle or ""):
            self.border_subtitle = subtitle
        return found[self._top : self._top + height]

    def action_scroll(self, by: int) -> None:
        """Up or down by rows."""
        self._top = max(0, min(self._top + by, self._num_rows - self.size.height))
        self.redraw()

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Textual's hook."""
        self.action_scroll(2)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Textual's hook."""
        self.action_scroll(-2)


class PlanSummary(LineWidget):
    """The plan in one row."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._state = PlanState()
        self._machine = ""

    def show(self, state: PlanState, machine: str) -> None:
        """Draw another state."""
        self._state, self._machine = state, machine
        self.redraw()

    def rows(self, width: int, height: int) -> list[Row]:
        """One row."""
        state = self._state
        return [
            summary_row(
                width,
                self.glyphs,
                forecast=state.forecast,
                phase=state.phase,
                stale=state.stale,
                error=state.error or state.trouble,
                machine=self._machine,
            )
        ]
