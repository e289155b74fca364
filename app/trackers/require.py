"""Before the first step: whether the trackers of a recipe can be sent to, as far as this machine can tell."""

from __future__ import annotations

import configparser
import contextlib
import importlib.util
import netrc
import os
import re
import urllib.parse
from collections.abc import Iterable
from pathlib import Path

from penstock.app.console.loading import versions
from penstock.storage.files.errors import UserError

_PACKAGES = {
    "trackio": ("trackio", (0, 40)),
    "wandb": ("wandb", (0, 20)),
    "tensorboard": ("tensorboard", (2, 18)),
    "mlflow": ("mlflow-skinny", (3, 0)),
}
"""Tracker -> what is installed for it and the oldest version, as in pyproject.toml. mlflow-skinny is mlflow's client;
mlflow as a whole pins pyarrow to what the data readers have left behind, and pip then takes a mlflow of long ago."""


def require_trackers(trackers: Iterable[str]) -> None:
    """Raise UserError, one line, for a tracker that is not installed, or that nobody has logged in to. None is
    imported, and nobody is asked."""
    logins = {"wandb": _wandb, "trackio": _trackio, "mlflow": _mlflow}
    wrong = []
    for name in trackers:
        if problem := _package(name):
            wrong.append(f"{name} {problem}")
        elif name in logins and (problem := logins[name]()):
            wrong.append(f"{name}: {problem}")
    if wrong:
        raise UserError(f"trackers: {'; '.join(wrong)}, or leave it out of trackers")


def _package(name: str) -> str | None:
    """What is wrong with a tracker's package; None where nothing is."""
    package, least = _PACKAGES[name]
    if not _can_be_imported(name):
        return f"is not installed; `pip install {package}`"
    version = next(iter(versions(package, name).values()), "")
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers and numbers < least:
        at_least = f"{package}>={'.'.join(map(str, least))}"
        return f"{version} is too old; `pip uninstall {name}`, then `pip install '{at_least}'`"
    return None


def _can_be_imported(name: str) -> bool:
    """A folder of that name where somebody works, as wandb makes one, is no package."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


def _wandb() -> str | None:
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


def _trackio() -> str | None:
    if os.environ.get("TRACKIO_SPACE_ID"):
        from huggingface_hub import get_token

        return None if get_token() else "TRACKIO_SPACE_ID needs a login to the hub; run `hf auth login`"
    server = os.environ.get("TRACKIO_SERVER_URL") or ""
    if server and "write_token=" not in server and not os.environ.get("TRACKIO_WRITE_TOKEN"):
        return "TRACKIO_SERVER_URL needs a write token; set TRACKIO_WRITE_TOKEN"
    return None


def _mlflow() -> str | None:
    if os.environ.get("MLFLOW_TRACKING_URI") or _can_be_imported("sqlalchemy"):
        return None
    return "no server is set; set MLFLOW_TRACKING_URI to a server's address"
