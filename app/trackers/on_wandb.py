"""Weights & Biases, with a server or offline, as WANDB_MODE says."""

from __future__ import annotations

import configparser
import contextlib
import netrc
import os
import re
import urllib.parse
import uuid
from html import escape
from pathlib import Path
from typing import Any

from penstock.app.runs.files import whole
from penstock.app.trackers.base import PROJECT, End, Line, Stream, Tracker, TrackerError, flat
from penstock.storage.files.untrusted import one_line, shell

INIT_S = 30
"""Until a server that does not answer counts as one that is away."""
_STEP = "train/global_step"
"""The axis of all charts: wandb's own counter counts what was sent."""
_REFUSED = re.compile(r"\b40[13]\b")
_QUIET: dict[str, Any] = {
    "silent": True,
    "console": "off",
    "disable_git": True,
    "disable_code": True,
    "disable_job_creation": True,
    "x_disable_stats": True,
    "x_disable_meta": True,
    "x_disable_machine_info": True,
    "x_save_requirements": False,
    "symlink": False,
    "init_timeout": INIT_S,
}
"""What is sent is what the run directory holds: nothing of this machine, and nothing of the sending process."""


class Wandb(Tracker):
    """wandb's own process keeps what is handed over in files and sends it, again and again where it has to."""

    name = "wandb"
    package = ("wandb", (0, 20))
    _run: Any = None

    @staticmethod
    def unready() -> str | None:
        environ, said = os.environ, configparser.ConfigParser(interpolation=None)
        folders = [environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb", f"{environ.get('WANDB_DIR') or '.'}/wandb"]
        with contextlib.suppress(configparser.Error, OSError, ValueError):  # of `wandb login` and `wandb offline`
            said.read(Path(folder).expanduser() / "settings" for folder in folders)
        mode = environ.get("WANDB_MODE") or said.get("default", "mode", fallback="online")
        keys = (environ.get("WANDB_API_KEY"), environ.get("WANDB_IDENTITY_TOKEN_FILE"))
        if mode in ("offline", "dryrun", "disabled") or any(keys) or said.has_option("default", "api_key"):
            return None
        server = environ.get("WANDB_BASE_URL") or said.get("default", "base_url", fallback="https://api.wandb.ai")
        with contextlib.suppress(OSError, netrc.NetrcParseError, ValueError):
            result = netrc.netrc(environ.get("NETRC")).authenticators(str(urllib.parse.urlsplit(server).hostname))
            if result is not None and result[2]:
                return None
        return "you are not logged in; run `wandb login`, or set WANDB_API_KEY, or WANDB_MODE=offline"

    def location(self) -> str:
        names = ("WANDB_BASE_URL", "WANDB_ENTITY", "WANDB_PROJECT")
        return " ".join(f"{name}={os.environ[name]}" for name in names if os.environ.get(name)) or "wandb"

    def open(self, first_step: int) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        own = {name: value for name, value in _QUIET.items() if name in wandb.Settings.model_fields}
        own_id = str(self.known.get("id") or uuid.uuid4().hex[:12])
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT") or PROJECT,
                name=os.environ.get("WANDB_NAME") or self.run_name,
                id=own_id,
                resume="allow",
                dir=os.environ.get("WANDB_DIR") or str(self.path / "trackers"),
                config=self.config,
                settings=wandb.Settings(**own),
                allow_val_change=True,
            )
        except wandb.errors.Error as error:
            if isinstance(error, wandb.errors.AuthenticationError) or _REFUSED.search(str(error)):
                raise TrackerError("it refuses this login; log in with `wandb login`, or set WANDB_API_KEY") from error
            raise TrackerError(f"its server gave an unexpected answer ({one_line(error, 160)})") from error
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)
        # wandb counts what it was sent; offline it does not know what it was sent before.
        rows, at = max(self._run.step, self._run.starting_step), str(self._run.url)
        if self._offline:
            rows = max(rows, whole(self.known.get("rows")) or 0)
            at = f"offline; send it with: {shell('wandb', 'sync', os.path.dirname(self._run.dir))}"
        self.known |= {"id": own_id, "at": at, "rows": rows}

    @property
    def _offline(self) -> bool:
        return bool(self._run.settings.mode not in ("online", "shared", "run"))

    def received(self) -> dict[Stream, int]:
        if self._offline:
            return {}
        last = self._run.summary.get(_STEP)
        return {"metrics": int(last) if isinstance(last, int | float) else -1}

    def send(self, lines: list[Line]) -> None:
        import wandb

        for line in lines:
            values: dict[str, Any] = {**line.values, _STEP: line.step}
            if line.samples:  # a table would be an artifact of its own
                shown = (f"<b>{escape(prompt)}</b>{escape(text)}" for prompt, text in line.samples)
                values["samples"] = wandb.Html(f'<div style="white-space: pre-wrap">{"<hr>".join(shown)}</div>')
            self._run.log(values, step=self.known["rows"])
            self.known["rows"] += 1

    def close(self, end: End, summary: dict[str, Any] | None) -> None:
        if summary is not None:
            self._run.summary.update({f"summary/{key}": value for key, value in flat(summary).items()})
        self._run.finish(exit_code=0 if end in ("finished", "stopped") else 1)


TRACKER = Wandb
