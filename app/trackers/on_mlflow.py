"""MLflow, at MLFLOW_TRACKING_URI."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from typing import Any

from penstock.app.trackers.base import PROJECT, STREAMS, End, Line, Stream, Tracker, flat, samples_text
from penstock.storage.files.untrusted import one_line

_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "GIT_PYTHON_REFRESH": "quiet",
}
"""Its own retries would take minutes of which nobody hears."""
_MOST_METRICS = 1000
"""Of one request; the server's limit."""
_MOST_PARAMS = 100
_PARAM_CHARS = 500
_NO_NAME = re.compile(r"[^\w./ -]")
"""What the name of a metric may not hold; that of a function that rewards may."""
_ENDS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED", "crashed": "FAILED"}
_MARK = "penstock.sent."
"""Tags with the last step of each stream: written with the figures, so that none is sent twice."""


class MLflow(Tracker):
    """Each request has arrived when it returns."""

    name = "mlflow"
    package = ("mlflow-skinny", (3, 0))  # mlflow pins a pyarrow that the data readers have left behind
    _client: Any = None

    @staticmethod
    def unready() -> str | None:
        if os.environ.get("MLFLOW_TRACKING_URI") or importlib.util.find_spec("sqlalchemy"):
            return None
        return "no server is set; set MLFLOW_TRACKING_URI to a server's address"

    def location(self) -> str:
        return f"{os.environ.get('MLFLOW_TRACKING_URI') or os.getcwd()} {self._experiment}"

    @property
    def _experiment(self) -> str:
        return os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT

    @property
    def _run(self) -> str:
        return str(self.known["id"])

    def open(self, first_step: int) -> None:
        for name, value in _DEFAULTS.items():
            os.environ.setdefault(name, value)
        import mlflow
        from mlflow.entities import Param

        self._client = mlflow.MlflowClient()
        if self.known:
            self._client.update_run(self._run, status="RUNNING")
            return
        experiment = os.environ.get("MLFLOW_EXPERIMENT_ID")
        if not experiment:
            result = self._client.get_experiment_by_name(self._experiment)
            experiment = self._client.create_experiment(self._experiment) if result is None else result.experiment_id
        made = {f"penstock.{name}": value for name, value in self.config["made_with"].items()}
        run_name = os.environ.get("MLFLOW_RUN_NAME") or self.run_name
        id = self._client.create_run(experiment, run_name=run_name, tags=made).info.run_id
        uri = mlflow.get_tracking_uri()
        page = f"{uri.rstrip('/')}/#/experiments/{experiment}/runs/{id}"
        self.known |= {"id": id, "at": page if uri.startswith("http") else f"run {id} at {uri}"}
        recipe = {name: value for name, value in self.config.items() if name != "made_with"}
        params = [Param(name, str(value)[:_PARAM_CHARS]) for name, value in flat(recipe).items()]
        for start in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._run, params=params[start : start + _MOST_PARAMS])

    def received(self) -> dict[Stream, int]:
        tags = self._client.get_run(self._run).data.tags
        return {stream: int(tags.get(f"{_MARK}{stream}", -1)) for stream in STREAMS if stream != "samples"}

    def send(self, lines: list[Line]) -> None:
        from mlflow.entities import Metric, RunTag

        batch: list[Any] = []
        marks: dict[str, str] = {}
        for line in [*lines, None]:
            if batch and (line is None or len(batch) + len(line.values) > _MOST_METRICS):
                self._client.log_batch(self._run, metrics=batch, tags=[RunTag(*mark) for mark in marks.items()])
                batch, marks = [], {}
            if line is not None and line.stream != "samples":
                at = int(line.time * 1000)
                batch += [Metric(_NO_NAME.sub("_", name), value, at, line.step) for name, value in line.values.items()]
                marks[f"{_MARK}{line.stream}"] = str(line.step)
        for line in lines:
            if line.samples:
                self._text(samples_text(line.samples), f"samples/step-{line.step}.md")

    def _text(self, text: str, name: str) -> None:
        """Write an artifact, which has a store of its own: figures arrive without it too."""
        try:
            self._client.log_text(self._run, text, name)
        except Exception as error:
            self.remarks.append(f"its artifact store does not accept samples and summary ({one_line(error, 200)})")

    def close(self, end: End, summary: dict[str, Any] | None) -> None:
        if summary is not None:
            self._text(json.dumps(summary, indent=1), "summary.json")
        self._client.set_terminated(self._run, _ENDS[end])


TRACKER = MLflow
