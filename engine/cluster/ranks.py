"""The processes that torchrun has started, as one: what they agree on before and while they train."""

from __future__ import annotations

import contextlib
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from penstock.storage.files.errors import UserError

_TIMEOUT = timedelta(hours=1)
"""For a collective: one rank may read or write all state meanwhile; torchrun ends them sooner if a rank died."""
_ANSWER = timedelta(seconds=2)
_SET_BY_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

T = TypeVar("T")


class SaidElsewhereError(UserError):
    """Another rank says what is wrong; this one ends as it does."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among all of them."""

    rank: int
    count: int

    @property
    def first(self) -> bool:
        """Whether it is the one that writes and speaks for all."""
        return self.rank == 0

    def together(self, act: Callable[[], T]) -> T:
        """What `act` returns; where it is refused on any rank all are, and the lowest of those says why."""
        result, error = None, None
        try:
            result = act()
        except UserError as refusal:
            error = refusal
        found = self.all_of(None if error is None else str(error))
        saying = next((rank for rank, text in enumerate(found) if text is not None), None)
        if saying is None:
            return result  # type: ignore[return-value]
        if saying != self.rank or error is None:
            raise SaidElsewhereError(str(found[saying]))
        everywhere = all(text is not None for text in found)
        raise error if everywhere or self.first else UserError(f"rank {self.rank} on {socket.gethostname()}: {error}")

    def first_then_all(self, act: Callable[[], T]) -> T:
        """As `together`, once rank 0 has done it alone: what it leaves on the shared disk the others find there."""
        mine = self.together(lambda: [act()] if self.first else [])
        return self.together(lambda: mine[0] if mine else act())

    def of_first(self, make: Callable[[], T]) -> T:
        """What `make` returns on rank 0, on every rank; refused there it is refused everywhere."""
        mine = self.together(lambda: make() if self.first else None)
        box: list[T | None] = [mine]
        dist.broadcast_object_list(box, src=0)
        return box[0]  # type: ignore[return-value]

    def all_of(self, value: T) -> list[T]:
        """The value of every rank, by rank."""
        result: list[T | None] = [None] * self.count
        dist.all_gather_object(result, value)
        return result  # type: ignore[return-value]

    def mesh(self, device: torch.device) -> DeviceMesh:
        """All ranks in a row, each with a device of its own of the type of `device`."""
        if device.type == "cuda":
            local, there = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
            if local >= there:
                raise UserError(
                    f"torchrun --nproc-per-node: process {local} of this machine has no GPU, as there are only "
                    f"{there}; start {there} processes on each machine"
                )
            torch.cuda.set_device(local)
        return init_device_mesh(device.type, (self.count,), mesh_dim_names=("shard",))

    def neighbours(self, device: torch.device, size: int) -> dist.ProcessGroup | None:
        """The group of `size` neighbours that this rank belongs to; None where that is itself."""
        if size == 1:
            return None
        return init_device_mesh(device.type, (self.count // size, size), mesh_dim_names=("data", "context")).get_group(
            1
        )


def _attempt(store: dist.Store, rank: int, count: int) -> str:
    """A name for these processes' time together, the same on all ranks, which no processes before them had.

    torchrun's store outlives its workers: after a restart it still holds where those that died could be reached, and no
    environment variable numbers the restarts alike on all machines (pytorch/pytorch#135712, #108158). So rank 0 makes a
    name up and answers each rank that greets it by that name; one that was made up before is answered by nobody.
    """
    own = uuid.uuid4().hex
    if rank == 0:
        store.set("penstock/name", own)
        for other in range(1, count):
            store.wait([f"penstock/{own}/{other}"], _TIMEOUT)
            store.set(f"penstock/{own}/{other}/{store.get(f'penstock/{own}/{other}').decode()}", "")
        return own
    deadline = time.monotonic() + _TIMEOUT.total_seconds()
    while True:
        name = store.get("penstock/name").decode()
        store.set(f"penstock/{name}/{rank}", own)
        try:
            store.wait([f"penstock/{name}/{rank}/{own}"], _ANSWER)
            return name
        except dist.DistStoreError:
            if time.monotonic() > deadline:
                raise


@contextlib.contextmanager
def joined() -> Iterator[Ranks]:
    """Join the processes that torchrun has started. Raises UserError where it has not started this one."""
    missing = [name for name in _SET_BY_TORCHRUN if name not in os.environ]
    if missing:
        raise UserError(
            f"start penstock cluster with torchrun, which sets {missing[0]}: torchrun --nnodes M --nproc-per-node 8 "
            "--rdzv-backend c10d --rdzv-endpoint HOST:29500 -m penstock cluster RECIPE --run-dir DIR (docs/cluster.md)"
        )
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    store, rank, count = next(iter(rendezvous("env://", timeout=_TIMEOUT)))
    fresh = dist.PrefixStore(_attempt(store, rank, count), store)
    dist.init_process_group(backend, store=fresh, rank=rank, world_size=count, timeout=_TIMEOUT)
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()
