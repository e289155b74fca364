"""Processes that run what a user gave: waited for no longer than they may take, and ended with all that they began."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

READ_BYTES = 1 << 16


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process that began a session, and all that it has started; whoever waits for it finds that."""
    if process.returncode is not None:  # its number may be another's
        return
    family: list[psutil.Process] = []
    with suppress(psutil.Error):  # those that began sessions of their own
        family = psutil.Process(process.pid).children(recursive=True)
    end_group(process)
    for member in family:
        with suppress(psutil.Error):
            member.kill()


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End what is left in its group, the process itself too; it is not reaped yet."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def kill(process: subprocess.Popen[bytes]) -> None:
    """The same, and wait for it."""
    end(process)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()


@contextmanager
def watched(process: subprocess.Popen[bytes]) -> Iterator[int]:
    """A descriptor that can be read once the process has ended; it is not reaped, so that its group keeps its
    number."""
    ended = os.pidfd_open(process.pid)
    try:
        yield ended
    finally:
        os.close(ended)


def wait_for(events: dict[int, int], deadline: float) -> set[int]:
    """Which descriptors are ready, of those to wait for -> select's events; none once time.monotonic() is
    `deadline`."""
    poll = select.poll()
    for fd, mask in events.items():
        poll.register(fd, mask)
    left_ms = 1000 * max(0.0, deadline - time.monotonic())
    return {fd for fd, _ in poll.poll(left_ms)}
