"""Commands that the application runs beside itself, and whose lines it reads as they come: fit and finetune."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
    """One command at a time. `changed` is called in the event loop whenever there is news."""

    def __init__(self, root: Path, changed: Callable[[], None]) -> None:
        self._root, self._changed = root, changed
        self._process: asyncio.subprocess.Process | None = None

    async def _run(
        self,
        command: Sequence[str],
        take: Callable[[bytes], None],
        show: Callable[[str], None] = lambda text: None,
        begun: Callable[[], None] | None = None,
    ) -> tuple[int, str]:
        """Run a command in a session of its own, without the application's limit on memory. Cancelled, it ends it.

        `take` gets each line of stdout, `show` each of stderr; `begun` is called once it runs, and writes to its stdin.
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
                show(text)

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


FIT_COMMAND = tuple(child.command("app.cli.main", "fit", "--json"))
_NOTHING_FITS = 1

Cell = tuple[str, int]
"""Model and context."""


@dataclass(slots=True)
class FitState:
    question: dict[str, Any] | None = None
    """None until the command has begun to answer."""
    cells: dict[Cell, dict[str, Any]] = field(default_factory=dict)
    done: bool = False
    trouble: str | None = None
    """Why there will be no more."""

    @property
    def models(self) -> list[str]:
        return [] if self.question is None else self.question["models"]

    @property
    def contexts(self) -> list[int]:
        return [] if self.question is None else self.question["contexts"]


class FitClient(Client):
    state = FitState()

    async def ask(self, machine: str) -> None:
        """Begin anew for a preset or a profile file; this machine where it is empty. Ends with the command."""
        state = self.state = FitState()
        self._changed()

        def take(line: bytes) -> None:
            try:
                result = json.loads(line)
            except ValueError:
                return
            if state.question is None:
                state.question = result
            else:
                state.cells[result["model"], result["context"]] = result
            self._changed()

        code, said = await self._run([*FIT_COMMAND, *(["--machine", machine] if machine else [])], take)
        state.done = True
        if code not in (0, _NOTHING_FITS) or state.question is None:
            state.trouble = said.removeprefix("error: ")
        self._changed()


FINETUNE_COMMAND = tuple(child.command("app.cli.main", "finetune", "--json"))


@dataclass(frozen=True, slots=True)
class FinetuneRequest:
    """What is inspected; what is empty is chosen by the command."""

    model: str = ""
    data: str = ""
    epochs: str = ""
    context: str = ""
    """Tokens of a row."""

    def arguments(self) -> list[str]:
        """As the command takes them."""
        words = ["--epochs", self.epochs] if self.epochs else []
        words += ["--set", f"data.sequence_length={self.context}"] if self.context else []
        return [*words, "--", self.model, self.data]


@dataclass(slots=True)
class FinetuneState:
    request: FinetuneRequest | None = None
    """None: nothing was requested yet."""
    doing: str = ""
    report: dict[str, Any] | None = None
    trouble: str | None = None
    """Why there is no report."""

    @property
    def done(self) -> bool:
        return self.report is not None or self.trouble is not None


class FinetuneClient(Client):
    state = FinetuneState()

    async def ask(self, request: FinetuneRequest) -> None:
        """Begin anew. Ends with the command."""
        state = self.state = FinetuneState(request)
        self._changed()
        printed: list[bytes] = []

        def show(text: str) -> None:
            state.doing = text
            self._changed()

        _, said = await self._run([*FINETUNE_COMMAND, *request.arguments()], printed.append, show)
        with contextlib.suppress(ValueError):
            state.report = json.loads(b"".join(printed))
        if state.report is None:
            state.trouble = said.removeprefix("error: ")
        self._changed()
