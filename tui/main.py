"""The `penstock` command: without arguments the terminal application, else the command line."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> int:
    if not sys.argv[1:] and "_PENSTOCK_COMPLETE" not in os.environ:
        from penstock.tui.app import open_app

        return open_app(Path.cwd())
    import penstock.tui.commands  # noqa: F401  (adds commands)
    from penstock.app.cli.main import main as command_line

    return command_line()


if __name__ == "__main__":
    sys.exit(main())
