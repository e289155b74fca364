"""The `penstock` command as a user starts it: in a terminal, and without one."""

from __future__ import annotations

import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from contextlib import suppress
from fcntl import ioctl
from pathlib import Path

import pytest
import real_runs

PENSTOCK = [sys.executable, "-m", "penstock.tui.main"]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PENSTOCK, *arguments],
        cwd=folder,
        env=real_runs.environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("arguments", "code", "parts"),
    [
        ([], 2, ["needs a terminal"]),
        (["--help"], 0, ["train", "plan", "watch", "serve"]),
        (["watch", "frist"], 2, ["did you mean 'first'?"]),
    ],
)
def test_without_a_terminal(root: Path, arguments: list[str], code: int, parts: list[str]) -> None:
    done = run(root, *arguments)
    assert done.returncode == code
    assert all(part in done.stdout + done.stderr for part in parts)
    assert "Traceback" not in done.stderr


def test_nothing_heavy_is_imported_for_the_first_frame() -> None:
    code = (
        "import sys, penstock.tui.app, penstock.tui.screens.home; "
        "heavy = {'torch', 'transformers', 'tensorstore', 'penstock.engine.train', 'numpy', 'typer'}; "
        "print(*(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=real_runs.environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


class Terminal:
    """The command in a pseudo-terminal; `text` is all that it has written."""

    def __init__(self, folder: Path, *arguments: str, **environment: str) -> None:
        self.text = ""
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.execvpe(PENSTOCK[0], [*PENSTOCK, *arguments], real_runs.environment() | {"TERM": "xterm"} | environment)
        self.resize(36, 120)

    def resize(self, rows: int, columns: int) -> None:
        ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def _read(self) -> str:
        """What it has written by now, or writes in a moment."""
        with suppress(OSError):  # it has ended
            if select.select([self._fd], [], [], 0.1)[0]:
                return os.read(self._fd, 65536).decode(errors="replace")
        return ""

    def until(self, text: str, timeout_s: float = 30.0) -> None:
        """Read until `text` has been written since the last call."""
        found, deadline = "", time.monotonic() + timeout_s
        while text not in found:
            assert time.monotonic() < deadline, found[-2000:]
            found += self._read()
        self.text += found

    def end(self, timeout_s: float = 20.0) -> int:
        """Wait for the process; its exit code."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.text += self._read()
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
        os.kill(self.pid, signal.SIGKILL)
        raise AssertionError("it did not end")


@pytest.mark.parametrize(
    ("arguments", "text", "environment"),
    [([], "quickstart", {}), (["watch", "first"], "finished", {"NO_COLOR": "1", "PENSTOCK_ASCII": "1"})],
    ids=["usual", "ascii"],
)
def test_in_a_terminal_it_leaves_that_as_it_was(
    root: Path, arguments: list[str], text: str, environment: dict[str, str]
) -> None:
    terminal = Terminal(root, *arguments, **environment)
    terminal.until(text)
    terminal.resize(24, 80)
    terminal.press("q")
    assert terminal.end() == 0
    assert "\x1b[?1049l" in terminal.text  # back from the alternate screen
    assert "Traceback" not in terminal.text
    assert not environment or all(ord(letter) < 0x2500 for letter in terminal.text)
