"""Sessions for a benchmark, on state that is drawn: nobody waits for billions of random numbers or writes them to a
drive to measure a step.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from benchmarks.parts.setup import Setup
from penstock.engine.data.corpus.prepare import prepare_data
from penstock.engine.data.loader import DataLoader
from penstock.engine.data.loading import make_loader
from penstock.engine.events import Observer
from penstock.engine.kernels import choose_kernels, kernel_query
from penstock.engine.machine.affinity import place_threads
from penstock.engine.machine.compilers import find_compilation
from penstock.engine.machine.presets import this_machine
from penstock.engine.model.quantise import quantised
from penstock.engine.model.spec import BufferSpec
from penstock.engine.model.tokens import MicroBatch
from penstock.engine.opening import typical_batch
from penstock.engine.optim.base import MASTER
from penstock.engine.plan.plan import Plan
from penstock.engine.runtime.calibrate import calibrate
from penstock.engine.runtime.compute import Compute
from penstock.engine.runtime.lanes import Lanes
from penstock.engine.runtime.sources import WEIGHTS
from penstock.engine.runtime.state import fill_store, state_arrays
from penstock.engine.session import Session, run_identity, run_meta
from penstock.storage.generations.store import NvmeStore
from penstock.storage.tier.manifest import ArraySpec
from penstock.storage.tier.readers import Readers

S = TypeVar("S", bound=Setup)

DTYPE = torch.bfloat16
"""What steps compute in, TrainConfig's default."""
_POOL_NUMEL = (1 << 22) + 7
"""Odd, so that the rows of no matrix begin at the same place of the pool."""
_STD = 0.02


class Nobody(Observer):
    """Observes nothing and wants nothing."""


NOBODY = Nobody()  # type: ignore[abstract]  # what it does not define does nothing


class WarmUpLoader:
    """A loader whose first `steps` batches are cut into short documents: the same shapes, a fraction of attention."""

    def __init__(self, loader: DataLoader, steps: int, document_tokens: int) -> None:
        self._loader, self._left, self._tokens = loader, steps, document_tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def next_step(self) -> list[MicroBatch]:
        batches = self._loader.next_step()
        if self._left == 0:
            return batches
        self._left -= 1
        return [_shortened(batch, self._tokens) for batch in batches]


def _shortened(batch: MicroBatch, tokens: int) -> MicroBatch:
    total = len(batch.ids)
    starts = list(range(0, total, tokens))
    lengths = [min(tokens, total - start) for start in starts]
    return replace(batch, positions=torch.arange(total) % tokens, documents=starts, lengths=lengths)


def loader_of(setup: Setup, folder: Path) -> DataLoader:
    corpus = prepare_data(setup.recipe, folder / "data").corpus
    return make_loader(corpus, setup.spec, setup.recipe)


