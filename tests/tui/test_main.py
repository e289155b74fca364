"""The `penstock` command as a user starts it: in a terminal, and without one."""

import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from fcntl import ioctl
from pathlib import Path
from typing import Any

import pytest
import real_runs

PENSTOCK = (sys.executable, "-m", "penstock.tui.main")


def run(folder: Path, *arguments: str, program: tuple[str, ...] = PENSTOCK) -> subprocess.CompletedProcess[str]:
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 60}
    return subprocess.run([*program, *arguments], cwd=folder, env=real_runs.environment(), **options)


def test_without_a_terminal_and_nothing_heavy_is_imported_for_the_first_frame(root: Path) -> None:
    for arguments, code, parts in (
        ([], 2, ["needs a terminal"]),
        (["--help"], 0, ["train", "plan", "watch", "serve"]),
        (["watch", "frist"], 2, ["did you mean 'first'?"]),
    ):
        done = run(root, *arguments)
        assert done.returncode == code
        assert all(part in done.stdout + done.stderr for part in parts)
        assert "Traceback" not in done.stderr
    heavy = {"torch", "transformers", "tensorstore", "penstock.engine.train", "numpy", "typer"}
    code = f"import sys, penstock.tui.app, penstock.tui.screens.home; print(*({heavy} & set(sys.modules)))"
    done = run(root, program=(sys.executable, "-c", code))
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


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

    def until(self, condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
        """Read what it writes until then."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, self.text[-2000:]
            with suppress(OSError):  # it has ended
                if select.select([self._fd], [], [], 0.1)[0]:
                    self.text += os.read(self._fd, 65536).decode(errors="replace")

    def end(self) -> int:
        """Wait for the process; its exit code."""
        ended: list[int] = []

        def is_over() -> bool:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            ended.extend([status] * bool(pid))
            return bool(ended)

        try:
            self.until(is_over)
        finally:
            if not ended:
                os.kill(self.pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(ended[0])


@pytest.mark.parametrize(
    ("arguments", "text", "environment"),
    [([], "quickstart", {}), (["watch", "first"], "finished", {"NO_COLOR": "1", "PENSTOCK_ASCII": "1"})],
    ids=["usual", "ascii"],
)
def test_in_a_terminal_it_leaves_that_as_it_was(
    root: Path, arguments: list[str], text: str, environment: dict[str, str]
) -> None:
    terminal = Terminal(root, *arguments, **environment)
    terminal.until(lambda: text in terminal.text)
    terminal.resize(24, 80)
    terminal.press("q")
    assert terminal.end() == 0
    assert "\x1b[?1049l" in terminal.text  # back from the alternate screen
    assert "Traceback" not in terminal.text
    assert not environment or all(ord(letter) < 0x2500 for letter in terminal.text)
