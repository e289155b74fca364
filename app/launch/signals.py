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
    """While entered: the first SIGINT, SIGTERM or SIGHUP sets `requested`; a later SIGINT or SIGTERM ends the process.

    Signals are watched by a thread of their own, so that an abort needs no help from a main thread deep in a kernel.
    Until `interrupts_main` is cleared the first signal also raises StopRequested in the main thread.
    """

    def __init__(self, on_first: Callable[[], None], on_abort: Callable[[], None]) -> None:
        self._on_first = on_first
        self._on_abort = on_abort
        self.requested = threading.Event()
        self.interrupts_main = True

    def __enter__(self) -> StopSignals:
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._old_fd = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        handled = set(_STOP)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
            handled.add(signal.SIGHUP)
        self._old = {number: signal.signal(number, self._handle) for number in handled}
        self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        for signum, handler in self._old.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._old_fd)
        self._write.close()
        self._thread.join()
        self._read.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Runs in the main thread; the wake-up socket has told the watcher already."""
        if self.interrupts_main:
            self.interrupts_main = False
            raise StopRequested

    def _watch(self) -> None:
        first_at: float | None = None
        while data := self._read.recv(64):
            for signum in data:
                if first_at is None and signum in self._old:
                    first_at = time.monotonic()
                    self.requested.set()
                    self._on_first()
                elif first_at is not None and signum in _STOP and time.monotonic() - first_at > _SAME_REQUEST_S:
                    try:
                        self._on_abort()
                    finally:
                        os._exit(ABORTED)


class GuestSignals:
    """The same for a run inside somebody else's program, as a notebook: it never ends the process.

    While entered, in the main thread: the first SIGINT or SIGTERM sets `requested`, a later SIGINT raises
    KeyboardInterrupt. In another thread no handler is installed.
    """

    def __init__(self, on_first: Callable[[int], None]) -> None:
        """`on_first` is called with the first signal."""
        self._on_first = on_first
        self.requested = threading.Event()
        self.interrupts_main = True
        """Until this is cleared the first signal also raises StopRequested."""
        self._old: dict[signal.Signals, Any] = {}
        self._first_at: float | None = None

    def __enter__(self) -> GuestSignals:
        if threading.current_thread() is threading.main_thread():
            self._old = {number: signal.signal(number, self._handle) for number in _STOP}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        self._old = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first_at is None:
            self._first_at = now
            self.requested.set()
            self._on_first(number)
            if self.interrupts_main:
                self.interrupts_main = False
                raise StopRequested
        elif number == signal.SIGINT and now - self._first_at > _SAME_REQUEST_S:
            raise KeyboardInterrupt
