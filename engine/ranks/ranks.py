"""What the ranks of a run agree on: objects, seldom, and small, over the pipes by which the first one started them."""

from __future__ import annotations

import itertools
import os
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from penstock.storage.files.errors import UserError

LOOK_S = 0.2
"""Between two looks of a waiting rank at whether the others live."""
GONE_S = 5.0
"""In which whoever watches over a rank notes that it has ended."""
RANK, COUNT, PIPE, PARENT = "PENSTOCK_RANK", "PENSTOCK_RANKS", "PENSTOCK_PIPE", "PENSTOCK_PARENT"
"""Variables by which a rank's process is told who it is, and the number of its end of the pipe."""

T = TypeVar("T")
_NONE: Any = object()
"""In the place of what a rank has not taken."""


class Ranks:
    """One rank among `count`; what all call, they call in the same order, from one thread."""

    def __init__(self, rank: int, count: int, pipes: Mapping[int, Connection], check: Callable[[], None]) -> None:
        """`pipes`: of the first rank to every other one, of others to the first; `check` raises where one of the others
        has ended."""
        self.rank, self.count, self.check, self._pipes = rank, count, check, pipes

    @property
    def first(self) -> bool:
        """Whether it is the one that decides, reports and commits."""
        return self.rank == 0

    def of_first(self, make: Callable[[], T]) -> T:
        """What `make` returns on rank 0, on every rank."""
        if not self.first:
            return self.hear()  # type: ignore[no-any-return]
        value = make()
        self.tell(value)
        return value

    def tell(self, value: object) -> None:
        """On rank 0, what the others `hear`."""
        for rank in self._pipes:
            self._send(rank, value)

    def hear(self) -> Any:
        return self._receive(0)

    def all_of(self, value: T) -> list[T]:
        """The value of every rank, by rank."""
        if self.first:
            return self.of_first(lambda: [value, *(self._receive(rank) for rank in range(1, self.count))])
        self._send(0, value)
        return self.hear()  # type: ignore[no-any-return]

    def in_turns(self, own: Sequence[T]) -> list[T]:
        """Of things that ranks take in turns, from the first on, all; `own`: what this one has taken."""
        turns = itertools.zip_longest(*self.all_of(own), fillvalue=_NONE)
        return [one for turn in turns for one in turn if one is not _NONE]

    def meet(self) -> None:
        """Return once all ranks have called it."""
        self.all_of(None)

    def _send(self, rank: int, value: object) -> None:
        try:
            self._pipes[rank].send_bytes(pickle.dumps(value))  # `send` would share a tensor's memory
        except OSError:
            self._gone(rank)

    def _receive(self, rank: int) -> Any:
        try:
            while not self._pipes[rank].poll(LOOK_S):
                self.check()
            return pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, OSError):
            self._gone(rank)

    def _gone(self, rank: int) -> None:
        """Raise why a rank is no longer there, once `check` knows."""
        deadline = time.monotonic() + GONE_S
        while time.monotonic() < deadline:
            self.check()
            time.sleep(LOOK_S / 10)
        raise UserError(f"GPU {rank}: its process has ended")


ALONE = Ranks(0, 1, {}, lambda: None)


def join() -> Ranks:
    """This process's rank, as the environment says."""
    pipe = Connection(int(os.environ[PIPE]))
    return Ranks(int(os.environ[RANK]), int(os.environ[COUNT]), {0: pipe}, lambda: None)
