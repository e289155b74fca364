"""How long a chat template may compute, and in how much memory: it is a program of whoever published the model."""

from __future__ import annotations

import resource
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType

from penstock.storage.files.errors import UserError

CPU_S = 3.0
"""For all renderings of one conversation of `_FEW_MESSAGES`, each of which takes less than a millisecond; of more, each
of which is rendered with all before it, as many times that."""
_FEW_MESSAGES = 100
MESSAGE_S = 0.05
"""What a message may take of it where there are many conversations: all of them together may take `CPU_S` more."""
CHAR_S = 1e-6
"""And a character of the conversation for each message: five times what the slowest published templates take."""
MORE_BYTES = 512 << 20
"""On top of what the process has, and of `_MOST_TIMES` the conversation in Python's widest characters."""
_CHAR_BYTES = 4
_FEW_CHARS = 64 << 10
_MOST_TIMES = 16
_MOST_CHARS = 4 << 20
"""A rendering may have so few characters, and so many times the conversation's; all together so many more."""
_AGAIN_S = 0.25
_MEASURED_S = 0.05


class TemplateLimitError(UserError):
    """A template that goes beyond what it may take; no conversation is rendered with it."""


class _TooLong(BaseException):
    """Raised within a template, where nothing must catch it."""


class Limits:
    """What one template may take. What a conversation takes beyond its share, later ones lack."""

    def __init__(self) -> None:
        self.owed_s, self._owed_chars = 0.0, 0

    @contextmanager
    def bounded(self, where: str, messages: Sequence[object] = (), tools: object = ()) -> Iterator[None]:
        """Compile the template or render `messages`. TemplateLimitError, naming `where`, when it takes too much.

        In the main thread only: no other receives signals, and the limit is the process's, in which the main thread may
        load PyTorch meanwhile. Another thread renders what a recipe names for a tokenizer that is trained here.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        num_messages, num_chars = max(1, len(messages)), len(str(messages)) + len(str(tools))
        begun, allowed_s = time.thread_time(), (MESSAGE_S + CHAR_S * num_chars) * num_messages
        alone_s = CPU_S * max(1, num_messages / _FEW_MESSAGES) + CHAR_S * num_chars * num_messages
        most_s = max(min(allowed_s, alone_s), alone_s - self.owed_s)
        more = MORE_BYTES + _CHAR_BYTES * _MOST_TIMES * num_chars

        def look(_: int, __: FrameType | None) -> None:
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)  # also where it raises: Python drops what a finalizer raises
            if time.thread_time() - begun > most_s:
                raise _TooLong

        before, limits = signal.signal(signal.SIGALRM, look), resource.getrlimit(resource.RLIMIT_DATA)
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, most_s)
                resource.setrlimit(resource.RLIMIT_DATA, (_allowed(more, *limits), limits[1]))
                yield
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except _TooLong:
            others = ", after others that took long," if self.owed_s else ""
            raise _refused(where, f"more than {most_s:.2g} s of computing{others}") from None
        except MemoryError:
            raise _refused(where, f"more than {more >> 20} MiB of memory") from None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            resource.setrlimit(resource.RLIMIT_DATA, limits)
            signal.signal(signal.SIGALRM, before)
            self.owed_s = max(0.0, self.owed_s + time.thread_time() - begun - allowed_s)

    def require_modest(self, text: str, given: object, where: str) -> None:
        """TemplateLimitError where the template, in this rendering or in all so far, made far more text than it was
        `given`: what comes after it, tokenising first of all, takes its time by the text."""
        if len(text) <= _FEW_CHARS:
            return
        self._owed_chars += max(0, len(text) - _FEW_CHARS - _MOST_TIMES * len(str(given)))
        if self._owed_chars > _MOST_CHARS:
            raise _refused(where, f"{len(text):,} characters")


def _refused(where: str, what: str) -> TemplateLimitError:
    return TemplateLimitError(
        f"{where}: the chat template takes {what} for one conversation; name another with data.chat_template"
    )


def _allowed(more: int, soft: int, hard: int) -> int:
    """What the process has, and `more` bytes; never more than it may have now."""
    wanted = _data_bytes(int(time.monotonic() / _MEASURED_S)) + more
    return min(limit for limit in (wanted, soft, hard) if limit != resource.RLIM_INFINITY)


@lru_cache(maxsize=1)
def _data_bytes(_: int) -> int:
    """What counts for RLIMIT_DATA; measured anew at another moment only, as it takes as long as a rendering."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[5]) * resource.getpagesize()
