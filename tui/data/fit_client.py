"""Runs `penstock fit --json` beside the application and keeps what it has said so far."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.storage.files import child
from penstock.tui.data import processes

COMMAND = tuple(child.command("app.cli.main", "fit", "--json"))
_LINE_BYTES = 1 << 22
_NOTHING_FITS = 1
_NO_PLACE = 127

Cell = tuple[str, int]
"""Model and context."""


@dataclass(slots=True)
class FitState:
    """What is known now."""

    question: dict[str, Any] | None = None
    """None until the command has begun to answer."""
    cells: dict[Cell, dict[str, Any]] = field(default_factory=dict)
    """Those that are planned."""
    done: bool = False
    trouble: str | None = None
    """Why there will be no more."""

    @property
    def models(self) -> list[str]:
        return [] if self.question is None else self.question["models"]

    @property
    def contexts(self) -> list[int]:
        return [] if self.question is None else self.question["contexts"]


class FitClient(processes.OneAtATime):
    """One command at a time, the newest. `changed` is called in the event loop whenever `state` says more."""

    def __init__(self, root: Path, changed: Callable[[], None], command: Sequence[str] | None = None) -> None:
        super().__init__()
        self.state = FitState()
        self._root, self._changed, self._command = root, changed, command or COMMAND

    async def ask(self, machine: str) -> None:
        """Begin anew for a preset or a profile file; this machine where it is empty."""
        await self.close()
        self.state = FitState()
        self._changed()
        self._read_in_task(self._read(self.state, machine))

    async def _read(self, state: FitState, machine: str) -> None:
        code, said = await self._run(state, ["--machine", machine] if machine else [])
        state.done = True
        if code not in (0, _NOTHING_FITS) or state.question is None:
            state.trouble = (said.strip() or f"exit code {code}").splitlines()[-1].removeprefix("error: ")
        self._changed()

    async def _run(self, state: FitState, options: list[str]) -> tuple[int, str]:
        """Carry out the command; its exit code and what it says on stderr."""
        try:
            process = self._process = await processes.begin(
                [*self._command, *options], self._root, stdin=asyncio.subprocess.DEVNULL, line_bytes=_LINE_BYTES
            )
        except OSError as error:
            return _NO_PLACE, str(error)
        assert process.stdout is not None
        assert process.stderr is not None
        stderr = asyncio.get_running_loop().create_task(process.stderr.read())
        try:
            while line := await process.stdout.readline():
                with contextlib.suppress(ValueError):
                    self._take(state, json.loads(line))
            return await process.wait(), (await stderr).decode(errors="replace")
        finally:
            stderr.cancel()

    def _take(self, state: FitState, said: dict[str, Any]) -> None:
        if state.question is None:
            state.question = said
        else:
            state.cells[said["model"], said["context"]] = said
        self._changed()
