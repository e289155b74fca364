"""Trackio: in TRACKIO_DIR on this machine, on a Space (TRACKIO_SPACE_ID) or a server (TRACKIO_SERVER_URL)."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
import warnings
from typing import Any

from penstock.app.runs.files import whole
from penstock.app.trackers.base import PROJECT, End, Line, Stream, Tracker, TrackerError
from penstock.storage.files.untrusted import one_line, shell

_SERVER_S = 15
_SAID_BYTES = 2000
_DRAIN_S = 60
"""Until what was handed over is on disk or sent."""


class Trackio(Tracker):
    """trackio's threads write what is handed over to its database here, or send it; what a server or a Space does not
    take waits in that database and is sent by trackio when it comes back."""

    name = "trackio"
    package = ("trackio", (0, 40))
    _run: Any = None

    @staticmethod
    def unready() -> str | None:
        if os.environ.get("TRACKIO_SPACE_ID"):
            from huggingface_hub import get_token

            return None if get_token() else "TRACKIO_SPACE_ID needs a login to the hub; run `hf auth login`"
        server = os.environ.get("TRACKIO_SERVER_URL") or ""
        if server and "write_token=" not in server and not os.environ.get("TRACKIO_WRITE_TOKEN"):
            return "TRACKIO_SERVER_URL needs a write token; set TRACKIO_WRITE_TOKEN"
        return None

    @property
    def _where(self) -> tuple[str, str]:
        """The Space, or else the server; both are empty where it is this machine."""
        space = os.environ.get("TRACKIO_SPACE_ID") or ""
        return space, "" if space else os.environ.get("TRACKIO_SERVER_URL") or ""

    @property
    def _project(self) -> str:
        return os.environ.get("TRACKIO_PROJECT") or PROJECT

    def location(self) -> str:
        space, server = self._where
        where = space or server.partition("?")[0] or os.environ.get("TRACKIO_DIR") or "trackio"
        return f"{where} {self._project}"

    def open(self, first_step: int) -> None:
        self._require_server()
        import trackio

        # What it does not raise, it warns of.
        warnings.showwarning = lambda message, *_, **__: self.remarks.append(one_line(message, 300))
        name = str(self.known.get("id") or f"{self.run_name}-{uuid.uuid4().hex[:6]}")
        self._run = trackio.init(
            project=self._project,
            name=name,
            resume="allow",
            config=self.config,
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        space, server = self._where
        at = f"https://huggingface.co/spaces/{space}" if space else server.partition("?")[0]
        self.known |= {"id": name, "at": at or f"see it with: {shell('trackio', 'show', '--project', self._project)}"}

    def received(self) -> dict[Stream, int]:
        following = getattr(self._run, "_next_step", None)
        return {} if any(self._where) or not isinstance(following, int) else {"metrics": following - 1}

    def send(self, lines: list[Line]) -> None:
        import trackio

        self._require_server()
        for line in lines:
            values: dict[str, Any] = dict(line.values)
            if line.samples:
                values["samples"] = trackio.Table(columns=["prompt", "text"], data=[list(one) for one in line.samples])
            self._run.log(values, step=line.step)
        deadline = time.monotonic() + _DRAIN_S
        while getattr(self._run, "_queued_logs", None) or getattr(self._run, "_sending_batch", None):
            if time.monotonic() > deadline:
                raise TrackerError(f"it has not written in {_DRAIN_S} s what it was given")
            time.sleep(0.05)

    def close(self, end: End, summary: dict[str, Any] | None) -> None:
        if summary is not None:
            import trackio

            text = f"{end}\n\n```json\n{json.dumps(summary)}\n```"
            step = whole(summary.get("steps"))  # its own next one would be taken for a step that it has
            self._run.log({"summary": trackio.Markdown(text)}, step=0 if step is None else step)
        self._run.finish()

    def _require_server(self) -> None:
        """Raise where the server does not take an empty list: trackio would keep figures to itself."""
        if not (server := self._where[1]):
            return
        parts = urllib.parse.urlsplit(server)
        token = dict(urllib.parse.parse_qsl(parts.query)).get("write_token") or os.environ.get("TRACKIO_WRITE_TOKEN")
        request = urllib.request.Request(
            f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}/api/bulk_log",
            data=json.dumps({"args": [], "kwargs": {"logs": [], "hf_token": None}}).encode(),
            headers={"Content-Type": "application/json", "X-Trackio-Write-Token": token or ""},
        )
        try:
            urllib.request.urlopen(request, timeout=_SERVER_S).close()
        except urllib.error.HTTPError as error:
            said = one_line(error.read(_SAID_BYTES).decode(errors="replace"))
            if error.code in (401, 403) or "write_token" in said:
                raise TrackerError("it refuses the write token; set TRACKIO_WRITE_TOKEN to the server's") from error
            raise TrackerError(f"its server answers {error.code} {error.reason}") from error


TRACKER = Trackio
