"""`penstock serve`: the terminal application in browsers, one process of it for each window."""

from __future__ import annotations

import asyncio
import errno
import getpass
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from penstock.storage.files import child
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import printable
from penstock.tui.web.access import Access, is_remote
from penstock.tui.web.server import WebServer

_MOST_LINE = 400
_END = "Press Ctrl+C to stop serving; runs keep running."
_Endpoint = tuple[socket.AddressFamily, str, tuple[Any, ...]]
"""Where to listen: the family, the address, and of IPv6 flow and interface."""


def serve_browsers(root: Path, host: str, port: int, *, allow_remote: bool, read_only: bool | None) -> None:
    """Serve until interrupted; `read_only` None: where other machines may reach it.

    Raises UserError where the port cannot be had, and for an address that others reach without `allow_remote`.
    """
    endpoints = _resolve(host)
    if is_remote(address for _, address, _ in endpoints) and not allow_remote:
        raise UserError(
            f"--host {host}: other machines could reach it over plain HTTP, and whoever learns the address can run "
            "recipes, which are Python code, as you. Leave --host out and use an SSH tunnel, or add --allow-remote"
        )
    sockets = _listen(endpoints, host, port)
    try:
        access = Access(host, tuple(item.getsockname()[0] for item in sockets), sockets[0].getsockname()[1])
        read_only = access.is_remote if read_only is None else read_only
        served = served_line(root, access, read_only)
        os.chdir(root)
        os.environ.update(child.environment(TEXTUAL_COLOR_SYSTEM="truecolor", TERM_PROGRAM="textual"))
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(_OneLine())
        logging.basicConfig(level=logging.INFO, handlers=[handler])
        print(f"Penstock is shown at {access.url}?token={access.token}", served, _END, sep="\n", flush=True)
        command = child.command("tui.browser_window", str(os.getpid()), "watch" if read_only else "act")
        asyncio.run(_serve(WebServer(access, command, served), sockets))
    finally:
        for item in sockets:
            item.close()


class _OneLine(logging.Formatter):
    """Whatever a stranger sent: a line, without what steers a terminal, and without a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.exc_info is not None and record.exc_info[1] is not None:
            text = f"{text}: {type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
        return " ".join(printable(text).split())[:_MOST_LINE]


async def _serve(server: WebServer, sockets: list[socket.socket]) -> None:
    until = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, until.set)
    await server.run(sockets, until)


def _resolve(host: str) -> list[_Endpoint]:
    try:
        result = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, ValueError) as error:
        raise UserError(f"--host {host}: is not an address of this machine ({error})") from None
    return list(dict.fromkeys((family, str(name[0]), name[2:]) for family, _, _, _, name in result))


def _listen(endpoints: list[_Endpoint], host: str, port: int) -> list[socket.socket]:
    """Sockets on all places that this machine has; port 0 is one that is free. Raises UserError."""
    sockets: list[socket.socket] = []
    trouble: Exception | None = None
    for family, address, scope in endpoints:
        same = sockets[0].getsockname()[1] if sockets else port
        try:
            sockets.append(socket.create_server((address, same, *scope), family=family))
        except (OSError, OverflowError) as error:
            trouble = error
            # `localhost` is ::1, too, on machines that have none.
            if getattr(error, "errno", None) not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                break
    else:
        if sockets:
            return sockets
    for item in sockets:
        item.close()
    raise UserError(f"--port {port}: cannot listen on {host}:{port} ({trouble}); choose another")


def served_line(root: Path, access: Access, read_only: bool) -> str:
    """What is served, to whom, how that is protected and what they can do, for the console and for the page."""
    if access.is_remote:
        whom = "this machine and others, unencrypted: whoever has the address with its token, or reads the traffic,"
    else:
        whom = "this machine only: whoever has the address with its token"
    can = (
        "can see runs and change nothing (--no-read-only allows changes)"
        if read_only
        else f"can start and stop runs, and run recipes, which are Python code, as {_user()}"
    )
    return f"It serves {printable(root.resolve())} to {whom} {can}."


def _user() -> str:
    try:
        return printable(getpass.getuser())
    except (KeyError, OSError):  # an account without a name, in a container
        return "you"
