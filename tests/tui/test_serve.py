"""`penstock serve`, a process of its own or in this one: browsers, who is not let in, and ends of every kind."""

import asyncio
import html
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import psutil
import pytest
from cli_process import refusal
from real_runs import until
from web_client import Served, browser, is_gone, served, shown, window

import penstock.tui.commands  # noqa: F401  (adds commands)
from penstock.tui.web import server as web_server
from penstock.tui.web import window as web_window
from penstock.tui.web.access import SECURITY_HEADERS, Access
from penstock.tui.web.server import MOST_CONNECTIONS, MOST_WINDOWS, STATIC, WebServer

ROUTES = ["/", "/ws", "/static/textual.js", "/nosuch"]


async def raw(server: Served, *lines: str) -> str:
    """The answer to a request that no client library would send."""
    reader, writer = await asyncio.open_connection("localhost", server.port)
    writer.write("\r\n".join([*lines, "Connection: close", "", ""]).encode("latin-1"))
    try:
        return (await asyncio.wait_for(reader.read(), 30)).decode("latin-1")
    finally:
        writer.close()


async def other(socket: aiohttp.ClientWebSocketResponse, kind: aiohttp.WSMsgType) -> aiohttp.WSMessage:
    """The first frame that is of another kind."""
    while (frame := await socket.receive(timeout=60)).type is kind:
        pass
    return frame


async def child_of(server: Served, socket: aiohttp.ClientWebSocketResponse, started: bool) -> int:
    """The process of the only window, once it has been started."""
    if started:
        await shown(socket, b"quickstart")
    await until(lambda: len(server.windows()) == 1)
    return server.windows()[0].pid


async def test_browsers_get_home_and_hostile_messages_change_nothing(place: Path, tmp_path: Path) -> None:
    async with served(place, tmp_path / "log") as server, browser(server.url) as session:
        page = await (await session.get(f"{server.base}/")).text()
        assert "Penstock" in page
        assert "http" not in page  # nothing from elsewhere
        _address, told, _end = server.log
        for part in (str(place), "this machine only", "run recipes, which are Python code, as "):
            assert part in told
        assert html.escape(told) in page
        assert {name for name in STATIC if f"static/{name}" in page} == set(STATIC) - {"RobotoMono.ttf"}
        for name in STATIC:
            answer = await session.get(f"{server.base}/static/{name}")
            assert answer.status == 200
            assert SECURITY_HEADERS.items() <= dict(answer.headers).items()
        async with window(session, server.base) as first, window(session, server.base) as second:
            for frame in await asyncio.gather(shown(first, b"quickstart"), shown(second, b"quickstart")):
                assert b"recipes" in frame
            (limit,) = {item.rlimit(9) for item in server.windows()}  # RLIMIT_AS
            assert 0 < limit[0] <= 4 << 30
            hostile = ["[]", "{}", '["nosuch"]', '["resize",{"width":1e8}]', "[" * 3_000_000]
            for text in hostile:
                await first.send_str(text)
            await first.send_bytes(b"\x00" * 1000)
            await first.send_str('["resize",{"width":1e8,"height":1e8}]')
            await first.send_str('["ping","7"]')
            assert (await other(first, aiohttp.WSMsgType.BINARY)).data == '["pong", "7"]'
            assert len([line for line in server.log if "ignored" in line]) == len(hostile) + 1 == len(server.log) - 3
            await second.send_str('["stdin","q"]')
            assert (await other(second, aiohttp.WSMsgType.BINARY)).type is aiohttp.WSMsgType.CLOSE
        await until(lambda: not server.windows())


