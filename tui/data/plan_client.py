"""Asks the plan server, a process beside the application, and keeps the newest answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from penstock.app.recipes.recipe import Recipe, to_dict
from penstock.storage.files import child
from penstock.tui.data.processes import Client

Phase = Literal["idle", "starting", "planning", "advising", "done"]

DEBOUNCE_S = 0.3
SERVER = tuple(child.command("app.planning.server"))


@dataclass(frozen=True, slots=True)
class PlanState:
    phase: Phase = "idle"
    """advising: the plan is there, and what would help most is being tried."""
    forecast: dict[str, Any] | None = None
    """The newest one, of an older request while `stale`."""
    stale: bool = False
    error: str | None = None
    """Why the request could not be planned: the user's to mend."""
    trouble: str | None = None
    """What is wrong with the planner itself."""
    recipe: dict[str, Any] | None = None
    """The recipe that begins with random weights, where that was requested."""


class PlanClient(Client):
    """Newest request wins. Lives in one event loop; `changed` is called there whenever `state` is another."""

    def __init__(self, root: Path, changed: Callable[[], None], *, niceness: int = 0) -> None:
        """`niceness`: of the server's process."""
        super().__init__(root, changed)
        self.state = PlanState()
        self._niceness = niceness
        self._number = 0
        self._wanted: dict[str, Any] | None = None
        self._ready = self._restarted = False
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: asyncio.Future[PlanState] | None = None

    def request(self, recipe: Recipe, machine: str | None, *, at_once: bool = False, **options: bool) -> None:
        """Ask for a plan once no newer request came for a moment.

        `options` of the request as app/planning/server.py has them: `from_scratch`, `advice`, `fetch`.
        """
        self._drop_request()
        self._wanted = {"id": self._number, "recipe": to_dict(recipe), "machine": machine or None} | options
        self._outdate(phase="planning" if self._ready else "starting", trouble=None)
        delay_s = 0.0 if at_once or self._process is None else DEBOUNCE_S
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._submit)

    async def plan(self, recipe: Recipe, machine: str | None, **options: bool) -> PlanState | None:
        """The plan without advice, or why there is none; None where a newer request came in between."""
        self.request(recipe, machine, at_once=True, **options)
        answer = self._waiting = asyncio.get_running_loop().create_future()
        try:
            return await answer
        except asyncio.CancelledError:
            if answer.cancelled():
                return None
            raise

    def forget(self) -> None:
        """What is shown belongs to no valid recipe any more, and nothing is asked."""
        self._drop_request()
        self._outdate(phase="idle")

    def retry(self) -> None:
        """Ask the same again, of a new server where the old one is gone."""
        self._restarted = False
        if self._wanted is not None:
            self._set(phase="starting", trouble=None)
            self._submit()

    async def close(self) -> None:
        """End the server; a later request starts another."""
        self._drop_request()
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._ready = False

    def _drop_request(self) -> None:
        self._number += 1
        self._wanted = None
        if self._waiting is not None:
            self._waiting.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self._waiting = self._timer = None

    def _submit(self) -> None:
        if self._process is None:
            if self._task is None or self._task.done():
                self._task = asyncio.get_running_loop().create_task(self._serve())
        elif self._wanted is not None and self._process.stdin is not None:
            with contextlib.suppress(ConnectionError, RuntimeError):
                self._process.stdin.write(json.dumps(self._wanted).encode() + b"\n")

    async def _serve(self) -> None:
        while True:
            _, why = await self._run(SERVER, self._take, begun=self._begun)
            self._ready = False
            if self._restarted:
                self._set(phase="idle", trouble=f"the planner stopped again: {why}")
                self._answer()
                return
            self._restarted = True
            self._set(phase="starting", trouble=f"the planner stopped ({why}); restarting it")

    def _begun(self) -> None:
        if self._niceness and self._process is not None:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, self._process.pid, self._niceness)
        self._submit()  # waits in the pipe until the server has loaded

    def _take(self, line: bytes) -> None:
        """One answer; those to older requests are dropped."""
        try:
            answer = json.loads(line)
        except ValueError:
            return
        if answer.get("ready"):
            self._ready = True
            if self.state.phase == "starting":
                self._set(phase="planning", trouble=None)
        elif self._wanted is not None and answer.get("id") == self._number:
            self._restarted = False
            if "error" in answer:
                self._outdate(phase="done", error=str(answer["error"]), recipe=None)
            else:
                phase: Phase = "done" if answer.get("done") else "advising"
                forecast, recipe = answer["forecast"], answer.get("recipe")
                self._set(phase=phase, forecast=forecast, stale=False, error=None, trouble=None, recipe=recipe)
            self._answer()

    def _outdate(self, **changes: Any) -> None:
        """Another state, in which the forecast is of an older request."""
        self._set(**{"stale": self.state.forecast is not None, "error": None} | changes)

    def _set(self, **changes: Any) -> None:
        state = replace(self.state, **changes)
        if state != self.state:
            self.state = state
            self._changed()

    def _answer(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(self.state)
