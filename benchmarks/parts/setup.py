"""What a benchmark of a step runs on this machine: for a case the largest model and depth that fit, and its plan.

A model cut to some of its layers is planned as the whole one would be: with as much memory for one block's work, and
with what is left over scaled to its depth, so that the same share of the layers is resident or kept.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.parts.cases import Case
from penstock.engine.config import DataConfig, ModelConfig, Recipe, StorageConfig, TrainConfig, parse_bytes
from penstock.engine.forecast.request import PlanRequest
from penstock.engine.hf.config import model_config
from penstock.engine.machine.budgets import Budgets, free_budgets
from penstock.engine.machine.device import resolve_device
from penstock.engine.machine.presets import this_machine
from penstock.engine.model.anatomy import model_spec
from penstock.engine.model.spec import ModelSpec
from penstock.engine.plan.gpu import allocator_bytes, with_share
from penstock.engine.plan.plan import Plan, gib
from penstock.engine.plan.problem import DTYPE_BYTES, FP32, PlanOptions
from penstock.engine.runtime.state import scratch_arrays
from penstock.storage.files.errors import BudgetError
from penstock.storage.tier.drives import FREE_MARGIN
from penstock.storage.tier.readers import Readers, select_readers

_EVERYTHING = 64 * 2**40


class Skip(Exception):
    """This machine is smaller than the case needs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What is run."""

    name: str
    """The model's."""
    recipe: Recipe
    spec: ModelSpec
    plan: Plan
    device: torch.device
    readers: Readers


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut(Setup):
    """A model cut to some of its layers, and the whole one."""

    full_spec: ModelSpec
    full_plan: Plan

    @property
    def depth(self) -> float:
        """Layers of the whole model over those of the cut one."""
        return len(self.full_spec.attention) / len(self.spec.attention)


def choose(case: Case, folder: Path, graph_bytes: Mapping[str, int] | None = None) -> Cut:
    """The first shape and depth that the machine holds. Raises Skip saying why none fits.

    graph_bytes: Calibration.graph_bytes_per_token, once there is one; without it saved graphs count as eager ones.
    """
    reasons = []
    for name, model in case.shapes.items():
        try:
            return _fit(case, name, model, folder, graph_bytes)
        except Skip as reason:
            reasons.append(f"{name}: {reason}" if len(case.shapes) > 1 else str(reason))
    raise Skip("; ".join(reasons))


def _fit(case: Case, name: str, model: ModelConfig, folder: Path, graph_bytes: Mapping[str, int] | None) -> Cut:
    if case.needs_cuda and not torch.cuda.is_available():
        raise Skip("needs CUDA, and torch sees no device")
    recipe, full_spec = random_model(
        model,
        case.row_tokens,
        max(4, case.rows),
        steps=10**6,
        global_batch_size=case.rows,
        chunk_tokens=case.chunk_tokens,
        device="cuda" if case.needs_cuda else "cpu",
        compile="auto" if case.needs_cuda or case.compiled else "off",
    )
    device = resolve_device(recipe.train)
    gpu, ram = (None if size is None else parse_bytes(size, "budgets") for size in (case.gpu, case.ram))
    free = free_budgets(device, gpu=gpu, ram=ram)
    # A whole model that needs more RAM than there is only limits the cases that measure such a one.
    whole = Budgets(free.gpu, free.ram if case.spill_state else _EVERYTHING, None, {})
    readers = select_readers("auto", device, [folder])

    def task(spec: ModelSpec, budgets: Budgets) -> PlanRequest:
        return plan_request(recipe, spec, budgets, device, readers, graph_bytes)

    full_plan = _plan([task(full_spec, whole)], device)
    if case.spill_state:
        _require_disk(full_plan, folder, whole_state=case.layers is not None)
    total, reasons = len(full_spec.attention), []
    for layers in case.layers or (total,):
        cut, spec = with_model(recipe, replace(model, num_layers=layers))
        share = layers / total
        gpu, ram = _scaled_peaks(full_plan, share)
        # Where all fits the GPU, a share of next to no RAM may be too little for a block's pass.
        rams = (ram, free.ram) if case.spill_state and share < 1 else (free.ram,)
        try:
            known = (case.chunk_tokens, full_plan.choice)
            plan = _plan([task(spec, Budgets(gpu, ram, None, {})) for ram in rams], device, known)
        except Skip as reason:
            reasons.append(str(reason))
            continue
        # The allocator keeps to the whole budget: a step that takes more than planned is seen, and does not fail.
        gpu_tier = replace(plan.tiers["gpu"], budget_bytes=full_plan.tiers["gpu"].budget_bytes)
        plan = replace(plan, tiers=plan.tiers | {"gpu": gpu_tier})
        if not case.spill_state and (lacking := _not_in_ram(plan)):
            reasons.append(f"{layers} layers of {name} need {lacking}, and budgets.ram is {gib(free.ram)}")
            continue
        return Cut(
            name=name,
            recipe=cut,
            spec=spec,
            plan=plan,
            device=device,
            readers=readers,
            full_spec=full_spec,
            full_plan=full_plan,
        )
    raise Skip(reasons[-1])


