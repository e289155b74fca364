"""System calls of this process that fail, or before which something happens."""

import errno
import os
import signal
import time
from collections.abc import Callable, Iterable
from multiprocessing.context import ForkServerContext
from typing import Any

import pytest

from penstock.storage.files.errors import UserError
from penstock.storage.tier import drives

CHANGING = ("open", "pwrite", "pwritev", "write", "fsync", "ftruncate")
CHANGING += ("link", "replace", "rename", "unlink", "mkdir", "rmdir")
WRITING = os.O_CREAT | os.O_TRUNC | os.O_WRONLY


def before_calls(
    patch: pytest.MonkeyPatch, names: Iterable[str], act: Callable[[int, str, tuple[Any, ...]], None]
) -> list[str]:
    """`act(number, name, arguments)` before every call (from 0) of these of `os`, of `open` where it is for writing.

    Returns the names of the calls made, which grows.
    """
    calls: list[str] = []

    def watched(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if name != "open" or args[1] & WRITING:
                calls.append(name)
                act(len(calls) - 1, name, args)
            return real(*args, **kwargs)

        return call

    for name in names:
        patch.setattr(os, name, watched(name))
    return calls


def failing(
    patch: pytest.MonkeyPatch, names: Iterable[str], code: int, *, first: int = 0, times: int = 10**9
) -> list[str]:
    """From call `first` on, `times` of them fail with `code`; the names of the calls made."""

    def act(number: int, name: str, args: tuple[Any, ...]) -> None:
        if first <= number < first + times:
            raise OSError(code, os.strerror(code), args[0] if isinstance(args[0], str) else None)

    return before_calls(patch, names, act)


def refuse_direct(patch: pytest.MonkeyPatch) -> None:
    """As a file system without direct I/O."""
    real = os.open

    def refuse(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        return real(path, flags, *args, **kwargs)

    patch.setattr(os, "open", refuse)


def said_by(act: Callable[[], object]) -> str | None:
    """What the user is told where it fails."""
    try:
        act()
    except UserError as error:
        return str(error)
    return None


def is_killed(
    processes: ForkServerContext, act: Callable[[], object], number: int, names: Iterable[str] = CHANGING
) -> bool:
    """Act in a process that dies before its call `number` of these; whether it came to that."""
    child = processes.Process(target=_act_and_die, args=(act, number, names))
    child.start()
    child.join(30)
    assert child.exitcode in (0, -signal.SIGKILL)
    return child.exitcode != 0


def _act_and_die(act: Callable[[], object], number: int, names: Iterable[str]) -> None:
    def kill(count: int, name: str, args: Any) -> None:
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)

    drives.WRITE_THREADS = 1  # one call after the other, so that the number names a place
    before_calls(pytest.MonkeyPatch(), names, kill)
    act()
    os._exit(0)