async def test_nobody_else_is_let_in(place: Path, tmp_path: Path) -> None:
    async with served(place, tmp_path / "log") as server:
        base, token = server.base, server.url.partition("token=")[2]
        name, own = f"penstock-{server.port}", {"Origin": base}
        async with aiohttp.ClientSession() as stranger:
            for route in ROUTES:
                for headers in (own, own | {"Cookie": f"{name}="}, own | {"Cookie": f"{name}={token[:-1]}x"}):
                    answer = await stranger.get(base + route, headers=headers)
                    assert (answer.status, route) == (403, route)
                    assert SECURITY_HEADERS.items() <= dict(answer.headers).items()
                assert (await stranger.get(f"{base}{route}?token={token[:-1]}x", headers=own)).status == 403
            answer = await stranger.get(f"{server.url}&fontsize=20", allow_redirects=False)
            assert (answer.status, answer.headers["Location"]) == (303, "/?fontsize=20")
            assert {"HttpOnly", "SameSite=Strict"} <= set(answer.headers["Set-Cookie"].split("; "))
        let_in, evil = {"Cookie": f"{name}={token}"}, f"evil.example:{server.port}"
        async with aiohttp.ClientSession(headers=let_in, cookie_jar=aiohttp.DummyCookieJar()) as fooled:
            wrong = ("http://evil.example", "null", f"http://127.0.0.1:{server.port}", "http://localhost")
            stolen = [{"Origin": origin} for origin in wrong]
            stolen += [{"Host": evil}, {"Host": evil, "Origin": f"http://{evil}"}]
            for route in ROUTES:
                for headers in stolen:
                    assert (await fooled.get(base + route, headers=headers)).status == 403
            assert (await fooled.get(f"{base}/?token={token}", headers={"Host": evil})).status == 403
            assert (await fooled.get(f"{base}/ws")).status == 403  # every browser names the page's origin
            assert (await fooled.post(base, data=b"x", headers=own)).status == 405
            for path in ("/static/", "/static", "/static/textual.js/.."):
                assert (await fooled.get(base + path)).status in (403, 404)
        asking = (f"Host: localhost:{server.port}", *(f"{key}: {text}" for key, text in let_in.items()))
        for path in ("../server.py", "..%2fserver.py", "/etc/passwd", "%2e%2e/access.py"):
            assert " 404 " in (await raw(server, f"GET /static/{path} HTTP/1.1", *asking)).splitlines()[0]
        assert " 403 " in (await raw(server, "GET / HTTP/1.0", *asking[1:])).splitlines()[0]
        chunked = ["GET / HTTP/1.1", asking[0], "Transfer-Encoding: chunked", "", "\x1b[31mzzz"]
        for nonsense in (["\x00\xff\x1b[31m nonsense"], ["GET http://[::1 HTTP/1.1"], chunked):
            assert " 400 " in (await raw(server, *nonsense)).splitlines()[0]
        await raw(server, "GET /a%0ab%1b[31m HTTP/1.1", asking[0])
        assert any("refused" in line and "a\\nb" in line for line in server.log)
        assert all(line.isprintable() for line in server.log)
        assert not server.windows()
        assert not any(token in line for line in server.log[1:])


@pytest.mark.parametrize("started", [False, True], ids=["in the middle of its start", "later"])
async def test_a_window_ends_with_its_client_that_vanishes_and_a_server_that_is_killed(
    place: Path, tmp_path: Path, started: bool
) -> None:
    async with served(place, tmp_path / "log") as server, browser(server.url) as session:
        socket = await window(session, server.base)
        child = await child_of(server, socket, started)
        socket._conn.transport.abort()
        await until(lambda: is_gone(child) and not server.windows())
        async with window(session, server.base) as socket:
            child = await child_of(server, socket, started)
            server.process.kill()
            server.process.wait()
            await until(lambda: is_gone(child))


async def test_other_machines_may_look(place: Path, tmp_path: Path) -> None:
    async with served(place, tmp_path / "log", "--host", "0.0.0.0", "--allow-remote") as server:
        assert any("change nothing" in line for line in server.log)
        base = f"http://127.0.0.1:{server.port}"
        url = f"{base}/?token={server.url.partition('token=')[2]}"
        async with browser(url) as session, window(session, base) as socket:
            await shown(socket, b"quickstart")
            for text in ('["focus"]', '["stdin","\\r"]'):  # open the recipe under the cursor
                await socket.send_str(text)
            await shown(socket, b"this window shows")


def test_where_it_does_not_serve_it_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    for host in ("0.0.0.0", "::", "192.0.2.7"):
        said = refusal(capsys, "serve", "--host", host)
        assert "--allow-remote" in said
        assert "Python code" in said
    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = refusal(capsys, "serve", "--host", "127.0.0.1", "--port", str(taken.getsockname()[1]))
        assert "choose another" in said
    for option, wrong in (("--port", "99999"), ("--port", "-1"), ("--host", "no such host")):
        assert wrong in refusal(capsys, "serve", option, wrong)


BEGIN = """
import os, signal, sys, time
def put(kind, data):
    rest = kind + len(data).to_bytes(4, "big") + data
    while rest:
        rest = rest[os.write(1, rest):]
os.write(1, b"__GANGLION__\\n")
put(b"D", b"hello %d" % os.getpid())
"""
QUIET = "while os.read(0, 4096): pass"
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: time.sleep(60)"
BABBLING = f"os.write(1, b'Z' + b'\\xff' * 1000)\n{QUIET}"
FLOOD = """
while True:
    put(b"D", b"x" * 1_000_000)
    os.write(2, b"said")
    with open(sys.argv[1], "ab") as file:
        file.write(b".")
"""


@asynccontextmanager
async def serving(code: str, *arguments: str) -> AsyncIterator[tuple[str, aiohttp.ClientSession]]:
    """A server, in this process, of an application that is `code`: its address, and a browser's session."""
    item = socket.create_server(("127.0.0.1", 0))
    access = Access("127.0.0.1", ("127.0.0.1",), item.getsockname()[1])
    until_then = asyncio.Event()
    command = [sys.executable, "-c", BEGIN + code, *arguments]
    running = asyncio.create_task(WebServer(access, command).run([item], until_then))
    try:
        async with browser(f"{access.url}?token={access.token}") as session:
            yield access.url.removesuffix("/"), session
    finally:
        until_then.set()
        await running


