"""`penstock serve`: the terminal application in browsers, one process of it for each visitor."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from pathlib import Path

from storage.errors import UserError


def serve(root: Path, host: str, port: int, public_url: str | None = None) -> None:
    """Serve until interrupted. Raises UserError where the port cannot be had."""
    from textual_serve.server import Server

    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            raise UserError(f"--port {port}: cannot listen on {host}:{port} ({error}); choose another") from None
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    os.chdir(root)
    server = Server(
        f"{shlex.quote(sys.executable)} -m tui.main",
        host=host,
        port=port,
        title="Penstock",
        public_url=public_url,
        templates_path=Path(__file__).parent / "templates",
    )
    server.serve()
