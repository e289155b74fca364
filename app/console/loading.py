"""How PyTorch and transformers are loaded, and which packages there are."""

from __future__ import annotations

import gc
import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def uncollected() -> Iterator[None]:
    """Nobody looks for garbage meanwhile: a plan makes little of it, among many ops."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def loading() -> Iterator[None]:
    """For imports of PyTorch and transformers. What they make stays: to look for garbage there, now, later and when the
    process ends, would take half of the time."""
    with uncollected():
        yield
    gc.freeze()


def versions(*packages: str) -> dict[str, str]:
    """Package -> its version, of those that are installed."""
    result = {}
    for name in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            result[name] = importlib.metadata.version(name)
    return result
