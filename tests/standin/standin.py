"""What the stand-in for CUDA counts, read from Python: by kind of call, and by thread.

Python's threads are counted under their own names (a lane's is its lane) once `name_threads` has been called;
autograd's are `pt_autograd_0` and so on.
"""

from __future__ import annotations

import ctypes
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

_WATCHER = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t)
_ever_watched: list[object] = []
"""A thread may have taken a watcher right before it was taken off: none is ever freed."""


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None)  # it is preloaded


def running() -> bool:
    """Whether this process runs on the stand-in."""
    return hasattr(_library(), "standin_counts")


@dataclass(slots=True)
class Counts:
    """Calls by (thread, kind); kinds are those of src/counters.cpp."""

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)

    def __sub__(self, other: Counts) -> Counts:
        return Counts(self.calls - other.calls)

    def total(self, *kinds: str) -> int:
        """Calls of these kinds by all threads."""
        return sum(count for (_, kind), count in self.calls.items() if kind in kinds)

    def by_thread(self, *kinds: str) -> dict[str, int]:
        """Calls of these kinds, of the threads that made any."""
        found: Counter[str] = Counter()
        for (thread, kind), count in self.calls.items():
            if kind in kinds:
                found[thread] += count
        return dict(found)


def lines(write: Callable[[Any, ctypes.c_size_t], int]) -> list[str]:
    """What a function of the libraries writes into memory of a given size; it returns how much there is to write."""
    size = 1 << 16
    while True:
        text = ctypes.create_string_buffer(size)
        needed = write(text, ctypes.c_size_t(size))
        if needed <= size:
            return text.value.decode().splitlines()
        size = 2 * needed


def counts() -> Counts:
    """Everything counted so far."""
    found = Counts()
    for line in lines(_library().standin_counts):
        thread, kind, calls, _ = line.split("\t")
        found.calls[thread, kind] += int(calls)
    return found


def change(name: str, value: int | str) -> None:
    """Give a variable of README.md's second table a value from now on."""
    assert _library().standin_set(name.encode(), str(value).encode()) == 0, f"there is no setting {name}"


@contextmanager
def setting(name: str, value: int | str, after: int | str) -> Iterator[None]:
    """Inside the block a variable of README.md's second table has `value`; `after` it has another."""
    change(name, value)
    try:
        yield
    finally:
        change(name, after)


def pinned_mib() -> int:
    """MiB that are pinned in this process, rounded up."""
    return int(_library().standin_pinned_mib())


def forget_error() -> None:
    """The error that a call has answered with is the thread's last one, which torch would raise at its next call."""
    _library().cudaGetLastError()


@contextmanager
def failed_device(error: int) -> Iterator[None]:
    """Inside the block every call of CUDA answers with `error`."""
    _library().standin_fail_device(error)
    try:
        yield
    finally:
        _library().standin_fail_device(0)


@cache
def name_threads() -> None:
    """Count this process's Python threads under their names from now on, those that start later."""
    run = threading.Thread.run

    def named(self: threading.Thread) -> None:
        _library().standin_name_thread(self.name.encode())
        run(self)

    threading.Thread.run = named  # type: ignore[method-assign]
    _library().standin_name_thread(b"main")


@dataclass(slots=True)
class Call:
    """A call that was watched for."""

    kind: str
    thread: str
    nbytes: int
    stack: list[str]
    """The Python functions that led to it, innermost last, as "file:line function"."""


@contextmanager
def watched(*kinds: str) -> Iterator[list[Call]]:
    """Inside the block every call of these kinds is noted with the stack of the thread that makes it."""
    found: list[Call] = []

    def see(kind: bytes, thread: bytes, nbytes: int) -> None:
        frames = traceback.extract_stack()[:-1]
        stack = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
        found.append(Call(kind.decode(), thread.decode(), nbytes, stack))

    watcher = _WATCHER(see)
    _ever_watched.append(watcher)
    for kind in kinds:
        assert _library().standin_watch(kind.encode(), watcher) == 0, f"there is no kind {kind}"
    try:
        yield found
    finally:
        for kind in kinds:
            _library().standin_watch(kind.encode(), None)
