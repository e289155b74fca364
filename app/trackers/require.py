"""Before the first step: whether the trackers of a recipe can be sent to, as far as this machine can tell."""

from __future__ import annotations

import configparser
import importlib.metadata
import importlib.util
import netrc
import os
import re
import urllib.parse
from collections.abc import Callable, Iterable
from pathlib import Path

from penstock.storage.files.errors import UserError

_PACKAGES = {
    "trackio": ("trackio", (0, 40)),
    "wandb": ("wandb", (0, 20)),
    "tensorboard": ("tensorboard", (2, 18)),
    "mlflow": ("mlflow-skinny", (3, 0)),
}
"""Tracker -> what is installed for it and the oldest version, as in pyproject.toml. mlflow-skinny is mlflow's client;
mlflow as a whole pins pyarrow to what the data readers have left behind, and pip then takes a mlflow of long ago."""
_WANDB = "https://api.wandb.ai"
_WANDB_OFFLINE = ("offline", "dryrun", "disabled")


def require_trackers(trackers: Iterable[str]) -> None:
    """Raise UserError, one line, for a tracker that is not installed, or that nobody has logged in to. None is
    imported, and nobody is asked."""
    wrong = []
    for name in trackers:
        if (problem := _package(name)) is not None:
            wrong.append(f"{name} {problem}")
        elif (problem := _LOGINS.get(name, lambda: None)()) is not None:
            wrong.append(f"{name}: {problem}")
    if wrong:
        raise UserError(f"trackers: {'; '.join(wrong)}, or leave it out of trackers")


def _package(name: str) -> str | None:
    """What is wrong with a tracker's package; None where nothing is."""
    package, least = _PACKAGES[name]
    if not _can_be_imported(name):
        return f"is not installed; `pip install {package}`"
    version = _version(package) or _version(name)
    numbers = tuple(int(part) for part in re.findall(r"\d+", version or "")[:2])
    if numbers and numbers < least:
        at_least = f"{package}>={'.'.join(map(str, least))}"
        return f"{version} is too old; `pip uninstall {name}`, then `pip install '{at_least}'`"
    return None


def _can_be_imported(name: str) -> bool:
    """A folder of that name where somebody works, as wandb makes one, is no package."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _wandb() -> str | None:
    said = _wandb_settings()
    mode = os.environ.get("WANDB_MODE") or said.get("mode", "online")
    keys = [os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")]
    if mode in _WANDB_OFFLINE or any(keys) or said.get("api_key"):
        return None
    host = urllib.parse.urlsplit(os.environ.get("WANDB_BASE_URL") or said.get("base_url") or _WANDB).hostname
    if host is not None and _in_netrc(host):
        return None
    return "you are not logged in; run `wandb login`, or set WANDB_API_KEY, or WANDB_MODE=offline"


def _wandb_settings() -> dict[str, str]:
    """What `wandb login` and `wandb offline` have written for this user and this folder."""
    folder = os.environ.get("WANDB_CONFIG_DIR") or Path("~/.config/wandb").expanduser()
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read([Path(folder) / "settings", Path(os.environ.get("WANDB_DIR") or ".") / "wandb" / "settings"])
        return dict(parser["default"]) if parser.has_section("default") else {}
    except (configparser.Error, OSError, ValueError):
        return {}


def _in_netrc(host: str) -> bool:
    named = os.environ.get("NETRC")
    for file in [Path(named)] if named else [Path("~/.netrc").expanduser(), Path("~/_netrc").expanduser()]:
        try:
            found = netrc.netrc(str(file)).authenticators(host)
        except (OSError, netrc.NetrcParseError, ValueError):
            continue
        if found is not None and found[2]:
            return True
    return False


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


_LOGINS: dict[str, Callable[[], str | None]] = {"wandb": _wandb, "trackio": _trackio, "mlflow": _mlflow}
"""What is wrong with the login of a tracker that is installed; None where nothing is."""
