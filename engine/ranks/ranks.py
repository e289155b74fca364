"""What the ranks of a run agree on, by torch's key-value store of the first one: objects, seldom, and small."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

from penstock.storage.files.errors import UserError

if TYPE_CHECKING:
    import torch.distributed as dist

LEAST_S, MOST_S = 2e-4, 0.02
"""Between two looks at whether another rank has said something: at first, and after a while."""
START = timedelta(seconds=120)
"""In which a rank reaches the first one, once it has begun."""
RANK, COUNT, PORT, PARENT = "PENSTOCK_RANK", "PENSTOCK_RANKS", "PENSTOCK_PORT", "PENSTOCK_PARENT"
"""Variables by which a rank's process is told who it is."""

T = TypeVar("T")


class Ranks:
    """One rank among `count`; what all call, they call in the same order, from one thread."""

    def __init__(self, rank: int, count: int, store: dist.Store | None, check: Callable[[], None]) -> None:
        """`check` raises where one of the others has ended."""
        self.rank, self.count, self.check = rank, count, check
        self._store, self._calls = store, 0

    @property
    def first(self) -> bool:
        """Whether it is the one that decides, reports and commits."""
        return self.rank == 0

    def of_first(self, make: Callable[[], T]) -> T:
        """What `make` returns on rank 0, on every rank."""
        if not self.first:
            return cast(T, self.hear())
        value = make()
        self.tell(value)
        return value

    def tell(self, value: object) -> None:
        """On rank 0, what the others `hear`."""
        if self.count > 1:
            self._set(self._key(), value)

    def hear(self) -> Any:
        return self._get(self._key(), self.count - 1)

    def all_of(self, value: T) -> list[T]:
        """The value of every rank, by rank."""
        if self.count == 1:
            return [value]
        key = self._key()
        self._set(f"{key}/{self.rank}", value)
        return [self._get(f"{key}/{rank}", self.count) for rank in range(self.count)]

    def meet(self) -> None:
        """Return once all ranks have called it."""
        self.all_of(None)

    def _key(self) -> str:
        self._calls += 1
        return str(self._calls)

    def _set(self, key: str, value: Any) -> None:
        assert self._store is not None
        self._store.set(key, pickle.dumps(value))  # type: ignore[arg-type]  # bytes are taken as they are

    def _get(self, key: str, readers: int) -> Any:
        """A value, which is forgotten once so many ranks have read it."""
        assert self._store is not None
        pause_s = LEAST_S
        while not self._store.check([key]):  # its own wait says so on standard error each time it ends in vain
            self.check()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, MOST_S)
        value = pickle.loads(self._store.get(key))
        if self._store.add(f"{key}/read", 1) == readers:
            self._store.delete_key(key)
            self._store.delete_key(f"{key}/read")
        return value


ALONE = Ranks(0, 1, None, lambda: None)


def serve() -> dist.Store:
    """The first rank's store, at a port that is free."""
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=START)


def join() -> Ranks:
    """This process's rank, as the environment says. Raises UserError where the first one cannot be reached."""
    from torch.distributed import DistError, TCPStore

    try:
        store = TCPStore("127.0.0.1", int(os.environ[PORT]), is_master=False, timeout=START)
    except DistError as error:
        raise UserError(f"the first process of the run cannot be reached on this machine: {error}") from error
    return Ranks(int(os.environ[RANK]), int(os.environ[COUNT]), store, lambda: None)
