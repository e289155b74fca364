"""Commands that the application runs beside itself, and whose lines it reads as they come."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from penstock.app.console import memory_limit
from penstock.storage.files import child

_LINE_BYTES = 1 << 26
_NOT_STARTED = 127
_LAST_WORDS_S = 2.0
"""A command's reason may be read after its end; what it started may hold its stderr open for longer."""


async def read_lines(stream: asyncio.StreamReader | None, take: Callable[[bytes], None]) -> None:
    """Call `take` with each line until the stream ends."""
    assert stream is not None
    while line := await stream.readline():
        take(line)


class Client:
    """One command at a time, the newest. `changed` is called in the event loop whenever there is news."""

    def __init__(self, root: Path, changed: Callable[[], None]) -> None:
        self._root, self._changed = root, changed
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Work in a task that `close` ends."""
        self._task = asyncio.get_running_loop().create_task(work)

    async def close(self) -> None:
        """End the command."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(
        self,
        command: Sequence[str],
        take: Callable[[bytes], None],
        told: Callable[[str], None] = lambda text: None,
        begun: Callable[[], None] | None = None,
    ) -> tuple[int, str]:
        """Run a command in a session of its own, without the application's limit on memory.

        `take` gets each line of stdout, `told` each of stderr; `begun` is called once it runs, and writes to its stdin.
        Returns the exit code and the last line of stderr, or why the command could not be started.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                cwd=self._root,
                env=child.environment(),
                stdin=asyncio.subprocess.PIPE if begun else asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=_LINE_BYTES,
                start_new_session=True,
            )
        except OSError as error:
            return _NOT_STARTED, str(error)
        last = ""

        def say(line: bytes) -> None:
            nonlocal last
            if text := line.decode(errors="replace").strip():
                last = text
                told(text)

        errors = asyncio.create_task(read_lines(process.stderr, say))
        try:
            memory_limit.unbound(process.pid)
            self._process = process
            if begun is not None:
                begun()
            await read_lines(process.stdout, take)
            code = await process.wait()
            await asyncio.wait([errors], timeout=_LAST_WORDS_S)
            return code, last or f"exit code {code}"
        finally:
            self._process = None
            errors.cancel()
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
