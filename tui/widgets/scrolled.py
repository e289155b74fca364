"""A page of rows that is longer than its widget: it scrolls, and its border says how much is below."""

from __future__ import annotations

from textual import events

from penstock.app.console.rows import Row
from penstock.tui.widgets.lines import LineWidget, row_bindings


class ScrolledLines(LineWidget, can_focus=True):
    """Draws the part of `page` that is scrolled to."""

    BINDINGS = [*row_bindings("scroll")]
    top = 0
    _num_rows = 0

    def page(self, width: int) -> list[Row]:
        """All rows."""
        raise NotImplementedError

    def rows(self, width: int, height: int) -> list[Row]:
        found = self.page(width)
        self._num_rows = len(found)
        self.top = max(0, min(self.top, len(found) - height))
        below = len(found) - self.top - height
        subtitle = f"{below} more {self.glyphs.down}" if below > 0 else ""
        if subtitle != (self.border_subtitle or ""):
            self.border_subtitle = subtitle
        return found[self.top : self.top + height]

    def action_scroll(self, by: int) -> None:
        self.top = max(0, min(self.top + by, self._num_rows - self.size.height))
        self.redraw()

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        self.action_scroll(2)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self.action_scroll(-2)
