"""The server of `penstock serve`: a page, what it loads, a websocket for each window; all for those let in alone."""

from __future__ import annotations

import asyncio
import html
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from importlib.resources import files
from pathlib import Path

import textual_serve
from aiohttp import web

from penstock.storage.files.untrusted import printable
from penstock.tui.web.access import SECURITY_HEADERS, Access
from penstock.tui.web.messages import MOST_MESSAGE_BYTES, requested_size
from penstock.tui.web.window import Window

log = logging.getLogger("penstock.serve")

MOST_WINDOWS = 8
MOST_CONNECTIONS = 64
_FIRST_REQUEST_S = 20.0
"""A connection on which nobody is let in for so long is closed."""
_HEARTBEAT_S = 15.0
_SHUTDOWN_S = 12.0
_TRY_AGAIN = 1013  # a websocket's close code
_SHOWN = 80

_EMULATOR = Path(str(files(textual_serve))) / "static"
_PAGE = Path(__file__).parent
STATIC: dict[str, tuple[Path, str]] = {
    "penstock.js": (_PAGE / "penstock.js", "text/javascript"),
    "penstock.css": (_PAGE / "penstock.css", "text/css"),
    "textual.js": (_EMULATOR / "js" / "textual.js", "text/javascript"),
    "xterm.css": (_EMULATOR / "css" / "xterm.css", "text/css"),
    "RobotoMono.ttf": (_EMULATOR / "fonts" / "RobotoMono-VariableFont_wght.ttf", "font/ttf"),
}
"""All files that are given out, by the name below /static/: no other path is ever looked at."""

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class WebServer:
    """Serves windows of the process `command`, whose last arguments are the width and height of the window."""

    def __init__(self, access: Access, command: Sequence[str], served: str = "") -> None:
        """`served`: a line for people, on the page until a window is open: what is served to whom."""
        self._access = access
        self._page = (_PAGE / "index.html").read_text().replace("SERVED", html.escape(served)).encode()
        self._command = tuple(command)
        self._windows: set[Window] = set()
        self._opened = 0
        self._known: set[web.RequestHandler] = set()
        """Connections on which somebody was let in."""

    async def run(self, sockets: Sequence[socket.socket], until: asyncio.Event) -> None:
        """Serve on bound sockets until the event is set; ends every window."""
        app = web.Application(middlewares=[self._let_in])
        app.on_response_prepare.append(_secure)
        app.add_routes(
            [web.get("/", self._index), web.get("/ws", self._websocket), web.get("/static/{name}", self._static)]
        )
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_S)
        await runner.setup()
        factory = runner.server
        assert factory is not None

        def connected() -> asyncio.BaseProtocol:
            return factory() if len(factory.connections) < MOST_CONNECTIONS else _Refuse()

        loop = asyncio.get_running_loop()
        servers = [await loop.create_server(connected, sock=item) for item in sockets]
        sweep = loop.create_task(self._sweep(factory))
        try:
            await until.wait()
        finally:
            sweep.cancel()
            for server in servers:
                server.close()
            await asyncio.gather(*(window.close("the server is shutting down") for window in self._windows))
            await runner.cleanup()

    async def _sweep(self, factory: web.Server) -> None:
        """Drop connections that do not come to a request, so that they do not keep out those that would."""
        before: set[web.RequestHandler] = set()
        while True:
            await asyncio.sleep(_FIRST_REQUEST_S)
            now = set(factory.connections)
            self._known &= now
            for connection in before & now - self._known:
                if connection.transport is not None:
                    connection.transport.abort()
            before = now

    @web.middleware
    async def _let_in(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        try:
            if (refusal := self._refusal(request)) is not None:
                refusal.force_close()
                return refusal
            self._known.add(request.protocol)
            return await handler(request)
        except web.HTTPException as answer:
            return web.Response(status=answer.status, text=f"{answer.status}: {answer.reason}\n")
        except Exception as error:
            log.error("%s: %s: %s", _what(request), type(error).__name__, printable(error))
            return web.Response(status=500, text="see the server's log for what went wrong\n")

    def _refusal(self, request: web.Request) -> web.Response | None:
        access = self._access
        trouble = access.host_trouble(request.headers.getall("Host", []))
        if trouble is None:
            origins = request.headers.getall("Origin", [])
            trouble = access.origin_trouble(origins, request.headers["Host"], needed=request.path == "/ws")
        if trouble is None and request.method not in ("GET", "HEAD"):
            return web.Response(status=405, text="405: only GET requests are allowed\n")
        if trouble is None and request.path == "/" and "token" in request.query:
            if access.is_token(request.query["token"]):
                return self._welcome(request)
            trouble = "wrong token"
        elif trouble is None and not access.is_token(request.cookies.get(access.cookie, "")):
            trouble = "no token"
        if trouble is None:
            return None
        log.warning("%s: refused: %s", _what(request), trouble)
        return web.Response(
            status=403, text=f"403: {trouble}.\nOpen the address that `penstock serve` printed, including its token.\n"
        )

    def _welcome(self, request: web.Request) -> web.Response:
        """To the address without the token, which the browser keeps as a cookie from now on."""
        target = request.rel_url.with_query([(key, text) for key, text in request.query.items() if key != "token"])
        answer = web.Response(status=303, headers={"Location": "/" + (f"?{target.query_string}" * bool(target.query))})
        answer.set_cookie(self._access.cookie, self._access.token, httponly=True, samesite="Strict", path="/")
        return answer

    async def _index(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=self._page, content_type="text/html")

    async def _static(self, request: web.Request) -> web.StreamResponse:
        result = STATIC.get(request.match_info["name"])
        if result is None:
            raise web.HTTPNotFound
        path, kind = result
        return web.Response(body=path.read_bytes(), content_type=kind)

    async def _websocket(self, request: web.Request) -> web.StreamResponse:
        answer = web.WebSocketResponse(heartbeat=_HEARTBEAT_S, max_msg_size=MOST_MESSAGE_BYTES, compress=False)
        await answer.prepare(request)
        if len(self._windows) >= MOST_WINDOWS:
            log.warning("%s: refused: %d windows are open", _what(request), MOST_WINDOWS)
            reason = f"{MOST_WINDOWS} windows are open already; close one"
            await answer.close(code=_TRY_AGAIN, message=reason.encode())
            return answer
        size = requested_size(request.query.get("width", ""), request.query.get("height", ""))
        self._opened += 1
        window = Window(answer, [*self._command, *map(str, size)], f"window {self._opened}")
        self._windows.add(window)
        transport = request.transport
        try:
            await window.run()
        except Exception as error:  # the answer has begun, and no other can be given
            log.error("%s: %s: %s", window.name, type(error).__name__, printable(error))
        finally:
            self._windows.discard(window)
            await window.close("the session has ended")
            if transport is not None and transport.get_write_buffer_size():
                transport.abort()  # nobody reads it: what waits for them would be kept
        return answer


class _Refuse(asyncio.Protocol):
    """A connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


async def _secure(_request: web.Request, answer: web.StreamResponse) -> None:
    answer.headers.update(SECURITY_HEADERS)


def _what(request: web.Request) -> str:
    """A request, for the log; without its query, which may hold a token."""
    return f"{printable(request.remote)}: {request.method} {printable(request.path)[:_SHOWN]!r}"
