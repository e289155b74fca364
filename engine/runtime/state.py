"""The state of a run on its way between checkpoints, the NVMe store and the memory of a run."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, cast

import torch
from torch import Tensor

from penstock.engine import preparing
from penstock.engine.clock import wait_for_copies
from penstock.engine.model.quantise import dequantised, quantised
from penstock.engine.model.spec import BufferSpec
from penstock.engine.optim.base import MASTER
from penstock.engine.plan.plan import BufferPlan, Plan
from penstock.engine.plan.problem import BufferShape, reference_name
from penstock.engine.runtime.memory import GpuMemory, RamMemory
from penstock.engine.runtime.past import StateReader
from penstock.engine.runtime.sources import WEIGHTS, Weights
from penstock.storage.files.errors import UserError
from penstock.storage.generations.store import NvmeStore
from penstock.storage.tier.arena import empty_aligned
from penstock.storage.tier.manifest import ArraySpec

_PARTS_AT_ONCE = 8
"""Parts of state that are read into RAM at once: enough for several drives."""


def state_arrays(plan: Plan) -> list[ArraySpec]:
    """What a generation holds: every kind of state of every buffer, from which compute weights are made again; of a
    frozen one the weights, which all generations share."""
    return arrays_of(plan.buffers.values(), plan.problem.state_kinds)


def arrays_of(buffers: Iterable[BufferShape], kinds: Sequence[str]) -> list[ArraySpec]:
    """`state_arrays` of any plan with such `buffers` and `kinds` of state."""
    arrays = []
    for b in buffers:
        if b.frozen:
            arrays.append(ArraySpec(b.name, WEIGHTS, b.numel, b.dtype, b.part_numel, fixed=True))
        else:
            arrays += [ArraySpec(b.name, kind, b.numel, "float32", b.part_numel) for kind in kinds]
    return arrays


def scratch_arrays(plan: Plan) -> list[ArraySpec]:
    """What lives on NVMe only while a run runs: compute weights and waiting gradients that the plan placed there."""
    arrays = []
    for b in plan.buffers.values():
        if b.weights == "nvme" and not b.frozen:
            arrays.append(ArraySpec(b.name, WEIGHTS, b.numel, b.dtype, b.part_numel))
        if b.gradient == "nvme":
            arrays.append(ArraySpec(b.name, "gradient", b.numel, plan.problem.gradient_dtype, b.part_numel))
    return arrays


def fill_store(
    store: NvmeStore,
    buffers: Iterable[tuple[str, dict[str, Tensor]]],
    specs_of: Mapping[str, BufferSpec],
    meta: dict[str, Any],
) -> float:
    """Write the first generation: master weights from `buffers` (one at a time), all other state zero; of what is
    frozen the weights, rounded or quantised; for the reference model rounded ones of what is trained as well. The
    largest relative error of a matrix that was quantised."""
    specs = {(spec.buffer, spec.kind): spec for spec in store.arrays()}
    total, written, worst = sum(buffer.numel for buffer in specs_of.values()), 0, 0.0
    for name, tensors in buffers:
        kinds = [kind for buffer, kind in specs if buffer == name]
        main = MASTER if MASTER in kinds else WEIGHTS
        values, error = _stored(specs_of[name], tensors, getattr(torch, specs[name, main].dtype))
        if error and specs_of[name].quantised is not None:
            raise UserError(
                f"model.frozen_format: stored, but {specs_of[name].format} does not hold the checkpoint's values of "
                f"'{name}' to the bit; set int8, nf4 or compute"
            )
        worst = max(worst, error)
        ranges = specs[name, main].parts()
        kept = specs.get((reference_name(name), WEIGHTS))
        zeros = empty_aligned(max(end - start for start, end in ranges), torch.float32).zero_()
        for part, (start, end) in enumerate(ranges):
            futures = [store.write(name, main, part, values[start:end])]
            futures += [store.write(name, kind, part, zeros[: end - start]) for kind in kinds if kind != main]
            if kept is not None:
                rounded = empty_aligned(end - start, getattr(torch, kept.dtype)).copy_(values[start:end])
                futures.append(store.write(kept.buffer, kept.kind, part, rounded))
            for future in futures:
                future.result()
            written += end - start
            preparing.report(written / total, name)
    preparing.report(1.0, "making it durable")
    store.commit(meta)
    return worst


def _stored(buffer: BufferSpec, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, float]:
    """What is stored of a buffer's float32 parameters, and the largest relative error of a matrix that is quantised."""
    if buffer.stored is not None:
        return quantised(buffer.stored, tensors)
    layout = buffer.layout
    flat = empty_aligned(layout.numel, torch.float32).zero_()
    for param, view in layout.views(flat).items():
        view.copy_(tensors[param])
    return flat if dtype == torch.float32 else empty_aligned(layout.numel, dtype).copy_(flat), 0.0


def load_memory(
    store: NvmeStore | Weights,
    plan: Plan,
    gpu: GpuMemory,
    ram: RamMemory,
    there: Container[str] = (),
) -> None:
    """Bring the committed generation to where the plan wants it: resident state, and weights on every tier. What lives
    in RAM is read there; the rest passes through the plan's part stages. `there`: buffers that are there already."""
    loading = _Loading(cast(NvmeStore, store), plan, gpu, ram)
    buffers = [buffer for buffer in plan.buffers.values() if buffer.name not in there]
    total, requested = sum(buffer.numel for buffer in buffers), 0
    for buffer in buffers:
        on_each_gpu = buffer.frozen and buffer.weights == "gpu"
        for part in range(buffer.num_parts) if on_each_gpu else buffer.owned(plan.rank):
            if buffer.frozen:
                loading.frozen(buffer, part)
            elif buffer.state == "ram":
                loading.in_place(buffer, part)
            else:
                loading.through_stages(buffer, part)
            start, end = buffer.part(part)
            requested += end - start
            preparing.report(requested / total, buffer.name)
    loading.finish()


