"""What the GPU's budget goes to: slots for one block's working set, then whole buffers, weights, sums and graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial

from penstock.engine.plan.activations import ACTIVATIONS
from penstock.engine.plan.plan import activation_slots, aligned, gib, graph_slot_bytes, sample_regions
from penstock.engine.plan.problem import FP32, LAYER_POOLS, POOLS, BufferShape, PlanInput, PlanOptions, Pool
from penstock.engine.plan.saving import Saving
from penstock.engine.plan.windows import window_bytes
from penstock.storage.files.errors import BudgetError
from penstock.storage.files.units import least_text

SMALL_WINDOW = 4
"""A window of keys and values is small where so many of them are no more than a layer's weights."""
GOLDEN = (5**0.5 - 1) / 2
"""The first multiples of it, however many, lie evenly in the unit interval, each taken modulo 1."""


class GpuPlacement(Saving):
    """What lives on the GPU, and what has slots there."""

    def __init__(self, problem: PlanInput, choice: PlanOptions) -> None:
        super().__init__(problem, choice)
        p = problem
        self.pool = _pools(p)
        self.in_order = sorted(
            p.buffers, key=lambda b: (b.reference_of is not None, self.pool[b.name] not in LAYER_POOLS, not b.frozen)
        )
        """Buffers in the order in which they find a place: layers first, then embedding and head, which are large; of
        either the frozen ones first, which have more traffic a byte; last of all the reference model's, which no step
        needs. Of a model that is only queried those of each tier are spread over its depth, so that disk and link are
        busy at once."""
        if not p.trains:
            numbers = {buffer.name: number for number, buffer in enumerate(p.buffers)}
            self.in_order.sort(key=lambda b: (self.pool[b.name] not in LAYER_POOLS, numbers[b.name] * GOLDEN % 1))
        self.samples = sample_regions(p)
        # A block that computes with several buffers holds them all at once.
        self.at_once = {
            pool: max(sum(self.pool[n] == pool for n in block.buffers) for block in p.blocks) for pool in POOLS
        }
        users = Counter(name for block in p.blocks for name in block.buffers)
        self.shares = {
            pool: any(self.pool[name] == pool for name, count in users.items() if count > 1) for pool in POOLS
        }
        """Whether two blocks compute with the same buffer of a pool."""
        slots = ACTIVATIONS["graph"].slots
        self.graph_slots_bytes = slots * graph_slot_bytes(p, self.max_chunk) if self.offloads else 0
        self.activation_slots_bytes = sum(map(sum, activation_slots(p, self.max_chunk).values()))
        self.windows = self.num_windows()
        self.resident: set[str] = set()
        """Buffers that live there whole."""
        self.weights = set() if p.adds_replicas else {b.name for b in p.buffers if b.float32}
        """Buffers not resident whose weights alone are on the GPU."""
        self.sums: set[str] = set()
        """Buffers not resident whose gradient stays on the GPU from group to group."""

    def num_windows(self) -> int:
        """Two where they are small: the next micro-batch's keys and values need not wait until this one's have left."""
        p = self.problem
        if self.streamed or self.group == 1 or p.continues_only:
            return 1
        (one,) = window_bytes(p, self.max_chunk, False, 1)["kv"]
        largest = max(b.nbytes for b in p.buffers if self.pool[b.name] in LAYER_POOLS)
        return 2 if one * SMALL_WINDOW <= largest else 1

    def slots(self) -> tuple[dict[Pool, int], dict[Pool, int], dict[Pool, int]]:
        """Weight slots, gradient slots and the bytes of a weight slot per pool, for what is not resident."""
        streamed = [b for b in self.problem.buffers if b.name not in self.resident]
        weights: dict[Pool, int] = dict.fromkeys(POOLS, 0)
        gradients: dict[Pool, int] = dict.fromkeys(POOLS, 0)
        nbytes: dict[Pool, int] = dict.fromkeys(POOLS, 0)
        for pool in POOLS:
            members = [b for b in streamed if self.pool[b.name] == pool]
            if not members:
                continue
            layer, moving = pool in LAYER_POOLS, sum(b.name not in self.weights for b in members)
            nbytes[pool] = max((b.nbytes for b in members if not b.frozen or b.name not in self.weights), default=0)
            # Embedding and head are large: both have a slot only where layers have one more than they need.
            spare = self.choice.spare_slots - (not layer)
            weights[pool] = min(moving, self.at_once[pool] + spare)
            trained = [b for b in members if not b.frozen]
            if trained:
                # Between groups sums leave and come back: one more is on its way, while that of a buffer which two
                # blocks share stays from one to the other.
                summed = sum(b.name not in self.sums for b in trained)
                more = 1 + self.shares[pool] if self.grouped else 0
                # A shard's gradient is complete only once all shards have given theirs of its keys and values.
                apart = self.problem.rounds if self.problem.sharded and layer else 1
                # Of experts of its own a rank adds up all replicas' gradients, each summed by itself before.
                added = self.choice.spread and layer
                at_once = self.at_once[pool] * apart + layer * (1 + more) + added
                gradients[pool] = min(summed * apart * (1 + added), at_once)
        return weights, gradients, nbytes

    def gpu_parts(self) -> dict[str, int]:
        """Bytes of everything on the GPU."""
        p, resident = self.problem, self.resident
        weights, gradients, nbytes = self.slots()
        trained = sum(b.numel for b in p.buffers if b.name in resident and not b.frozen)
        held = sum(b.nbytes for b in p.buffers if b.name in resident or b.name in self.weights)
        parts = {
            "resident blocks": held + trained * (1 + len(p.state_kinds)) * FP32,
            "weight slots": sum(weights[k] * aligned(nbytes[k]) for k in POOLS),
            "gradient slots": sum(gradients[k] * aligned(p.gradient_slot_numel(k, nbytes[k]) * FP32) for k in POOLS),
            "K/V window": sum(map(sum, window_bytes(p, self.max_chunk, self.streamed, self.windows).values())),
            "activation slots": self.activation_slots_bytes,
            "saved activations": self.on_gpu_bytes,
            "saved graphs": self.graphs_bytes,
            "workspace": p.workspace_bytes + allocator_bytes(p),
        }
        if self.grouped:
            parts["gradient sums"] = sum(b.numel for b in p.buffers if b.name in self.sums - resident) * FP32
        if self.offloads:
            parts["graph slots"] = self.graph_slots_bytes
        if p.copy_bytes:
            parts["dequantised block"] = aligned(p.copy_bytes)
        if p.vision.weights_bytes:
            parts["vision tower"] = p.vision.weights_bytes
        return parts if p.samples is None else parts | {"samples": self.samples.gpu_bytes}

    def gpu_need(self) -> int:
        return sum(self.gpu_parts().values())

    def place_gpu(self) -> None:
        p = self.problem
        all_graphs = p.activation_checkpointing == "none" and not self.offloads
        if p.activation_checkpointing == "none":
            self.require_graphs()
        if all_graphs:
            self.saved_graphs.update(self.savable())
            self.graphs_bytes = sum(self.graph_bytes(*key) for key in self.saved_graphs)
        taken = self.gpu_need()
        if taken > p.gpu_budget:
            need = with_share(taken - allocator_bytes(p), p.allocator_share)
            what = "one block's working set"
            if all_graphs:
                what += " and all activations, which train.activation_checkpointing=none needs,"
            what += f" of {gib(need)} ({listing(self.gpu_parts())})"
            message = f"budgets.gpu: {gib(p.gpu_budget)} cannot hold {what}; give at least {least_text(need)}"
            raise BudgetError(message, tier="gpu", need_bytes=need, budget_bytes=p.gpu_budget)
        # Sums come before whole blocks, of which they are a fourth; graphs before both. The last sums come first: those
        # that find a place in RAM are the same ones with more of the GPU.
        trained = [buffer for buffer in reversed(self.in_order) if not buffer.frozen]
        graphs_first = self.choice.gpu_first in ("graphs", "graphs only")
        if not self.grouped or graphs_first or self._admit(self.sums, trained, p.gpu_budget):
            self._fill_gpu(p.gpu_budget - self.gpu_need())
        self.choose_offloaded()

    def _fill_gpu(self, left: int) -> None:
        """What the GPU's last `left` bytes go to."""
        budget = self.problem.gpu_budget
        # Where replicas are added, what is trained is updated by its owners, in RAM or on NVMe.
        may_stay = [b for b in self.in_order if b.frozen or not self.problem.adds_replicas]
        reside = partial(self._admit, self.resident, may_stay)
        match self.choice.gpu_first:
            case "graphs":
                self.save_graphs(left) and reside(budget)
            case "blocks":
                reside(budget) and self.save_graphs(budget - self.gpu_need())
            case "half":
                reside(budget - left // 2)
                self.save_graphs(left // 2)
            case "graphs only":
                self.save_graphs(left)
            case "saved activations":
                self.hold(left) and reside(budget)
            case "weights":
                self._admit(self.weights, may_stay, budget) and self.save_graphs(budget - self.gpu_need())

    def _admit(self, chosen: set[str], buffers: Iterable[BufferShape], budget: int) -> bool:
        """Choose buffers in order as long as all on the GPU takes no more than `budget` bytes; whether all are."""
        for buffer in buffers:
            chosen.add(buffer.name)
            if self.gpu_need() > budget:
                chosen.discard(buffer.name)
                return False
        return True

    def require_graphs(self) -> None:
        """Raise BudgetError unless it is known of every layer what its graph holds."""
        blocks = self.problem.blocks
        unknown = [blocks[i].name for i in self.saving if blocks[i].graph_bytes_per_token is None]
        if unknown:
            raise BudgetError(
                f"train.activation_checkpointing: what {unknown[0]} would have to keep is not known, so 'none' is not "
                "possible; use auto, selective or full"
            )


def allocator_bytes(problem: PlanInput) -> int:
    """The share of the GPU's budget that is left to the allocator."""
    return problem.gpu_budget // problem.allocator_share if problem.allocator_share else 0


def with_share(used_bytes: int, share: int) -> int:
    """The least budget that holds `used_bytes` and one part in `share` of itself; 0: no such part."""
    if not share:
        return used_bytes
    budget = -(-used_bytes * share // (share - 1))
    while (budget - 1) - (budget - 1) // share >= used_bytes:
        budget -= 1
    return budget


def _pools(problem: PlanInput) -> dict[str, Pool]:
    """Buffer -> the slots that it takes: a small embedding, head or vision tower takes those of the layers."""
    layers = {name for block in problem.blocks if block.of_layer for name in block.buffers}
    most = {False: 0, True: 0}
    """Bytes of the largest layer's buffer of those that are trained and of those that are frozen."""
    for buffer in problem.buffers:
        if buffer.name in layers and not buffer.float32:
            most[buffer.frozen] = max(most[buffer.frozen], buffer.nbytes)
    towers = {name for block in problem.blocks if block.kind == "vision" for name in block.buffers}

    def pool(buffer: BufferShape) -> Pool:
        if buffer.float32:
            return "float32"
        large = buffer.nbytes > most[buffer.frozen]
        return POOLS[(2 + 2 * (buffer.name in towers)) * large + buffer.frozen]

    own = {buffer.name: pool(buffer) for buffer in problem.buffers if buffer.reference_of is None}
    return own | {reference: own[name] for name, reference in problem.references.items()}


def listing(parts: Mapping[str, int]) -> str:
    """What a tier is taken by, for people."""
    return ", ".join(f"{name} {gib(size)}" for name, size in parts.items() if size)
