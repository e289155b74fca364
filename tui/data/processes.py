"""Processes that the application has beside itself and reads: begun with pipes, and ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path

from penstock.app import memory_limit
from penstock.storage import child


async def begin(command: Sequence[str], folder: Path, *, stdin: int, line_bytes: int) -> asyncio.subprocess.Process:
    """Start a command in `folder`, in a session of its own, without the application's limit on memory. OSError.

    `stdin`: of asyncio.subprocess; what it prints is read from pipes, lines of at most `line_bytes`.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env=child.environment(),
        stdin=stdin,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=line_bytes,
        start_new_session=True,
    )
    memory_limit.unbound(process.pid)
    return process


async def end(process: asyncio.subprocess.Process | None) -> None:
    """Kill it and wait for its end; nothing where there is none, or it has ended."""
    if process is not None and process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
