"""Signals of a process that trains: the first one stops the run at its next step boundary."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

ABORTED = 130
"""Exit code after a second signal: what a shell reports for a process ended by Ctrl-C."""

_SAME_REQUEST_S = 0.3
"""Signals this close together are one request: a supervisor may signal the process and its group."""

_STOP = {signal.SIGINT, signal.SIGTERM}


class StopRequested(BaseException):
    """A stop before the first step; no `except Exception` on the way may take it for a failure."""


class StopSignals:
    """While entered: the first SIGINT, SIGTERM or SIGHUP sets `requested` and, until `interrupts_main` is cleared,
    raises StopRequested in the main thread; a later SIGINT or SIGTERM ends the process, by a thread that needs no help
    from a main thread deep in a kernel.

    Without `on_abort` the run is inside somebody else's program, as a notebook, whose process is never ended: a later
    SIGINT raises KeyboardInterrupt, SIGHUP is left alone, and outside the main thread no handler is installed.
    """

    def __init__(self, on_first: Callable[[int], None], on_abort: Callable[[], None] | None) -> None:
        """`on_first` is called with the first signal, `on_abort` before the process ends."""
        self._on_first = on_first
        self._on_abort = on_abort
        self.requested = threading.Event()
        self.interrupts_main = True
        self._old: dict[int, Any] = {}
        self._first_at: float | None = None

    def __enter__(self) -> StopSignals:
        handled = set(_STOP)
        if self._on_abort is not None:
            self._read, self._write = socket.socketpair()
            self._write.setblocking(False)
            self._old_fd = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
            if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
                handled.add(signal.SIGHUP)
        elif threading.current_thread() is not threading.main_thread():
            return self
        self._old = {number: signal.signal(number, self._handle) for number in handled}
        if self._on_abort is not None:
            self._thread = threading.Thread(target=self._watch, args=[self._on_abort], name="signals", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        if self._on_abort is not None:
            signal.set_wakeup_fd(self._old_fd)
            self._write.close()
            self._thread.join()
            self._read.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Runs in the main thread; where there is a watcher, it knows by the wake-up socket already."""
        is_later = self._on_abort is None and self._take(number)
        if self.interrupts_main:
            self.interrupts_main = False
            raise StopRequested
        if is_later and number == signal.SIGINT:
            raise KeyboardInterrupt

    def _take(self, number: int) -> bool:
        """Take the request of a signal; whether an earlier one has made it already."""
        if self._first_at is not None:
            return time.monotonic() - self._first_at > _SAME_REQUEST_S
        self._first_at = time.monotonic()
        self.requested.set()
        self._on_first(number)
        return False

    def _watch(self, on_abort: Callable[[], None]) -> None:
        while data := self._read.recv(64):
            for number in data:
                if number in self._old and self._take(number) and number in _STOP:
                    try:
                        on_abort()
                    finally:
                        os._exit(ABORTED)