def random_model(
    model: ModelConfig, context: int, documents: int, *, part_bytes: str = "32MiB", lr: float = 1e-5, **train: Any
) -> tuple[Recipe, ModelSpec]:
    """A recipe that trains `model` on so many documents of random tokens and commits nothing, and the model's spec."""
    recipe = Recipe(
        name="bench",
        data=DataConfig(source="random", sequence_length=context, max_documents=documents),
        train=TrainConfig(lr=lr, lr_schedule="constant", **train),
        storage=StorageConfig(checkpoint_every=10**9, part_bytes=part_bytes),
    )
    return with_model(recipe, model)


def with_model(recipe: Recipe, model: ModelConfig) -> tuple[Recipe, ModelSpec]:
    """The recipe with another model, and that one's spec."""
    recipe = replace(recipe, model=model)
    return recipe, model_spec(model_config(recipe, None), recipe)


def plan_request(
    recipe: Recipe,
    spec: ModelSpec,
    budgets: Budgets,
    device: torch.device,
    readers: Readers,
    graph_bytes: Mapping[str, int] | None = None,
) -> PlanRequest:
    """What has to be planned on this machine, for one drive."""
    return PlanRequest(
        spec=spec,
        recipe=recipe,
        budgets=budgets,
        device_type=device.type,
        device_reads=readers.device is not None,
        reader_bytes=readers.pinned_bytes(1),
        graph_bytes=graph_bytes,
    )


def _plan(tasks: Sequence[PlanRequest], device: torch.device, only: tuple[int, PlanOptions] | None = None) -> Plan:
    """The best plan of the first of the tasks that has enough; with `only` that of these choices. Raises Skip."""
    for task in tasks:
        try:
            return task.search(this_machine(device), only=only).plan
        except BudgetError as error:
            refusal = error
    raise Skip(str(refusal))


