"""State for a benchmark: nobody waits for billions of random numbers or writes them to a drive to measure a step."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.engine.optim.base import MASTER
from penstock.engine.plan.plan import Plan
from penstock.engine.runtime.state import WEIGHTS, fill_store, state_arrays
from penstock.storage.generations.store import NvmeStore
from penstock.storage.tier.layout import FlatLayout
from penstock.storage.tier.manifest import ArraySpec
from penstock.storage.tier.readers import Readers

_POOL_NUMEL = (1 << 22) + 7
"""Odd, so that the rows of no matrix begin at the same place of the pool."""
_STD = 0.02


class DrawnState:
    """Values of a new model's state: matrices normal with deviation 0.02, norms one, biases and moments zero.

    All matrices are cut from one pool of four million normal numbers: statistics and mantissas are those of random
    weights, at the speed of a copy.
    """

    def __init__(self, plan: Plan, layouts: dict[str, FlatLayout]) -> None:
        self._plan, self._layouts = plan, layouts
        self._pool = torch.randn(_POOL_NUMEL, generator=torch.Generator().manual_seed(0)) * _STD

    def fill(self, buffer: str, kind: str, part: int, out: Tensor) -> None:
        """Write part `part` of a kind of a buffer into `out`; weights are those of a frozen one."""
        out.zero_()
        if kind not in (MASTER, WEIGHTS):
            return
        start, end = self._plan.buffers[buffer].part(part)
        layout = self._layouts[buffer]
        for param in layout.params:
            first = max(start, layout.offset(param.name))
            last = min(end, layout.offset(param.name) + param.numel)
            if first >= last:
                continue
            if param.decay:
                self._cut(out[first - start : last - start], first)
            elif "bias" not in param.name:
                out[first - start : last - start] = 1

    def weights(self, buffer: str) -> dict[str, Tensor]:
        """The master weights of a buffer by parameter, float32."""
        layout = self._layouts[buffer]
        values = torch.empty(layout.numel)
        for part in range(self._plan.buffers[buffer].num_parts):
            start, end = self._plan.buffers[buffer].part(part)
            self.fill(buffer, "master", part, values[start:end])
        return layout.views(values)

    def _cut(self, out: Tensor, position: int) -> None:
        done = 0
        while done < out.numel():
            at = (position + done) % _POOL_NUMEL
            count = min(out.numel() - done, _POOL_NUMEL - at)
            out[done : done + count] = self._pool[at : at + count]
            done += count


class DrawnStore:
    """An NvmeStore that holds only what the plan puts on NVMe; all other state is drawn when it is read.

    To be opened with and trained from; what it does not hold cannot be committed.
    """

    def __init__(self, store: NvmeStore, drawn: DrawnState, arrays: Sequence[ArraySpec]) -> None:
        """`arrays`: what a store of the whole state would hold."""
        self._store, self._drawn = store, drawn
        self._made = {(array.buffer, array.kind) for array in arrays if array not in store.arrays()}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def read(self, buffer: str, kind: str, part: int, out: Tensor) -> Future[None]:
        if (buffer, kind) not in self._made:
            return self._store.read(buffer, kind, part, out)
        self._drawn.fill(buffer, kind, part, out)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def open_drawn(
    root: Path,
    plan: Plan,
    layouts: dict[str, FlatLayout],
    meta: dict[str, Any],
    readers: Readers,
) -> DrawnStore:
    """A store in `root` whose first generation is a new model."""
    whole = state_arrays(plan)
    tiers = {name: buffer.weights if buffer.frozen else buffer.state for name, buffer in plan.buffers.items()}
    arrays = [array for array in whole if tiers[array.buffer] == "nvme"]
    store = NvmeStore.create(root, arrays, budget_bytes=None, readers=readers)
    drawn = DrawnState(plan, layouts)
    held = dict.fromkeys(array.buffer for array in arrays)
    try:
        fill_store(store, ((name, drawn.weights(name)) for name in held), layouts, meta)
    except BaseException:
        store.close()
        raise
    return DrawnStore(store, drawn, whole)
