"""Servers that play those of trackers, on this machine: enough of each protocol for its own client, and four moods.

A mood is `works`, `refuses` (whoever logs in), `fails` (500) or `hangs` (never answers).
"""

import gzip
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self
from urllib.parse import parse_qsl, urlsplit

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


class Request(NamedTuple):
    method: str
    path: str
    body: Any


class StandIn:
    """A server for the time of the block; what it was asked stays in `asked`."""

    refusal = 401

    def __init__(self, mood: str = "works") -> None:
        self.mood = mood
        self.requests: list[Request] = []
        self.reached = threading.Event()
        """Somebody has asked something."""
        self._released = threading.Event()

    def __enter__(self) -> Self:
        handler = type("Handler", (_Handler,), {"owner": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._released.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def respond(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        self.requests.append(Request(method, path, body))
        self.reached.set()
        if self.mood == "hangs":
            self._released.wait()
        if self.mood == "refuses":
            said = {"error": "A write_token is required", "errors": [{"message": "user is not logged in"}]}
            return self.refusal, said
        if self.mood != "works":
            return 500, {"error": "broken", "error_code": "INTERNAL_ERROR", "message": "broken"}
        return 200, self.answer(method, path, body)

    def answer(self, method: str, path: str, body: Any) -> Any:
        raise NotImplementedError


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Whoever asked was killed."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: ClassVar[StandIn]

    def log_message(self, *_: object) -> None:
        pass

    def _do(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            data = gzip.decompress(data)
        parts = urlsplit(self.path)
        try:
            body = json.loads(data) if data else dict(parse_qsl(parts.query))
        except ValueError:
            body = data.decode(errors="replace")
        try:
            code, answer = self.owner.respond(self.command, parts.path, body)
            content = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        except OSError:  # whoever asked was killed meanwhile
            return

    do_GET = do_POST = do_PUT = do_PATCH = _do


class WandbServer(StandIn):
    """W&B's: runs by their ids, each with its rows, summary, config and exit code."""

    def __init__(self, mood: str = "works") -> None:
        super().__init__(mood)
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.summary, self.config = dict[str, dict[str, Any]](), dict[str, dict[str, Any]]()
        self.exit_codes: dict[str, int] = {}

    def answer(self, method: str, path: str, body: Any) -> Any:
        if path.endswith("/file_stream"):
            return self._stream(path.split("/")[-2], body)
        if path != "/graphql":
            return {}
        name, variables = body["operationName"], body["variables"]
        project = {"id": "p", "name": "penstock", "entity": {"id": "e", "name": "me"}}
        if name == "RunResumeStatus":
            return {"data": {"model": {**project, "bucket": self._bucket(variables["name"])}}}
        if name == "UpsertBucket":
            run = variables["name"]
            self.rows.setdefault(run, [])
            if variables.get("config"):
                self.config[run] = json.loads(variables["config"])
            bucket = {"id": run, "name": run, "displayName": run, "config": "{}", "project": project}
            bucket["historyLineCount"] = len(self.rows[run])
            return {"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}}
        if name == "CreateRunFiles":
            files = [{"name": file, "uploadUrl": f"{self.url}/upload/{file}"} for file in variables["files"]]
            return {"data": {"createRunFiles": {"runID": variables["run"], "uploadHeaders": [], "files": files}}}
        return {"data": {}}

    def _bucket(self, run: str) -> dict[str, Any] | None:
        if run not in self.rows:
            return None
        rows = self.rows[run]
        counts = {"logLineCount": 0, "historyLineCount": len(rows), "eventsLineCount": 0}
        tail = json.dumps([json.dumps(rows[-1])] if rows else [])
        texts = {"summaryMetrics": json.dumps(self.summary.get(run, {})), "historyTail": tail, "eventsTail": "[]"}
        texts["wandbConfig"] = json.dumps({"t": 1})  # without it the run counts as one that has not begun
        config = json.dumps(self.config.get(run, {}))
        return {"id": run, "name": run, "displayName": run, "config": config, "tags": [], "notes": ""} | counts | texts

    def _stream(self, run: str, body: dict[str, Any]) -> Any:
        files = body.get("files", {})
        if "wandb-history.jsonl" in files:
            sent, rows = files["wandb-history.jsonl"], self.rows[run]
            rows[sent["offset"] : sent["offset"] + len(sent["content"])] = map(json.loads, sent["content"])
        if "wandb-summary.json" in files:
            self.summary[run] = json.loads(files["wandb-summary.json"]["content"][-1])
        if body.get("complete"):
            self.exit_codes[run] = body.get("exitcode", 0)
        return {"exitcode": None, "limits": {}}


class MlflowServer(StandIn):
    """MLflow's REST: one experiment and its runs, the texts that were put beside them."""

    def __init__(self, mood: str = "works") -> None:
        super().__init__(mood)
        self.runs: dict[str, dict[str, Any]] = {}
        self.texts: dict[str, str] = {}

    def answer(self, method: str, path: str, body: Any) -> Any:
        if "/artifacts/" in path:
            self.texts[path.rpartition("/")[2]] = body if isinstance(body, str) else json.dumps(body)
            return {}
        what = path.partition("/mlflow/")[2]
        if what == "experiments/get-by-name":
            return {"experiment": {"experiment_id": "1", "name": body["experiment_name"]}}
        if what == "runs/create":
            run = f"run{len(self.runs)}"
            self.runs[run] = {"name": body["run_name"], "tags": {}, "params": {}, "metrics": [], "status": "RUNNING"}
            self._tags(run, body.get("tags", []))
            return {"run": self._run(run)}
        run = body.get("run_id", "")
        if what == "runs/update":
            self.runs[run]["status"] = body.get("status", "RUNNING")
            return {"run_info": self._run(run)["info"]}
        if what == "runs/log-batch":
            self.runs[run]["metrics"] += body.get("metrics", [])
            self.runs[run]["params"] |= {one["key"]: one["value"] for one in body.get("params", [])}
            self._tags(run, body.get("tags", []))
            return {}
        if what == "runs/get":
            return {"run": self._run(run)}
        if what == "metrics/get-history":
            return {"metrics": [one for one in self.runs[run]["metrics"] if one["key"] == body["metric_key"]]}
        return {}

    def _tags(self, run: str, tags: list[dict[str, str]]) -> None:
        self.runs[run]["tags"] |= {one["key"]: one["value"] for one in tags}

    def _run(self, run: str) -> dict[str, Any]:
        kept = self.runs[run]
        info = {"run_id": run, "run_uuid": run, "experiment_id": "1", "status": kept["status"], "start_time": 0}
        info |= {"lifecycle_stage": "active", "artifact_uri": f"mlflow-artifacts:/1/{run}/artifacts", "user_id": "me"}
        data = {"tags": [{"key": key, "value": value} for key, value in kept["tags"].items()], "params": []}
        return {"info": info, "data": data}


class TrackioServer(StandIn):
    """Trackio's own: the logs that were sent to it."""

    refusal = 400
    """As trackio's says it."""

    def __init__(self, mood: str = "works") -> None:
        super().__init__(mood)
        self.logs: list[dict[str, Any]] = []

    def answer(self, method: str, path: str, body: Any) -> Any:
        name = path.rpartition("/")[2]
        if name == "bulk_log":
            self.logs += body["kwargs"]["logs"]
            return {"data": None}
        if name == "get_runs_for_project":
            return {"data": [{"name": one, "id": one} for one in sorted({log["run"] for log in self.logs})]}
        return {"data": None, "api_version": 1}


SERVERS: dict[str, type[StandIn]] = {"wandb": WandbServer, "mlflow": MlflowServer, "trackio": TrackioServer}


def without_settings(patch: pytest.MonkeyPatch) -> None:
    """None of this machine's user, for any tracker."""
    for name in [*os.environ]:
        if name.startswith(("WANDB_", "MLFLOW_", "TRACKIO_")):
            patch.delenv(name)


def tensorboard(run: Path) -> EventAccumulator:
    """What a run's tensorboard holds."""
    found = EventAccumulator(str(run / "tensorboard"))
    found.Reload()
    return found


def environment(name: str, url: str) -> dict[str, str]:
    """What sends a tracker to a stand-in."""
    return {
        "wandb": {"WANDB_BASE_URL": url, "WANDB_API_KEY": "0" * 40},
        "mlflow": {"MLFLOW_TRACKING_URI": url},
        "trackio": {"TRACKIO_SERVER_URL": url, "TRACKIO_WRITE_TOKEN": "token"},
    }[name]
