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
    """What is known now."""

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
    """Inspects a model and data."""

    state = FinetuneState()

    async def ask(self, request: FinetuneRequest) -> None:
        """Begin anew."""
        await self.close()
        self.state = FinetuneState(request)
        self._changed()
        self._begin(self._read(self.state, request))

    async def _read(self, state: FinetuneState, request: FinetuneRequest) -> None:
        printed: list[bytes] = []

        def told(text: str) -> None:
            state.doing = text
            self._changed()

        _, said = await self._run([*COMMAND, *request.arguments()], printed.append, told)
        with contextlib.suppress(ValueError):
            state.report = json.loads(b"".join(printed))
        if state.report is None:
            state.trouble = said.removeprefix("error: ")
        self._changed()
