"""What `penstock` has beyond app/cli.py: commands that need the terminal application, which app/ may not import."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.app.cli import RunArgument, bench_cli, cli
from penstock.app.rundir import find_run


@cli.command(epilog="Example: penstock watch quickstart-20260101-120000")
def watch(run: RunArgument) -> None:
    """Open the terminal application on a run; leaving it changes nothing in the run."""
    from penstock.tui.app import open_app

    raise typer.Exit(open_app(Path.cwd(), find_run(run)))


@cli.command(epilog="Example: penstock serve --port 8000")
def serve(
    host: Annotated[str, typer.Option(help="Address to listen on; default this machine alone.")] = "localhost",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    allow_remote: Annotated[
        bool,
        typer.Option(
            "--allow-remote",
            help="Let --host be an address that other machines reach: whoever learns the printed address is let in.",
        ),
    ] = False,
    read_only: Annotated[
        bool | None,
        typer.Option(help="Show runs and take no action; default where other machines reach it.", show_default=False),
    ] = None,
) -> None:
    """Show the terminal application in browsers: to whoever opens the address that it prints."""
    from penstock.tui.serve import serve_browsers

    serve_browsers(Path.cwd(), host, port, allow_remote=allow_remote, read_only=read_only)


@bench_cli.command("tui", hidden=True, epilog="Example: penstock bench tui --minutes 10 --save docs/results/tui.md")
def bench_tui_command(
    minutes: Annotated[float, typer.Option(help="Time to watch for; half a minute of it is warm-up.")] = 10.0,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the page FILE.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure what the terminal application costs while it watches a made-up run: processor time and memory."""
    from penstock.tui.bench import bench_tui

    bench_tui(minutes, save=save, json_output=as_json)
