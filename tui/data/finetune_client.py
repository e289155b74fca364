"""Runs `penstock finetune --json` beside the application, and keeps what it found and chose."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.storage.files import child
from penstock.tui.data import processes

COMMAND = tuple(child.command("app.cli.main", "finetune", "--json"))
_LINE_BYTES = 1 << 26
_NO_PLACE = 127


@dataclass(frozen=True, slots=True)
class Asked:
    """What is looked at."""

    model: str = ""
    data: str = ""
    epochs: str = ""
    """Empty: chosen."""
    context: str = ""
    """Tokens of a row; empty: chosen."""

    def arguments(self) -> list[str]:
        """As the command takes them."""
        words = ["--epochs", self.epochs] if self.epochs else []
        words += ["--set", f"data.sequence_length={self.context}"] if self.context else []
        return [*words, "--", self.model, self.data]


@dataclass(slots=True)
class FinetuneState:
    """What is known now."""

    asked: Asked | None = None
    """None: nothing was asked yet."""
    doing: str = ""
    """What the command is at."""
    report: dict[str, Any] | None = None
    trouble: str | None = None
    """Why there is no report."""

    @property
    def done(self) -> bool:
        return self.report is not None or self.trouble is not None


class FinetuneClient(processes.OneAtATime):
    """One command at a time, the newest. `changed` is called in the event loop whenever `state` says more."""

    def __init__(self, root: Path, changed: Callable[[], None]) -> None:
        super().__init__()
        self.state = FinetuneState()
        self._root, self._changed = root, changed

    async def ask(self, asked: Asked) -> None:
        """Begin anew."""
        await self.close()
        self.state = FinetuneState(asked)
        self._changed()
        self._read_in_task(self._read(self.state, asked))

    async def _read(self, state: FinetuneState, asked: Asked) -> None:
        code, printed = await self._run(state, [*COMMAND, *asked.arguments()])
        with contextlib.suppress(ValueError):
            state.report = json.loads(printed)
        if state.report is None:
            state.trouble = state.doing.removeprefix("error: ") or f"exit code {code}"
        self._changed()

    async def _run(self, state: FinetuneState, command: Sequence[str]) -> tuple[int, bytes]:
        """Carry out the command; its exit code and what it printed. Its last line on stderr is what it is at."""
        try:
            process = self._process = await processes.begin(
                command, self._root, stdin=asyncio.subprocess.DEVNULL, line_bytes=_LINE_BYTES
            )
        except OSError as error:
            state.doing = str(error)
            return _NO_PLACE, b""
        assert process.stdout is not None
        assert process.stderr is not None
        stdout = asyncio.get_running_loop().create_task(process.stdout.read())
        try:
            while line := await process.stderr.readline():
                if text := line.decode(errors="replace").strip():
                    state.doing = text
                    self._changed()
            return await process.wait(), await stdout
        finally:
            stdout.cancel()
