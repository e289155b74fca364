"""Processes of ours: with the code that this one runs, and none of the folder that they are started in."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

import penstock

_PR_SET_PDEATHSIG = 1


def command(module: str, *arguments: str) -> list[str]:
    """What runs a module of ours. -P: app/ or torch/ in the user's current folder is not taken for a package."""
    return [sys.executable, "-P", "-m", f"penstock.{module}", *arguments]


def end_with_parent(parent: int | None = None) -> None:
    """Let the kernel kill this process when its parent ends, however that ends; at once where the `parent` of this id
    has ended before."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def environment(**more: str) -> dict[str, str]:
    """This process's environment with `more`, in which a child finds the package that runs here: one that is not
    installed goes into PYTHONPATH."""
    folder = Path(penstock.__file__).resolve().parents[1]
    if folder.name not in ("site-packages", "dist-packages"):
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        more = {"PYTHONPATH": os.pathsep.join(paths), **more}
    return os.environ | more
