"""Runs `penstock finetune --json` beside the application, and keeps its report."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from typing import Any

from penstock.storage.files import child
from penstock.tui.data.processes import Client

COMMAND = tuple(child.command("app.cli.main", "finetune", "--json"))


@dataclass(frozen=True, slots=True)
class Asked:
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
    """What is known now."""

    asked: Asked | None = None
    """None: nothing was asked yet."""
    doing: str = ""
    report: dict[str, Any] | None = None
    trouble: str | None = None
    """Why there is no report."""

    @property
    def done(self) -> bool:
        return self.report is not None or self.trouble is not None


class FinetuneClient(Client):
    """Inspects a model and data."""

    state = FinetuneState()

    async def ask(self, asked: Asked) -> None:
        """Begin anew."""
        await self.close()
        self.state = FinetuneState(asked)
        self._changed()
        self._begin(self._read(self.state, asked))

    async def _read(self, state: FinetuneState, asked: Asked) -> None:
        printed: list[bytes] = []

        def told(text: str) -> None:
            state.doing = text
            self._changed()

        _, said = await self._run([*COMMAND, *asked.arguments()], printed.append, told)
        with contextlib.suppress(ValueError):
            state.report = json.loads(b"".join(printed))
        if state.report is None:
            state.trouble = said.removeprefix("error: ")
        self._changed()
