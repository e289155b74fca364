"""What all screens share: bindings from the action table, and a feed that reads files away from the UI's thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, ClassVar

from textual.screen import Screen

from penstock.tui.actions import ACTIONS, bindings
from penstock.tui.host import Host, host_of

POLL_S = 0.1


def _unless_read_only(handler: Callable[..., Any]) -> Callable[..., Any]:
    """An action that a read-only application refuses, from wherever it is called."""

    @wraps(handler)
    def refusing(screen: PenstockScreen, *args: Any) -> Any:
        if screen.penstock.refuses():
            return None
        return handler(screen, *args)

    return refusing


class PenstockScreen(Screen[None]):
    """A screen of its own `SCOPE` in the action table."""

    SCOPE: ClassVar[str] = ""
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide"), (160, "-very-wide")]
    VERTICAL_BREAKPOINTS = [(0, "-tiny"), (16, "-short"), (30, "-tall"), (48, "-very-tall")]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        cls.BINDINGS = [*bindings(cls.SCOPE)]
        acting = {action.id for action in ACTIONS if action.scope == cls.SCOPE and action.acts}
        for handler in (f"action_{id}" for id in acting):
            if hasattr(cls, handler):
                setattr(cls, handler, _unless_read_only(getattr(cls, handler)))
        check = cls.check_action

        def check_action(screen: PenstockScreen, action: str, parameters: tuple[object, ...]) -> bool | None:
            if action in acting and screen.is_attached and screen.penstock.read_only:
                return False
            return check(screen, action, parameters)

        cls.check_action = check_action  # type: ignore[method-assign, assignment]
        super().__init_subclass__(**kwargs)

    def __init__(self) -> None:
        super().__init__()
        self._feed_stop: threading.Event | None = None

    @property
    def penstock(self) -> Host:
        return host_of(self)

    def start_feed(self, poll: Callable[[], Any], show: Callable[[Any], None], every_s: float = POLL_S) -> None:
        """Call `poll` in a thread every `every_s` seconds while this screen is on show.

        `show` is called in the UI's thread with what it returned, unless that is falsy or the screen is closing.
        """
        self.stop_feed()
        stop = self._feed_stop = threading.Event()
        app = self.penstock

        def show_if_open(found: Any) -> None:
            if self.is_attached and self.display and not stop.is_set():  # its panes go before it does
                show(found)

        def work() -> None:
            while not stop.is_set():
                if app.on_show(self):
                    found = poll()
                    if found and not stop.is_set():
                        app.from_thread(show_if_open, found)
                stop.wait(every_s)

        threading.Thread(target=work, name=f"feed-{self.SCOPE}", daemon=True).start()

    def stop_feed(self) -> None:
        """End the feed; what it is reading is not shown any more."""
        if self._feed_stop is not None:
            self._feed_stop.set()

    def on_unmount(self) -> None:
        self.stop_feed()
