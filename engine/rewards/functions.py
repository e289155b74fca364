"""A Python function that rewards, called in a process of its own (worker.py)."""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, BinaryIO

from penstock.engine.config import reward_function
from penstock.engine.rewards.processes import READ_BYTES, kill, wait_for, watched
from penstock.storage.files import child
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import one_line

OPENING_S = 300.0
"""In which a file is imported, with libraries that may be large."""
_MOST_BYTES = 1 << 26
"""Of an answer."""


class Function:
    """`identity`: SHA-256 of its file, in hex."""

    def __init__(self, entry: str, where: str, timeout_s: float, log: BinaryIO) -> None:
        """`where`: the field that names it. Raises UserError where file or function are not there, or not to be
        imported."""
        name, function = reward_function(entry)
        self._where, self._timeout_s = f"{where}: {one_line(entry, 200)}", timeout_s
        file = Path(name).expanduser().absolute()
        if not file.is_file():
            raise UserError(
                f"{self._where}: there is no such file; name one, from the current folder or by its whole path"
            )
        try:
            self.identity = hashlib.sha256(file.read_bytes()).hexdigest()
        except OSError as error:
            raise UserError(f"{self._where}: the file cannot be read ({error.strerror}); give one that can") from error
        self._process = subprocess.Popen(
            child.command("engine.rewards.worker"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            # What it prints comes into the log at once, and whatever a completion holds.
            env=child.environment(PYTHONUNBUFFERED="1", PYTHONIOENCODING="utf-8:backslashreplace"),
            start_new_session=True,
        )
        try:
            self._request({"file": str(file), "function": function}, OPENING_S, "importing the file", "the file")
        except BaseException:
            self.close()
            raise

    def rewards(self, arguments: dict[str, Any], count: int) -> list[float | None]:
        """One per completion. Raises UserError in a line where the function does not give them."""
        what, way_out = f"rewarding {count:,} completions", "the function, or raise grpo.reward_timeout_s"
        answer = self._request(arguments, self._timeout_s, what, way_out)
        rewards: list[float | None] = answer["rewards"]
        if len(rewards) != count:
            raise UserError(f"{self._where}: it returned {len(rewards):,} rewards for {count:,} completions")
        return rewards

    def close(self) -> None:
        kill(self._process)

    def _request(self, message: dict[str, Any], timeout_s: float, what: str, mend: str) -> dict[str, Any]:
        if self._process.returncode is not None:
            raise UserError(f"{self._where}: its process has ended")
        line = self._exchange(json.dumps(message).encode() + b"\n", time.monotonic() + timeout_s)
        if line is None:
            self.close()
            raise UserError(f"{self._where}: {what} took longer than {timeout_s:g} s and was ended; mend {mend}")
        answer: dict[str, Any] = json.loads(line) if line.endswith(b"\n") else {"error": self._died()}
        if "error" in answer:
            at = f", line {answer['line']}" if answer.get("line") else ""
            raise UserError(f"{self._where}{at}: {one_line(answer['error'])}")
        return answer

    def _exchange(self, message: bytes, deadline: float) -> bytes | None:
        """The line that comes back; without an end where the process died, None where it is too late."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        to, answers = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(to, False)
        unsent, line = memoryview(message), bytearray()
        with watched(self._process) as ended:
            while not line.endswith(b"\n") and len(line) < _MOST_BYTES:
                events = {answers: select.POLLIN, ended: select.POLLIN} | ({to: select.POLLOUT} if unsent else {})
                ready = wait_for(events, deadline)
                if not ready:
                    return None
                if to in ready:
                    try:
                        unsent = unsent[os.write(to, unsent[:READ_BYTES]) :]
                    except BrokenPipeError:
                        unsent = unsent[:0]
                if answers in ready and (data := os.read(answers, READ_BYTES)):
                    line += data
                elif answers in ready or ended in ready:
                    break
        return bytes(line)

    def _died(self) -> str:
        """How the process ended, in words; all of it then has."""
        assert self._process.stdout is not None
        with watched(self._process) as ended:
            wait_for({ended: select.POLLIN}, time.monotonic() + 1)
        status = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        self.close()
        if status is not None and status.si_code != os.CLD_EXITED:
            name = signal.Signals(status.si_status).name
            more = "; SIGKILL usually means out of memory" if name == "SIGKILL" else ""
            return f"its process was killed by {name}{more}"
        return "its process ended" + (f" with exit code {status.si_status}" if status is not None else "")
