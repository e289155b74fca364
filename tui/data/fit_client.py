"""Runs `penstock fit --json` beside the application, and keeps its answers so far."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from penstock.storage.files import child
from penstock.tui.data.processes import Client

COMMAND = tuple(child.command("app.cli.main", "fit", "--json"))
_NOTHING_FITS = 1

Cell = tuple[str, int]
"""Model and context."""


@dataclass(slots=True)
class FitState:
    """What is known now."""

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
    """Plans all models at all contexts."""

    state = FitState()

    async def ask(self, machine: str) -> None:
        """Begin anew for a preset or a profile file; this machine where it is empty."""
        await self.close()
        self.state = FitState()
        self._changed()
        self._begin(self._read(self.state, ["--machine", machine] if machine else []))

    async def _read(self, state: FitState, options: list[str]) -> None:
        def take(line: bytes) -> None:
            try:
                found = json.loads(line)
            except ValueError:
                return
            if state.question is None:
                state.question = found
            else:
                state.cells[found["model"], found["context"]] = found
            self._changed()

        code, said = await self._run([*COMMAND, *options], take)
        state.done = True
        if code not in (0, _NOTHING_FITS) or state.question is None:
            state.trouble = said.removeprefix("error: ")
        self._changed()
