"""What an objective measures beside its loss (`rewards/margins`, `kl`), read from lines that anybody may have written,
and in few words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from penstock.app.runs.files import number
from penstock.engine.events import REWARD as REWARD
from penstock.storage.files.units import figure

MOST_NAMES = 64
"""Of a run; objectives have far fewer, and what is beyond is left out."""
_MOST_CHARS = 100
_FIRST = ("rewards/margins", "rewards/accuracies", REWARD, "kl", "reward_std", "completions/mean_length")
"""What says most of a run."""
_IN_A_LINE = 3
"""So many are told where there is little room."""


def measured_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Name -> value in a line of metrics.jsonl or validation.jsonl; NaN where it was not finite. What is no number, or
    has a name that cannot be shown, is left out."""
    given = line.get("measured")
    result: dict[str, float] = {}
    for name, value in islice(given.items() if isinstance(given, dict) else (), MOST_NAMES):
        known = math.nan if value is None else number(value)
        if known is not None and _is_name(name):
            result[name] = known
    return result


def _is_name(name: str) -> bool:
    """Whether a name can be shown, and sent to trackers, which take it for a path."""
    shown = len(name) <= _MOST_CHARS and name.isprintable() and "\ufffd" not in name
    return shown and all(part.strip(" .") for part in name.split("/"))


def add_first_and_last(known: dict[str, dict[str, float]], line: Mapping[str, Any]) -> None:
    """Take a line's finite values into `known`: name -> `first` and `last`, as summary.json has them."""
    for name, value in measured_of(line).items():
        if math.isfinite(value) and (name in known or len(known) < MOST_NAMES):
            known.setdefault(name, {"first": value})["last"] = value


def by_weight(names: Iterable[str]) -> list[str]:
    """Those first that say most, the others as they come; names with the same beginning stand together."""
    ordered = _ordered(names)
    groups = [*dict.fromkeys(map(group_of, ordered))]
    return sorted(ordered, key=lambda name: groups.index(group_of(name)))


def _ordered(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST))


def group_of(name: str) -> str:
    """What is before the last slash; a name without one is alone."""
    return name.rpartition("/")[0] or name


def label(name: str, before: str | None) -> str:
    """The name, without its beginning where that of the name `before` it is the same."""
    return name if before is None or group_of(name) != group_of(before) else name.rpartition("/")[2]


def measured_text(measured: Mapping[str, float]) -> str:
    """The first few by weight: `rewards/margins 0.310  accuracies 0.720`; empty where there is nothing."""
    first = _ordered(measured)[:_IN_A_LINE]
    before = [None, *first]
    return "  ".join(f"{label(name, last)} {figure(measured[name])}" for name, last in zip(first, before, strict=False))
