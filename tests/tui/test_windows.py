"""The server of `penstock serve` with applications that do what none should, and clients that do not read."""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import psutil
import pytest
from real_runs import until
from web_client import browser, is_gone, window

from penstock.tui.web import server as web_server
from penstock.tui.web import window as web_window
from penstock.tui.web.access import Access
from penstock.tui.web.server import MOST_CONNECTIONS, MOST_WINDOWS, WebServer

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
BABBLING = "os.write(1, b'Z' + b'\\xff' * 1000)\nwhile os.read(0, 4096): pass"
FLOOD = """
while True:
    put(b"D", b"x" * 1_000_000)
    os.write(2, b"said")
    with open(sys.argv[1], "ab") as file:
        file.write(b".")
"""
FILES = r"""
put(b"M", b'{"type": "deliver_file_start", "key": "k1", "path": "/tmp/a b\\r\\nX: y.svg"}')
asked = 0
while data := os.read(0, 4096):
    if b"deliver_chunk_request" in data:
        from textual._binary_encode import dump
        put(b"P", dump(("deliver_chunk", "k1", [b"first ", b"second", b""][asked])))
        asked += 1
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


@pytest.mark.parametrize("code", [DEAF, QUIET])
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


async def test_a_file_reaches_the_browser_once_and_its_name_breaks_no_header() -> None:
    async with serving(FILES) as (base, session), window(session, base) as ws:
        file = f"{base}/download/k1"
        await hello(ws)
        assert (await ws.receive_json(timeout=60)) == ["deliver_file_start", "k1"]
        async with aiohttp.ClientSession() as stranger:
            assert (await stranger.get(file)).status == 403
        answer = await session.get(file)
        assert await answer.read() == b"first second"
        assert answer.headers["Content-Disposition"] == 'attachment; filename="a_b__X__y.svg"'
        assert answer.content_type == "application/octet-stream"
        assert "X" not in answer.headers
        assert (await session.get(file)).status == 404


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