class _Loading:
    """Reads under way, oldest first, with what is done with each once it is there."""

    def __init__(self, store: NvmeStore, plan: Plan, gpu: GpuMemory, ram: RamMemory) -> None:
        self._store, self._gpu, self._ram = store, gpu, ram
        self._device, self._kinds = gpu.arena.device, plan.problem.state_kinds
        self._stages = ram.part_stages
        part_bytes = max((b.part_numel * b.weight_bytes for b in plan.buffers.values() if not b.frozen), default=0)
        self._rounded = empty_aligned(part_bytes, torch.uint8)
        self._turn = itertools.cycle(self._stages)
        self._device_reads = plan.problem.device_reads
        self._reading: deque[tuple[list[Future[None]], Callable[[], None]]] = deque()

    def in_place(self, buffer: BufferPlan, part: int) -> None:
        """State in RAM, and the weights that follow from it."""
        start, end = buffer.part(part)
        memory = self._ram.buffers[buffer.name]
        targets = {kind: memory[kind][buffer.kept(start, end)] for kind in self._kinds}
        self._read(buffer, part, targets, lambda: self._weights(buffer, part, targets[MASTER]), _PARTS_AT_ONCE)

    def through_stages(self, buffer: BufferPlan, part: int) -> None:
        """State on the compute device, or on NVMe, of which only the weights are wanted here."""
        start, end = buffer.part(part)
        memory, resident = self._gpu.buffers[buffer.name], buffer.state == "gpu"
        for kind in self._kinds if resident else (MASTER,):
            rows = self._stage(end - start, torch.float32)

            def then(kind: str = kind, rows: Tensor = rows) -> None:
                if resident:
                    memory[kind][start:end].copy_(rows, non_blocking=True)
                if kind == MASTER:
                    self._weights(buffer, part, rows)
                wait_for_copies(self._device)  # the stage is another part's next

            self._read(buffer, part, {kind: rows}, then, len(self._stages))

    def frozen(self, buffer: BufferPlan, part: int) -> None:
        """Weights of a frozen buffer, which stay on NVMe where that is their place."""
        start, end = buffer.part(part)
        if buffer.weights == "nvme":
            return
        memory = self._ram if buffer.weights == "ram" else self._gpu
        target = memory.buffers[buffer.name][WEIGHTS][start:end]
        if buffer.weights == "ram" or self._device_reads:
            self._read(buffer, part, {WEIGHTS: target}, lambda: None, _PARTS_AT_ONCE)
            return
        rows = self._stage(end - start, getattr(torch, buffer.dtype))

        def then() -> None:
            target.copy_(rows, non_blocking=True)
            wait_for_copies(self._device)

        self._read(buffer, part, {WEIGHTS: rows}, then, len(self._stages))

    def _stage(self, numel: int, dtype: torch.dtype) -> Tensor:
        """The next stage, as so many elements."""
        return next(self._turn)[: numel * dtype.itemsize].view(dtype)

    def finish(self) -> None:
        while self._reading:
            self._end_oldest()

    def _read(
        self, buffer: BufferPlan, part: int, targets: dict[str, Tensor], then: Callable[[], None], most: int
    ) -> None:
        while len(self._reading) >= most:
            self._end_oldest()
        futures = [self._store.read(buffer.name, kind, part, rows) for kind, rows in targets.items()]
        self._reading.append((futures, then))

    def _end_oldest(self) -> None:
        futures, then = self._reading.popleft()
        for future in futures:
            future.result()
        then()

    def _weights(self, buffer: BufferPlan, part: int, master: Tensor) -> None:
        """A part's weights are its rounded master weights."""
        start, end = buffer.part(part)
        memory = self._gpu if buffer.weights == "gpu" else self._ram
        resident = memory.buffers[buffer.name]
        if "weights" in resident:
            resident["weights"][start:end].copy_(master, non_blocking=True)
        else:
            rounded = self._rounded[: (end - start) * buffer.weight_bytes].view(getattr(torch, buffer.dtype))
            self._store.write(buffer.name, "weights", part, rounded.copy_(master)).result()


def read_parameters(state: StateReader, name: str, buffer: BufferSpec) -> dict[str, Tensor]:
    """Master weights of one buffer of the committed generation, or the weights of a frozen one, dequantised, float32,
    by parameter name. UserError where the store has none, or of another size."""
    store = state.store
    spec = next((spec for spec in store.arrays() if spec.buffer == name and spec.kind in (MASTER, WEIGHTS)), None)
    if spec is None or spec.numel != buffer.numel:
        raise UserError(
            f"{store.root}: holds no weights of '{name}' as the recipe's model has them; restore the run's manifest "
            "and recipe from a copy"
        )
    flat = empty_aligned(buffer.numel, getattr(torch, spec.dtype))
    for part, (start, end) in enumerate(spec.parts()):
        state.read(spec, part, flat[start:end])
    return dequantised(buffer, flat) if buffer.stored else buffer.layout.views(flat.float())
