"""What an observer wants of a run, on all ranks alike: what the first rank's says."""

from __future__ import annotations

from typing import Any, cast

from penstock.engine.events import Observer, Want
from penstock.engine.ranks.ranks import Ranks


class _Agreed:
    """An observer whose answers are those of the first rank's."""

    def __init__(self, given: Observer, ranks: Ranks) -> None:
        self._given, self._ranks = given, ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._given, name)

    def wanted(self) -> Want:
        return self._ranks.of_first(self._given.wanted)

    def checkpoint_requests(self) -> list[str]:
        return self._ranks.of_first(self._given.checkpoint_requests)


def agreed(given: Observer, ranks: Ranks) -> Observer:
    return given if ranks.count == 1 else cast(Observer, _Agreed(given, ranks))