def _scaled_peaks(full: Plan, share: float) -> tuple[int, int]:
    """Bytes of GPU and RAM that leave a model cut to `share` of its layers in the same position as the whole one.

    What serves one block at a time stays as it is; what the layers hold for themselves shrinks with their number, on
    the GPU by whole layers and saved graphs, so that nothing else fills what would be left over.
    """
    layers = {name for block in full.blocks if block.saved_inputs for name in block.buffers}
    compute, waiting = full.problem.compute_bytes, full.problem.gradient_bytes
    sizes = {"weights": compute, "gradient": waiting, "state": len(full.problem.state_kinds) * FP32}
    resident = [full.buffers[name] for name in layers if full.buffers[name].weights == "gpu"]
    trained = sum(buffer.numel for buffer in resident if buffer.state == "gpu")
    resident_bytes = sum(buffer.numel for buffer in resident) * compute
    resident_bytes += trained * (1 + len(full.problem.state_kinds)) * FP32
    # Gradients that wait between groups do in float32, and those that stay on the GPU go with their layers.
    waiting_on_gpu = [
        full.buffers[name].numel * FP32
        for name in layers
        if full.buffers[name].sums == "gpu" and full.buffers[name].gradient != "gpu"
    ]
    sums_bytes = sum(waiting_on_gpu)
    graphs_bytes, graphs = full.tiers["gpu"].parts["saved graphs"], len(full.saved_graphs - full.offloaded_graphs)
    gone = _gone(resident_bytes, len(resident), share) + _gone(graphs_bytes, graphs, share)
    gone += _gone(sums_bytes, len(waiting_on_gpu), share)
    state = sum(
        full.buffers[name].numel * (FP32 if kind == "gradient" and full.buffers[name].sums == "ram" else size)
        for name in layers
        for kind, size in sizes.items()
        if getattr(full.buffers[name], kind) == "ram"
    )
    saved = sum(
        full.saved_bytes(index, chunk.index)
        for index, block in enumerate(full.blocks)
        if block.saved_inputs
        for chunk in full.group_chunks
        if (index, chunk.index) not in full.spilled
    )
    ram = full.tiers["ram"]
    in_ram = state + min(saved, ram.parts["activations"])
    # What the GPU holds less of for being counted in whole pieces has a place in RAM.
    rounded = int(gone - (1 - share) * (resident_bytes + graphs_bytes + sums_bytes))
    gpu_bytes = full.tiers["gpu"].peak_bytes - gone
    # Of any budget its share is left to the allocator: what a smaller one leaves must not become a saved graph.
    gpu_bytes = with_share(gpu_bytes - allocator_bytes(full.problem), full.problem.allocator_share)
    return gpu_bytes, ram.peak_bytes - int(in_ram * (1 - share)) + rounded


def _gone(total_bytes: int, count: int, share: float) -> int:
    """Bytes of the pieces that are too many when a share of `count` pieces, rounded down, is left."""
    return total_bytes * (count - int(count * share)) // count if count else 0


def _not_in_ram(plan: Plan) -> str | None:
    """What a plan put on NVMe for want of RAM."""
    missing = sum(
        buffer.numel * size
        for buffer in plan.buffers.values()
        for kind, size in (("weights", 2), ("gradient", 4), ("state", 12))
        if getattr(buffer, kind) == "nvme"
    )
    missing += plan.spill_bytes
    return f"{gib(plan.tiers['ram'].peak_bytes + missing)} of RAM or more" if missing else None


def _require_disk(plan: Plan, folder: Path, *, whole_state: bool) -> None:
    """Skip unless the drive holds what training keeps there, or only what a benchmark of all layers writes."""
    need, free = nvme_bytes(plan, whole_state=whole_state), shutil.disk_usage(folder).free
    if need > free:
        what = "two generations of its state" if whole_state else "state and activations"
        raise Skip(f"needs {gib(need)} of disk for {what}, and {gib(free)} are free")


def nvme_bytes(plan: Plan, *, whole_state: bool = True) -> int:
    """Bytes on drives of a run of `plan`: two generations of the state (all, or what lives there), frozen weights once,
    and scratch."""
    held = [b for b in plan.buffers.values() if whole_state or "nvme" in (b.state, b.weights if b.frozen else None)]
    state = sum(buffer.numel for buffer in held if not buffer.frozen) * len(plan.problem.state_kinds) * FP32
    frozen = sum(buffer.numel * buffer.weight_bytes for buffer in held if buffer.frozen)
    scratch = sum(a.numel * DTYPE_BYTES[a.dtype] for a in scratch_arrays(plan))
    return int((2 * state + frozen) * FREE_MARGIN) + scratch + plan.spill_bytes
