"""`penstock serve` as a process of its own: browsers, those who are not let in, and ends of every kind."""

import asyncio
import html
import socket
from pathlib import Path

import aiohttp
import pytest
from cli_process import refusal
from real_runs import until
from web_client import Served, browser, is_gone, served, shown, window

import penstock.tui.commands  # noqa: F401  (adds commands)
from penstock.tui.web.access import SECURITY_HEADERS
from penstock.tui.web.server import STATIC

ROUTES = ["/", "/ws", "/download/0123", "/static/textual.js", "/nosuch"]


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
        told = server.log
        assert len(told) == 3  # the address, what is served to whom, how to end it
        for part in (str(place), "this machine only", "run recipes, which are Python code, as "):
            assert part in told[1]
        assert html.escape(told[1]) in page
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
            for path in ("/static/", "/static", "/download/0123", "/static/textual.js/.."):
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


async def test_a_window_ends_with_its_client_wherever_that_vanishes(place: Path, tmp_path: Path) -> None:
    async with served(place, tmp_path / "log") as server, browser(server.url) as session:
        for started in (False, True):  # in the middle of its start, and later
            socket = await window(session, server.base)
            child = await child_of(server, socket, started)
            socket._conn.transport.abort()
            await until(lambda child=child: is_gone(child) and not server.windows())  # type: ignore[misc]


@pytest.mark.parametrize("started", [False, True])
async def test_a_window_ends_with_a_server_that_is_killed(place: Path, tmp_path: Path, started: bool) -> None:
    async with (
        served(place, tmp_path / "log") as server,
        browser(server.url) as session,
        window(session, server.base) as socket,
    ):
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


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        *[(["--host", host], ["--allow-remote", "Python code"]) for host in ("0.0.0.0", "::", "192.0.2.7")],
        (["--host", "127.0.0.1", "--port", "TAKEN"], ["choose another"]),
        (["--port", "99999"], ["99999"]),
        (["--port", "-1"], ["-1"]),
        (["--host", "no such host"], ["no such host"]),
    ],
)
def test_where_it_does_not_serve_it_says_why(
    capsys: pytest.CaptureFixture[str], arguments: list[str], parts: list[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        said = refusal(capsys, "serve", *(str(taken.getsockname()[1]) if a == "TAKEN" else a for a in arguments))
    assert all(part in said for part in parts)
