"""`python -m benchmarks NAME [OPTIONS]`: runs `main` of benchmarks/NAME, whose parameters are the options."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from penstock.storage.files.errors import UserError

FOLDER = Path(__file__).parent


def names() -> list[str]:
    """The benchmarks."""
    files = [*FOLDER.glob("[a-z]*.py"), *(path.parent for path in FOLDER.glob("*/__init__.py"))]
    return sorted({path.stem for path in files} - {"parts"})


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in names():
        sys.exit(f"python -m benchmarks NAME [OPTIONS]; NAME is one of {', '.join(names())}")
    try:
        import typer
    except ModuleNotFoundError:
        sys.exit(f"{name}: {sys.executable} has no typer; give an interpreter that has Penstock's dependencies")
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(importlib.import_module(f"benchmarks.{name}").main)
    try:
        app(sys.argv[2:], prog_name=f"python -m benchmarks {name}")
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
