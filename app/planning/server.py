"""Plans on request: `python -m penstock.app.planning.server` reads requests, writes forecasts: a JSON object a line.

Request: {"id", "recipe": nested dicts, "machine": name | null, "from_scratch": bool, "advice": bool, "fetch": bool
(whether config.json of a model on the hub may be fetched)}. Answers:
{"ready": true} once all is loaded; then for a request {"id", "forecast", "done": false} without advice and again with
it and "done": true, or {"id", "error": text}; where no advice is wanted the first one is done. Where random weights
were asked for, "recipe" is the recipe that begins with them.

Torch and the planner are loaded once. Each request is planned in a fork, so that the next one ends it at once; here
itself nothing is computed, and no device is touched. It ends when its standard input is closed.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import selectors
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
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
    """One request at a time, the newest: `plan` is called in a fork and writes answers to the file it is given."""

    def __init__(self, requests: int, answers: int, plan: Callable[[dict[str, Any], _Send], None]) -> None:
        self._requests, self._answers, self._plan = requests, answers, plan
        self._selector = selectors.DefaultSelector()
        self._selector.register(requests, selectors.EVENT_READ)
        self._child: int | None = None
        self._child_pipe = -1
        self._child_id: Any = None
        self._pending = b""
        self._answer = b""

    def serve(self) -> None:
        try:
            while True:
                for key, _ in self._selector.select():
                    if key.fd == self._child_pipe:
                        self._relay()
                    elif key.fd == self._requests and not self._read_requests():
                        return
        finally:
            self._end_child()

    def send(self, answer: Any) -> None:
        _write(self._answers, answer)

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
            identity = request["id"]
        except (ValueError, TypeError, KeyError) as error:
            self.send({"id": None, "error": f"not a request: {error}"})
            return
        _load_architecture(request)
        read, write = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _die_with(parent)
            os.close(read)
            os._exit(_work(self._plan, request, write))
        os.close(write)
        self._child, self._child_pipe, self._child_id, self._answer = pid, read, identity, b""
        self._selector.register(read, selectors.EVENT_READ)

    def _relay(self) -> None:
        """Whole answers only: what a killed child had half written is dropped."""
        data = os.read(self._child_pipe, _READ_BYTES)
        *lines, self._answer = (self._answer + data).split(b"\n")
        for line in lines:
            _write_all(self._answers, line + b"\n")
        if not data:
            identity, status = self._child_id, self._reap()
            if status != 0:
                how = f"signal {-status}" if status < 0 else f"exit code {status}"
                self.send({"id": identity, "error": f"the planner's process ended ({how}); perhaps memory is short"})

    def _end_child(self) -> None:
        if self._child is not None:
            os.kill(self._child, signal.SIGKILL)
            self._reap()

    def _reap(self) -> int:
        """Exit code of the child, negative for a signal."""
        assert self._child is not None
        self._selector.unregister(self._child_pipe)
        os.close(self._child_pipe)
        _, status = os.waitpid(self._child, 0)
        self._child, self._child_pipe = None, -1
        return os.waitstatus_to_exitcode(status)


def _write(file: int, answer: dict[str, Any]) -> None:
    _write_all(file, json.dumps(answer).encode() + b"\n")


def _write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


def _die_with(parent: int) -> None:
    """No plan outlives the server, however that ends."""
    child.end_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    os.nice(_NICE)


def _load_architecture(request: Any) -> None:
    """Import the model's code here, where every later request finds it."""
    try:
        name = request["recipe"]["model"]["model_type"]
        if re.fullmatch(r"[a-z][a-z0-9_]*", name):
            importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    except Exception:
        return  # planning says what is wrong with it


def _work(plan: Callable[[dict[str, Any], _Send], None], request: dict[str, Any], out: int) -> int:
    """A child's life; returns its exit code."""

    def send(answer: dict[str, Any]) -> None:
        _write(out, {"id": request["id"]} | answer)

    try:
        plan(request, send)
    except UserError as error:
        send({"error": str(error)})
    except BaseException as error:
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        send({"error": f"planning failed: {type(error).__name__}: {reason}"})
    return 0


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
