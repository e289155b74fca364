"""How PyTorch and transformers are loaded."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
