"""What benchmarks share: work in a process of its own, folders for it, and what is printed at the end."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Any

from penstock.storage.files import child
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import real_path

_ANSWER = "answer: "
"""Before what a child hands over, in a line of its own; libraries may write before and after it."""
_OUTPUT_LINES = 60


class CallFailed(UserError):
    """A child broke or met its limit; the message is one line, `output` the end of what it wrote."""

    def __init__(self, reason: str, output: str = "") -> None:
        super().__init__(reason)
        self.output = output


def call(
    work: str, *arguments: Any, limit_s: float = math.inf, more: dict[str, str] | None = None, what: str = ""
) -> Any:
    """What the function `work`, as module:name, returns for `arguments` in a process of its own; all of it is JSON.
    `what` names it in messages; `more`: variables of its environment. Raises UserError of one line with the words of
    the function's own UserError, and CallFailed for any other end."""
    command = child.command("app.bench.process", work, json.dumps(arguments))
    with tempfile.TemporaryFile("w+") as output:
        code = run_limited(command, limit_s, stdout=output, stderr=output, more=more)
        output.seek(0)
        lines = output.read().strip().splitlines()
    said = what and f"{what}: "
    text = "\n".join(lines[-_OUTPUT_LINES:])
    if code is None:
        raise CallFailed(f"{said}not done after {limit_s:.0f} s, so it was stopped", text)
    handed = [line.removeprefix(_ANSWER) for line in lines if line.startswith(_ANSWER)]
    answer = json.loads(handed[-1]) if handed else {}
    if "refusal" in answer:
        raise UserError(f"{said}{answer['refusal']}")
    if code != 0 or not handed:
        raise CallFailed(f"{said}exit {code}: {last_words(text) or 'it said nothing'}", text)
    return answer["result"]


def last_words(output: str) -> str:
    """The last line, or the exception that a traceback ends with, without the notes below it; empty where none is."""
    words = [line for line in output.splitlines() if not line.startswith("[")]  # a library's note at exit: [name] ...
    if _TRACEBACK in words:
        last = len(words) - words[::-1].index(_TRACEBACK)
        words = [line for line in words[last:] if line.strip() and not line[0].isspace()][:1]
    return words[-1] if words else ""


_TRACEBACK = "Traceback (most recent call last):"


def scratch(folder: Path | None = None) -> tempfile.TemporaryDirectory[str]:
    """A folder below `folder` (the current one when none) that is removed with all that is in it."""
    return tempfile.TemporaryDirectory(prefix=".bench-", dir=folder or Path.cwd(), ignore_cleanup_errors=True)


@contextlib.contextmanager
def raised_by_signals(end: Callable[[int], BaseException], *numbers: int) -> Iterator[None]:
    """These signals raise `end` of their number in the main thread: everything is cleaned up on the way out."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise end(number)

    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def require_folders(*folders: Path | None) -> None:
    """UserError for the first that is named and not there."""
    for folder in folders:
        if folder is not None and not real_path(folder).is_dir():
            raise UserError(f"{folder}: no such folder; create it first")


def resident_bytes(field: str) -> int:
    """This process's resident memory: VmRSS now, VmHWM the highest so far."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def show(report: Any, line: str, *, as_json: bool) -> None:
    """Print a benchmark's result: its line for people, or all of it as one JSON object."""
    print(json.dumps(report, indent=2) if as_json else line)


def markdown_row(cells: Iterable[object]) -> str:
    return f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    return [markdown_row(head), "|---" * len(head) + "|", *map(markdown_row, rows)]


def run_limited(
    command: Sequence[str],
    limit_s: float,
    *,
    stdout: IO[str],
    stderr: IO[str],
    more: dict[str, str] | None = None,
    cwd: str | None = None,
    grace_s: float = 0.0,
) -> int | None:
    """The exit code of `command`, offline, None where it was ended after `limit_s` seconds and, to say what it has
    found, `grace_s` more after an interrupt. It ends with this process, and all that it started with it. `more`:
    further variables of its environment. Raises OSError."""
    # A session of its own: what it starts (compilers) ends with it.
    process = subprocess.Popen(
        command,
        env=child.environment(USE_HUB_KERNELS="0", HF_HUB_OFFLINE="1", NO_COLOR="1") | (more or {}),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        preexec_fn=child.end_with_parent,  # killed, it ends nothing that it started: the GPU is free again
    )
    try:
        return process.wait(None if limit_s == math.inf else limit_s)
    except subprocess.TimeoutExpired:
        if grace_s:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main() -> None:
    """The child: carry out the work and hand over what it returns, or the words of its refusal, with exit code 1."""
    module, _, name = sys.argv[1].partition(":")
    work = getattr(importlib.import_module(module), name)
    try:
        answer = {"result": work(*json.loads(sys.argv[2]))}
    except UserError as error:
        answer = {"refusal": " ".join(str(error).split())}
    print(f"\n{_ANSWER}{json.dumps(answer)}", flush=True)
    if "refusal" in answer:
        sys.exit(answer["refusal"])


if __name__ == "__main__":
    main()
