"""The emulator from Python: which operators have been called, random delays of its streams."""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from standin import lines, setting

PACKAGES = sorted(Path(__file__).parents[1].glob("packages/flash-attn-*"))
"""Folders of flash-attn's versions as they are emulated."""


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(os.environ["COMPUTES_LIBRARY"])


def operators() -> int:
    """How many operators and overloads have a kernel that computes."""
    return int(_library().computes_operators())


def calls() -> Counter[str]:
    """Operators -> how often they were called so far."""
    found = (line.split("\t") for line in lines(_library().computes_calls))
    return Counter({name: int(count) for count, name in found})


@contextmanager
def delays(seed: int, us: int, copy_us: int = 0) -> Iterator[None]:
    """Inside the block each stream sleeps up to `us` microseconds before pieces of work, and up to `copy_us` before one
    copy of six, differently for each seed."""
    delay = ctypes.CDLL(None).standin_set_delays
    delay(ctypes.c_uint64(seed), ctypes.c_long(us), ctypes.c_long(copy_us))
    try:
        yield
    finally:
        delay(ctypes.c_uint64(0), ctypes.c_long(0), ctypes.c_long(0))


@contextmanager
def races() -> Iterator[list[str]]:
    """Inside the block accesses of memory are noted that nothing orders; they are in the list behind it."""
    found: list[str] = []
    cuda = ctypes.CDLL(None)
    with setting("STANDIN_RACES", 1, after=0):
        cuda.standin_forget_races()
        yield found
        found += lines(cuda.standin_races)


@contextmanager
def packages() -> Iterator[None]:
    """Inside the block all versions of flash-attn are installed, for whoever has not looked for them yet."""
    before = list(sys.path)
    sys.path += map(str, PACKAGES)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = before
        for name in [name for name in sys.modules if name.startswith("flash_attn")]:
            del sys.modules[name]
