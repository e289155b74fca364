"""The log pane: the run's messages, filtered, following the newest until one scrolls up."""

from __future__ import annotations

from textual import events
from textual.binding import Binding

from penstock.app.console.rows import Row, exactly
from penstock.tui.render.log import log_rows, matches
from penstock.tui.widgets.lines import RunPane


class LogPane(RunPane, can_focus=True):
    """Messages of log.jsonl; of a run without one, nothing."""

    BINDINGS = [
        Binding("up", "scroll_by(1)", show=False),
        Binding("down", "scroll_by(-1)", show=False),
        Binding("pageup", "scroll_by(10)", show=False),
        Binding("pagedown", "scroll_by(-10)", show=False),
        Binding("home", "scroll_by(1000000)", show=False),
        Binding("end", "scroll_by(-1000000)", show=False),
    ]

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
        """How the log is shown."""
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
