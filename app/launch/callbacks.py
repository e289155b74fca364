"""Callbacks of a program that trains from Python, and how it stops the run."""

from __future__ import annotations

import io
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from signal import raise_signal
from typing import TypeVar

from rich.console import Console

from penstock.engine.events import SampleMetrics, StepMetrics, ValidationMetrics

OnStep = Callable[[StepMetrics], object]
OnValidation = Callable[[ValidationMetrics], object]
OnSample = Callable[[SampleMetrics], object]
OnMessage = Callable[[str], object]

T = TypeVar("T")

_COLUMNS = 120
"""Of plain output."""


class StopTraining(Exception):
    """Raise it in a callback to end the run after the present step, which is committed; the run can be resumed."""


class CallbackError(Exception):
    """What a callback raised, on its way out of the run."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error

    def text(self) -> str:
        """Its own traceback."""
        return "".join(traceback.format_exception(self.error))


@dataclass(kw_only=True, slots=True)
class Callbacks:
    """Functions of the program around a run, called in the thread that trains, between two steps. What one raises ends
    the run; StopTraining stops it."""

    on_step: OnStep | None = None
    on_validation: OnValidation | None = None
    on_sample: OnSample | None = None
    on_message: OnMessage | None = None
    """Is given each line that would have been printed."""
    stopping: bool = field(default=False, init=False)
    """Whether one of them wants the run to stop."""
    signal: int | None = field(default=None, init=False)
    """What stopped the run."""

    def deliver(self) -> None:
        """Let the program have the signal that stopped its run, now that this is over: SIGINT is KeyboardInterrupt."""
        if self.signal is not None:
            raise_signal(self.signal)

    def console(self) -> Console:
        """Where the run's lines go: without cursor control, unless there is a terminal to control."""
        if self.on_message is not None:
            lines = _Lines(partial(self.call, self.on_message))
            return Console(file=lines, force_terminal=False, force_jupyter=False, width=_COLUMNS)
        if sys.stdout is not None and sys.stdout.isatty():
            return Console(force_jupyter=False)
        return Console(force_terminal=False, force_jupyter=False, width=_COLUMNS)

    def call(self, callback: Callable[[T], object] | None, value: T) -> None:
        """Call one of the functions, where there is one."""
        if callback is None:
            return
        try:
            callback(value)
        except StopTraining:
            self.stopping = True
        except Exception as error:
            raise CallbackError(error) from error


class _Lines(io.StringIO):
    """A file that hands on each line."""

    def __init__(self, line: Callable[[str], None]) -> None:
        super().__init__()
        self._line, self._rest = line, ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._line(line)
        return len(text)
