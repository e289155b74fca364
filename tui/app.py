"""The application: screens, themes, questions. It reads run directories; training runs in processes of its own."""

from __future__ import annotations

import locale
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from textual.app import App, SystemCommand
from textual.driver import Driver
from textual.filter import LineFilter
from textual.notifications import SeverityLevel
from textual.screen import Screen

from penstock.app.console.rows import ASCII, UNICODE, Glyphs
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import printable
from penstock.tui.actions import Action, actions, bindings
from penstock.tui.filters import IN_ASCII, PRINTABLE
from penstock.tui.host import Host
from penstock.tui.screens.base import PenstockScreen
from penstock.tui.theme import THEMES

if TYPE_CHECKING:
    from penstock.tui.data.home_plans import HomePlans

BAD_INPUT = 2
_ACTING = ("configure", "fit", "finetune")
"""Screens that do more than show."""


def terminal_glyphs() -> Glyphs:
    """ASCII where PENSTOCK_ASCII is set or the locale is not UTF-8."""
    wanted = os.environ.get("PENSTOCK_ASCII", "")
    if wanted not in ("", "0") or os.environ.get("TERM") == "dumb":
        return ASCII
    return UNICODE if "UTF" in locale.getpreferredencoding(False).upper() else ASCII


class PenstockApp(App[None]):
    """Parameters: `root`, the folder with runs/ and the user's recipes/; `run`, a run to open at once.

    `read_only`: show runs and take no action. `served`: shown in a browser, where files are written below `root` alone.
    `plans_recipes`: while nobody presses a key on Home, plan the recipes that it lists for this machine.
    """

    TITLE = "penstock"
    CSS_PATH = "app.tcss"
    BINDINGS = [*bindings("global")]

    def __init__(
        self,
        root: Path,
        run: Path | None = None,
        *,
        glyphs: Glyphs | None = None,
        clock: Callable[[], float] = time.time,
        read_only: bool = False,
        served: bool = False,
        plans_recipes: bool = False,
        driver_class: type[Driver] | None = None,
    ) -> None:
        super().__init__(driver_class=driver_class)
        self.read_only = read_only
        self.served = served
        self.root = root.resolve()
        self.glyphs = glyphs or terminal_glyphs()
        self.clock = clock
        """Unix seconds now."""
        self._plans_recipes = plans_recipes and not read_only
        self._first_run = run
        for theme in THEMES:
            self.register_theme(theme)
        self.theme = THEMES[0].name

    @cached_property
    def home_plans(self) -> HomePlans:
        """Which recipes fit this machine, as far as is known."""
        from penstock.tui.data.home_plans import HomePlans

        return HomePlans(self.root, may_plan=self._plans_recipes)

    def on_mount(self) -> None:
        self.open("home")
        if self._first_run is not None:
            self.open("run", self._first_run)
        if not self.glyphs.braille:
            self.add_class("-ascii")

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Textual's hook: what every line drawn goes through."""
        filters = [*super().get_line_filters(), PRINTABLE]
        return filters if self.glyphs.braille else [*filters, IN_ASCII]

    def notify(
        self,
        message: str,
        *,
        title: str = "",
        severity: SeverityLevel = "information",
        timeout: float | None = None,
        markup: bool = False,
    ) -> None:
        """Textual's, but that no text is taken for markup: most have names of files and models in them."""
        super().notify(printable(message), title=title, severity=severity, timeout=timeout, markup=False)

    def open(self, name: str, *arguments: Any) -> None:
        """Show a screen of tui/screens/NAME.py: `run`, its path; `timeline`, that and a step, None its last one;
        `compare`, paths of runs; `configure`, a .py file, which it executes, or a run's recipe.json, and plans; `fit`,
        a machine, empty this one, for which it plans models; `finetune`: reads a model and data, and may fetch them.
        """
        if name in _ACTING and self.refuses():
            return
        module = import_module(f"penstock.tui.screens.{name}")
        self.push_screen(getattr(module, f"{name.capitalize()}Screen")(*arguments))

    def on_show(self, screen: Screen[Any]) -> bool:
        """Whether `screen` is the one that is seen, if only behind a dialog."""
        stack = [shown for shown in self._screen_stacks.get("_default", []) if isinstance(shown, PenstockScreen)]
        return bool(stack) and stack[-1] is screen

    def refuses(self) -> bool:
        """Whether no action is taken here, which it says then."""
        if self.read_only:
            self.notify("read-only: this window shows runs and cannot change them", severity="warning")
        return self.read_only

    def target(self, typed: str) -> Path | None:
        """Where a file or folder is to be written that was typed as `typed`; None, and it is said, where it cannot."""
        try:
            return written_path(self.root, typed, inside=self.served)
        except UserError as error:
            self.notify(str(error), severity="error")
            return None

    async def ask(self, title: str, text: str, yes: str = "Yes", no: str = "Cancel") -> bool:
        """A question with two answers; call it from a worker."""
        from penstock.tui.screens.dialogs import ConfirmDialog

        return bool(await self.push_screen_wait(ConfirmDialog(title, text, yes, no)))

    async def ask_text(self, title: str, text: str, value: str = "") -> str | None:
        """A question for a line of text; None where there is no answer. Call it from a worker."""
        from penstock.tui.screens.dialogs import TextDialog

        answer: str | None = await self.push_screen_wait(TextDialog(title, text, value))
        return answer

    def offered(self, screen: Screen[Any]) -> list[Action]:
        """The actions that `screen` offers now."""
        scope = getattr(screen, "SCOPE", "")
        return [
            action
            for action in actions(scope)
            if action.scope == "global" or screen.check_action(action.name, ()) is not False
        ]

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        for action in self.offered(screen):
            if action.id != "command_palette":
                where = self if action.scope == "global" else screen
                run = partial(self.run_action, action.id, where)
                yield SystemCommand(f"{action.label} ({action.shown_key})", action.help, run)
        yield SystemCommand("Choose a theme", "Penstock's own and Textual's.", self.action_change_theme)
        if not self.served:
            yield SystemCommand("Screenshot", "Save the screen as an SVG file.", self.deliver_screenshot)

    def action_help(self) -> None:
        from penstock.tui.screens.dialogs import HelpScreen

        if isinstance(self.screen, PenstockScreen):
            self.push_screen(HelpScreen(self.screen.SCOPE, self.offered(self.screen)))

    async def action_back(self) -> None:
        if len(self.screen_stack) > 2:
            await self.pop_screen()

    def action_next_theme(self) -> None:
        names = [theme.name for theme in THEMES]
        index = names.index(self.theme) if self.theme in names else -1
        self.theme = names[(index + 1) % len(names)]


def written_path(root: Path, typed: str, *, inside: bool) -> Path:
    """The path that `typed` means, below `root` unless it is absolute.

    Raises UserError for what is no path, and with `inside` for what would lie outside `root` once links are followed.
    """
    try:
        path = root / Path(typed).expanduser()
        os.lstat(path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, RuntimeError) as error:  # ValueError: a NUL or half a character; RuntimeError: ~nobody
        raise UserError(f"{typed}: cannot be written there ({getattr(error, 'strerror', None) or error})") from None
    places = (os.path.realpath(path), os.path.realpath(path.parent))
    if inside and not all(Path(place).is_relative_to(os.path.realpath(root)) for place in places):
        raise UserError(f"{typed}: is outside {root}; in a browser, files can only be written below that folder")
    return path


_host: type[Host] = PenstockApp  # the type checker's: what screens and widgets ask for is there


def open_app(root: Path, run: Path | None = None) -> int:
    """Run the application in this terminal until it is closed; the exit code."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        print("error: the terminal application needs a terminal; `penstock --help` lists the commands", file=sys.stderr)
        return BAD_INPUT
    app = PenstockApp(root, run, plans_recipes=True)
    app.run()
    return app.return_code or 0
