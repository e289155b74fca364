"""A server on this machine that speaks as much of the Hugging Face hub's API as fetching and pushing take.

Tests drive the real huggingface_hub against it. It can be told to misbehave, and keeps what it was asked.
"""

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = 2_000
"""Bytes from which a file is a large one (LFS), as weights are on the hub."""


def git_oid(content: bytes) -> str:
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


@dataclass
class Repo:
    """A repository: its files by branch or tag."""

    files: dict[str, bytes]
    private: bool = False
    gated: bool = False
    revisions: dict[str, dict[str, bytes]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def at(self, revision: str) -> dict[str, bytes] | None:
        """The files of a branch or a commit."""
        found = {"main": self.files, **self.revisions}
        return found.get(revision) or next((files for files in found.values() if commit_of(files) == revision), None)


def commit_of(files: dict[str, bytes]) -> str:
    return hashlib.sha1(b"".join(name.encode() + files[name] for name in sorted(files))).hexdigest()


def is_large(name: str, content: bytes) -> bool:
    return name.endswith((".safetensors", ".parquet")) or len(content) >= LARGE


class FakeHub:
    """Repositories by "models/OWNER/NAME" or "datasets/OWNER/NAME"; what was asked is in `requests`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.cdn = url.replace("127.0.0.1", "localhost")
        """Large files come from another host, as the hub's do."""
        self.repos: dict[str, Repo] = {}
        self.requests: list[str] = []
        self.ranges: list[str] = []
        """Of the requests that wanted a part of a file."""
        self.cut: dict[str, int] = {}
        """File -> bytes after which the connection breaks, once."""
        self.wrong: set[str] = set()
        """Files of which other bytes are sent than they have."""
        self.claimed: dict[str, int] = {}
        """File -> the size that the listing says."""
        self.uploaded: dict[str, bytes] = {}
        self.token = "hf_good"

    def add(self, name: str, files: dict[str, bytes] | Path, **more: Any) -> Repo:
        """A repository with these files, or with those of a folder."""
        if isinstance(files, Path):
            files = {str(f.relative_to(files)): f.read_bytes() for f in files.rglob("*") if f.is_file()}
        self.repos[name] = repo = Repo(files, **more)
        return repo


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        parts = path.strip("/").split("/")
        if parts[0] == "cdn":
            return self._send_file("/".join(parts[4:]), self.hub.repos["/".join(parts[1:4])].files, {})
        if parts[0] == "api" and parts[1] in ("models", "datasets"):
            return self._api("/".join(parts[1:4]), parts[4:])
        kind = "datasets" if parts[0] == "datasets" else "models"
        parts = parts[1:] if kind == "datasets" else parts
        if len(parts) > 3 and parts[2] == "resolve":
            return self._resolve(f"{kind}/{parts[0]}/{parts[1]}", parts[3], "/".join(parts[4:]))
        self._error(404, "NotFound")

    def _authorised(self) -> bool:
        return self.headers.get("authorization") == f"Bearer {self.hub.token}"

    def _allowed(self, name: str, revision: str) -> dict[str, bytes] | None:
        """The files of a revision; None where the answer is a refusal, which is sent."""
        repo = self.hub.repos.get(name)
        if repo is None or (repo.private and not self._authorised()):
            self._error(404 if self._authorised() else 401, "RepoNotFound")
            return None
        files = repo.at(revision)
        if files is None:
            self._error(404, "RevisionNotFound")
        return files

    def _api(self, name: str, rest: list[str]) -> None:
        verb, revision = (rest[0], "/".join(rest[1:])) if rest else ("revision", "main")
        files = self._allowed(name, revision)
        if files is None:
            return
        entries = [(n, self.hub.claimed.get(n, len(c)), git_oid(c), c) for n, c in sorted(files.items())]
        if verb == "tree":
            tree = [{"type": "file", "path": n, "size": s, "oid": o, **_lfs(n, s, c, "oid")} for n, s, o, c in entries]
            return self._json(tree)
        siblings = [{"rfilename": n, "size": s, "blobId": o, **_lfs(n, s, c, "sha256")} for n, s, o, c in entries]
        identity = name.partition("/")[2]
        self._json({"id": identity, "sha": commit_of(files), "siblings": siblings, "private": False, "tags": []})

    def _resolve(self, name: str, revision: str, file: str) -> None:
        files = self._allowed(name, revision)
        if files is None:
            return
        if self.hub.repos[name].gated and not self._authorised():
            return self._error(401, "GatedRepo")
        if file not in files:
            return self._error(404, "EntryNotFound")
        content, headers = files[file], {"X-Repo-Commit": commit_of(files)}
        if is_large(file, content):
            digest = hashlib.sha256(content).hexdigest()
            headers["X-Linked-Size"] = str(self.hub.claimed.get(file, len(content)))
            headers |= {"X-Linked-ETag": f'"{digest}"', "Location": f"{self.hub.cdn}/cdn/{name}/{file}"}
            return self._answer(302, b"", headers)
        self._send_file(file, files, headers | {"ETag": f'"{git_oid(content)}"'})

    def _send_file(self, file: str, files: dict[str, bytes], headers: dict[str, str]) -> None:
        content = files[file]
        if file in self.hub.wrong:
            content = bytes(byte ^ 1 for byte in content)
        status, start = 200, 0
        if (asked := self.headers.get("Range")) is not None:
            self.hub.ranges.append(asked)
            start = int(asked.removeprefix("bytes=").rstrip("-"))
            status, headers["Content-Range"] = 206, f"bytes {start}-{len(content) - 1}/{len(content)}"
        cut = None if self.command == "HEAD" else self.hub.cut.pop(file, None)
        self._answer(status, content[start:], headers, cut)

    def do_POST(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"POST {path}")
        body = self._body()
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if not self._authorised():
            return self._error(401, None)
        if path == "/api/repos/create":
            wanted = json.loads(body)
            name = f"models/{wanted.get('organization') or 'me'}/{wanted['name']}"
            if name in self.hub.repos:
                return self._error(409, None)
            self.hub.add(name, {}, private=bool(wanted.get("private") or wanted.get("visibility") == "private"))
            return self._json({"url": f"{self.hub.url}/{name.removeprefix('models/')}", "id": name})
        parts = path.strip("/").split("/")
        if parts[-1] == "batch":
            objects = json.loads(body)["objects"]
            for item in objects:
                item["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{item['oid']}"}}
            return self._json({"transfer": "basic", "objects": objects})
        repo = self.hub.repos.get("/".join(parts[1:4]))
        if repo is None:
            return self._error(404, "RepoNotFound")
        if parts[4] == "preupload":
            files = json.loads(body)["files"]
            for file in files:
                large = file["path"].endswith(".safetensors") or file["size"] >= LARGE
                file |= {"shouldIgnore": False, "uploadMode": "lfs" if large else "regular"}
            return self._json({"files": files})
        if parts[4] == "commit":
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "header":
                    repo.messages.append(value["summary"])
                elif line["key"] == "file":
                    repo.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    repo.files[value["path"]] = self.hub.uploaded[value["oid"]]
            oid = commit_of(repo.files)
            url = f"{self.hub.url}/{parts[2]}/{parts[3]}/commit/{oid}"
            return self._json({"success": True, "commitOid": oid, "commitUrl": url})
        self._error(404, None)

    def do_PUT(self) -> None:
        self.hub.requests.append(f"PUT {self.path}")
        content = self._body()
        assert hashlib.sha256(content).hexdigest() == self.path.rpartition("/")[2]
        self.hub.uploaded[self.path.rpartition("/")[2]] = content
        self._answer(200, b"", {})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            content = b""
            while size := int(self.rfile.readline(), 16):
                content += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return content
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _json(self, value: Any) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _error(self, status: int, code: str | None) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": code} if code else {}
        self._answer(status, json.dumps({"error": code or "refused"}).encode(), headers)

    def _answer(self, status: int, content: bytes, headers: dict[str, str], cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:cut])
        if cut is not None:
            self.close_connection = True


def _lfs(name: str, size: int, content: bytes, key: str) -> dict[str, Any]:
    if not is_large(name, content):
        return {}
    return {"lfs": {key: hashlib.sha256(content).hexdigest(), "size": size, "pointerSize": 134}}


@contextlib.contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """A hub that serves while entered."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    hub = FakeHub(f"http://127.0.0.1:{server.server_port}")
    server.RequestHandlerClass = type("Handler", (_Handler,), {"hub": hub})
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.02), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
