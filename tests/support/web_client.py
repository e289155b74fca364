"""`penstock serve` as a process, and a browser's part played by a client, for tests."""

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil
import real_runs
from cli_process import PATIENCE_S, is_running

OURS = (sys.executable, "-m", "penstock.tui.main")


@dataclass
class Served:
    """A server that runs."""

    process: subprocess.Popen[bytes]
    url: str
    """As it was printed."""
    log_file: Path

    @property
    def base(self) -> str:
        """The address without path and token."""
        return self.url.partition("/?")[0]

    @property
    def port(self) -> int:
        return int(self.base.rpartition(":")[2])

    @property
    def log(self) -> list[str]:
        return self.log_file.read_text().splitlines()

    def windows(self) -> list[psutil.Process]:
        """The applications that it has started and that have not ended."""
        return psutil.Process(self.process.pid).children()


@asynccontextmanager
async def served(
    folder: Path, log_file: Path, *arguments: str, penstock: Sequence[str] = OURS, env: dict[str, str] | None = None
) -> AsyncIterator[Served]:
    """`penstock serve` on a free port."""
    command = [*penstock, "serve", "--port", "0", *arguments]
    env = env or real_runs.environment()
    with log_file.open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT)
    try:
        await real_runs.until(lambda: "Ctrl+C" in log_file.read_text() or process.poll() is not None)
        found = re.search(r"http://\S+", log_file.read_text())
        assert found is not None, log_file.read_text()
        yield Served(process, found[0], log_file)
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=PATIENCE_S) == 0
        assert "Traceback" not in log_file.read_text()
    finally:
        process.kill()
        process.wait()


@asynccontextmanager
async def browser(url: str) -> AsyncIterator[aiohttp.ClientSession]:
    """A session that has opened the printed address, and so has the cookie."""
    jar = aiohttp.CookieJar(unsafe=True)  # of addresses, too
    async with aiohttp.ClientSession(cookie_jar=jar) as session:
        answer = await session.get(url)
        assert answer.status == 200
        yield session


def window(
    session: aiohttp.ClientSession, base: str, size: str = "?width=100&height=30"
) -> aiohttp.client._WSRequestContextManager:
    return session.ws_connect(f"{base}/ws{size}", origin=base, max_msg_size=0)


async def shown(socket: aiohttp.ClientWebSocketResponse, text: bytes) -> bytes:
    """What is sent until `text` is in it."""
    found = b""
    async with asyncio.timeout(PATIENCE_S):
        while text not in found:
            frame = await socket.receive()
            assert frame.type is aiohttp.WSMsgType.BINARY, frame
            found += frame.data
    return found


def is_gone(pid: int) -> bool:
    """Whether a process has ended, if only to be waited for."""
    return not is_running(pid)
