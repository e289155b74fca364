"""The application in a window's process: it is shown through pipes, ends with its server, and has bounded memory.

Arguments: the server's process number, `watch` or `act`, the width and the height of the window in cells.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from pathlib import Path
from typing import Any, ClassVar

from textual import messages
from textual.drivers.web_driver import WebDriver

from penstock.app.console import memory_limit
from penstock.storage.files import child

MOST_MEMORY_BYTES = 4 << 30
"""Of addresses; the application takes a quarter of a GiB of them at the largest size of a window."""
_MOST_WAITING = 200


class WindowDriver(WebDriver):
    """Textual's own for browsers, but no faster than the application follows, and it ends with its input."""

    WIRE: ClassVar[int] = 1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lock = threading.Lock()
        self._write: Any = self._put

    def _put(self, data: bytes) -> None:
        """Whole packets, from whichever thread."""
        rest = memoryview(data)
        with self._lock:
            while rest:
                rest = rest[os.write(self.WIRE, rest) :]

    def send_message(self, message: messages.Message) -> None:
        """Textual's hook, in the thread that reads the input: reads no further while much waits to be handled."""
        super().send_message(message)
        if threading.current_thread() is self._key_thread:
            while self._waiting() > _MOST_WAITING and not self.exit_event.wait(0.01):
                pass

    def _waiting(self) -> int:
        app = self._app
        with contextlib.suppress(Exception):  # no screen yet, or no more
            return sum(item.message_queue_size for item in (app, app.screen, app.focused) if item is not None)
        return 0

    def run_input_thread(self) -> None:
        """Textual's hook: the server's end is the application's."""
        super().run_input_thread()
        if not self.exit_event.is_set():
            with contextlib.suppress(RuntimeError):
                asyncio.run_coroutine_threadsafe(self._app._post_message(messages.ExitApp()), self._loop)


def main(server: int, may_act: bool, size: tuple[int, int]) -> int:
    """Run the application in the current folder until the server or its user ends it; the exit code."""
    child.end_with_parent()
    if os.getppid() != server:
        return 0  # it ended before this began
    memory_limit.bound(MOST_MEMORY_BYTES)
    WindowDriver.WIRE = os.dup(1)  # what is printed by others must not come between
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    from penstock.tui.app import PenstockApp

    app = PenstockApp(Path.cwd(), read_only=not may_act, served=True, plans_recipes=may_act, driver_class=WindowDriver)
    app.run(size=size)
    return app.return_code or 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2] == "act", (int(sys.argv[3]), int(sys.argv[4]))))
