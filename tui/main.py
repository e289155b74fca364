"""The `penstock` command: without arguments the terminal application, else the command line."""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> int:
    """The console script."""
    if not sys.argv[1:]:
        from tui.app import open_app

        return open_app(Path.cwd())
    import tui.commands  # noqa: F401  (adds commands)
    from app.cli import main as command_line

    return command_line()


if __name__ == "__main__":
    sys.exit(main())
