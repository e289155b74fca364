"""Processes that the application has beside itself and reads: begun with pipes, and ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from penstock.app.console import memory_limit
from penstock.storage.files import child


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


class OneAtATime:
    """A command whose output a task reads; the newest alone."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    def _read_in_task(self, reading: Coroutine[Any, Any, None]) -> None:
        """Read in a task of its own; the one before is closed."""
        self._reading = asyncio.get_running_loop().create_task(reading)

    async def close(self) -> None:
        """End the command."""
        reading, self._reading = self._reading, None
        process, self._process = self._process, None
        if reading is not None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        await end(process)
