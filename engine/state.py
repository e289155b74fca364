"""The state of a run on its way between checkpoints, the NVMe store and the memory of a run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from engine.memory import GpuMemory, RamMemory
from engine.plan import STATE_KINDS, Plan
from storage.arena import empty_aligned
from storage.layout import FlatLayout, part_ranges
from storage.nvme import ArraySpec, NvmeStore


def state_arrays(plan: Plan) -> list[ArraySpec]:
    """What a generation holds: master, exp_avg and exp_avg_sq of every buffer, wherever they live while training.

    The compute weights are the rounded master and are made from it again.
    """
    return [
        ArraySpec(buffer.name, kind, buffer.numel, "float32", buffer.part_numel)
        for buffer in plan.buffers.values()
        for kind in STATE_KINDS
    ]


def scratch_arrays(plan: Plan, compute_dtype: str, gradient_dtype: str) -> list[ArraySpec]:
    """What lives on NVMe only while a run runs: compute weights and waiting gradients that the plan placed there."""
    arrays = []
    for buffer in plan.buffers.values():
        if buffer.weights == "nvme":
            arrays.append(ArraySpec(buffer.name, "weights", buffer.numel, compute_dtype, buffer.part_numel))
        if buffer.gradient == "nvme":
            arrays.append(ArraySpec(buffer.name, "gradient", buffer.numel, gradient_dtype, buffer.part_numel))
    return arrays


def fill_store(
    store: NvmeStore,
    buffers: Iterable[tuple[str, dict[str, Tensor]]],
    layouts: dict[str, FlatLayout],
    meta: dict[str, Any],
) -> None:
    """Write the first generation: master weights from `buffers` (one at a time), moments zero."""
    specs = {(spec.buffer, spec.kind): spec for spec in store.arrays()}
    for name, tensors in buffers:
        layout = layouts[name]
        flat = empty_aligned(layout.numel, torch.float32).zero_()
        for param, view in layout.views(flat).items():
            view.copy_(tensors[param])
        ranges = part_ranges(layout.numel, specs[name, "master"].part_numel)
        zeros = empty_aligned(max(end - start for start, end in ranges), torch.float32).zero_()
        for part, (start, end) in enumerate(ranges):
            futures = [store.write(name, "master", part, flat[start:end])]
            futures += [store.write(name, kind, part, zeros[: end - start]) for kind in STATE_KINDS[1:]]
            for future in futures:
                future.result()
    store.commit(meta)


def load_memory(store: NvmeStore, plan: Plan, gpu: GpuMemory, ram: RamMemory, compute_dtype: torch.dtype) -> None:
    """Bring the committed generation to where the plan wants it: resident state, and weights on every tier."""
    stage = empty_aligned(plan.part_numel, torch.float32)
    rounded = empty_aligned(plan.part_numel, compute_dtype)
    for buffer in plan.buffers.values():
        resident = gpu.buffers[buffer.name] if buffer.state == "gpu" else ram.buffers[buffer.name]
        weights = gpu.buffers[buffer.name].weights if buffer.weights == "gpu" else ram.buffers[buffer.name].weights
        for part in range(buffer.num_parts):
            start, end = buffer.part(part)
            rows = stage[: end - start]
            # Master comes last, so that the weights are rounded from what is still in the stage.
            for kind in reversed(range(len(STATE_KINDS))):
                if resident.state is None and kind:
                    continue
                store.read(buffer.name, STATE_KINDS[kind], part, rows).result()
                if resident.state is not None:
                    resident.state[kind][start:end].copy_(rows)
            if weights is not None:
                weights[start:end].copy_(rows)
            else:
                store.write(buffer.name, "weights", part, rounded[: end - start].copy_(rows)).result()


def read_parameters(store: NvmeStore, name: str, layout: FlatLayout) -> dict[str, Tensor]:
    """Master weights, float32, of one buffer of the committed generation, by parameter name."""
    spec = next(spec for spec in store.arrays() if (spec.buffer, spec.kind) == (name, "master"))
    flat = empty_aligned(layout.numel, torch.float32)
    for part, (start, end) in enumerate(part_ranges(layout.numel, spec.part_numel)):
        store.read(name, "master", part, flat[start:end]).result()
    return layout.views(flat)
