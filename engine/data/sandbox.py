"""How long a chat template may compute, and in how much memory: it is a program of whoever published the model."""

from __future__ import annotations

import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType

from penstock.storage.errors import UserError

CPU_S = 3.0
"""For all renderings of one conversation of `_FEW_MESSAGES`, each of which takes less than a millisecond; of more, each
of which is rendered with all before it, as many times that."""
_FEW_MESSAGES = 100
MESSAGE_S = 0.05
"""What a message may take of it where there are many conversations: all of them together may take `CPU_S` more."""
MORE_BYTES = 512 << 20
"""On top of what the process has."""
_FEW_CHARS = 64 << 10
_MOST_TIMES = 16
_MOST_CHARS = 4 << 20
"""A rendering may have so few characters, and so many times the conversation's; all together so many more."""
_AGAIN_S = 0.25
_MEASURED_S = 0.05
_owed_s = 0.0
"""What conversations before this one took beyond `MESSAGE_S` a message."""
_owed_chars = 0
"""What renderings so far had beyond what each may have."""


class TemplateLimitError(UserError):
    """A template that goes beyond what it may take; no conversation is rendered with it."""


class _TooLong(BaseException):
    """Raised within a template, where nothing must catch it."""


@contextmanager
def bounded(where: str, num_messages: int = 1) -> Iterator[None]:
    """Compile or render a template. TemplateLimitError, with `where` before it, when it takes too long or too much.

    In the main thread only: no other receives signals, and the limit is the process's, in which the main thread may
    load PyTorch meanwhile. Another thread renders what a recipe names for a tokenizer that is trained here.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    global _owed_s
    begun, allowed_s = time.thread_time(), MESSAGE_S * num_messages
    alone_s = CPU_S * max(1, num_messages / _FEW_MESSAGES)
    most_s = max(min(allowed_s, alone_s), alone_s - _owed_s)

    def look(_: int, __: FrameType | None) -> None:
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)  # also where it raises: Python drops what a finalizer raises
        if time.thread_time() - begun > most_s:
            raise _TooLong

    before, limits = signal.signal(signal.SIGALRM, look), resource.getrlimit(resource.RLIMIT_DATA)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, most_s)
            resource.setrlimit(resource.RLIMIT_DATA, (_allowed(*limits), limits[1]))
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _TooLong:
        others = ", after others that took long," if _owed_s else ""
        raise _refused(where, f"more than {most_s:.2g} s of computing{others}") from None
    except MemoryError:
        raise _refused(where, f"more than {MORE_BYTES >> 20} MiB of memory") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_DATA, limits)
        signal.signal(signal.SIGALRM, before)
        _owed_s = max(0.0, _owed_s + time.thread_time() - begun - allowed_s)


def require_modest(text: str, given: object, where: str) -> None:
    """TemplateLimitError where a template, in this rendering or in all so far, made far more text than it was `given`:
    what comes after it, tokenising first of all, takes its time by the text."""
    global _owed_chars
    if len(text) <= _FEW_CHARS:
        return
    _owed_chars += max(0, len(text) - _FEW_CHARS - _MOST_TIMES * len(str(given)))
    if _owed_chars > _MOST_CHARS:
        raise _refused(where, f"{len(text):,} characters")


def _refused(where: str, what: str) -> TemplateLimitError:
    return TemplateLimitError(
        f"{where}: the chat template takes {what} for one conversation; name another with data.chat_template"
    )


def _allowed(soft: int, hard: int) -> int:
    """What the process has, and `MORE_BYTES`; never more than it may have now."""
    wanted = _data_bytes(int(time.monotonic() / _MEASURED_S)) + MORE_BYTES
    return min(limit for limit in (wanted, soft, hard) if limit != resource.RLIM_INFINITY)


@lru_cache(maxsize=1)
def _data_bytes(_: int) -> int:
    """What counts for RLIMIT_DATA; measured anew at another moment only, as it takes as long as a rendering."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[5]) * resource.getpagesize()
