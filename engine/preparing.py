"""The checklist of what a run prepares before its first step: what is being done, and how long each item took."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from penstock.engine.events import Preparing

REPORT_S = 0.25
"""Between two words of progress on an item."""

_under_way: Checklist | None = None
"""Whose item is being done in this process, if any."""


def report(fraction: float | None = None, detail: str | None = None) -> None:
    """`Checklist.progress` of the item that is being done in this process, if any, for who works on it deep below."""
    if (checklist := _under_way) is not None:
        checklist.progress(fraction, detail)


class Listener(Protocol):
    """The part of an `Observer` that a checklist needs."""

    def on_prepare(self, item: Preparing) -> None:
        """An item has begun, got on, or is done."""


class Checklist:
    """Reports one item after the other to `listener`, if there is one. Items of several checklists follow one another,
    or one that is done within another takes its place meanwhile."""

    def __init__(self, listener: Listener | None = None) -> None:
        self._listener = listener
        self._lock = threading.Lock()
        self._item: str | None = None
        self._began = self._reported = 0.0

    @contextmanager
    def step(self, item: str, *, when: bool = True) -> Iterator[None]:
        """While entered, `item` is being done; nothing is reported unless `when`. Items do not nest. An error leaves it
        begun."""
        if not when:
            yield
            return
        with self._lock:
            assert self._item is None, f"{item} begins within {self._item}"
            self._item, self._began = item, time.perf_counter()
            self._reported = self._began
            self._report(Preparing(item, "begun", 0.0))
        global _under_way
        outer, _under_way = _under_way, self
        try:
            yield
        except BaseException:
            with self._lock:
                self._item = None
            raise
        finally:
            _under_way = outer
        with self._lock:
            self._item = None
            self._report(Preparing(item, "done", time.perf_counter() - self._began))

    def progress(self, fraction: float | None = None, detail: str | None = None) -> None:
        """How far the present item is: a `fraction` from 0 to 1, and what it is at. Any thread may call this as often
        as it likes; it is reported every REPORT_S seconds at most, and not once no item is being done."""
        with self._lock:
            now = time.perf_counter()
            if self._item is None or now - self._reported < REPORT_S:
                return
            self._reported = now
            if fraction is not None:
                fraction = min(1.0, max(0.0, fraction))
            self._report(Preparing(self._item, "progress", now - self._began, detail, fraction))

    def _report(self, item: Preparing) -> None:
        if self._listener is not None:
            self._listener.on_prepare(item)
