"""Before the first step: whether the trackers of a recipe can be sent to, as far as this machine can tell."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable

from penstock.app.console.loading import versions
from penstock.app.trackers.base import tracker
from penstock.storage.files.errors import UserError


def require_trackers(trackers: Iterable[str]) -> None:
    """Raise UserError, one line, for a tracker that is not installed, or that nobody has logged in to. No package is
    imported, and nobody is asked."""
    wrong = []
    for name in trackers:
        if problem := _package(name):
            wrong.append(f"{name} {problem}")
        elif problem := tracker(name).unready():
            wrong.append(f"{name}: {problem}")
    if wrong:
        raise UserError(f"trackers: {'; '.join(wrong)}, or leave it out of trackers")


def _package(name: str) -> str | None:
    """What is wrong with a tracker's package; None where nothing is."""
    package, least = tracker(name).package
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
