"""The base of every drawn widget: rows from a pure renderer, drawn through Textual's line API; and the line of keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rich.segment import Segment
from textual import events, widgets
from textual.binding import Binding
from textual.strip import Strip
from textual.widget import Widget

from penstock.app.console.rows import Glyphs, Row
from penstock.tui.host import host_of
from penstock.tui.theme import style

if TYPE_CHECKING:
    from penstock.tui.data.run_data import RunData


def row_bindings(action: str) -> list[Binding]:
    """Keys that go down by rows, or up where `action` is given a negative number."""
    keys = {"down,j": 1, "up,k": -1, "pagedown": 10, "pageup": -10, "home": -1_000_000, "end": 1_000_000}
    return [Binding(key, f"{action}({by})", show=False) for key, by in keys.items()]


class LineWidget(Widget):
    """Draws what `rows` returns. Rows are made once per change and size; a renderer never runs for a hidden widget."""

    DEFAULT_CSS = "LineWidget { width: 1fr; height: 1fr; }"

    _strips: Sequence[Strip] = ()
    _blank = Strip([])
    _drawn_for: tuple[int, int, bool] | None = None

    def rows(self, width: int, height: int) -> list[Row]:
        """What to show in `width` x `height` cells; missing rows are empty, further ones are not drawn."""
        raise NotImplementedError

    @property
    def glyphs(self) -> Glyphs:
        return host_of(self).glyphs

    def headline(self) -> str | None:
        """What stands in the lower border; None: it is no business of this widget's."""
        return None

    def redraw(self) -> None:
        self._drawn_for = None
        if (headline := self.headline()) is not None:
            self.border_subtitle = headline.replace("[", "(").replace("]", ")")
        self.refresh()

    def render_line(self, y: int) -> Strip:
        width, height = self.size
        dark = self.app.current_theme.dark
        if self._drawn_for != (width, height, dark):
            rows = self.rows(width, height) if width > 0 and height > 0 else []
            base = self.rich_style  # costs as much as a row
            self._strips = [
                Strip([Segment(text, base + style(token, dark)) for text, token in row]).adjust_cell_length(width, base)
                for row in rows
            ]
            self._blank = Strip.blank(width, base)
            self._drawn_for = (width, height, dark)
        return self._strips[y] if y < len(self._strips) else self._blank

    def notify_style_update(self) -> None:
        """Textual's hook: the background may be another."""
        self._drawn_for = None
        super().notify_style_update()


class Drawn(LineWidget):
    """Shows what `draw` returns for a width, a height and the glyphs."""

    def __init__(
        self, draw: Callable[[int, int, Glyphs], list[Row]], *, id: str | None = None, classes: str = ""
    ) -> None:
        super().__init__(id=id, classes=classes)
        self._draw = draw

    def rows(self, width: int, height: int) -> list[Row]:
        return self._draw(width, height, self.glyphs)


class RunPane(LineWidget):
    def __init__(self, data: RunData, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._data = data


class ScrolledLines(LineWidget, can_focus=True):
    """Draws the part of `page` that is scrolled to."""

    BINDINGS = [*row_bindings("scroll")]
    top = 0
    _num_rows = 0

    def page(self, width: int) -> list[Row]:
        raise NotImplementedError

    def rows(self, width: int, height: int) -> list[Row]:
        result = self.page(width)
        self._num_rows = len(result)
        self.top = max(0, min(self.top, len(result) - height))
        below = len(result) - self.top - height
        subtitle = f"{below} more {self.glyphs.down}" if below > 0 else ""
        if subtitle != (self.border_subtitle or ""):
            self.border_subtitle = subtitle
        return result[self.top : self.top + height]

    def action_scroll(self, by: int) -> None:
        self.top = max(0, min(self.top + by, self._num_rows - self.size.height))
        self.redraw()

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        self.action_scroll(2)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self.action_scroll(-2)


class Footer(widgets.Footer):
    """Makes its keys anew only where they have changed; Textual's does, styles and all, whenever the focus moves."""

    _shown: list[Any] | None = None

    def __init__(self, *, compact: bool = False) -> None:
        super().__init__(compact=compact, show_command_palette=False)

    async def recompose(self) -> None:
        if not self.is_attached:  # the screen was closed while this waited its turn
            return
        keys = [active[1:] for active in self.screen.active_bindings.values() if active.binding.show]
        if keys != self._shown:
            self._shown = keys
            await super().recompose()
