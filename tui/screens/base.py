"""What all screens share: bindings from the action table, and a feed that reads files away from the UI's thread."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar

from textual import events, work
from textual.css.query import NoMatches
from textual.screen import Screen
from textual.types import NoActiveAppError

from penstock.app.recipes.recipe import Recipe, changes, load_recipe, save_recipe
from penstock.storage.files.errors import UserError
from penstock.tui.actions import ACTIONS, bindings
from penstock.tui.host import Host, host_of

POLL_S = 0.1
NOTICE_S = 4.0


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
        acting = {action.name for action in ACTIONS if action.scope == cls.SCOPE and action.acts}
        for handler in (f"action_{name}" for name in acting):
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
        self._said = ("", 0.0)

    @property
    def penstock(self) -> Host:
        return host_of(self)

    def action_screen(self, name: str) -> None:
        """Open the screen `name` (PenstockApp.open), about what this one shows."""
        self.penstock.open(name, *self.subject)

    @property
    def subject(self) -> tuple[Path, ...]:
        """The run that it is about, if it is about one."""
        return ()

    def why_not(self, action: str) -> str:
        """Why an action that `check_action` refuses does nothing now; empty: nothing is said."""
        return ""

    def say(self, text: str) -> None:
        """A short notice; once, where a key is held down."""
        now = time.monotonic()
        if text != self._said[0] or now - self._said[1] > NOTICE_S:
            self._said = text, now
            self.notify(text, timeout=NOTICE_S)

    def on_key(self, event: events.Key) -> None:
        """Says why a key of the table that is not offered now does nothing."""
        for action in ACTIONS:
            pressed = action.scope == self.SCOPE and event.key in action.keys.split(",")
            if pressed and self.check_action(action.name, ()) is False:
                if action.acts and self.penstock.read_only:
                    self.penstock.refuses()
                elif text := self.why_not(action.name):
                    self.say(text)

    def unless_closing(self, function: Callable[..., Any], *args: Any) -> None:
        """Call `function`; not where the screen closes, whose parts go before it."""
        if self._is_closing():
            return
        try:
            function(*args)
        except (NoMatches, NoActiveAppError):
            if not self._is_closing():
                raise

    def _is_closing(self) -> bool:
        return not (self.is_attached and self.display and self.is_running and self.app.is_running)

    @work(exclusive=True, group="feed", exit_on_error=False)
    async def start_feed(self, poll: Callable[[], Any], show: Callable[[Any], None], every_s: float = POLL_S) -> None:
        """Call `poll` in a thread every `every_s` seconds while this screen is on show.

        `show` is called with what it returned, unless that is falsy or the screen is closing.
        """
        while True:
            if self.penstock.on_show(self) and (result := await asyncio.to_thread(poll)):
                self.unless_closing(show, result)
            await asyncio.sleep(every_s)

    def save_and_configure(self, recipe: Recipe, stem: str) -> None:
        """Save a recipe as recipes/STEM.json, or under the next number that is free, and open it."""
        stem = stem.replace("-", "_").replace(".", "_")
        for number in range(1, 1000):
            path = self.penstock.target(f"recipes/{stem}{'' if number == 1 else f'_{number}'}.json")
            if path is None:
                return
            try:
                if not os.path.lexists(path):
                    save_recipe(path, recipe)
                    self.notify(f"saved as {path}")
                elif changes(load_recipe(path)) != changes(recipe):
                    continue
            except UserError as error:
                self.notify(str(error), severity="error")
                return
            self.penstock.open("configure", path)
            return