def open_drawn(
    setup: S,
    folder: Path,
    *,
    short_steps: int = 0,
    document_tokens: int = 0,
    calibrated: Callable[[Mapping[str, int]], S] | None = None,
) -> tuple[S, Session]:
    """A session on drawn state with random tokens; the first `short_steps` batches have documents of that length.

    `calibrated` plans once more with what saved graphs take where layers are compiled, bytes a token by block, as a run
    does: a compiled graph is smaller than an eager one, so that more of them fit. The setup returned is the one that
    the session runs.
    """
    compiled = find_compilation(setup.recipe.train, setup.device, lambda message: print(message, file=sys.stderr))
    with contextlib.ExitStack() as undo:
        budget = setup.plan.tiers["gpu"].budget_bytes
        lanes = Lanes.open(setup.device, budget, compiled=compiled.layers, placement=place_threads(setup.device))
        undo.callback(lanes.close)
        what = kernel_query(setup.spec, setup.plan)
        lanes.executor.call("compute", lambda: choose_kernels(what, setup.device, DTYPE))
        compute = Compute.make(setup.spec, setup.recipe.train, setup.device, {}, compiled)
        loader = loader_of(setup, folder)
        if calibrated is not None and compute.runner.compiled and not setup.plan.streamed:
            calibration = calibrate(
                setup.plan,
                compute,
                setup.recipe.train,
                typical_batch(loader),
                this_machine(setup.device),
                lanes.executor,
            )
            depth, setup = len(setup.spec.attention), calibrated(calibration.graph_bytes_per_token)
            if len(setup.spec.attention) != depth:
                compute = Compute.make(setup.spec, setup.recipe.train, setup.device, {}, compiled)
            loader = loader_of(setup, folder)
        identity = run_identity(setup.recipe)
        meta = run_meta(0, 0, loader.cursor, identity)
        store = _drawn_store(folder / "state", setup.plan, setup.spec.buffers, meta, setup.readers)
        undo.callback(store.close)
        session = Session(
            spec=setup.spec,
            plan=setup.plan,
            store=cast(NvmeStore, store),
            loader=cast(DataLoader, WarmUpLoader(loader, short_steps, document_tokens)),
            compute=compute,
            recipe=setup.recipe,
            device=setup.device,
            identity=identity,
            lanes=lanes,
        )
        undo.pop_all()
    return setup, session


class DrawnState:
    """Values of a new model's state: matrices normal with deviation 0.02, norms one, biases and moments zero.

    All matrices are cut from one pool of four million normal numbers: statistics and mantissas are those of random
    weights, at the speed of a copy.
    """

    def __init__(self, plan: Plan, buffers: Mapping[str, BufferSpec]) -> None:
        self._plan, self._buffers = plan, buffers
        self._pool = torch.randn(_POOL_NUMEL, generator=torch.Generator().manual_seed(0)) * _STD

    def fill(self, buffer: str, kind: str, part: int, out: Tensor) -> None:
        """Write part `part` of a kind of a buffer into `out`; weights are those of a frozen one."""
        out.zero_()
        if kind not in (MASTER, WEIGHTS):
            return
        start, end = self._plan.buffers[buffer].part(part)
        stored = self._buffers[buffer].stored
        if stored is not None:
            out.copy_(quantised(stored, self.weights(buffer))[0][start:end])
        else:
            self._draw(buffer, start, end, out)

    def _draw(self, buffer: str, start: int, end: int, out: Tensor) -> None:
        """Write the elements [start, end) of a buffer's weights, as they are computed with, into `out` of zeros."""
        layout = self._buffers[buffer].layout
        for param in layout.params:
            first = max(start, layout.offsets[param.name])
            last = min(end, layout.offsets[param.name] + param.numel)
            if first >= last:
                continue
            if param.decay:
                self._cut(out[first - start : last - start], first)
            elif "bias" not in param.name:
                out[first - start : last - start] = 1

    def weights(self, buffer: str) -> dict[str, Tensor]:
        """The master weights of a buffer by parameter, float32."""
        layout = self._buffers[buffer].layout
        values = torch.zeros(layout.numel)
        self._draw(buffer, 0, layout.numel, values)
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


def _drawn_store(
    root: Path, plan: Plan, buffers: Mapping[str, BufferSpec], meta: dict[str, Any], readers: Readers
) -> DrawnStore:
    """A store in `root` whose first generation is a new model."""
    whole = state_arrays(plan)
    tiers = {name: buffer.weights if buffer.frozen else buffer.state for name, buffer in plan.buffers.items()}
    arrays = [array for array in whole if tiers[array.buffer] == "nvme"]
    store = NvmeStore.create(root, arrays, budget_bytes=None, readers=readers)
    drawn = DrawnState(plan, buffers)
    held = dict.fromkeys(array.buffer for array in arrays)
    try:
        fill_store(store, ((name, drawn.weights(name)) for name in held), buffers, meta)
    except BaseException:
        store.close()
        raise
    return DrawnStore(store, drawn, whole)
