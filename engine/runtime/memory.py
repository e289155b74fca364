"""The memory of a run, carved once as the plan says: GPU slots and windows, RAM regions and stages."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.engine.plan.activations import ACTIVATIONS
from penstock.engine.plan.plan import (
    BufferPlan,
    Plan,
    activation_slots,
    between_bytes,
    boundary_chunks,
    graph_slot_bytes,
    sample_regions,
)
from penstock.engine.plan.problem import ALIGNMENT, FP32, POOLS, RING_PARTS, Pool, Tier
from penstock.engine.plan.windows import attention_regions, shared_regions, window_bytes
from penstock.storage.tier.arena import HostArena, empty_aligned


class DeviceArena:
    """Slots on the compute device, allocated once and for good, within a capacity; each by itself, as autograd and
    torch.compile take tensors that share a storage for views of one another."""

    def __init__(self, capacity_bytes: int, device: torch.device) -> None:
        self._capacity_bytes = capacity_bytes
        self.device = device
        self.used_bytes = 0

    def slot(self, nbytes: int) -> Tensor:
        """uint8 [nbytes], its address a multiple of 4 KiB; counts as whole pages."""
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        self.used_bytes += size
        assert self.used_bytes <= self._capacity_bytes, f"device arena: {nbytes} bytes exceed the plan"
        if self.device.type == "cpu":
            return empty_aligned(nbytes, torch.uint8)  # direct reads end here
        whole = torch.empty(size, dtype=torch.uint8, device=self.device)
        if whole.data_ptr() % ALIGNMENT:
            # The allocator aligns to 512 bytes; GPUDirect bounces what does not start at a page.
            del whole
            whole = torch.empty(size + ALIGNMENT, dtype=torch.uint8, device=self.device)
        skipped = -whole.data_ptr() % ALIGNMENT
        return whole[skipped : skipped + nbytes]


Resident = dict[str, Tensor]
"""What lives here of one buffer: weights, gradient or kind of state -> flat tensor [numel]."""


@dataclass(slots=True)
class GpuMemory:
    """Everything on the compute device except saved graphs and the temporaries of a running op."""

    arena: DeviceArena
    buffers: dict[str, Resident] = field(default_factory=dict)
    weights: dict[Pool, list[Tensor]] = field(default_factory=dict)
    """Weight slots, uint8 [bytes of the pool's largest buffer]."""
    gradients: dict[Pool, list[Tensor]] = field(default_factory=dict)
    """Gradient slots, float32."""
    copy: Tensor | None = None
    """The dequantised weights of one block, in the compute dtype; None where no weights are quantised."""
    slots: dict[str, list[Tensor]] = field(default_factory=dict)
    """Space of a kind of activations -> its slots, each for one chunk, uint8: see engine.plan.plan.activation_slots."""
    window: dict[str, list[Tensor]] = field(default_factory=dict)
    """What attention reads and sums, uint8: see engine.plan.windows.window_bytes."""
    saved_activations: dict[tuple[int, int], dict[str, Tensor]] = field(default_factory=dict)
    """(block, chunk) -> kind -> what is saved for its backward and stays here, uint8: see Plan.saved_activations."""
    sample_stages: list[Tensor] = field(default_factory=list)
    """Keys and values of samples in one layer, uint8: see engine.plan.plan.sample_regions."""
    sample_logits: Tensor | None = None
    """float32 [sequences, vocabulary]; None where the run writes no samples."""


@dataclass(slots=True)
class RamMemory:
    """Everything in the host arena."""

    arena: HostArena
    shared: HostArena | None = None
    """What all ranks have in common; None: there is one rank."""
    buffers: dict[str, Resident] = field(default_factory=dict)
    """Where there are several ranks, gradient and state of this one's parts alone (BufferPlan.kept)."""
    added_apart: dict[str, Tensor] = field(default_factory=dict)
    """Buffer -> of this rank's parts of its gradient what PlanInput.added_apart says, float32."""
    rings: list[list[Tensor]] = field(default_factory=list)
    """Of each rank parts of its gradients on their way, float32 [part]."""
    squares: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    """float64 [parts of all that is trained]: squared norm of each part of the step's gradient."""
    losses: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    """float64 [chunks of the whole step]."""
    saved_activations: dict[tuple[int, int], dict[str, Tensor]] = field(default_factory=dict)
    """(block, chunk) -> kind -> what is saved for its backward, uint8: see Plan.saved_activations."""
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Buffer -> its gradient as it waits between groups, float32."""
    between: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    """(space, chunk) -> what waits of it between two blocks, uint8: see engine.plan.plan.between_bytes."""
    window: dict[str, list[Tensor]] = field(default_factory=dict)
    """For each chunk of a micro-batch what one block's pass needs, uint8: see engine.plan.windows.attention_regions."""
    shared_window: dict[str, list[Tensor]] = field(default_factory=dict)
    """The same of what ranks share: see engine.plan.windows.shared_regions."""
    state_stages: list[dict[str, Tensor]] = field(default_factory=list)
    """Kind of state (float32), or "gradient" -> one part of it."""
    part_stages: list[Tensor] = field(default_factory=list)
    """One part of any kind, uint8."""
    sample_kv: dict[int, Tensor] = field(default_factory=dict)
    """block -> keys and values of the samples, uint8."""
    activation_stages: list[Tensor] = field(default_factory=list)
    """One saved activation on its way to or from NVMe, uint8."""

    def close(self) -> None:
        self.arena.close()
        if self.shared is not None:
            self.shared.close()

    def copy(self, target: Tensor, source: Tensor) -> None:
        """As HostArena.copy, of slots of either arena."""
        shared = self.shared
        in_shared = shared is not None and (shared.holds(target) or shared.holds(source))
        (shared if shared is not None and in_shared else self.arena).copy(target, source)


def _dtypes(plan: Plan, buffer: BufferPlan, tier: Tier) -> dict[str, torch.dtype]:
    """Kind -> dtype of what lives on `tier` of a buffer."""
    result = {"weights": getattr(torch, buffer.dtype)} if buffer.weights == tier else {}
    if tier in (buffer.gradient, buffer.sums):
        in_sum = tier == "gpu" or buffer.sums == tier
        result["gradient"] = torch.float32 if in_sum else getattr(torch, plan.problem.gradient_dtype)
    return result | (dict.fromkeys(plan.problem.state_kinds, torch.float32) if buffer.state == tier else {})


def allocate_gpu(plan: Plan, device: torch.device, weights: dict[str, Tensor] | None = None) -> GpuMemory:
    """Carve the compute device's memory, without temporaries. `weights`: of buffers that have theirs there already."""
    problem = plan.problem
    parts = plan.tiers["gpu"].parts
    gpu = GpuMemory(DeviceArena(sum(parts.values()) - parts["workspace"] - parts["saved graphs"], device))

    def typed(numel: int, dtype: torch.dtype) -> Tensor:
        return gpu.arena.slot(numel * dtype.itemsize).view(dtype)

    for buffer in plan.buffers.values():
        dtypes = _dtypes(plan, buffer, "gpu")
        if weights and buffer.name in weights:
            gpu.buffers[buffer.name] = {"weights": weights[buffer.name]}
            continue
        gpu.buffers[buffer.name] = {kind: typed(buffer.numel, dtype) for kind, dtype in dtypes.items()}
    for pool in POOLS:
        nbytes = plan.weight_slot_bytes[pool]
        gpu.weights[pool] = [gpu.arena.slot(nbytes) for _ in range(plan.weight_slots[pool])]
        numel = problem.gradient_slot_numel(pool, nbytes)
        gpu.gradients[pool] = [typed(numel, torch.float32) for _ in range(plan.gradient_slots[pool])]
    if problem.copy_bytes:
        gpu.copy = gpu.arena.slot(problem.copy_bytes).view(getattr(torch, problem.compute_dtype))
    sizes = window_bytes(problem, plan.max_chunk_tokens, plan.streamed, plan.windows)
    gpu.window = {name: [gpu.arena.slot(nbytes) for nbytes in each] for name, each in sizes.items()}
    for key in plan.saved_on_gpu:
        gpu.saved_activations[key] = {
            kind: gpu.arena.slot(nbytes) for kind, nbytes in plan.saved_activations(*key).items()
        }
    tokens = plan.max_chunk_tokens
    slots = activation_slots(problem, tokens)
    if "graph slots" in parts:
        graph = ACTIVATIONS["graph"]
        slots[graph.gpu] = [graph_slot_bytes(problem, tokens)] * graph.slots
    gpu.slots = {space: [gpu.arena.slot(nbytes) for nbytes in each] for space, each in slots.items()}
    if problem.samples is not None:
        regions, of_logits = sample_regions(problem), (problem.samples.sequences, problem.samples.vocabulary)
        gpu.sample_stages = [gpu.arena.slot(nbytes) for nbytes in regions.stages]
        gpu.sample_logits = typed(of_logits[0] * of_logits[1], torch.float32).view(of_logits)
    return gpu


def shared_slots(plan: Plan) -> dict[str, int]:
    """Name -> bytes of what ranks share: tables, rings, and the weights that live in RAM."""
    problem = plan.problem
    ring = dict.fromkeys((f"ring.{rank}.{i}" for rank, i in _ring_slots(plan)), problem.state_part_numel * FP32)
    weights = {f"{b.name}.weights": b.nbytes for b in plan.buffers.values() if b.weights == "ram"}
    tables = {"squares": _num_parts(plan) * 8, "losses": problem.num_chunks * 8}
    spread = {name: nbytes for name, _, nbytes in _passed_on(plan)}
    return tables | ring | weights | _shared_windows(plan) | spread


def _passed_on(plan: Plan) -> Iterator[tuple[str, tuple[str, int] | tuple[int, int], int]]:
    """Name, place and bytes of what waits of any rank's chunk where ranks compute experts of all: what is between two
    blocks, by space and number of the chunk; what is sent to experts, as far as it is saved, by block and number."""
    firsts = [groups[0] for groups in plan.problem.groups_of_experts] if plan.choice.spread else []
    for rank in range(plan.problem.ranks) if firsts else ():
        of_rank, first = plan.of_rank(rank), (rank - plan.rank) % plan.problem.ranks * len(plan.chunks)
        for c in of_rank.chunks:
            for space, nbytes in between_bytes(plan.problem, c.end - c.start).items():
                yield f"{space}.{rank}.{c.index}", (space, first + c.index), nbytes
            for block in firsts:
                if sizes := of_rank.saved_activations(block, c.index):
                    yield f"{block}.sent.{rank}.{c.index}", (block, first + c.index), sizes["sent"]


def _shared_windows(plan: Plan) -> dict[str, int]:
    regions = shared_regions(plan.problem)
    return {f"shared.{name}.{i}": nbytes for name, sizes in regions.items() for i, nbytes in enumerate(sizes)}


def _num_parts(plan: Plan) -> int:
    return sum(buffer.num_parts for buffer in plan.buffers.values() if not buffer.frozen)


def _ring_slots(plan: Plan) -> list[tuple[int, int]]:
    """(rank, slot) of all rings."""
    return list(itertools.product(range(plan.problem.ranks), range(RING_PARTS))) if plan.problem.adds_replicas else []


def allocate_ram(plan: Plan, shared: HostArena | None = None) -> RamMemory:
    """Carve the host arena, unpinned, as the plan's rank needs it; what it does not hold of a buffer lives on another
    tier. `shared`: has room for `shared_slots`, where there are several ranks."""
    problem, tier, gradient_dtype = plan.problem, plan.tiers["ram"], getattr(torch, plan.problem.gradient_dtype)
    capacity = max(ALIGNMENT, tier.peak_bytes - problem.beside_bytes)  # a model that is queried may need none
    if shared is not None:  # a rank may own a part more than the mean of all; what is not used is not resident
        capacity += sum((3 + len(problem.state_kinds)) * b.part_numel * FP32 for b in plan.buffers.values())
    ram = RamMemory(HostArena(capacity, budget_bytes=max(capacity, tier.budget_bytes)), shared)

    def typed(name: str, numel: int, dtype: torch.dtype, arena: HostArena = ram.arena) -> Tensor:
        return arena.slot(name, numel * dtype.itemsize).view(dtype)

    common = shared or ram.arena
    if problem.adds_replicas:
        ram.squares = typed("squares", _num_parts(plan), torch.float64, common)
        ram.losses = typed("losses", problem.num_chunks, torch.float64, common)
        ram.rings = [[] for _ in range(problem.ranks)]
        for owner, i in _ring_slots(plan):
            slot = typed(f"ring.{owner}.{i}", problem.state_part_numel, torch.float32, common)
            ram.rings[owner].append(slot)
    apart = problem.added_apart
    for buffer in plan.buffers.values():
        name, dtypes, own = buffer.name, _dtypes(plan, buffer, "ram"), buffer.owned_numel(plan.rank)
        ram.buffers[name] = {}
        for kind, dtype in dtypes.items():
            numel, arena = (buffer.numel, common) if kind == "weights" else (own, ram.arena)
            if numel:
                ram.buffers[name][kind] = typed(f"{name}.{kind}", numel, dtype, arena)
        if name in apart and own:
            ram.added_apart[name] = typed(f"{name}.apart", own, torch.float32)
        if buffer.sums == "ram":
            # What is complete takes the place of what was summed so far.
            ram.sums[name] = ram.buffers[name]["gradient"]
            ram.buffers[name]["gradient"] = ram.sums[name].view(gradient_dtype)[: buffer.numel]
    for name, place, nbytes in _passed_on(plan):
        where, number = place
        if isinstance(where, str):
            ram.between[where, number] = common.slot(name, nbytes)
        else:
            ram.saved_activations[where, number] = {"sent": common.slot(name, nbytes)}
    for chunk in () if plan.choice.spread else boundary_chunks(problem, plan.group_chunks):
        for space, nbytes in between_bytes(problem, chunk.end - chunk.start).items():
            ram.between[space, chunk.index] = ram.arena.slot(f"{space}.{chunk.index}", nbytes)
    for chunk in plan.group_chunks:
        for i, block in enumerate(plan.blocks):
            key = (i, chunk.index)
            if key in plan.spilled or key in plan.saved_on_gpu or key in ram.saved_activations:
                continue
            sizes = plan.saved_activations(*key).items()
            ram.saved_activations[key] = {
                kind: ram.arena.slot(f"{kind}.{block.name}.{chunk.index}", n) for kind, n in sizes
            }
    regions = attention_regions(
        problem, plan.group_chunks, plan.streamed, bool(plan.recomputed), bool(plan.activation_stages)
    )
    ram.window = {
        name: [ram.arena.slot(f"window.{name}.{i}", nbytes) for i, nbytes in enumerate(each)]
        for name, each in regions.items()
    }
    for name, of_chunks in shared_regions(problem).items():
        ram.shared_window[name] = [common.slot(f"shared.{name}.{i}", nbytes) for i, nbytes in enumerate(of_chunks)]
    stage_bytes = plan.activation_stage_bytes
    ram.activation_stages = [ram.arena.slot(f"act.{i}", stage_bytes) for i in range(plan.activation_stages)]
    part = plan.problem.state_part_numel
    for i in range(plan.state_stages):
        stage = {kind: typed(f"stage.{i}.{kind}", part, torch.float32) for kind in problem.state_kinds}
        ram.state_stages.append(stage | {"gradient": typed(f"stage.{i}.gradient", part, gradient_dtype)})
    ram.part_stages = [ram.arena.slot(f"part.{i}", plan.problem.part_stage_bytes) for i in range(plan.part_stages)]
    cached = sample_regions(problem).cached.items()
    ram.sample_kv = {block: ram.arena.slot(f"sample_kv.{block}", nbytes) for block, nbytes in cached}
    return ram
