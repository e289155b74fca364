"""One browser window: a process of the application, and what goes between it and the browser's websocket."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from aiohttp import WSMsgType, web

from penstock.storage.files.untrusted import parse_object, printable
from penstock.tui.web.messages import MalformedError, meta, read_message

log = logging.getLogger("penstock.serve")

_FIRST_BYTES = b"__GANGLION__\n"
_MOST_PACKET_BYTES = 64 << 20
"""The largest frame of the largest terminal takes 25 MB."""
_MOST_MALFORMED = 20
_CHUNK_BYTES = 1 << 16
_SAID_BYTES = 4096
"""Of the end of what the process says of its own end."""
_TAKE_S = 10.0
"""An application that has taken no input for so long is ended."""
_QUIT_S = 3.0
_TERMINATE_S = 2.0
_CLOSE_S = 3.0
_LAST_WORDS_S = 0.5


class Window:
    """Made for a websocket that is prepared; `run` lasts as long as the window."""

    def __init__(self, socket: web.WebSocketResponse, command: Sequence[str], name: str) -> None:
        self.name = name
        self._socket = socket
        self._command = command
        self._said = b""
        self._input: asyncio.StreamWriter
        """Of the process; likewise what it shows and what it says."""
        self._output: asyncio.StreamReader
        self._errors: asyncio.StreamReader

    async def run(self) -> None:
        """Until the browser or the application ends it, which ends the other."""
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._input, self._output, self._errors = process.stdin, process.stdout, process.stderr
        log.debug("%s: opened, process %d", self.name, process.pid)
        saying = asyncio.create_task(self._listen())
        work = [asyncio.create_task(self._from_application()), asyncio.create_task(self._from_browser())]
        try:
            done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if (error := task.exception()) is not None:
                    log.warning("%s: %s", self.name, printable(error) or type(error).__name__)
        finally:
            await asyncio.shield(self._end(process, [*work, saying]))

    async def _end(self, process: asyncio.subprocess.Process, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks[:-1]:
            task.cancel()
        await asyncio.gather(*tasks[:-1], return_exceptions=True)
        drain = asyncio.create_task(self._read_all())  # an application that waits for its reader cannot end
        with contextlib.suppress(OSError, RuntimeError):
            self._input.write(meta({"type": "quit"}))
            self._input.close()
        for wait_s, act in ((_QUIT_S, process.terminate), (_TERMINATE_S, process.kill), (_TERMINATE_S, None)):
            try:
                await asyncio.wait_for(process.wait(), wait_s)
                break
            except TimeoutError:
                if act is not None:
                    log.warning("%s: process %d does not exit; killing it", self.name, process.pid)
                    with contextlib.suppress(ProcessLookupError):
                        act()
        await asyncio.wait([tasks[-1]], timeout=_LAST_WORDS_S)
        tasks[-1].cancel()
        drain.cancel()
        await asyncio.gather(tasks[-1], drain, return_exceptions=True)
        if self._said.strip():
            last = self._said.decode(errors="replace").strip().splitlines()[-1]
            log.warning("%s: the application said: %s", self.name, printable(last))
        log.debug("%s: closed", self.name)

    async def close(self, why: str) -> None:
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._socket.close(code=1001, message=why.encode()), _CLOSE_S)

    async def _from_browser(self) -> None:
        malformed = 0
        async for frame in self._socket:
            if frame.type is WSMsgType.ERROR:
                raise ConnectionError(f"the connection failed: {frame.data}")
            try:
                if frame.type is not WSMsgType.TEXT:
                    raise MalformedError("a binary frame")
                message = read_message(frame.data)
            except MalformedError as error:
                log.warning("%s: a message was ignored: %s", self.name, error)
                malformed += 1
                if malformed == _MOST_MALFORMED:
                    raise ConnectionError(f"{malformed} malformed messages; closing the window") from None
                continue
            if message.answer is not None:
                await self._socket.send_str(message.answer)
            for packet in message.packets:
                await self._send(packet)
            await asyncio.sleep(message.pause_s)

    async def _send(self, packet: bytes) -> None:
        """Raises where the application does not take it."""
        self._input.write(packet)
        try:
            await asyncio.wait_for(self._input.drain(), _TAKE_S)
        except TimeoutError:
            raise ConnectionError(f"the application has taken no input for {_TAKE_S:.0f} s") from None

    async def _from_application(self) -> None:
        stream = self._output
        try:
            if await stream.readexactly(len(_FIRST_BYTES)) != _FIRST_BYTES:
                raise ValueError("the application's first output was not understood")
            while True:
                head = await stream.readexactly(5)
                size = int.from_bytes(head[1:], "big")
                if size > _MOST_PACKET_BYTES:
                    raise ValueError(f"a packet of {size:,} bytes from the application")
                payload = await stream.readexactly(size)
                if head[:1] == b"D":
                    await self._socket.send_bytes(payload)
                elif head[:1] == b"M" and parse_object(payload).get("type") == "exit":
                    return  # all else, as addresses to open and files, is not passed on
        except asyncio.IncompleteReadError:
            return

    async def _listen(self) -> None:
        while data := await self._errors.read(_CHUNK_BYTES):
            self._said = (self._said + data)[-_SAID_BYTES:]

    async def _read_all(self) -> None:
        while await self._output.read(_CHUNK_BYTES):
            pass
