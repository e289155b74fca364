"""Asks the plan server, a process beside the application, and keeps the newest answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from penstock.app.recipes.recipe import Recipe, to_dict
from penstock.storage.files import child
from penstock.tui.data import processes

Phase = Literal["idle", "starting", "planning", "advising", "done"]

DEBOUNCE_S = 0.3
_LINE_BYTES = 1 << 24
_STDERR_LINES = 20
_LAST_WORDS_S = 2.0
"""A server's reason may be read after its end; what it started may hold its stderr open for longer."""
SERVER = tuple(child.command("app.planning.server"))


@dataclass(frozen=True, slots=True)
class PlanState:
    """What is known of the plan now."""

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
    """The recipe that begins with random weights, where that was asked for."""


class PlanClient:
    """Newest request wins. Lives in one event loop; `changed` is called there whenever `state` is another."""

    def __init__(
        self,
        root: Path,
        changed: Callable[[], None],
        *,
        debounce_s: float | None = None,
        command: Sequence[str] | None = None,
        niceness: int = 0,
    ) -> None:
        """`niceness`: by how much the server gives way to all else."""
        self.state = PlanState()
        self._root, self._changed, self._command = root, changed, command or SERVER
        self._debounce_s = DEBOUNCE_S if debounce_s is None else debounce_s
        self._niceness = niceness
        self._number = 0
        self._wanted: dict[str, Any] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._ready = False
        self._restarted = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._serving: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._stderr: deque[str] = deque(maxlen=_STDERR_LINES)
        self._waiting: asyncio.Future[PlanState] | None = None
        """For the answer to the newest request."""

    def request(
        self,
        recipe: Recipe,
        machine: str | None,
        *,
        from_scratch: bool = False,
        advice: bool = True,
        at_once: bool = False,
        fetch: bool = False,
    ) -> int:
        """Ask for a plan once no newer request came for a moment; returns the request's number.

        `fetch`: of a model on the hub, config.json may be fetched.
        """
        self._number += 1
        self._wanted = {
            "id": self._number,
            "recipe": to_dict(recipe),
            "machine": machine or None,
            "from_scratch": from_scratch,
            "advice": advice,
            "fetch": fetch,
        }
        self._drop_waiting()
        phase: Phase = "planning" if self._ready else "starting"
        self._set(replace(self.state, phase=phase, stale=self.state.forecast is not None, error=None, trouble=None))
        self._cancel_timer()
        delay_s = 0.0 if at_once or self._process is None else self._debounce_s
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._submit)
        return self._number

    async def plan(
        self,
        recipe: Recipe,
        machine: str | None,
        *,
        from_scratch: bool = False,
        advice: bool = True,
        fetch: bool = False,
    ) -> PlanState | None:
        """The plan without advice, or why there is none; None where a newer request came in between.

        `advice` False: the server does not go on to find any. `fetch`: as for `request`.
        """
        self.request(recipe, machine, from_scratch=from_scratch, advice=advice, at_once=True, fetch=fetch)
        answer = self._waiting = asyncio.get_running_loop().create_future()
        try:
            return await answer
        except asyncio.CancelledError:
            if answer.cancelled():
                return None
            raise

    def forget(self) -> None:
        """What is shown belongs to no valid recipe any more, and nothing is asked."""
        self._number += 1
        self._wanted = None
        self._drop_waiting()
        self._cancel_timer()
        self._set(replace(self.state, phase="idle", stale=self.state.forecast is not None, error=None))

    def retry(self) -> None:
        """Ask the same again, of a new server where the old one is gone."""
        self._restarted = False
        if self._wanted is not None:
            self._set(replace(self.state, phase="starting", trouble=None))
            self._submit()

    async def close(self) -> None:
        """End the server; a later request starts another."""
        self._cancel_timer()
        self._drop_waiting()
        process, self._process, self._ready = self._process, None, False
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await processes.end(process)

    def _submit(self) -> None:
        self._timer = None
        if self._process is None:
            if self._serving is None or self._serving.done():
                self._serving = self._spawn(self._serve())
        elif self._wanted is not None and self._process.stdin is not None:
            with contextlib.suppress(ConnectionError, RuntimeError):
                self._process.stdin.write(json.dumps(self._wanted).encode() + b"\n")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _serve(self) -> None:
        """One server's life, and once another's after it."""
        while True:
            why = await self._one_server()
            self._process, self._ready = None, False
            if self._restarted:
                self._set(replace(self.state, phase="idle", trouble=f"the planner stopped again: {why}"))
                self._answer(self.state)
                return
            self._restarted = True
            self._set(replace(self.state, phase="starting", trouble=f"the planner stopped ({why}); restarting it"))

    async def _one_server(self) -> str:
        """Returns why it ended."""
        self._stderr.clear()
        try:
            process = await processes.begin(
                self._command, self._root, stdin=asyncio.subprocess.PIPE, line_bytes=_LINE_BYTES
            )
        except OSError as error:
            return str(error)
        if self._niceness:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, process.pid, self._niceness)
        self._process = process
        assert process.stdout is not None
        assert process.stderr is not None
        reading = self._spawn(self._read_stderr(process.stderr))
        self._submit()  # waits in the pipe until the server has loaded
        while line := await process.stdout.readline():
            with contextlib.suppress(ValueError):
                self._take(json.loads(line))
        code = await process.wait()
        await asyncio.wait([reading], timeout=_LAST_WORDS_S)
        return self._stderr[-1] if self._stderr else f"exit code {code}"

    async def _read_stderr(self, stream: asyncio.StreamReader) -> None:
        while line := await stream.readline():
            if text := line.decode(errors="replace").strip():
                self._stderr.append(text)

    def _take(self, answer: dict[str, Any]) -> None:
        """One answer; those to older requests are dropped."""
        if answer.get("ready"):
            self._ready = True
            if self.state.phase == "starting":
                self._set(replace(self.state, phase="planning", trouble=None))
        elif self._wanted is not None and answer.get("id") == self._number:
            self._restarted = False
            if "error" in answer:
                stale = self.state.forecast is not None
                state = replace(self.state, phase="done", error=str(answer["error"]), stale=stale, recipe=None)
            else:
                phase: Phase = "done" if answer.get("done") else "advising"
                state = PlanState(phase, answer["forecast"], recipe=answer.get("recipe"))
            self._set(state)
            self._answer(state)

    def _set(self, state: PlanState) -> None:
        if state != self.state:
            self.state = state
            self._changed()

    def _answer(self, state: PlanState) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(state)

    def _drop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
