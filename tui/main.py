"""The `penstock` command: without arguments the terminal application, else the command line."""

from __future__ import annotations

import sys
from pathlib import Path

BAD_INPUT = 2


def open_app(root: Path, run: Path | None = None) -> int:
    """Run the application in this terminal until it is closed; the exit code."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        print("error: the terminal application needs a terminal; `penstock --help` lists the commands", file=sys.stderr)
        return BAD_INPUT
    from tui.app import PenstockApp

    app = PenstockApp(root, run)
    app.run()
    return app.return_code or 0


def main() -> int:
    """The console script."""
    if not sys.argv[1:]:
        return open_app(Path.cwd())
    import tui.commands  # noqa: F401  (adds commands)
    from app.cli import main as command_line

    return command_line()


if __name__ == "__main__":
    sys.exit(main())
