"""Ways to run out of something for real, in this process, and what is said of each."""

import fcntl
import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_FILES = 65_536
"""As many as a process here ever needs, and a table of their numbers is small."""


def no_thread() -> None:
    """A thread whose stack is larger than the address space cannot be started."""
    before = threading.stack_size(1 << 47)
    try:
        threading.Thread(target=int).start()
    finally:
        threading.stack_size(before)


@contextmanager
def files_used_up() -> Iterator[None]:
    """All numbers that a file of this process could have are taken."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def no_file() -> None:
    """A file more than there are numbers for, above the last number; other threads can open files meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(soft, _FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    last = fcntl.fcntl(0, fcntl.F_DUPFD, most - 1)
    try:
        fcntl.fcntl(0, fcntl.F_DUPFD, most - 1)
    finally:
        os.close(last)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


SHORTAGES: dict[str, tuple[Callable[[], object], str]] = {
    "memory": (lambda: bytearray(1 << 62), "out of memory"),
    "memory of torch": (lambda: torch.empty(1 << 60, dtype=torch.uint8), "out of memory"),
    "threads": (no_thread, "no more threads can be started"),
    "open files": (no_file, "the limit on open files is reached"),
}
