"""Whether recipes fit this machine, as plans said: cached, so that a list need not plan. An answer holds for a recipe
file's content, on one machine with about as much free memory and disk."""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from penstock import __version__
from penstock.storage.files.user_cache import code_digest, read_cached, write_cached

_MOST_FILES = 256
_CODE = ("machine", "forecast", "plan", "schedule", "model", "attention", "hf", "optim")
"""Rooms of the engine whose code decides a plan."""
_CLASSES = 8
"""Free bytes of one class differ by less than 2 ** (1 / _CLASSES), which is a twelfth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What a plan of a recipe for this machine said."""

    fits: bool | None
    """None: it could not be planned, and `message` says why."""
    short: str = ""
    """What there is too little of: RAM, GPU memory or disk."""
    message: str = ""
    """The plan's own words on that."""
    params: int | None = None
    context: int | None = None
    """Tokens."""
    step_s: float | None = None
    tokens_per_s: float | None = None
    """Planned; None where it does not fit."""


def fit_of(forecast: dict[str, Any]) -> Fit:
    """The answer that a forecast (app/planning/plan.py) gives."""
    known: dict[str, Any] = {"context": forecast.get("context"), "params": (forecast.get("model") or {}).get("params")}
    if forecast["fits"]:
        return Fit(fits=True, step_s=forecast["step_s"], tokens_per_s=forecast["tokens_per_s"], **known)
    refusal = forecast["refusal"]
    gpu = "RAM" if forecast["machine"]["gpu"] is None else "GPU memory"
    short = {"gpu": gpu, "ram": "RAM", "nvme": "disk"}[refusal["tier"]]
    return Fit(fits=False, short=short, message=refusal["message"], **known)


def here_digest(root: Path) -> str:
    """Of this machine as a plan of a run below `root` finds it: its profile, and the class of what is free."""
    from penstock.engine.machine.limits import free_disk, free_memory, total_memory
    from penstock.engine.machine.presets import profile_path
    from penstock.engine.machine.reservations import reserved

    free = free_memory().free_bytes - sum(other.ram_bytes for other in reserved())
    made_of = {
        "version": __version__,
        "code": _code_digest(),
        "profile": _content_digest(profile_path()),
        "gpus": sorted(path.name for path in Path("/proc/driver/nvidia/gpus").glob("*")),
        "cores": os.cpu_count(),
        "ram": [total_memory(), _class(free)],
        "disk": _class(free_disk(root)),
    }
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()


def _class(num_bytes: int) -> int:
    return math.floor(_CLASSES * math.log2(num_bytes)) if num_bytes > 0 else -1


@cache
def _code_digest() -> str:
    base = Path(__file__).resolve().parents[2]
    return code_digest([base / "app", *(base / "engine" / available for available in _CODE)])


def _content_digest(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def read_fit(recipe: str, here: str) -> Fit | None:
    """The kept answer for a recipe file's digest and `here_digest`; None without one."""
    from penstock.storage.files.untrusted import typed

    try:
        return typed(read_cached("fits", _name(recipe, here)), Fit)
    except ValueError:
        return None


def keep_fit(recipe: str, here: str, fit: Fit) -> None:
    """Keep an answer, where a folder for it can be used."""
    write_cached("fits", _name(recipe, here), asdict(fit), _MOST_FILES)


def _name(recipe: str, here: str) -> str:
    return hashlib.sha256(f"{recipe} {here}".encode()).hexdigest()
