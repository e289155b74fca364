"""A local S3 server (moto), and a proxy in front of it that lets requests go wrong."""

import contextlib
import http.client
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import boto3
from cli_process import PATIENCE_S
from moto.server import ThreadedMotoServer

BUCKET = "penstock-tests"
KEYS = {"AWS_ACCESS_KEY_ID": "AKIDTESTTESTTESTTEST", "AWS_SECRET_ACCESS_KEY": "s3cr3t/that/must/not/be/told"}
KEYS["AWS_REGION"] = "us-east-1"
CODES = {"503": "SlowDown", "500": "InternalError", "429": "TooManyRequests", "403": "AccessDenied"}
FAULTS = ("cut before", "cut during", "cut after", "503", "500", "429", "403", "short", "flipped", "delayed")
"""What a request of the proxy can meet: the connection is cut before the server has it, in the middle of its body, or
before its answer; an error; a body of which the server stores less, or other bytes; an answer that comes late."""


class Faulty:
    """The proxy: `faults` are met by the next requests whose method and key match, in turn."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.faults: deque[tuple[str, str, str]] = deque()
        """(method, part of the key, fault)."""
        self.always: tuple[str, str, str] | None = None
        """The same, met by every request."""
        self.met: list[tuple[str, str, str]] = []
        """(method, path, fault) of those that were met."""
        self._lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments: Any) -> None:
                pass

            def handle_any(self) -> None:
                with contextlib.suppress(ConnectionError, OSError):
                    proxy.handle(self)

            do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = handle_any

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _fault(self, method: str, path: str) -> str | None:
        with self._lock:
            for wanted in (self.always, self.faults[0] if self.faults else None):
                if wanted is not None and wanted[0] in ("*", method) and wanted[1] in path:
                    if wanted is not self.always:
                        self.faults.popleft()
                    self.met.append((method, path, wanted[2]))
                    return wanted[2]
        return None

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        method, size = request.command, int(request.headers.get("content-length") or 0)
        fault = self._fault(method, request.path)
        if fault in ("cut before", "cut during"):
            request.rfile.read(size // 2 if fault == "cut during" else 0)
            return self._cut(request)
        body = request.rfile.read(size)
        if fault in CODES:
            return self._answer(request, int(fault), [], f"<Error><Code>{CODES[fault]}</Code></Error>".encode())
        headers = {name: value for name, value in request.headers.items() if name.lower() not in ("host", "connection")}
        if fault == "short" and size > 1:
            body = body[: size // 2]
            headers = {name: value for name, value in headers.items() if "sha256" not in name.lower()}
            headers["content-length"] = str(len(body))
        if fault == "flipped" and size:
            body = bytes([body[0] ^ 1]) + body[1:]
        if fault == "delayed":
            time.sleep(0.7)
        server = http.client.HTTPConnection(self.target.removeprefix("http://"), timeout=PATIENCE_S)
        server.request(method, request.path, body, headers)
        answer = server.getresponse()
        content = answer.read()
        server.close()
        if fault == "cut after":
            return self._cut(request)
        self._answer(request, answer.status, answer.getheaders(), content)

    def _answer(self, request: BaseHTTPRequestHandler, status: int, headers: list[Any], content: bytes) -> None:
        request.send_response(status)
        length = str(len(content))
        for name, value in headers:
            if name.lower() not in ("content-length", "connection", "transfer-encoding", "server", "date"):
                request.send_header(name, value)
            elif name.lower() == "content-length" and request.command == "HEAD":
                length = value
        request.send_header("content-length", length)
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(content)

    def _cut(self, request: BaseHTTPRequestHandler) -> None:
        request.close_connection = True
        request.connection.shutdown(socket.SHUT_RDWR)


class S3:
    """The server, its bucket and the proxy."""

    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        host, port = self._server.get_host_and_port()
        self.url = f"http://{host}:{port}"
        self.proxy = Faulty(self.url)
        keys = {name.lower(): KEYS[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
        self.client = boto3.client("s3", endpoint_url=self.url, region_name=KEYS["AWS_REGION"], **keys)
        self.client.create_bucket(Bucket=BUCKET)

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to reach the bucket, through the proxy."""
        return KEYS | {"AWS_ENDPOINT_URL": self.proxy.url}

    def close(self) -> None:
        self.proxy.close()
        self._server.stop()

    def keys(self, prefix: str) -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return [item["Key"] for page in pages for item in page.get("Contents", [])]

    def get(self, key: str) -> bytes:
        content: bytes = self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        return content

    def put(self, key: str, content: bytes) -> None:
        self.client.put_object(Bucket=BUCKET, Key=key, Body=content)


@contextlib.contextmanager
def serving() -> Iterator[S3]:
    """An S3 server for as long as the block runs."""
    server = S3()
    try:
        yield server
    finally:
        server.close()