async def hello(ws: aiohttp.ClientWebSocketResponse) -> int:
    """The application's process."""
    frame = await ws.receive(timeout=60)
    assert frame.type is aiohttp.WSMsgType.BINARY, frame
    return int(frame.data.split()[1])


async def end(ws: aiohttp.ClientWebSocketResponse) -> tuple[int | None, str]:
    """How the server closes it."""
    while (frame := await ws.receive(timeout=60)).type in (aiohttp.WSMsgType.BINARY, aiohttp.WSMsgType.TEXT):
        pass
    return (frame.data, frame.extra or "") if frame.type is aiohttp.WSMsgType.CLOSE else (None, "")


async def test_so_many_windows_and_no_more() -> None:
    others = {child.pid for child in psutil.Process().children()}  # of tests before this one

    def count() -> int:
        return len({child.pid for child in psutil.Process().children()} - others)

    async with serving(QUIET) as (base, session):
        windows = [await window(session, base) for _ in range(MOST_WINDOWS)]
        pids = [await hello(ws) for ws in windows]
        async with window(session, base) as refused:
            code, reason = await end(refused)
            assert code == 1013
            assert "8 windows are open" in reason
        assert count() == MOST_WINDOWS
        await windows[0].close()
        await until(lambda: is_gone(pids[0]) and count() == MOST_WINDOWS - 1)
        async with asyncio.timeout(60):
            while len(windows) == MOST_WINDOWS:  # until the server has seen that end, too
                ws = await window(session, base)
                if (await ws.receive()).type is aiohttp.WSMsgType.BINARY:
                    windows.append(ws)
        for ws in windows:
            await ws.close()
    assert all(is_gone(pid) for pid in pids)


@pytest.mark.parametrize("code", [DEAF, QUIET], ids=["deaf", "quiet"])
async def test_an_application_ends_with_its_window_even_if_it_does_not_want_to(
    code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_window, "_QUIT_S", 0.2)
    monkeypatch.setattr(web_window, "_TERMINATE_S", 0.2)
    async with serving(code) as (base, session):
        async with window(session, base) as ws:
            pid = await hello(ws)
        await until(lambda: is_gone(pid))
        ws = await window(session, base)
        pid = await hello(ws)  # ends with the server, too
    await until(lambda: is_gone(pid))


@pytest.mark.parametrize(
    ("code", "messages", "closed"),
    [
        (DEAF, ['["stdin", "%s"]' % ("a" * 100_000)] * 4, {1001}),
        (BABBLING, [], {1001}),
        (QUIET, ["[]"] * 50, {1001}),
        (QUIET, ["[" * (5 << 20)], {1009, None}),
    ],
    ids=["takes no input", "babbles", "only nonsense is sent", "too long a message"],
)
async def test_what_makes_no_sense_ends_its_window_alone(
    monkeypatch: pytest.MonkeyPatch, code: str, messages: list[str], closed: set[int | None]
) -> None:
    for name in ("_QUIT_S", "_TERMINATE_S", "_TAKE_S"):
        monkeypatch.setattr(web_window, name, 0.2)
    cut_off = (aiohttp.ClientError, ConnectionError) if None in closed else ()  # in the middle of a long message
    async with serving(code) as (base, session):
        async with window(session, base) as ws:
            pid = await hello(ws)
            with suppress(*cut_off):
                for message in messages:
                    await ws.send_str(message)
                assert (await end(ws))[0] in closed
        await until(lambda: is_gone(pid))
        assert (await session.get(base)).status == 200


async def test_what_a_client_does_not_read_stays_with_the_application(tmp_path: Path) -> None:
    written = tmp_path / "megabytes"
    written.touch()
    async with serving(FLOOD, str(written)) as (base, session):
        ws = await window(session, base)
        pid = await hello(ws)
        ws._conn.transport.pause_reading()  # type: ignore[attr-defined]
        before, same = -1, 0
        while same < 20:
            await asyncio.sleep(0.05)
            size = written.stat().st_size
            assert size < 100, "nobody waits for the client"
            before, same = size, same + 1 if size == before else 0
        ws._conn.transport.abort()
        await until(lambda: is_gone(pid))


async def test_connections_that_ask_for_nothing_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_server, "_FIRST_REQUEST_S", 0.2)
    async with serving(QUIET) as (base, session), AsyncExitStack() as stack:
        port = int(base.rpartition(":")[2])
        for _ in range(MOST_CONNECTIONS):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
            writer.write(b"GET / HTTP/1.1\r\n")
        async with asyncio.timeout(60):
            while True:
                with suppress(aiohttp.ClientError):
                    async with aiohttp.ClientSession(cookie_jar=session.cookie_jar) as another:
                        assert (await another.get(base)).status == 200
                        break
                await asyncio.sleep(0.05)
