"""What a command shows on a terminal, as a picture: it runs on a terminal of its own, and its last screen is drawn."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import re
import struct
import subprocess
import termios
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from penstock.storage.files import child

_LINES = 50
_CONTROL = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\r|\n")
_TEXT_STYLE = "m"
_QUESTION = b"]: "


def run(command: Sequence[str], folder: Path, answers: str, width: int) -> str:
    """Run a command of ours in `folder` on a terminal; all that it wrote. `answers` are typed where it asks."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", _LINES, width, 0, 0))
    process = subprocess.Popen(
        child.command("app.cli.main", *command),
        cwd=folder,
        env=child.environment(TERM="xterm-256color", COLORTERM="truecolor", COLUMNS=str(width)),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    written = b""
    while True:
        try:
            data = os.read(ours, 1 << 16)
        except OSError as error:
            if error.errno != errno.EIO:  # what Linux says once nobody has the other end
                raise
            break
        if not data:
            break
        written += data
        if answers and written.endswith(_QUESTION):
            os.write(ours, answers.encode())
            answers = ""
    os.close(ours)
    if process.wait() != 0:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{written.decode(errors='replace')}")
    return written.decode(errors="replace")


def screen_lines(written: str) -> list[str]:
    """The lines that stand in the end, styles in them: bars that were drawn again and again are there once.

    Of what moves a terminal's cursor only that is known which Rich writes: up a line, erase the line, its beginning.
    """
    lines, row, at, fresh = [""], 0, 0, False
    for match in [*_CONTROL.finditer(written), None]:
        text = written[at : match.start() if match else len(written)]
        if match is not None and match[2] == _TEXT_STYLE:
            text += match[0]
        if text:
            lines[row] = text if fresh else lines[row] + text
            fresh = False
        if match is None:
            break
        at = match.end()
        if match[0] == "\n":
            row, fresh = row + 1, False
            lines += [""] * (row == len(lines))
        elif match[0] == "\r":
            fresh = written[at : at + 1] != "\n"
        elif match[2] == "A":
            row = max(0, row - int(match[1] or 1))
        elif match[2] == "K":
            lines[row] = ""
    return [line.rstrip() for line in lines]


def picture(lines: Sequence[str], title: str, width: int) -> str:
    """The lines as SVG."""
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for line in lines:
        console.print(Text.from_ansi(line), overflow="fold", highlight=False)
    return without_fonts(console.export_svg(title=title, unique_id="penstock"))


def without_fonts(svg: str) -> str:
    """A picture without the fonts that it would load from elsewhere."""
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL).replace("Fira Code", "ui-monospace, Menlo")
