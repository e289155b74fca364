"""A bound on the memory of a process that shows runs, which those that it starts to train or plan do not have: a
training reserves far more addresses than memory."""

from __future__ import annotations

import contextlib
import resource

_before: tuple[int, int] | None = None


def bound(most_bytes: int) -> None:
    """Let this process have at most `most_bytes` of addresses from now on: MemoryError where it wants more."""
    global _before
    _before = soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limits = [limit for limit in (most_bytes, soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))


def unbound(pid: int) -> None:
    """Let a process that this one has just started have what this one had before `bound`."""
    if _before is not None:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_AS, _before)
