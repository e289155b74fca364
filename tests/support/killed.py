"""Processes that die by SIGKILL at a chosen moment."""

import os
import signal
from collections.abc import Callable
from typing import Any


def die_at_call(owner: Any, name: str, moment: int) -> None:
    """From now on this process dies at the call of that number of `owner.name`."""
    original: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def counted(*args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **named)

    setattr(owner, name, counted)
