"""The process of a reward function: it imports the function's file once, and calls the function when it is told to.

An object as JSON in a line comes on its standard input, and one goes back: first `file` and `function`, then the
arguments of each call. What the function prints goes to standard error. It ends when its input does, with all of its
group, whatever the function is at.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import os
import queue
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, BinaryIO

_MOST_CHARS = 1000
"""Of an error."""


def main() -> None:
    given, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(given, requests), daemon=True).start()
    opening = json.loads(requests.get())
    file, name, function = Path(opening["file"]), opening["function"], None
    while True:
        try:
            if function is None:
                function = _find(file, name)
                answer: dict[str, Any] = {}
            else:
                answer = {"rewards": _called(function, json.loads(requests.get()))}
        except BaseException as error:  # the function's own, whatever it derives from
            answer = _fault(file, error)
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()
        if function is None:
            return


def _receive(given: BinaryIO, requests: queue.SimpleQueue[bytes]) -> None:
    """In a thread, as functions run in the main one, where alone they may set alarms."""
    for line in given:
        requests.put(line)
    os.killpg(0, signal.SIGKILL)


class _Fault(Exception):
    """What is wrong with a function, in words."""


def _find(file: Path, name: str) -> Any:
    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(file.stem, module)
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        functions = [
            key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")
        ]
        raise _Fault(f"there is no function '{name}' in it; it has {', '.join(functions) or 'none'}")
    return function


def _called(function: Any, arguments: dict[str, Any]) -> list[float | None]:
    result = function(**arguments)
    if inspect.isawaitable(result):
        result = asyncio.run(_awaited(result))
    if isinstance(result, str | bytes | dict):
        raise _Fault(f"it returned {type(result).__name__}; expected a list of numbers")
    try:
        values = list(result)
    except TypeError:
        raise _Fault(f"it returned {type(result).__name__}; expected a list of numbers") from None
    return [_number(value, at) for at, value in enumerate(values)]


async def _awaited(result: Any) -> Any:
    return await result


def _number(value: Any, at: int) -> float | None:
    """A number of whatever library, or None."""
    try:
        if value is None or not isinstance(value, str | bytes):
            return None if value is None else float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise _Fault(f"its reward for completion {at} is {repr(value)[:80]}, which is no number")


def _fault(file: Path, error: BaseException) -> dict[str, Any]:
    """What was wrong, and the last line of the file that had to do with it."""
    if isinstance(error, _Fault):
        return {"error": str(error)[:_MOST_CHARS]}
    traceback.print_exception(error)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    line = error.lineno if isinstance(error, SyntaxError) and error.filename == str(file) else (lines or [None])[-1]
    said = traceback.format_exception_only(error)[-1].strip()
    if isinstance(error, TypeError) and line is None:
        said += "; let the function take **kwargs, as it is given all columns of the data"
    return {"error": said[:_MOST_CHARS], "line": line}


if __name__ == "__main__":
    main()
