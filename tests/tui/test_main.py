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

import real_runs

PENSTOCK = [sys.executable, "-m", "tui.main"]


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


def test_without_a_terminal_it_says_so(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 2
    assert "needs a terminal" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_line_has_both_commands_more(tmp_path: Path) -> None:
    done = run(tmp_path, "--help")
    assert done.returncode == 0
    for name in ("train", "plan", "watch", "serve"):
        assert name in done.stdout


def test_watching_a_run_that_is_not_there_names_the_nearest(root: Path) -> None:
    done = run(root, "watch", "frist")
    assert done.returncode == 2
    assert "did you mean 'first'?" in done.stderr


def test_nothing_heavy_is_imported_for_the_first_frame() -> None:
    code = (
        "import sys, tui.app, tui.screens.home; "
        "print(*({'torch', 'transformers', 'tensorstore', 'engine.train', 'numpy', 'typer'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=real_runs.environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


class Terminal:
    """The command in a pseudo-terminal; `text` is all that it has written."""

    def __init__(self, folder: Path, *arguments: str, size: tuple[int, int] = (36, 120), **environment: str) -> None:
        self.text = ""
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.execvpe(PENSTOCK[0], [*PENSTOCK, *arguments], real_runs.environment() | {"TERM": "xterm"} | environment)
        self.resize(*size)

    def resize(self, rows: int, columns: int) -> None:
        ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def until(self, text: str, timeout_s: float = 30.0) -> None:
        """Read until `text` has been written since the last call."""
        found, deadline = "", time.monotonic() + timeout_s
        while text not in found:
            assert time.monotonic() < deadline, found[-2000:]
            if select.select([self._fd], [], [], 0.1)[0]:
                found += os.read(self._fd, 65536).decode(errors="replace")
        self.text += found

    def end(self, timeout_s: float = 20.0) -> int:
        """Wait for the process; its exit code."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if select.select([self._fd], [], [], 0.05)[0]:
                with suppress(OSError):
                    self.text += os.read(self._fd, 65536).decode(errors="replace")
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
        os.kill(self.pid, signal.SIGKILL)
        raise AssertionError("it did not end")


def test_in_a_terminal_it_shows_home_and_leaves_the_terminal_as_it_was(root: Path) -> None:
    terminal = Terminal(root)
    terminal.until("quickstart")
    terminal.resize(24, 80)
    terminal.press("q")
    assert terminal.end() == 0
    assert "\x1b[?1049l" in terminal.text  # back from the alternate screen
    assert "Traceback" not in terminal.text


def test_no_color_and_no_unicode(root: Path) -> None:
    terminal = Terminal(root, NO_COLOR="1", PENSTOCK_ASCII="1")
    terminal.until("quickstart")
    terminal.press("q")
    assert terminal.end() == 0
    shown = terminal.text
    assert all(ord(letter) < 0x2500 for letter in shown), {letter for letter in shown if ord(letter) >= 0x2500}


def test_watch_opens_the_run(root: Path) -> None:
    terminal = Terminal(root, "watch", "first")
    terminal.until("finished")
    terminal.press("q")
    assert terminal.end() == 0
