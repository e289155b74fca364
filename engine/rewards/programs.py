"""A program that rewards, run once for each completion."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import select
import subprocess
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, BinaryIO

from penstock.engine.config import COMMAND
from penstock.engine.rewards.processes import READ_BYTES, end, end_group, kill, wait_for, watched
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import one_line

_ROW = "PENSTOCK_ROW"
_MOST_ROW_BYTES = 100_000
"""Of a row that the environment holds; Linux takes 128 KiB a value."""
_TAIL_BYTES = 4096
"""Of what is printed, of which the last line counts."""
_NOT_RUN = (126, 127)
"""The shell's exit codes where it finds no program, or cannot start it."""


class Program:
    """`identity`: SHA-256 of the command, in hex; `timed_out`: how many of its runs were ended, which are worth 0."""

    def __init__(self, entry: str, where: str, timeout_s: float, log: BinaryIO) -> None:
        """`where`: the field that names it. Raises UserError where the shell cannot read it, or finds no program."""
        self._command = entry.removeprefix(COMMAND).strip()
        self._where, self._timeout_s, self._log = f"{where}: {one_line(entry, 200)}", timeout_s, log
        self.identity = hashlib.sha256(self._command.encode()).hexdigest()
        self.timed_out = 0
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = threading.Event()
        self._require_readable()

    def _require_readable(self) -> None:
        checked = subprocess.run(
            ["/bin/sh", "-n", "-c", self._command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
        if checked.returncode:
            said = one_line(checked.stderr.decode(errors="replace"))
            raise UserError(f"{self._where}: the shell cannot read the command ({said}); mend it")
        program = re.match(r"[\w./+-]+(?=\s|$)", self._command)
        if program is not None:
            look = ["/bin/sh", "-c", 'command -v -- "$1"', "sh", program[0]]
            if subprocess.run(look, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode:
                raise UserError(f"{self._where}: there is no program {program[0]}; install it, or name another")

    def rewards(self, texts: list[str], rows: list[dict[str, Any]]) -> list[float | None]:
        """One per completion, as many at a time as there are processors. Raises UserError where it cannot be run, or
        prints a number that is not finite."""
        self._stopped.clear()
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            try:
                found = list(pool.map(self._reward, texts, rows))
            finally:  # where one cannot be run, the others are not waited for
                pool.shutdown(wait=False, cancel_futures=True)
                self._stopped.set()
                for process in list(self._running):
                    end(process)
        self.timed_out += found.count(None)
        return [0.0 if reward is None else reward for reward in found]

    def _reward(self, text: str, row: dict[str, Any]) -> float | None:
        """None where it took too long."""
        content = json.dumps(row)
        with tempfile.TemporaryDirectory(prefix="penstock-") as folder, tempfile.TemporaryFile() as given:
            if len(content) > _MOST_ROW_BYTES:
                path = os.path.join(folder, "row.json")
                with open(path, "w", encoding="utf-8") as file:
                    file.write(content)
                content = path
            given.write(text.encode(errors="replace"))
            given.seek(0)
            process = subprocess.Popen(
                ["/bin/sh", "-c", self._command],
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=os.environ | {_ROW: content},
                start_new_session=True,
            )
            self._running.add(process)
            try:
                return 0.0 if self._stopped.is_set() else self._worth(*self._outcome(process))
            finally:
                kill(process)
                self._running.discard(process)

    def _outcome(self, process: subprocess.Popen[bytes]) -> tuple[int | None, str]:
        """Exit code, None where it took too long, and the last line that it printed."""
        assert process.stdout is not None
        printed, tail = process.stdout.fileno(), b""
        deadline, is_open, has_ended = time.monotonic() + self._timeout_s, True, False
        with watched(process) as ended:
            while is_open or not has_ended:
                if time.monotonic() > deadline:  # which whoever never stops printing would not meet otherwise
                    return None, ""
                # What it started may hold its output open; of an ended one only what is there already counts.
                events = {} if has_ended else {ended: select.POLLIN}
                ready = wait_for(events | ({printed: select.POLLIN} if is_open else {}), 0 if has_ended else deadline)
                if not ready and not has_ended:
                    return None, ""
                has_ended = has_ended or ended in ready
                if printed in ready:
                    data = os.read(printed, READ_BYTES)
                    tail, is_open = (tail + data)[-_TAIL_BYTES:], bool(data)
                elif has_ended:
                    break
        end_group(process)
        process.wait()
        lines = tail.decode(errors="replace").split("\n")
        return process.returncode, next((line.strip() for line in reversed(lines) if line.strip()), "")

    def _worth(self, code: int | None, said: str) -> float | None:
        if code is None:
            return None
        if code in _NOT_RUN:
            raise UserError(f"{self._where}: exit code {code}: the shell found no such program, or cannot start it")
        reward = 1.0
        with suppress(ValueError):
            reward = float(said)
        if not math.isfinite(reward) and code == 0:
            raise UserError(f"{self._where}: it printed {said} as its last line; a reward must be finite")
        return reward if code == 0 else 0.0
