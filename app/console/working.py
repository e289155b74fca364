"""What a command is doing and how far it is, on standard error, once it takes longer than a few seconds: on a terminal
a line that is rewritten and erased at the end; elsewhere a plain line now and then."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator

from penstock.engine.events import Preparing
from penstock.engine.preparing import Checklist
from penstock.storage.files.units import duration_text
from penstock.storage.files.untrusted import printable

FIRST_S = 5.0
"""Without a terminal a command that is done sooner prints no line."""
EVERY_S = 10.0
"""Between two lines without a terminal, at least."""
EVERY_SHARE = 0.05
"""And at least this share of the time that the command has taken."""
_TICK_S = 0.5

_active: Working | None = None
"""The one that is shown in this process: whoever works inside shows steps of it."""


class Working:
    """Shows what is under way, as an `engine.preparing.Listener`. `each`: a line for each word of it, terminal or
    not."""

    def __init__(self, *, each: bool = False) -> None:
        self._each = each
        self._rewrites = not each and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._item: Preparing | None = None
        self._reported_at = 0.0
        self._began = time.monotonic()
        self._due_s = FIRST_S
        """Seconds after the beginning at which the next line may be printed, without a terminal."""
        self._columns = 0
        """Of the line that stands on the terminal."""
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="working", daemon=True)

    def __enter__(self) -> Working:
        global _active
        self._outer, _active = _active, self
        if not self._each:
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        global _active
        _active = self._outer
        self.end()

    def end(self) -> None:
        """Show nothing more."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self.clear()

    def clear(self) -> None:
        """Erase the line on the terminal, before something else is printed there."""
        with self._lock:
            self._erase()

    def on_prepare(self, item: Preparing) -> None:
        with self._lock:
            self._item, self._reported_at = None if item.state == "done" else item, time.monotonic()
            if item.state == "done":
                self._erase()
            elif item.state == "begun" or self._each:
                self._show()

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """While entered, `name` is being done; a step inside another takes its place meanwhile."""
        outer, reported_at = self._item, self._reported_at
        try:
            with Checklist(self).step(name):
                yield
        finally:
            with self._lock:
                self._erase()
                self._item, self._reported_at = outer, reported_at

    def _tick(self) -> None:
        while not self._ended.wait(_TICK_S):
            with self._lock:
                self._show()

    def _show(self) -> None:
        if self._item is None or self._ended.is_set():
            return
        now = time.monotonic()
        if self._rewrites:
            self._rewrite(self._text(self._item, now))
        elif self._each or now - self._began >= self._due_s:
            self._due_s = now - self._began + max(EVERY_S, EVERY_SHARE * (now - self._began))
            _write(self._text(self._item, now) + "\n")

    def _text(self, item: Preparing, now: float) -> str:
        seconds = item.seconds + now - self._reported_at
        parts = [
            "" if item.fraction is None else f"{item.fraction:.0%}",
            item.detail or "",
            duration_text(seconds) if seconds >= 1 else "",
        ]
        how = ", ".join(filter(None, parts))
        return printable(f"{item.name}: {how}" if how else item.name)

    def _rewrite(self, text: str) -> None:
        from rich.cells import set_cell_size

        try:
            columns = os.get_terminal_size(sys.stderr.fileno()).columns
        except (OSError, ValueError):
            columns = 80
        _write("\r" + set_cell_size(text, max(1, columns - 1)))
        self._columns = max(1, columns - 1)

    def _erase(self) -> None:
        if self._columns:
            _write("\r" + " " * self._columns + "\r")
            self._columns = 0


@contextlib.contextmanager
def working(what: str) -> Iterator[Working]:
    """While entered, the command is doing `what`: by itself, or as a step of what is shown already."""
    with Working() if _active is None else contextlib.nullcontext(_active) as shown, shown.step(what):
        yield shown


def say(text: str) -> None:
    """A line on standard error, beside what a command is for."""
    print(printable(text), file=sys.stderr, flush=True)


def _write(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # whoever has closed it wants to read nothing
        sys.stderr.write(text)
        sys.stderr.flush()
