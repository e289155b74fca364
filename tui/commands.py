"""What `penstock` has beyond app/cli/main.py: commands with the terminal application, which app/ may not import."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.app.cli.help_groups import LOOK
from penstock.app.cli.main import cli
from penstock.app.cli.options import RunArgument
from penstock.app.runs.directory import find_run


@cli.command(epilog="Example: penstock watch quickstart-20260101-120000", rich_help_panel=LOOK)
def watch(run: RunArgument) -> None:
    """Watch a run in the terminal application. Quitting it does not stop the run."""
    from penstock.tui.app import open_app

    raise typer.Exit(open_app(Path.cwd(), find_run(run)))


@cli.command(epilog="Example: penstock serve --port 8000", rich_help_panel=LOOK)
def serve(
    host: Annotated[str, typer.Option(help="Address to listen on. Default: this machine only.")] = "localhost",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    allow_remote: Annotated[
        bool,
        typer.Option(
            "--allow-remote",
            help="Allow a --host that other machines can reach. Anyone who has the printed address gets in.",
        ),
    ] = False,
    read_only: Annotated[
        bool | None,
        typer.Option(help="Show runs without any actions. Default if other machines can reach it.", show_default=False),
    ] = None,
) -> None:
    """Show the terminal application in a browser, at the address it prints."""
    from penstock.tui.serve import serve_browsers

    serve_browsers(Path.cwd(), host, port, allow_remote=allow_remote, read_only=read_only)
