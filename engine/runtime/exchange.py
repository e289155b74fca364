"""What ranks (engine/ranks) give each other during a step: gradients through rings, losses, norms, counts, and word of
what is done.

All ranks emit the same ops on gradients and updates in the same order, so that a number says which part is meant, and
no rank can wait for one that waits for it: of all ops that wait, the first in program order never has to.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from penstock.engine.plan.chunks import Chunk
from penstock.engine.plan.plan import Plan
from penstock.engine.runtime.memory import RamMemory
from penstock.engine.schedule import actions as a
from penstock.engine.schedule.ops import Op
from penstock.storage.tier.layout import ALIGN_NUMEL
from penstock.storage.tier.shared import Counters

KINDS = ("handed over", "freed", "updated", "step", "committing", "layer", "handed on", "routes", "ratios")
"""Of counters; each rank has one of each."""
TABLES = ("routes", "ratios")
"""Of numbers of all ranks that backward needs: where routers send a step's tokens, and KTO's ratios."""


class Exchange:
    """One rank's side of it; alone, it has nobody to wait for."""

    def __init__(
        self,
        plan: Plan,
        ram: RamMemory,
        counters: Counters | None,
        tables: Mapping[str, Tensor] | None = None,
        on_wait: Callable[[int, float], None] | None = None,
        of_chunks: Counters | None = None,
    ) -> None:
        """`counters`: of all ranks, KINDS times their number; None for the only one. `tables`: of TABLES those that are
        needed, float64 [ranks, what each has], in shared memory. `on_wait`: told of each rank that is waited for, and
        of the seconds. `of_chunks`: a counter for each chunk of all ranks, where they compute experts of all."""
        self._plan, self.rank, self._ram, self._counters = plan, plan.rank, ram, counters
        self._tables, self._on_wait, self._of_chunks = tables or {}, on_wait, of_chunks
        self.count = plan.problem.ranks
        self._met: Counter[str] = Counter()
        self._first_part: dict[str, int] = {}
        number = 0
        for name, buffer in plan.buffers.items():
            self._first_part[name] = number
            number += 0 if buffer.frozen else buffer.num_parts

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.count) if rank != self.rank]

    # ------------------------------------------------------------------ waiting

    def _post(self, kind: str, value: int) -> None:
        if self._counters is not None:
            self._counters.post(KINDS.index(kind) * self.count + self.rank, value)

    def _await(self, kind: str, rank: int, value: int) -> None:
        if self._counters is not None and rank != self.rank:
            self._wait(self._counters, KINDS.index(kind) * self.count + rank, rank, value)

    def _wait(self, counters: Counters, index: int, rank: int, value: int) -> None:
        """For a counter that another rank raises."""
        if counters[index] >= value:
            return
        began = time.perf_counter()
        counters.wait(index, value)
        if self._on_wait is not None:
            self._on_wait(rank, time.perf_counter() - began)

    def meet(self, kind: str) -> None:
        """Return once all ranks have called it as often; from one thread for each `kind`."""
        self._met[kind] += 1
        self._post(kind, self._met[kind])
        for rank in self.others:
            self._await(kind, rank, self._met[kind])

    # ------------------------------------------------------------------ gradients

    def ring(self, op: Op) -> Tensor:
        """This rank's slot for a part, float32, once what was there before has been added."""
        if a.FREED_BY in op.slots:
            self._await("freed", op.slots[a.FREED_BY], op.slots[a.SEQUENCE] + 1 - len(self._ram.rings[self.rank]))
        return self._slot(op, self.rank)

    def signal(self, op: Op) -> None:
        """The op's part is in this rank's ring."""
        self._post("handed over", op.slots[a.SEQUENCE] + 1)

    def parts(self, op: Op) -> Iterator[Tensor]:
        """The op's part of every rank's gradient, float32, in descending order of replicas, or of that of the only one
        that has any; it is free at the end."""
        alone = op.slots.get(a.OF_RANK)
        for rank in reversed(range(self.count)) if alone is None else (alone,):
            self._await("handed over", rank, op.slots[a.SEQUENCE] + 1)
            yield self._slot(op, rank)
        self._post("freed", op.slots[a.SEQUENCE] + 1)

    def _slot(self, op: Op, rank: int) -> Tensor:
        start, end = self._plan.buffers[op.block].part(op.index)
        return self._ram.rings[rank][op.slots[a.RING]][: end - start]

    def note_square(self, op: Op, gradient: Tensor) -> None:
        """Note the squared norm of a part, float32, that is complete: of whole rows, each summed by one thread, and
        then of all of them without rounding, so that it does not depend on how many threads there are."""
        rows = torch.linalg.vector_norm(gradient.view(-1, ALIGN_NUMEL), dim=1, dtype=torch.float64)
        self._ram.squares[self._first_part[op.block] + op.index] = math.fsum(rows.square().tolist())

    # ------------------------------------------------------------------ spread experts

    def signal_chunk(self, op: Op) -> None:
        """The op's chunk may go on elsewhere. Its counter is raised by whoever has the chunk, one after the other."""
        assert self._of_chunks is not None
        self._of_chunks.post(op.slots[a.PLACE], op.slots[a.SEQUENCE])

    def await_chunk(self, op: Op) -> None:
        assert self._of_chunks is not None
        self._wait(self._of_chunks, op.slots[a.PLACE], op.slots[a.OF_RANK], op.slots[a.SEQUENCE])

    # ------------------------------------------------------------------ shared sequences

    def signal_state(self, op: Op) -> None:
        """What this rank hands on is there."""
        self._post("handed on", op.slots[a.SEQUENCE])

    def await_state(self, op: Op) -> None:
        self._await("handed on", op.slots[a.OF_RANK], op.slots[a.SEQUENCE])

    def add_dkv(self, op: Op, sums: Tensor) -> None:
        """Add to `sums`, uint8 of float32, what ranks have found for the op's chunk of keys and values, in descending
        order of their shards; the first one takes the place of what was there."""
        length, chunk = self._plan.stream_chunks, self._plan.chunks[op.index]
        total, begun = sums.view(torch.float32), a.FIRST not in op.flags
        for rank in reversed(range(self.count)):
            if op.slots[a.OF_RANKS] >> rank & 1:
                found = self._ram.shared_window["dkv"][rank * length + chunk.ordinal][: op.nbytes].view(torch.float32)
                if begun:
                    total.add_(found)
                else:
                    total.copy_(found)
                begun = True

    # ------------------------------------------------------------------ numbers that backward needs

    def of_all(self, table: str, own: Tensor) -> Tensor:
        """A table of all ranks' numbers, float64 [ranks, n], once each has given its `own` [n], once a step. Nobody
        gives those of the next step before all have these: the end of a step lies between."""
        if self.count == 1:
            return own.double().cpu()[None]
        self._tables[table][self.rank] = own
        self.meet(table)
        return self._tables[table].clone()

    # ------------------------------------------------------------------ the end of a step

    def share(self, losses: Mapping[int, float]) -> tuple[list[float], list[float]]:
        """The losses of a step's chunks by their number in the whole step, from those of this rank's chunks by index,
        and the squared norms of its buffers; once all ranks have theirs."""
        for chunk in self._plan.chunks:
            self._ram.losses[self.number(chunk)] = losses.get(chunk.index, 0.0)
        self.meet("step")
        squares = self._ram.squares.tolist()
        of_buffer = [0.0] * len(self._plan.buffers)
        for i, (name, buffer) in enumerate(self._plan.buffers.items()):
            first = self._first_part[name]
            if not buffer.frozen:
                of_buffer[i] = math.fsum(squares[first : first + buffer.num_parts])
        return self._ram.losses.tolist(), of_buffer

    def number(self, chunk: Chunk) -> int:
        """Where a chunk of this rank is among those of the whole step."""
        return self._plan.stream_chunks * self._plan.in_step(chunk.micro_batch) + chunk.ordinal

    # ------------------------------------------------------------------ weights

    def await_weights(self, op: Op) -> None:
        """This rank has updated its parts of a buffer; return when all have."""
        self._post("updated", op.slots[a.SEQUENCE])
        for rank in self.others:
            self._await("updated", rank, op.slots[a.SEQUENCE])


class Committing:
    """The ranks as those who write one store together (storage/generations/members.py)."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def agree(self) -> None:
        self._exchange.meet("committing")
