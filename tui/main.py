"""The `penstock` command: without arguments the terminal application, else the command line with two commands more."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

BAD_INPUT = 2


def open_app(root: Path, run: Path | None = None) -> int:
    """Run the application in this terminal until it is closed; the exit code."""
    served = "TEXTUAL_DRIVER" in os.environ  # a browser is the terminal
    if not served and not (sys.stdin.isatty() and sys.stdout.isatty()):
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
    _add_commands()
    from app.cli import main as command_line

    return command_line()


def _add_commands() -> None:
    """`penstock watch` and `penstock serve`, which need what app/ may not import."""
    import typer

    from app.cli import RunArgument, cli

    @cli.command(epilog="Example: penstock watch quickstart-20260101-120000")
    def watch(run: RunArgument) -> None:
        """Open the terminal application on a run; leaving it changes nothing in the run."""
        from app.rundir import find_run

        raise typer.Exit(open_app(Path.cwd(), find_run(run)))

    @cli.command(epilog="Example: penstock serve --port 8000")
    def serve(
        host: Annotated[str, typer.Option(help="Address to listen on; default this machine alone.")] = "localhost",
        port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
        public_url: Annotated[str | None, typer.Option(help="Address that browsers use, behind a proxy.")] = None,
    ) -> None:
        """Show the terminal application in browsers: whoever reaches the port controls the runs."""
        from tui.serve import serve as serve_browsers

        serve_browsers(Path.cwd(), host, port, public_url)


if __name__ == "__main__":
    sys.exit(main())
