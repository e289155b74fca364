"""The same work on many things, by processes of ours that end with this one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

from penstock.storage.files import child

T = TypeVar("T")
R = TypeVar("R")


def spread(work: Callable[[T], R], todo: Sequence[T], processes: int) -> Iterator[R]:
    """The results in order, each as soon as it and those before it are there; of what `work` raises the first. All that
    is handed to and fro must be picklable."""
    processes = min(processes, len(todo))
    if processes <= 1:
        yield from map(work, todo)
        return
    # A fork is there at once; where other threads may hold locks, PyTorch's among them, it would wait for ever.
    alone = threading.active_count() == 1 and "torch" not in sys.modules
    context = multiprocessing.get_context("fork" if alone else "spawn")
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_begin, initargs=(os.getpid(),))
    try:
        yield from pool.map(work, todo)
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(parent: int) -> None:
    """A worker's first act: it ends with its parent, and Ctrl-C is its parent's to hear."""
    child.end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
