"""Processes that write one store together, each parts of its own: what they tell each other of it."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Protocol

import torch


class Members(Protocol):
    """One process's side of it."""

    def agree(self) -> None:
        """Return once all members have called it as often."""


class SharedChecksums(MutableMapping[int, int]):
    """Part -> CRC-32C of what has been written of an array since the last commit, by whichever process, in memory that
    they share. Two generations take turns in it: whoever has not heard yet of a commit still sees those before it."""

    def __init__(self, rows: torch.Tensor) -> None:
        """`rows`: int64 [2, parts]; 0 where nothing has been written, else the checksum and one."""
        self._rows, self._turn = rows, 0

    @property
    def _row(self) -> torch.Tensor:
        return self._rows[self._turn]

    def __getitem__(self, part: int) -> int:
        if not (value := int(self._row[part])):
            raise KeyError(part)
        return value - 1

    def __setitem__(self, part: int, crc: int) -> None:
        self._row[part] = crc + 1

    def __delitem__(self, part: int) -> None:
        if not int(self._row[part]):
            raise KeyError(part)
        self._row[part] = 0

    def __iter__(self) -> Iterator[int]:
        return iter(self._row.nonzero().flatten().tolist())

    def __len__(self) -> int:
        return int(self._row.count_nonzero())

    def clear(self) -> None:
        """This process has heard of the commit."""
        self._turn = 1 - self._turn

    def forget(self) -> None:
        """All processes have heard of the commit before the one to come: make room for what follows that."""
        self._rows[1 - self._turn].zero_()
