"""A recipe file that is run as a script."""

from __future__ import annotations

import sys
from pathlib import Path


def run_recipe(path: str) -> None:
    """`penstock train` for the recipe file at `path`, its `__file__`; takes the same options. Ends the process."""
    # Python has put the script's folder first; a recipe named like a package must not be imported in its place.
    if sys.path and Path(sys.path[0] or ".").resolve() == Path(path).resolve().parent:
        del sys.path[0]
    from penstock.app.cli import main

    sys.exit(main(["train", path, *sys.argv[1:]]))
