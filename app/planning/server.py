"""Plans on request: `python -m penstock.app.planning.server` reads requests, writes forecasts: a JSON object a line.

Request: {"id", "recipe": nested dicts, "machine": name | null, "from_scratch": bool, "advice": bool, "fetch": bool
(whether config.json of a model on the hub may be fetched)}. Answers: {"ready": true} once all is loaded; then {"id",
"error": text}, or {"id", "forecast", "done": false} without advice and another with it and "done": true, which is the
only one where none is wanted. "recipe" is that of the random weights that were asked for.

Each request is planned in a fork, which the next one ends at once; here nothing is computed, and no device is touched.
It ends when its standard input is closed.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from penstock.app.hub.names import stay_offline
from penstock.storage.files import child
from penstock.storage.files.errors import UserError

_READ_BYTES = 1 << 16
_NICE = 5
"""A plan gives way to the terminal that shows it, and to a training beside it."""
_LOADED = (
    "penstock.app.launch.run",
    "penstock.app.runs.trace",
    "penstock.engine.forecast.advice",
    "penstock.engine.data.corpus.prepare",
    "penstock.engine.forecast.report",
    "penstock.engine.forecast.request",
    "penstock.engine.hf.config",
    "penstock.engine.model.anatomy",
    "penstock.engine.machine.presets",
    "penstock.engine.forecast.extrapolate",
)
_Send = Callable[[dict[str, Any]], None]


class PlanServer:
    """One request at a time, the newest: `plan` is called in a fork and gives answers to the function it is given."""

    def __init__(self, requests: int, answers: int, plan: Callable[[dict[str, Any], _Send], None]) -> None:
        self._requests, self._answers, self._plan = requests, answers, plan
        self._child: BaseProcess | None = None
        self._child_id: Any = None
        self._pipe: Connection | None = None
        self._pending = b""

    def serve(self) -> None:
        try:
            while True:
                if self._requests not in wait([self._requests, *filter(None, [self._pipe])]):
                    self._relay()
                elif not self._read_requests():
                    return
        finally:
            self._end_child()

    def send(self, answer: Any) -> None:
        self._write(json.dumps(answer).encode())

    def _write(self, answer: bytes) -> None:
        data = answer + b"\n"
        while data:
            data = data[os.write(self._answers, data) :]

    def _read_requests(self) -> bool:
        """Begin with the last request that has come; False at the end of them."""
        data = os.read(self._requests, _READ_BYTES)
        if not data:
            return False
        *lines, self._pending = (self._pending + data).split(b"\n")
        result = [line for line in lines if line.strip()]
        if result:
            self._end_child()
            self._begin(result[-1])
        return True

    def _begin(self, line: bytes) -> None:
        try:
            request = json.loads(line)
            self._child_id = request["id"]
        except (ValueError, TypeError, KeyError) as error:
            self.send({"id": None, "error": f"not a request: {error}"})
            return
        _load_architecture(request)
        fork = multiprocessing.get_context("fork")
        self._pipe, ours = fork.Pipe(duplex=False)
        self._child = fork.Process(target=_work, args=(self._plan, request, ours, os.getpid()))
        self._child.start()
        ours.close()

    def _relay(self) -> None:
        """Whole answers only: what a killed child had half written is dropped."""
        assert self._child is not None
        assert self._pipe is not None
        try:
            answer = self._pipe.recv_bytes()
        except (EOFError, OSError):
            self._child.join()
            status = self._child.exitcode
            self._end_child()
            if status:
                how = f"signal {-status}" if status < 0 else f"exit code {status}"
                error = f"the planner's process ended ({how}); perhaps memory is short"
                self.send({"id": self._child_id, "error": error})
        else:
            self._write(answer)

    def _end_child(self) -> None:
        if self._child is not None and self._pipe is not None:
            self._child.kill()
            self._child.join()
            self._pipe.close()
        self._child = self._pipe = None


def _load_architecture(request: Any) -> None:
    """Import the model's code here, where every later request finds it."""
    try:
        name = request["recipe"]["model"]["model_type"]
        if re.fullmatch(r"[a-z][a-z0-9_]*", name):
            importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    except Exception:
        return  # planning says what is wrong with it


def _work(plan: Callable[[dict[str, Any], _Send], None], request: dict[str, Any], out: Connection, parent: int) -> None:
    """A child's life. No plan outlives the server, however that ends."""
    child.end_with_parent(parent)
    os.nice(_NICE)

    def send(answer: dict[str, Any]) -> None:
        out.send_bytes(json.dumps({"id": request["id"]} | answer).encode())

    try:
        plan(request, send)
    except UserError as error:
        send({"error": str(error)})
    except BaseException as error:
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        send({"error": f"planning failed: {type(error).__name__}: {reason}"})


def plan_request(request: dict[str, Any], send: _Send) -> None:
    """Answer one request; relative paths are taken from the current folder. Raises UserError."""
    from penstock.app.hub.fetch import for_plan
    from penstock.app.planning.inputs import from_scratch
    from penstock.app.planning.opened import opened
    from penstock.app.planning.plan import plan_stages
    from penstock.app.recipes.recipe import from_dict, resolve_paths, to_dict

    given = resolve_paths(from_dict(request["recipe"]), Path.cwd())
    recipe = for_plan(given, fetch=bool(request.get("fetch")))
    extra: dict[str, Any] = {}
    if request.get("from_scratch"):
        recipe = from_scratch(recipe)
        data = replace(given.data, tokenizer=given.data.tokenizer or recipe.data.tokenizer)
        extra = {"recipe": to_dict(replace(recipe, data=data))}
    recipe, said = opened(recipe)
    stages = plan_stages(recipe, request.get("machine") or None, said=said)
    if not request.get("advice", True):
        send({"forecast": next(stages), "done": True} | extra)
        return
    for done, forecast in zip((False, True), stages, strict=True):
        send({"forecast": forecast, "done": done} | extra)


def main() -> None:
    """Serve on standard input and output; what libraries print goes to standard error."""
    stay_offline()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a pool of threads would not survive a fork
    answers = os.dup(1)
    os.dup2(2, 1)
    for module in _LOADED:
        importlib.import_module(module)
    server = PlanServer(0, answers, plan_request)
    try:
        server.send({"ready": True})
        server.serve()
    except (BrokenPipeError, KeyboardInterrupt):
        sys.exit(0)


if __name__ == "__main__":
    main()
