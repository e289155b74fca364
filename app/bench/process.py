"""A benchmark's child process: it ends at its time limit, with everything that it started, and with its parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

REPOSITORY = Path(__file__).parents[2]
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.2


def environment() -> dict[str, str]:
    """The parent's, with this checkout's code, and offline."""
    return os.environ | {"PYTHONPATH": str(REPOSITORY), "USE_HUB_KERNELS": "0", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}


def run_limited(
    command: Sequence[str],
    limit_s: float,
    *,
    stdout: IO[str],
    stderr: IO[str],
    more: dict[str, str] | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> int | None:
    """The exit code of `command`, None where it was ended after `limit_s` seconds.

    `more`: further variables of its environment. `meanwhile` is called some times a second, and once after the end; an
    exception of it, as of a signal, ends the child. Raises OSError where the command cannot be started.
    """
    deadline = time.monotonic() + limit_s
    # A session of its own: what it starts (compilers) ends with it.
    process = subprocess.Popen(
        command,
        env=environment() | (more or {}),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        preexec_fn=_end_with_parent,
    )
    code: int | None = None
    try:
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                code = process.wait(min(_POLL_S, left_s))
                break
            except subprocess.TimeoutExpired:
                meanwhile()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    meanwhile()
    return code


def _end_with_parent() -> None:
    """A parent that is killed cannot end what it started: the kernel does, and the GPU is free again."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
