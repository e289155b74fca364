"""`penstock serve`: the terminal application in browsers, one process of it for each window."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from pathlib import Path

from textual_serve.server import Server

from storage.errors import UserError


def serve_browsers(root: Path, host: str, port: int) -> None:
    """Serve until interrupted. Raises UserError where the port cannot be had."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            raise UserError(f"--port {port}: cannot listen on {host}:{port} ({error}); choose another") from None
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    os.chdir(root)
    server = Server(
        f"{shlex.quote(sys.executable)} -m tui.main",
        host=host,
        port=port,
        title="Penstock",
        templates_path=Path(__file__).parent / "templates",
    )
    server.serve()
